"""What every `agentrl sandbox` command on tasks begins with: its settings, its environment, its task, its pool."""

from __future__ import annotations

import difflib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import RunConfig, SandboxConfig
from agentrl.config.load import build, leaf_keys, load_config, parse_overrides
from agentrl.errors import AgentRLError, ConfigError, DatasetError, InfrastructureError
from agentrl.run.environments import load_environment
from agentrl.run.signals import Interrupted, ReaderGone
from agentrl.sandbox import Pool, open_pool
from agentrl.trajectory import Split
from agentrl.wire import Environment, Task, TaskCatalog

SCRATCH = Path("runs/sandbox")
# Where an environment has no catalogue, its splits are read this far.
_SCAN = 500
_CLOSE = 5

# What these commands set themselves, and what to give instead.
_SET_BY_COMMAND = {
    "sandbox.size": "--jobs N in `verify`, one elsewhere",
    "sandbox.image": "--environment.image IMAGE",
}
TASK_SETTINGS = ("environment", "sandbox")
GRADE_SETTINGS = (*TASK_SETTINGS, "rollout.grade_timeout_s", "rollout.infrastructure_retries")
AGENT_SETTINGS = (*GRADE_SETTINGS, "agent.tools", "agent.episode_timeout_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What the options that the commands share say. None: not given."""

    env: str | None = None
    data: Path | None = None
    backend: str | None = None
    preset: str | None = None
    file: Path | None = None
    overrides: Sequence[str] = ()

    def words(self) -> list[str]:
        """All of it but preset and file as dotted overrides, the most special last."""
        given = {"environment.name": self.env, "environment.dataset": self.data, "sandbox.backend": self.backend}
        return [*self.overrides, *(f"--{key}={value}" for key, value in given.items() if value is not None)]


def resolve(choice: Choice, *, reads: Sequence[str]) -> RunConfig:
    """The configuration that `choice` means. `reads` are the dotted keys that the command reads.

    Raises ConfigError, also for an override that the command never reads.
    """
    refuse_idle(choice.overrides, reads)
    if choice.data is not None and not _exists(choice.data):
        raise ConfigError(
            f"there is no {choice.data}", where="--data", remedy="name a file of rows or a folder of them"
        )
    return load_config(preset=choice.preset, file=choice.file, overrides=choice.words())


def _exists(path: Path) -> bool:
    """False also for a name that no file can have (too long, say)."""
    try:
        return path.expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def refuse_idle(overrides: Sequence[str], reads: Sequence[str]) -> None:
    """Raise ConfigError for a setting on the command line that the command never reads, or sets itself."""
    for key in leaf_keys(parse_overrides(overrides)):
        if key in _SET_BY_COMMAND:
            raise ConfigError(
                f"`{key}` is set by the command itself",
                where="command line",
                remedy=f"give {_SET_BY_COMMAND[key]}",
            )
        if not any(key == name or key.startswith(f"{name}.") for name in reads):
            raise ConfigError(
                f"`{key}` has no effect in this command",
                where="command line",
                remedy=f"leave it out; read are: {', '.join(reads)}",
            )


def open_task(choice: Choice, task_id: str, *, reads: Sequence[str]) -> tuple[RunConfig, Environment, Task]:
    """Configuration, environment and the task of that id. Raises UsageError of every kind."""
    config = resolve(choice, reads=reads)
    environment = load_environment(config.environment, recipes=config.sandbox.recipes)
    return config, environment, find_task(environment, task_id)


# --- tasks --------------------------------------------------------------------------------------------------------


def find_task(environment: Environment, task_id: str) -> Task:
    """The task of that id: by the environment's catalogue, else among the first tasks of every split.

    Raises DatasetError that names close ids.
    """
    if isinstance(environment, TaskCatalog):
        return environment.find(task_id)
    seen: list[str] = []
    for split in Split:
        for task in environment.tasks(split, start=0, count=_SCAN):
            if task.id == task_id:
                return task
            seen.append(task.id)
    raise DatasetError(
        f"no task {task_id!r} among the first {_SCAN} of each split",
        where=f"environment {environment.name}",
        remedy=near(task_id, seen),
    )


def near(name: str, names: Sequence[str]) -> str:
    """A remedy that lists the names closest to `name`, or the first ones there are."""
    unique = list(dict.fromkeys(names))
    close = difflib.get_close_matches(name, unique, n=_CLOSE, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    if not unique:
        return "there is none"
    more = f", … ({len(unique)} in all)" if len(unique) > _CLOSE else ""
    return f"there are: {', '.join(unique[:_CLOSE])}{more}"


def all_tasks(environment: Environment, count: int | None) -> list[Task]:
    """The environment's tasks, each once, or the first `count` of them.

    Raises ConfigError where there is no end of them and no `count`, DatasetError where there is none.
    """
    every = environment.every() if isinstance(environment, TaskCatalog) else _finite(environment)
    if every is None and count is None:
        raise ConfigError(
            "there is no end of these tasks", where=f"environment {environment.name}", remedy="give --tasks N"
        )
    tasks = environment.tasks(Split.TRAIN, start=0, count=count or 0) if every is None else every
    if not tasks:
        raise DatasetError("there is no task", where=f"environment {environment.name}", remedy="give it rows (--data)")
    return tasks[:count]


def _finite(environment: Environment) -> list[Task] | None:
    """Every task of an environment without a catalogue; None where a split goes on beyond what is read."""
    found: dict[str, Task] = {}
    for split in Split:
        tasks = environment.tasks(split, start=0, count=_SCAN)
        new = {task.id: task for task in tasks if task.id not in found}
        if len(new) == _SCAN:
            return None
        found |= new
    return list(found.values())


def hint(environment: Environment, task: Task, *, lines: int = 8) -> str:
    """The first lines of what the agent is told, for a person's eye."""
    said = environment.prompt(task)[-1].content.strip().splitlines()
    more = [f"… ({len(said) - lines} more lines; `:task` shows them)"] if len(said) > lines else []
    return "\n".join(f"  {line[:160]}".rstrip() for line in [*said[:lines], *more])


# --- sandboxes ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def debug_pool(config: RunConfig, *, size: int, image: str | None = None) -> AsyncIterator[Pool]:
    """A pool of at most `size` sandboxes; `image` is kept ready (None: the configuration's).

    Raises as `open_pool`, and ConfigError where the other settings leave no room for `size`.
    """
    changes = {"size": size, "starters": min(size, config.sandbox.starters), "image": image or config.sandbox.image}
    settings = build(SandboxConfig, {**config.sandbox.model_dump(), **changes}, where="sandbox")
    async with open_pool(settings, run_id=f"debug-{time.time():.0f}") as pool:
        yield pool


@contextmanager
def no_verdict_by_accident() -> Iterator[None]:
    """In a command whose exit code 1 is a verdict, no failure of ours may look like one: it ends with 3.

    Raises InfrastructureError, UsageError, Interrupted, and ReaderGone where nobody reads the output.
    """
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error
    except (AgentRLError, Interrupted) as error:
        if not isinstance(error, AgentRLError) or error.exit_code != 1:
            raise
        raise InfrastructureError(error.what, where=error.where, remedy=error.remedy) from error
    except Exception as error:
        raise InfrastructureError(
            f"a fault of the program: {type(error).__name__}: {error}",
            remedy="AGENTRL_TRACEBACK=1 shows where; report it",
        ) from error
