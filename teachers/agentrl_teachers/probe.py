"""What must be true of a teacher before a run begins. Each finding is a line for the log or a `TeacherUnfitError` that
names the reason and the remedy.

* window: a whole segment fits, and the one token more that a server samples;
* tokenizer: one text with control tokens, code and many scripts, and the text of the student's vocabulary, have the
  same ids in both (of a vocabulary of 40,000 tokens or more, the text of at least 20,000 evenly chosen ones);
* template: a note only. The student's own prompt is scored, id for id, whatever template the teacher was trained with:
  another one makes a worse teacher perhaps, but no wrong score;
* scores: asked for at temperature 1, there, finite, and the same when the same prompt is asked again, now that its
  prefix is cached. Candidates are asked for whether the run wants them or not: probabilities that make up more than 1
  show logits, and values that are not normalised. A normalised distribution at another temperature does not show;
* candidates: as many as are wanted, or fewer where the server allows no more;
* what is kept on disk under this teacher's name agrees with what it says now.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.errors import (
    ConfigError,
    DeadlineError,
    TeacherRefusedError,
    TeacherRequestError,
    TeacherUnfitError,
)
from agentrl.wire import SAME_MODEL, ChatMessage, TeacherSpec, TokenScores
from agentrl_teachers.cache import REFERENCE, ScoreCache
from agentrl_teachers.checked import CheckedSource
from agentrl_teachers.checks import check_candidates, check_scores
from agentrl_teachers.folder_text import FolderText
from agentrl_teachers.source import CandidateSource, ChatSource, Source

REPEATED = {"float32": 1e-4, "bfloat16": 0.3}
"""Nats by which a repeated prompt's scores may differ, by the precision that the teacher computes in."""

_TEXT = (
    "<|im_start|>system\nYou fix bugs.<|im_end|>\n<|im_start|>assistant\n<tool_call>\n<function=bash>\n"
    "<parameter=command>\ngrep -rn 'def total' src/*.py | head -20\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
    "def total(items: list[int]) -> int:\n\treturn sum(x ** 2 for x in items if x >= 10)\n\n\n    # 3.14159, 20-11-29\n"
    "naïve café, Ελληνικά, русский, 中文字符, العربية, हिन्दी, 🙂👩‍💻\r\n  \t  \u00a0 trailing   \n"
)
_VOCABULARY_SAMPLE = 20_000
_CHAT = (
    ChatMessage(role="system", content="You fix bugs."),
    ChatMessage(role="user", content="total() is wrong."),
    ChatMessage(role="assistant", content="I look."),
    ChatMessage(role="user", content="Go on."),
)
_SHORT = 8
_PROBED = 16  # candidates that are asked for where the run wants none


@dataclass(frozen=True, slots=True, eq=False)
class Probed:
    """What `probe_source` found: how many candidates it is asked for from then on (None: all tokens), and lines."""

    top_k: int | None
    notes: list[str]


def check_window(source: Source, spec: TeacherSpec) -> None:
    """A segment and one token more must fit."""
    if source.max_model_len < spec.longest + 1:
        raise TeacherUnfitError(
            f"teacher {spec.name} has a window of {source.max_model_len} tokens, a segment has up to {spec.longest}",
            where=f"distill.teachers, {spec.model}",
            remedy=f"agent.max_tokens={source.max_model_len - 1}, or a teacher with a longer window",
        )


async def check_tokenizer(source: Source, spec: TeacherSpec, *, timeout_s: float) -> str:
    """The student's and the teacher's tokenizers give the same ids to one text and to that of the vocabulary, of which
    at least 20,000 evenly chosen tokens are looked at where it has 40,000 or more."""
    student = await asyncio.to_thread(FolderText, spec.student)
    digest = hashlib.sha256()
    for text in (_TEXT, _vocabulary_text(student)):
        ours, theirs = student.encode(text), await source.encode(text, timeout_s=timeout_s)
        if ours != theirs:
            raise _other_tokenizer(student, ours, theirs, spec)
        digest.update(np.asarray(ours, dtype=np.int32).tobytes())
    return f"same tokenizer ({student.size} tokens, fingerprint {digest.hexdigest()[:12]})"


async def check_template(source: Source, spec: TeacherSpec, *, timeout_s: float) -> str:
    """Whether the teacher's own template renders a chat as the student's does; either way the student's is scored."""
    student = await asyncio.to_thread(FolderText, spec.student)
    if not isinstance(source, ChatSource):
        return "chat template not known: the student's own prompts are scored"
    try:
        same = student.open_chat(_CHAT) == await source.open_chat(_CHAT, timeout_s=timeout_s)
    except (ConfigError, TeacherRequestError) as error:
        return f"chat template not compared ({error.what}): the student's own prompts are scored"
    return "same chat template" if same else "another chat template than the student's, whose own prompts are scored"


async def probe_source(
    checked: CheckedSource, spec: TeacherSpec, token_ids: Sequence[int], *, timeout_s: float
) -> Probed:
    """Score `token_ids` twice, with as many candidates as are allowed, up to what is wanted (or `_PROBED`), past
    `checked`'s own care; then see that what it has on disk is this teacher's."""
    source = checked.source
    where = f"probe of teacher {spec.name}"
    deadline = time.monotonic() + timeout_s
    if spec.any_token and not isinstance(source, CandidateSource):
        raise TeacherUnfitError(
            f"teacher {spec.name} gives its own most likely tokens only, and is to score "
            + ("the whole vocabulary" if spec.top_k is None else "those that the student chooses"),
            where=f"distill.teachers, {spec.model}",
            remedy="--teacher transformers:MODEL, or distill.support=teacher",
        )

    async def ask(ids: Sequence[int], top_k: int) -> TokenScores:
        async def once(left_s: float) -> TokenScores:
            found = await source.score(ids, top_k=top_k, timeout_s=left_s)
            check_scores(found, ids, top_k=top_k, positions=None, where=where)
            return found

        return await checked.tried(once, timeout_s=deadline - time.monotonic(), where=where)

    try:
        async with asyncio.timeout(timeout_s):
            given, notes = await _candidates(lambda k: ask(list(token_ids[:_SHORT]), k), spec)
            started = time.monotonic()
            first = await ask(token_ids, given)
            took_s = time.monotonic() - started
            again = await ask(token_ids, given)
            if isinstance(source, CandidateSource):
                await _check_any_token(source, token_ids, first, spec, left_s=deadline - time.monotonic(), where=where)
            if checked.cache is not None:
                ids = (await source.encode(_TEXT, timeout_s=deadline - time.monotonic()))[: source.max_model_len - 1]
                notes += await _confirm_cache(checked.cache, (await ask(ids, 0)).logprobs)
    except TeacherRequestError as error:
        raise TeacherUnfitError(f"teacher {spec.name}: {error.what}", where=where, remedy=error.remedy) from error
    except (TimeoutError, DeadlineError) as error:
        raise DeadlineError(
            f"teacher {spec.name} did not score a prompt of {len(token_ids)} tokens within {timeout_s:g} s",
            where=where,
            remedy="raise distill.timeout_s, or see that the teacher is not overloaded",
        ) from error
    _check_repeated(first, again, spec, where)
    notes.append(f"scores {len(token_ids)} tokens in {took_s:.2f} s, the same when asked again")
    return Probed(top_k=given if spec.top_k else spec.top_k, notes=notes)


async def _confirm_cache(cache: ScoreCache, logprobs: np.ndarray) -> list[str]:
    """Hold what the teacher says of the probe's text now against what it said when its scores on disk were made; forget
    those where it has changed (a server at an address may have got another model), or where that is not known."""
    kept = await asyncio.to_thread(cache.read, REFERENCE)
    if kept is not None and kept[0].shape == logprobs.shape and np.abs(kept[0] - logprobs).max() <= SAME_MODEL:
        return []
    foreign = await asyncio.to_thread(cache.holds_any)
    if foreign:
        await asyncio.to_thread(cache.clear)
    await asyncio.to_thread(cache.write, REFERENCE, [logprobs])
    return ["another model than the one whose scores were on disk: those are forgotten"] if foreign else []


def _vocabulary_text(student: FolderText) -> str:
    """Every token of the student that is text, one per line; of 40,000 or more, every second, third, … of them."""
    step = max(1, student.size // _VOCABULARY_SAMPLE)
    lines = []
    for token in range(0, student.size, step):
        try:
            lines.append(student.token_bytes([token])[0].decode())
        except (UnicodeDecodeError, TeacherRefusedError):
            continue  # part of a character, or a hole in the numbering
    return "\n".join(lines)


def _other_tokenizer(student: FolderText, ours: list[int], theirs: list[int], spec: TeacherSpec) -> TeacherUnfitError:
    pairs = zip([*ours, None], [*theirs, None], strict=False)
    at = next(index for index, (mine, other) in enumerate(pairs) if mine != other)
    before = b"".join(student.token_bytes(ours[max(0, at - 3) : at + 2])).decode(errors="replace")
    return TeacherUnfitError(
        f"teacher {spec.name} has another tokenizer than the student: of {before!r} the student makes "
        f"{ours[at : at + 3]}, the teacher {theirs[at : at + 3]}",
        where=f"distill.teachers, {spec.model}; student {spec.student}",
        remedy="a teacher with the student's tokenizer, or distill.align=bytes",
    )


async def _candidates(ask: Callable[[int], Awaitable[object]], spec: TeacherSpec) -> tuple[int, list[str]]:
    """How many candidates the teacher gives, up to what is wanted (or `_PROBED`), and what is to be said of it."""
    given = await _most_candidates(ask, spec.top_k or _PROBED)
    if given == 0 and spec.top_k:
        raise TeacherUnfitError(
            f"teacher {spec.name} gives no candidates, and the divergence is over them",
            where=f"distill.teachers, {spec.model}",
            remedy="start its server with --max-logprobs 16, or train.divergence.name=sampled",
        )
    if given == 0:
        return 0, ["it gives no candidates, whose sum would show values that are not normalised"]
    if spec.top_k and given < spec.top_k:
        return given, [f"{given} candidates per token instead of {spec.top_k}: the server gives no more"]
    return given, []


async def _most_candidates(ask: Callable[[int], Awaitable[object]], wanted: int) -> int:
    """The most candidates ≤ `wanted` that are not refused, by halving; 0 where one is."""

    async def allowed(top_k: int) -> bool:
        try:
            await ask(top_k)
        except TeacherRefusedError:
            return False
        return True

    if await allowed(wanted):
        return wanted
    most, refused = 0, wanted
    while refused - most > 1:
        middle = (most + refused) // 2
        most, refused = (middle, refused) if await allowed(middle) else (most, middle)
    return most


async def _check_any_token(
    source: CandidateSource,
    token_ids: Sequence[int],
    first: TokenScores,
    spec: TeacherSpec,
    *,
    left_s: float,
    where: str,
) -> None:
    """Asked for by name, the prompt's own tokens have the same scores; the whole vocabulary makes up 1."""
    positions = np.arange(1, min(len(token_ids), _SHORT + 1))
    own = np.asarray(token_ids, dtype=np.int32)[positions][:, None]
    for candidates in (own, None):
        _, found = await source.score_candidates(
            token_ids, positions=positions, candidates=candidates, timeout_s=left_s
        )
        width = 1 if candidates is not None else found.shape[-1]
        check_candidates(found, shape=(len(positions), width), given=candidates, where=where)
        named = found[:, 0] if candidates is not None else np.take_along_axis(found, own, axis=1)[:, 0]
        if (worst := float(np.abs(named - first.logprobs[: len(positions)]).max())) > REPEATED[spec.dtype]:
            raise TeacherRequestError(f"a token asked for by name has other scores, by {worst:.3g} nats", where=where)


def _check_repeated(first: TokenScores, again: TokenScores, spec: TeacherSpec, where: str) -> None:
    worst = float(np.abs(first.logprobs - again.logprobs).max())
    if not worst <= REPEATED[spec.dtype]:
        raise TeacherUnfitError(
            f"teacher {spec.name} gives a repeated prompt other scores, by {worst:.3g} nats",
            where=where,
            remedy="start its server with --no-enable-prefix-caching; distill.dtype=bfloat16 where it computes in less "
            "than float32",
        )
