"""`agentrl sandbox mine` and `… inject`: task factories by entry point, a pool for them, and their report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import msgspec

from agentrl.config import SandboxConfig
from agentrl.config.load import leaf_keys, load_config, parse_overrides
from agentrl.errors import ConfigError
from agentrl.run.environments import entry_point
from agentrl.run.signals import INTERRUPTED, Interrupted, run_interruptible
from agentrl.sandbox import open_pool
from agentrl.wire import FactoryReport, InjectRequest, MineRequest, TaskFactory

GROUP = "agentrl.factories"
_DEFAULT = "swe-gym"
# Settings that the commands' own options stand for.
_OWN_OPTION = {"sandbox.size": "--jobs", "sandbox.image": "--image"}


@dataclass(frozen=True, slots=True)
class Machines:
    """Which environment's factory, and the sandboxes it works in, as the command line says it."""

    environment: str | None = None
    backend: str | None = None
    preset: str | None = None
    file: Path | None = None
    overrides: Sequence[str] = ()


def load_factory(name: str) -> TaskFactory:
    """The task factory of an environment. Raises UnknownEnvironmentError that lists the installed names."""
    factory: TaskFactory = entry_point(GROUP, name, what=f"task factory for {name!r}").load()()
    return factory


def mine_command(request: MineRequest, machines: Machines) -> int:
    """Mine, print the report; the exit code: 0 with rows, 1 with none, 130 interrupted."""
    if request.since is not None:
        try:
            date.fromisoformat(request.since)
        except ValueError as error:
            raise ConfigError(
                f"{request.since!r} is no date", where="--since", remedy="write it as 2024-01-31"
            ) from error
    return factory_command(request, machines)


def factory_command(request: MineRequest | InjectRequest, machines: Machines) -> int:
    """Run one request, print the report; the exit code as `mine_command`."""
    factory = load_factory(machines.environment or _DEFAULT)
    config = sandbox_config(request, machines)
    request = msgspec.structs.replace(request, recipes=str(config.recipes) if config.recipes else None)
    try:
        report = run_interruptible(_run(factory, request, config))
    except Interrupted:
        print("interrupted: what was decided is kept, and the same command goes on from there")
        return INTERRUPTED
    print(describe(report, recipes=config.recipes))
    return 0 if report.rows else 1


def sandbox_config(request: MineRequest | InjectRequest, machines: Machines) -> SandboxConfig:
    """The sandboxes' settings. Raises ConfigError for a setting that has no effect here."""
    for key in leaf_keys(parse_overrides(machines.overrides)):
        if not key.startswith("sandbox.") or key in _OWN_OPTION:
            raise ConfigError(
                f"`{key}` has no effect here",
                where="command line",
                remedy=f"give {_OWN_OPTION[key]}" if key in _OWN_OPTION else "leave it out",
            )
    words = [*machines.overrides, *([f"--sandbox.backend={machines.backend}"] if machines.backend else [])]
    config = load_config(preset=machines.preset, file=machines.file, overrides=words).sandbox
    starters = min(config.starters, request.jobs)
    return config.model_copy(
        update={"image": request.image or config.image, "size": request.jobs, "starters": starters}
    )


async def _run(factory: TaskFactory, request: MineRequest | InjectRequest, config: SandboxConfig) -> FactoryReport:
    async with open_pool(config, run_id="task-factory") as pool:
        if isinstance(request, MineRequest):
            return await factory.mine(request, pool=pool, tell=_tell)
        return await factory.inject(request, pool=pool, tell=_tell)


def _tell(line: str) -> None:
    print(line, flush=True)


def describe(report: FactoryReport, *, recipes: Path | None = None) -> str:
    """The report for a person; `recipes` is the folder that its rows' images need."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.kinds.items())
    lines = [
        f"{report.rows} rows in {report.folder}"
        + (f" ({kinds})" if kinds else "")
        + f", {report.new_rows} of them new",
        f"looked at {report.looked_at}; left out: {sum(report.left_out.values())}",
    ]
    width = len(str(max(report.left_out.values(), default=0)))
    lines += [f"  {count:>{width}}  {reason}" for reason, count in report.left_out.items()]
    lines += [f"note: {note}" for note in report.notes]
    if report.rows:
        option = f" --sandbox.recipes {shlex.quote(str(recipes))}" if recipes else ""
        lines.append(f"check them: agentrl sandbox verify swe-gym --data {shlex.quote(report.folder)}{option}")
    return "\n".join(lines)
