"""The twenty functions that generated repositories are made of, and the bugs each may carry.

A template is text with placeholders: {a} {b} {c} scalars, {xs} a list, {s} a string, {d} a mapping, {t} an
accumulator, {k} {k2} constants. A mutation replaces one line of the body (or the signature) by a wrong one.
Arguments are drawn so that boundary cases are common: a bug must show in several different calls, or hidden
tests could be met by a special case for the visible one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """One function. `mutations` are (body line, wrong line); `arguments` draws a call's positional arguments."""

    verbs: tuple[str, ...]
    signature: str
    docs: tuple[str, ...]
    body: tuple[str, ...]
    mutations: tuple[tuple[int, str], ...]
    arguments: Callable[[random.Random], Arguments]
    wrong_signatures: tuple[str, ...] = ()


def _number(rng: random.Random, low: int = -9, high: int = 9) -> int:
    return rng.randint(low, high)


def _numbers(rng: random.Random, low: int = -9, high: int = 9, length: int | None = None) -> list[int]:
    return [rng.randint(low, high) for _ in range(length or rng.randint(3, 6))]


def _word(rng: random.Random) -> str:
    return "".join(rng.choice("abcdeghk") for _ in range(rng.randint(2, 4)))


def _words(rng: random.Random) -> list[str]:
    return [_word(rng) for _ in range(rng.randint(2, 4))]


def _in_range(rng: random.Random) -> Arguments:
    low, high = _number(rng, -5, 0), _number(rng, 2, 6)
    return rng.choice([_number(rng), low, high, low]), low, high


def _one_or_two(rng: random.Random) -> Arguments:
    return tuple(_number(rng, 1, 9) for _ in range(rng.choice([1, 2])))


def _list_and_member(rng: random.Random) -> Arguments:
    numbers = _numbers(rng)
    return numbers, rng.choice(numbers)


def _list_and_maybe_member(rng: random.Random) -> Arguments:
    numbers = _numbers(rng)
    return numbers, rng.choice([*numbers, 10, 11, 12])


def _five_and_count(rng: random.Random) -> Arguments:
    return _numbers(rng, length=5), _number(rng, 1, 4)


def _padded_word(rng: random.Random) -> Arguments:
    return (f" {_word(rng).title()} ",)


def _list_or_empty(rng: random.Random) -> Arguments:
    return rng.choice([[], _numbers(rng, 1, 9)]), _number(rng, 1, 9)


def _mapping_and_keys(rng: random.Random) -> Arguments:
    return {key: _number(rng) for key in (1, 2, 3)}, rng.randint(1, 6), rng.randint(2, 9)


def _dividend(rng: random.Random) -> Arguments:
    divisor = rng.randint(2, 4)
    return rng.choice([_number(rng, 1, 9), divisor * rng.randint(1, 4)]), divisor


def _around(rng: random.Random) -> Arguments:
    bound = rng.randint(1, 20)
    return bound + rng.choice([-2, -1, 0, 0, 1, 5]), bound


def _words_and_edge(at: slice) -> Callable[[random.Random], Arguments]:
    def draw(rng: random.Random) -> Arguments:
        words = _words(rng)
        return words, rng.choice(words)[at]

    return draw


TEMPLATES: tuple[Template, ...] = (
    Template(
        ("clamp", "limit"),
        "{a}, {b}, {c}",
        ("Clamp {a} to the range {b} to {c}.", "Keep {a} between {b} and {c}."),
        ("if {a} < {b}:", "    return {b}", "if {a} > {c}:", "    return {c}", "return {a}"),
        (
            (0, "if {a} > {b}:"),
            (1, "    return {c}"),
            (2, "if {a} < {c}:"),
            (3, "    return {b}"),
            (4, "return {b}"),
        ),
        lambda rng: (_number(rng), _number(rng, -5, 0), _number(rng, 1, 6)),
    ),
    Template(
        ("inside", "within"),
        "{a}, {b}, {c}",
        ("True if {a} is at least {b} and less than {c}.",),
        ("return {b} <= {a} < {c}",),
        (
            (0, "return {b} < {a} < {c}"),
            (0, "return {b} <= {a} <= {c}"),
            (0, "return {c} <= {a} < {b}"),
            (0, "return {b} >= {a} < {c}"),
        ),
        _in_range,
    ),
    Template(
        ("sum", "total"),
        "{xs}, {a}",
        ("Sum of the first {a} items of {xs}.", "Add up the first {a} of {xs}."),
        ("{t} = 0", "for i in range({a}):", "    {t} += {xs}[i]", "return {t}"),
        (
            (0, "{t} = 1"),
            (1, "for i in range({a} - 1):"),
            (1, "for i in range(1, {a}):"),
            (2, "    {t} -= {xs}[i]"),
            (2, "    {t} = {xs}[i]"),
            (3, "return {a}"),
        ),
        lambda rng: (_numbers(rng, length=5), _number(rng, 1, 5)),
    ),
    Template(
        ("count", "tally"),
        "{xs}, {a}",
        ("Count the items of {xs} greater than {a}.", "How many of {xs} are above {a}."),
        ("{t} = 0", "for x in {xs}:", "    if x > {a}:", "        {t} += 1", "return {t}"),
        (
            (0, "{t} = 1"),
            (2, "    if x >= {a}:"),
            (2, "    if x < {a}:"),
            (3, "        {t} += x"),
            (3, "        {t} -= 1"),
            (4, "return {a}"),
        ),
        _list_and_member,
    ),
    Template(
        ("largest", "top"),
        "{xs}",
        ("Return the largest item of {xs}.", "Find the maximum of {xs}."),
        ("{t} = {xs}[0]", "for x in {xs}:", "    if x > {t}:", "        {t} = x", "return {t}"),
        ((2, "    if x < {t}:"), (3, "        {t} += x"), (4, "return x"), (0, "{t} = 0")),
        lambda rng: (_numbers(rng, -9, rng.choice([-1, 3])),),
    ),
    Template(
        ("smallest", "low"),
        "{xs}",
        ("Return the smallest item of {xs}.", "Find the minimum of {xs}."),
        ("{t} = {xs}[0]", "for x in {xs}:", "    if x < {t}:", "        {t} = x", "return {t}"),
        ((2, "    if x > {t}:"), (3, "        {t} -= x"), (4, "return x"), (0, "{t} = 0")),
        lambda rng: (_numbers(rng, rng.choice([1, -3]), 9),),
    ),
    Template(
        ("scale", "grow"),
        "{a}, {b}={k}",
        ("Multiply {a} by {b}, which is {k} by default.",),
        ("return {a} * {b}",),
        ((0, "return {a} + {b}"), (0, "return {a} - {b}"), (0, "return {a} * {k}"), (0, "return {b} * {b}")),
        _one_or_two,
        wrong_signatures=("{a}, {b}={k2}",),
    ),
    Template(
        ("shift", "offset"),
        "{a}, {b}={k}",
        ("Add {b} to {a}, with {b} {k} by default.",),
        ("return {a} + {b}",),
        ((0, "return {a} * {b}"), (0, "return {a} - {b}"), (0, "return {a} + {k}"), (0, "return {b} + {b}")),
        _one_or_two,
        wrong_signatures=("{a}, {b}={k2}",),
    ),
    Template(
        ("clean", "tidy"),
        "{s}",
        ("Strip {s} and make it lower case.",),
        ("{t} = {s}.strip()", "return {t}.lower()"),
        (
            (0, "{t} = {s}.lstrip()"),
            (0, "{t} = {s}.rstrip()"),
            (1, "return {t}.upper()"),
            (1, "return {s}.lower()"),
            (1, "return {t}"),
        ),
        _padded_word,
    ),
    Template(
        ("shout", "title"),
        "{s}",
        ("Strip {s} and make it upper case.",),
        ("{t} = {s}.strip()", "return {t}.upper()"),
        (
            (0, "{t} = {s}.lstrip()"),
            (0, "{t} = {s}.rstrip()"),
            (1, "return {t}.lower()"),
            (1, "return {s}.upper()"),
            (1, "return {t}"),
        ),
        _padded_word,
    ),
    Template(
        ("mean", "average"),
        "{xs}, {a}",
        ("Mean of {xs}, or {a} if it is empty.",),
        ("if not {xs}:", "    return {a}", "return sum({xs}) / len({xs})"),
        (
            (0, "if {xs}:"),
            (1, "    return {k}"),
            (1, "    return {xs}"),
            (2, "return sum({xs}) * len({xs})"),
            (2, "return len({xs}) / sum({xs})"),
            (2, "return sum({xs}) // len({xs})"),
        ),
        _list_or_empty,
    ),
    Template(
        ("lookup", "find"),
        "{d}, {a}, {b}",
        ("Value of {a} in {d}, or {b} if it is missing.",),
        ("if {a} in {d}:", "    return {d}[{a}]", "return {b}"),
        (
            (0, "if {a} not in {d}:"),
            (0, "if {b} in {d}:"),
            (1, "    return {d}[{b}]"),
            (1, "    return {b}"),
            (2, "return {a}"),
        ),
        _mapping_and_keys,
    ),
    Template(
        ("gap", "distance"),
        "{a}, {b}",
        ("Absolute difference of {a} and {b}.",),
        ("return abs({a} - {b})",),
        ((0, "return abs({a} + {b})"), (0, "return {a} - {b}"), (0, "return abs({a})")),
        lambda rng: (_number(rng), _number(rng)),
    ),
    Template(
        ("last", "tail"),
        "{xs}, {a}",
        ("Return the last {a} items of {xs}.",),
        ("return {xs}[-{a}:]",),
        ((0, "return {xs}[:{a}]"), (0, "return {xs}[{a}:]"), (0, "return {xs}[:-{a}]")),
        _five_and_count,
    ),
    Template(
        ("first", "head"),
        "{xs}, {a}",
        ("Return the first {a} items of {xs}.",),
        ("return {xs}[:{a}]",),
        ((0, "return {xs}[-{a}:]"), (0, "return {xs}[{a}:]"), (0, "return {xs}[:-{a}]")),
        _five_and_count,
    ),
    Template(
        ("divides", "splits"),
        "{a}, {b}",
        ("True if {a} is a multiple of {b}.",),
        ("return {a} % {b} == 0",),
        (
            (0, "return {a} % {b} == 1"),
            (0, "return {a} % {b} != 0"),
            (0, "return {b} % {a} == 0"),
            (0, "return {a} // {b} == 0"),
        ),
        _dividend,
    ),
    Template(
        ("fee", "cost"),
        "{a}, {b}",
        ("Return {k} if {a} is {b} or more, else {k2}.",),
        ("if {a} >= {b}:", "    return {k}", "return {k2}"),
        (
            (0, "if {a} > {b}:"),
            (0, "if {a} < {b}:"),
            (0, "if {a} >= {k}:"),
            (1, "    return {b}"),
            (1, "    return {k2}"),
            (2, "return {k}"),
        ),
        _around,
    ),
    Template(
        ("collect", "add"),
        "{xs}, {a}",
        ("Append {a} to {xs} unless present; return {xs}.",),
        ("if {a} not in {xs}:", "    {xs}.append({a})", "return {xs}"),
        (
            (0, "if {a} in {xs}:"),
            (1, "    {xs}.remove({a})"),
            (1, "    {xs}.insert(0, {a})"),
            (2, "return {a}"),
        ),
        _list_and_maybe_member,
    ),
    Template(
        ("starts", "pick"),
        "{xs}, {s}",
        ("Return the words of {xs} that start with {s}.",),
        ("return [w for w in {xs} if w.startswith({s})]",),
        (
            (0, "return [w for w in {xs} if w.endswith({s})]"),
            (0, "return [w for w in {xs} if not w.startswith({s})]"),
            (0, "return [{s} for w in {xs} if w.startswith({s})]"),
        ),
        _words_and_edge(slice(None, 1)),
    ),
    Template(
        ("ends", "match"),
        "{xs}, {s}",
        ("Return the words of {xs} that end with {s}.",),
        ("return [w for w in {xs} if w.endswith({s})]",),
        (
            (0, "return [w for w in {xs} if w.startswith({s})]"),
            (0, "return [w for w in {xs} if not w.endswith({s})]"),
            (0, "return [{s} for w in {xs} if w.endswith({s})]"),
        ),
        _words_and_edge(slice(-1, None)),
    ),
)
