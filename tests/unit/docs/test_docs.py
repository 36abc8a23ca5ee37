"""What the documentation says is held against the code: commands, links, snippets, tables, words."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from local_sandbox import LocalSandbox

from agentrl import errors
from agentrl.agent.tools import TOOLS
from agentrl.cli.main import app
from agentrl.config import AlarmConfig, describe, preset_names
from agentrl.config.distill import parse_teacher
from agentrl.config.load import load_config, load_warm_start
from agentrl.errors import AgentRLError, ConfigError
from agentrl.rollout.advantages import advantage_names
from agentrl.telemetry import alarms
from agentrl.trajectory import Split
from agentrl.trajectory.parquet import schema
from agentrl.wire import Environment, Task

ROOT = Path(__file__).resolve().parents[3]
DOCS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "sandbox_images/README.md", *ROOT.glob("docs/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FORBIDDEN = re.compile(
    r"https?://|pypi|huggingface\.co|ghcr\.|quay\.|/work/|/root/|prototype|\bissue #?\d|(?-i:\bK\d\d?\b)", re.IGNORECASE
)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def snippets(language: str) -> list[tuple[str, str]]:
    """(page, source) of every fenced block in a language."""
    found = []
    for page in DOCS:
        for kind, source in FENCE.findall(page.read_text(encoding="utf-8")):
            if kind == language:
                found.append((page.name, source))
    return found


def command_lines(program: str) -> list[tuple[str, str, bool]]:
    """(page, line, whether it stands in prose) of every command of `program`; one with `…` stands for several."""
    found: dict[tuple[str, str, bool], None] = {}
    for page in DOCS:
        text = page.read_text(encoding="utf-8")
        fenced = [line for kind, source in FENCE.findall(text) if kind == "bash" for line in source.splitlines()]
        prose = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
        for lines, in_prose in ((fenced, False), (prose, True)):
            for line in lines:
                if re.match(rf"{program} [a-z-]", line) and "…" not in line and not line.endswith("--help"):
                    found[page.name, line, in_prose] = None
    return list(found)


# --- commands ---------------------------------------------------------------------------------------------------


def parsed(words: list[str]) -> dict[str, Any]:
    """The parameters of a command line as typer reads it, nothing run. Raises what typer raises."""
    command: Any = typer.main.get_command(app)
    context = None
    while hasattr(command, "commands"):
        context = command.make_context(None, words, parent=context)
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
    context = command.make_context(name, words, parent=context)
    return {**context.params, "command": name, "overrides": context.args}


@pytest.mark.parametrize(("page", "line", "in_prose"), command_lines("agentrl"))
def test_every_command_parses(page: str, line: str, in_prose: bool) -> None:
    try:
        found = parsed(shlex.split(line, comments=True)[1:])
    except typer.TyperException as error:
        # Prose may name a command without what it needs; its options have been read by then.
        if in_prose and type(error).__name__ == "MissingParameter":
            return
        raise
    settings = {"preset": found.get("preset"), "file": None, "overrides": found["overrides"]}
    if found["command"] == "sft":
        load_warm_start(**settings)
    elif found["command"] in ("train", "eval", "rollout"):
        load_config(**settings)
    elif found["command"] == "distill":
        load_config(**{**settings, "overrides": distilling(found)})
    elif line.startswith(("agentrl sandbox ", "agentrl bench ")):
        load_config(overrides=found["overrides"])
    else:
        assert found["overrides"] == []


def distilling(found: dict[str, Any]) -> list[str]:
    """What the options of `agentrl distill` mean as settings; a line without a teacher leaves it to the reader."""
    teachers = [parse_teacher(text) for text in found["teacher"] or ["transformers:t"]]
    words = [f"--distill.teachers={_toml(teachers)}"]
    given = {key: found[key] for key in ("route", "reward_weight", "from_run") if found[key] is not None}
    named = found["overrides"][:1] if not "".join(found["overrides"][:1]).startswith("-") else []  # ENV
    words += [f"--environment.name={name}" for name in named]
    words += [f"--distill.{key}={value}" for key, value in given.items()]
    return [*words, *found["overrides"][len(named) :]]


def test_a_wrong_command_is_caught() -> None:
    with pytest.raises(typer.TyperException):
        parsed(["report", "runs/mine", "--nowhere"])
    with pytest.raises(typer.TyperException):
        parsed(["trian", "swe-gym"])
    with pytest.raises(ConfigError):
        load_config(overrides=parsed(["train", "swe-gym", "--rollout.gruops", "3"])["overrides"])
    assert len(command_lines("agentrl")) > 15


@pytest.mark.parametrize(("page", "line", "in_prose"), command_lines("make"))
def test_every_make_target_exists(page: str, line: str, in_prose: bool) -> None:
    assert re.search(rf"^{line.split()[1]}:", text_of("Makefile"), re.MULTILINE), f"{page}: {line}"


def test_every_dotted_option_in_the_text_is_a_setting() -> None:
    keys = {key for _, key, _ in describe.leaves(describe.RunConfig)}
    environment = re.findall(r"^\| `(environment\.\w+)` ", text_of("docs/environments.md"), re.MULTILINE)
    sections = {key.rsplit(".", depth)[0] for key in keys for depth in range(3)}
    for page in DOCS:
        for option in re.findall(r"--([a-z]{2,}\.[a-z_.-]+[a-z])", page.read_text(encoding="utf-8")):
            key = option.replace("-", "_")
            assert key in keys | sections | {*environment}, f"{page.name}: --{option}"


# --- links, words, snippets ---------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The names that a page's headings can be linked by."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_relative_link_resolves(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def test_the_index_names_every_page_in_order() -> None:
    index = re.findall(r"^(\d+)\. \[[^]]+\]\(docs/(\w+\.md)\)", text_of("README.md"), re.MULTILINE)
    assert [int(number) for number, _ in index] == list(range(1, len(index) + 1))
    assert sorted(name for _, name in index) == sorted(page.name for page in ROOT.glob("docs/*.md"))


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_no_forbidden_words(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if FORBIDDEN.search(line)] == []


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_file_named_exists(page: Path) -> None:
    """A path in back-ticks that starts with a folder of the repository is there, but for what runs and builds make."""
    for path in re.findall(r"`((?:agentrl|benchmarks|scripts|tests|sandbox_images|envs)/[\w./-]+)`", page.read_text()):
        assert path == "agentrl/base" or (ROOT / path).exists(), f"{page.name}: {path}"


@pytest.mark.parametrize(("page", "source"), snippets("toml"))
def test_every_toml_snippet_loads(page: str, source: str) -> None:
    tables = tomllib.loads(source)
    if "project" not in tables:
        load_config(overrides=[f"--{key}={_toml(value)}" for key, value in _flat(tables)])


def _flat(tables: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


@pytest.mark.parametrize(("page", "source"), snippets("python"))
def test_every_python_snippet_compiles(page: str, source: str) -> None:
    compile(source, page, "exec")


# --- tables -------------------------------------------------------------------------------------------------------


def test_the_configuration_page_is_up_to_date() -> None:
    fresh = "run: python -m agentrl.config.describe > docs/configuration.md"
    assert text_of("docs/configuration.md") == describe.page(), fresh


def test_every_setting_has_a_meaning_and_none_has_two() -> None:
    fields = [
        *describe.leaves(describe.RunConfig),
        *describe.leaves(describe.WarmStartConfig),
        *describe.leaves(describe.WarmStartStage, "stages."),
        *describe.leaves(describe.RejectionRule, "train.correction.reject."),
        *describe.leaves(describe.TeacherConfig, "distill.teachers."),
    ]
    described = {key for _, key, field in fields if field.description}
    assert {key for _, key, _ in fields} - described == set(describe.MEANINGS)


def test_the_environments_options_are_up_to_date() -> None:
    from agentrl_envs.swe_gym.options import SweGymOptions

    expected = describe.table(SweGymOptions, "environment.")
    found = re.search(r"<!-- options:.*?-->\n(.*?)<!-- /options -->", text_of("docs/environments.md"), re.DOTALL)
    assert found is not None
    assert found[1] == expected, f"the table must be:\n{expected}"


def test_every_error_and_alarm_is_explained() -> None:
    page = text_of("docs/troubleshooting.md")
    known = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, AgentRLError)]
    assert [cls.__name__ for cls in known if cls is not AgentRLError and f"`{cls.__name__}`" not in page] == []
    rules = alarms._rules(AlarmConfig())
    assert len(rules) == 5
    for name, bound, _, _ in rules:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` "))
        assert f"{bound:g}" in row


def test_marks_of_the_error_table_are_what_the_code_does() -> None:
    """† is not tried again, ‡ ends the run."""
    from agentrl.rollout.driver import ENDS_RUN

    rows = re.findall(r"^\| `(\w+Error)` ?([†‡]?) \|", text_of("docs/troubleshooting.md"), re.MULTILINE)
    machines = [(getattr(errors, name), mark) for name, mark in rows]
    assert {cls for cls, mark in machines if mark == "‡"} == set(ENDS_RUN)
    for cls, mark in machines:
        row = errors.handling(cls("what"))
        if issubclass(cls, errors.InfrastructureError):
            assert row is not None
            assert row.retry == (mark == ""), cls.__name__
    assert len(machines) > 20


def test_every_column_of_a_trajectory_file_is_explained() -> None:
    rows = [line.split("|")[1] for line in text_of("docs/record.md").splitlines() if line.startswith("| `")]
    explained = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(explained) == sorted(schema().names)


def test_names_in_tables_are_those_of_the_code() -> None:
    correction = text_of("docs/rollout_correction.md")
    presets = correction[correction.index("## Presets") : correction.index("## Metrics")]
    assert tuple(re.findall(r"^\| `([\w-]+)` ", presets, re.MULTILINE)) == preset_names()
    environments = text_of("docs/environments.md")
    section = environments[environments.index("## An advantage") :]
    assert tuple(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == advantage_names()


def test_the_experts_profiles_are_named() -> None:
    from agentrl_envs.swe_gym.generated.expert import GeneratedExpert

    text = text_of("docs/environments.md")
    section = text[text.index("### The expert") : text.index("## Your own environment")]
    assert [name for name in GeneratedExpert.profiles if f"`{name}`" not in section] == []


# --- worked examples ----------------------------------------------------------------------------------------------


def module_of(page: str, marker: str) -> types.ModuleType:
    """The Python snippet of a page that holds `marker`, executed as a module."""
    source = next(source for name, source in snippets("python") if name == page and marker in source)
    module = types.ModuleType(f"docs_{page.removesuffix('.md')}")
    sys.modules[module.__name__] = module
    exec(compile(source, page, "exec"), module.__dict__)  # noqa: S102 - our own page
    return module


def test_the_corrections_worked_example(capsys: pytest.CaptureFixture[str]) -> None:
    example = module_of("rollout_correction.md", "preset(")
    text = text_of("docs/rollout_correction.md")
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d., ]+) \| ([\d., ]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    assert tuple(name for name, *_ in rows) == preset_names()
    for name, first, second, *figures in rows:
        found = example.correct(example.logp_train, example.logp_rollout, example.mask, example.preset(name))
        weights = [*map(float, first.split(",")), *map(float, second.split(",")), 0, 0]
        assert found.weights.flatten().tolist() == pytest.approx(weights, abs=6e-6)
        names = ("ess", "clamped_fraction", "masked_token_fraction")
        assert [found.metrics[each] for each in names] == pytest.approx(list(map(float, figures)), abs=1e-6)
        for each, shown in re.findall(r"`(kl|k3_kl|chi2_token|chi2_sequence)` (−?[\d.]+\d)", text):
            assert found.metrics[each] == pytest.approx(float(shown.replace("−", "-")), abs=2e-6)


def test_the_advantages_example() -> None:
    import numpy as np

    rank = module_of("environments.md", "def group_rank").group_rank
    np.testing.assert_allclose(rank(np.array([1.0, 0.0, 0.0, 0.5])), [1, -2 / 3, -2 / 3, 1 / 3])
    np.testing.assert_array_equal(rank(np.array([1.0, 1.0])), [0, 0])
    np.testing.assert_array_equal(rank(np.array([0.5])), [0])


@pytest.fixture(scope="module")
def example() -> types.ModuleType:
    return module_of("environments.md", "class AnswerEnvironment")


@pytest.fixture
def new_sandbox(tmp_path: Path) -> Callable[[], Any]:
    """Makes the environments' stand-in sandboxes."""
    made = iter(range(100))
    return lambda: LocalSandbox(tmp_path / f"sandbox-{next(made)}")


def test_the_example_keeps_the_environments_protocol(example: types.ModuleType) -> None:
    """What every environment promises and can be seen without a sandbox."""
    environment = example.AnswerEnvironment({})
    assert isinstance(environment, Environment)
    with pytest.raises(ConfigError):
        example.AnswerEnvironment({"imgae": "x"})
    seen: set[str] = set()
    for split in Split:
        tasks = environment.tasks(split, start=2, count=6, seed=1)
        assert tasks == environment.tasks(split, start=2, count=6, seed=1), "the same tasks for the same arguments"
        assert tasks[1:] == environment.tasks(split, start=3, count=5, seed=1), "`start` is the data position"
        assert [task.split for task in tasks] == [split] * 6
        assert len({task.id for task in tasks} - seen) == 6, "splits are disjoint"
        seen |= {task.id for task in tasks}
    task = environment.tasks(Split.FRESH, start=0, count=1)[0]
    assert task.environment == environment.name
    assert set(environment.tool_names(task)) <= set(TOOLS)
    assert "submit" in environment.tool_names(task)
    shown = environment.prompt(task)
    assert [message.role for message in shown] == ["system", "user"]
    assert not any(environment.reference_patch(task) in message.content for message in shown)


def test_the_example_grades_right(example: types.ModuleType, new_sandbox: Callable[[], Any]) -> None:
    environment = example.AnswerEnvironment({})
    task: Task = environment.tasks(Split.TRAIN, start=4, count=1)[0]

    async def work() -> tuple[str, str]:
        sandbox = new_sandbox()
        await environment.prepare(task, sandbox)
        untouched = await environment.collect(task, sandbox)
        await sandbox.run(
            "sed -i s/None/12/ answer.py && git -c user.name=a -c user.email=a@b commit -qam a", timeout_s=9
        )
        return untouched, await environment.collect(task, sandbox)

    untouched, changed = asyncio.run(work())
    assert untouched == ""
    assert "+    return 12" in changed, "a commit of the agent's hides nothing"
    rewards = {
        patch: asyncio.run(environment.grade(task, new_sandbox(), patch)).reward
        for patch in (environment.reference_patch(task), changed, untouched, "no patch")
    }
    assert list(rewards.values()) == [1.0, 1.0, 0.0, 0.0]
