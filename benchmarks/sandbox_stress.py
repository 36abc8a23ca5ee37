"""Hostile episodes among honest ones: every one must get its right status, and nothing may be left behind.

    python benchmarks/sandbox_stress.py [--backend bubblewrap|docker] [--episodes 500] [--concurrency 32]

Each episode goes through the real driver (`agentrl.rollout`): lease → prepare → commands → collect → grade in another
sandbox, on generated tasks. One in ten is hostile (`HOSTILE`). The baseline, printed beside it, is a quiet run of
honest episodes alone at the same concurrency. Afterwards the machine is compared with what it was before: containers,
volumes, processes, mounts, control groups, folders, file descriptors, threads.

A scripted agent takes the policy's place: what is measured is the sandboxes. Exit code 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import fnmatch
import json
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from sandbox_report import quantile

from agentrl.config import EnvironmentConfig, SandboxConfig
from agentrl.errors import SandboxOutOfMemoryError
from agentrl.rollout.driver import Limits, RolloutDriver
from agentrl.rollout.episode import OnSealed, OnTurn
from agentrl.rollout.groups import GroupRequest
from agentrl.rollout.status import RolloutStatus
from agentrl.run.environments import load_environment
from agentrl.sandbox import Pool, open_pool
from agentrl.sandbox.owner import Owner
from agentrl.trajectory import OutcomeKind, Segment, Span, SpanKind, Split, Trajectory, TurnTiming
from agentrl.wire import CommandResult, Environment, Sandbox, Task

HOSTILE_SHARE = 10
"""One episode in so many."""
MEMORY_MB, DISK_MB, PIDS = 384, 128, 64
HANG_S = 900.0
_SHOWN = {"p50": 0.5, "p95": 0.95}


@dataclass(frozen=True, slots=True)
class Hostile:
    """What a hostile episode runs, what its result must be, and whether its honest fix must still count.

    `right` judges the command's result. `rewarded`: None where the agent shut the way on which its own patch leaves.
    `may_die`: the sandbox as a whole may run out of memory.
    """

    name: str
    command: str
    right: Callable[[CommandResult], bool]
    timeout_s: float = 30.0
    rewarded: bool | None = True
    may_die: bool = False


HOSTILE = (
    Hostile(
        "fork bomb",
        "bomb() { bomb | bomb & }; bomb; sleep 60",
        lambda r: r.timed_out or r.exit_code != 0,
        timeout_s=3,
    ),
    Hostile(
        "memory hog",
        'python3 -c "x = bytearray(2_000_000_000)"',
        lambda r: r.out_of_memory,
        may_die=True,
    ),
    Hostile(
        "disk filler",
        "head -c 900M /dev/zero > /tmp/fill",
        lambda r: r.exit_code == 1 and "No space left" in r.output,
        rewarded=None,
    ),
    Hostile(
        "output flood",
        "yes flood | head -c 300000000",
        lambda r: r.exit_code == 0 and r.output_bytes == 300_000_000 and len(r.output) < 200_000,
        timeout_s=60,
    ),
    Hostile(
        "setsid daemon",
        "setsid nohup sleep 611 > /dev/null 2>&1 & (trap '' TERM HUP INT; exec sleep 612) & echo started",
        lambda r: r.exit_code == 0 and r.output == "started\n",
    ),
    Hostile("infinite loop", "while :; do :; done", lambda r: r.timed_out, timeout_s=2),
    Hostile(
        "kill of PID 1",
        "kill -9 1; kill -STOP 1; kill -TERM 1; kill -9 -1 2> /dev/null; echo over",
        lambda r: r.exit_code in (0, 137),
    ),
    Hostile(
        "symlink out of the tree",
        "ln -s /etc/passwd leak.txt; ln -s / root; ln -s /proc/1/environ env; ln -s loop loop; echo done",
        lambda r: r.output == "done\n",
    ),
    Hostile(
        "100 MB file",
        "head -c 100000000 /dev/zero > big.bin; stat -c %s big.bin",
        lambda r: r.output == "100000000\n",
        timeout_s=90,
        rewarded=False,  # no patch can be read from a tree that large: the agent made it so
    ),
    Hostile(
        "non-UTF-8 names",
        "printf x > $'bad\\xff\\xfe.txt'; mkdir $'d\\xe9'; printf y > $'d\\xe9/f\\x80'; ls | wc -l",
        lambda r: r.exit_code == 0,
    ),
    Hostile("tree shut", "chmod 0 /testbed; echo shut", lambda r: r.output == "shut\n"),
    Hostile(
        "tree removed", "rm -rf /testbed/* /testbed/.[!.]*; ls -A | wc -l", lambda r: r.output == "0\n", rewarded=False
    ),
)


@dataclass(frozen=True, slots=True)
class Done:
    """What the scripted agent leaves (`agentrl.rollout.episode.EpisodeResult`)."""

    segments: Sequence[Segment]
    turns: Sequence[TurnTiming] = ()
    submitted: bool = True
    stop: str = "submitted"
    info: Mapping[str, float] = field(default_factory=lambda: {"submitted": 1.0, "bad_calls": 0.0})


@dataclass(slots=True)
class Agent:
    """A scripted agent (`EpisodeRunner`): looks, does something hostile or not, mends the module, tests, submits.

    `faults` takes what was not as it must be; `command_s` the seconds of honest commands.
    """

    solution: str
    module: str
    hostile: Hostile | None
    faults: list[str] = field(default_factory=list)
    command_s: list[float] = field(default_factory=list)
    died: bool = False
    temperature: float = 1.0

    async def __call__(
        self, task: Task, sandbox: Sandbox, *, trajectory_id: str, on_turn: OnTurn, on_sealed: OnSealed
    ) -> Done:
        if self.hostile is not None and self.hostile.name in ("tree shut", "tree removed"):
            await self._mend(sandbox)
            await self._attack(sandbox, self.hostile)
        else:
            await self._honest(sandbox, "ls -la && git status 2>&1 | head -3; cat *.py | wc -l")
            if self.hostile is not None:
                await self._attack(sandbox, self.hostile)
            await self._mend(sandbox)
        return Done(segments=[_segment()])

    async def _attack(self, sandbox: Sandbox, hostile: Hostile) -> None:
        try:
            result = await sandbox.run(hostile.command, timeout_s=hostile.timeout_s)
        except SandboxOutOfMemoryError:
            self.died = True
            if not hostile.may_die:
                self.faults.append(f"{hostile.name}: the whole sandbox ran out of memory")
            raise
        if not hostile.right(result):
            shown = (result.exit_code, result.timed_out, result.out_of_memory, result.output[-200:])
            self.faults.append(f"{hostile.name}: {shown}")
        after = await sandbox.run("pgrep -c 'sleep|bomb' ; echo usable", timeout_s=20, cwd="/")
        if after.output != "0\nusable\n":
            self.faults.append(f"{hostile.name}: afterwards {after.output!r}")

    async def _mend(self, sandbox: Sandbox) -> None:
        encoded = base64.b64encode(self.solution.encode()).decode()
        await self._honest(sandbox, f"echo {encoded} | base64 -d > {self.module}")
        await self._honest(sandbox, "python3 -m pytest -q $(ls test_*.py) 2>&1 | tail -5")
        await self._honest(sandbox, f"python3 -m py_compile {self.module} && wc -c *.py")

    async def _honest(self, sandbox: Sandbox, command: str) -> None:
        began = time.perf_counter()
        result = await sandbox.run(command, timeout_s=60)
        self.command_s.append(time.perf_counter() - began)
        if result.exit_code != 0 or result.timed_out:
            self.faults.append(f"an honest command failed: {result.exit_code}, {result.output[-300:]!r}")


def _segment() -> Segment:
    """A prompt of one token: a trajectory has at least one segment, and nobody trains this one."""
    return Segment(
        token_ids=np.array([1]),
        spans=(Span(SpanKind.PROMPT, 0, 1, 0),),
        logprobs=np.array([np.nan]),
        versions=np.array([-1]),
    )


# --- one run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Episode:
    """How one episode went."""

    hostile: str
    seconds: float
    command_s: list[float]
    outcome: str
    faults: list[str]


async def episode(pool: Pool, environment: Environment, number: int, hostile: Hostile | None) -> Episode:
    """Run episode `number` through the driver and judge it. A hostile one does what it does once, then is graded."""
    task = environment.tasks(Split.TRAIN, start=number, count=1, seed=0)[0]
    agent = Agent(task.data["solution"], task.data["file"], hostile)
    limits = Limits(lease_s=HANG_S, episode_s=180, grade_s=120, rollout_s=HANG_S, retries=2)
    notes: list[str] = []
    driver = RolloutDriver(environment, pool, limits, time.monotonic, time.time, notes.append)
    status = RolloutStatus(trajectory_id=f"e{number}", task_id=task.id, since=time.monotonic())
    record = await driver.run(
        GroupRequest(group_id=f"e{number}", task=task, index=number, size=1), 0, episode=agent, status=status
    )
    faults = [*agent.faults, *_wrong_outcome(record, hostile, agent), *(notes if hostile is None else [])]
    seconds = record.info["setup_s"] + record.info["episode_s"] + record.info["score_s"]
    name = "" if hostile is None else hostile.name
    return Episode(name, seconds, agent.command_s, record.outcome.kind.value, faults)


def _wrong_outcome(record: Trajectory, hostile: Hostile | None, agent: Agent) -> list[str]:
    """Honest: solved. Hostile: its reward, or, where it may kill its sandbox, a failure of infrastructure."""
    if agent.died and hostile is not None and hostile.may_die:
        died = record.outcome.kind is OutcomeKind.INFRASTRUCTURE and "OutOfMemory" in record.outcome.cause
        return [] if died else [f"out of memory was recorded as {record.outcome}"]
    rewarded = True if hostile is None else hostile.rewarded
    allowed = {True: [OutcomeKind.SOLVED], False: [OutcomeKind.FAILED], None: [OutcomeKind.SOLVED, OutcomeKind.FAILED]}
    right = record.outcome.kind in allowed[rewarded]
    return [] if right else [f"outcome {record.outcome}, expected {[each.value for each in allowed[rewarded]]}"]


async def run_all(pool: Pool, plan: Sequence[Hostile | None], *, concurrency: int) -> list[Episode]:
    """All episodes of the plan, `concurrency` at once. Raises TimeoutError where one hangs."""
    environment = load_environment(EnvironmentConfig())
    slots = asyncio.Semaphore(concurrency)

    async def one(number: int, hostile: Hostile | None) -> Episode:
        async with slots, asyncio.timeout(HANG_S):
            return await episode(pool, environment, number, hostile)

    return list(await asyncio.gather(*(one(number, hostile) for number, hostile in enumerate(plan))))


def make_plan(episodes: int) -> list[Hostile | None]:
    """One hostile in ten, each kind in turn."""
    return [
        HOSTILE[number // HOSTILE_SHARE % len(HOSTILE)] if number % HOSTILE_SHARE == HOSTILE_SHARE - 1 else None
        for number in range(episodes)
    ]


# --- what is left -------------------------------------------------------------------------------------------


def census(backend: str) -> dict[str, int]:
    """What this process and its sandboxes hold of the machine, which others may use too."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return {
        "processes": len(_descendants(os.getpid())),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "mounts": sum("agentrl" in line for line in mounts),  # a container's go with it, and others have some too
        "threads of sandboxes": sum("docker" in thread.name for thread in threading.enumerate()),
        "control groups": _control_groups(f"agentrl-*-{os.getpid()}-*"),
        "folders": sum(
            1 for top in ("/tmp", "/dev/shm", "/run") for _ in Path(top).glob(f"*agentrl*/*-{os.getpid()}-*")
        ),
        **(_docker_census() if backend == "docker" else {}),
    }


def _control_groups(pattern: str) -> int:
    """By `os.walk`, which does not mind that groups of others go meanwhile."""
    return sum(len(fnmatch.filter(names, pattern)) for _, names, _ in os.walk("/sys/fs/cgroup"))


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # ended since
            continue
        parents.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(text.split()[0]))
    found, todo = [], [pid]
    while todo:
        found += (below := parents.get(todo.pop(), []))
        todo += below
    return found


def _docker_census() -> dict[str, int]:
    from agentrl.sandbox.docker_client import LABEL_OWNER, connect  # bubblewrap needs none of it

    client = connect(30.0)
    try:
        mine = {"label": f"{LABEL_OWNER}={Owner.current()}"}
        return {
            "containers": len(client.api.containers(all=True, filters=mine)),
            "anonymous volumes": sum(len(v["Name"]) == 64 for v in client.api.volumes()["Volumes"] or []),
        }
    finally:
        client.close()


def leaks(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """What there is more of."""
    return [f"{what}: {before[what]} before, {count} after" for what, count in after.items() if count > before[what]]


# --- the report ---------------------------------------------------------------------------------------------


def summary(episodes: Sequence[Episode], wall_s: float) -> dict[str, Any]:
    """Figures over the honest episodes of a run, and every fault."""
    honest = [each for each in episodes if not each.hostile]
    seconds = [each.seconds for each in honest]
    commands_ms = [1e3 * s for each in honest for s in each.command_s]
    return {
        "episodes": len(episodes),
        "hostile": dict(sorted(Counter(each.hostile for each in episodes if each.hostile).items())),
        "wall_s": round(wall_s, 1),
        "episodes_per_s": round(len(episodes) / wall_s, 2),
        "honest_episode_s": {name: round(quantile(seconds, at), 2) for name, at in _SHOWN.items()},
        "honest_command_ms": {name: round(quantile(commands_ms, at), 1) for name, at in _SHOWN.items()},
        "mean_s_of_hostile": {
            name: round(statistics.fmean(each.seconds for each in episodes if each.hostile == name), 1)
            for name in sorted({each.hostile for each in episodes if each.hostile})
        },
        "faults": [f"{each.hostile or 'honest'}: {fault}" for each in episodes for fault in each.faults],
    }


async def stress(backend: str, *, episodes: int, concurrency: int, quiet: int) -> dict[str, Any]:
    """A quiet run, the hostile run, and what is left, on one backend."""
    config = SandboxConfig.model_validate(
        {"backend": backend, "size": concurrency + 2, "memory_mb": MEMORY_MB, "disk_mb": DISK_MB, "pids": PIDS}
    )
    async with open_pool(config, run_id="stress-warm-up") as pool:  # what opens once in a process is open then
        await run_all(pool, [None, None], concurrency=2)
    before = census(backend)
    report: dict[str, Any] = {}
    for name, plan in (("quiet", [None] * quiet), ("with_hostile", make_plan(episodes))):
        async with open_pool(config, run_id=f"stress-{name}") as pool:
            began = time.monotonic()
            done = await run_all(pool, plan, concurrency=concurrency)
            report[name] = summary(done, time.monotonic() - began)
            report[name]["sandbox_starts"] = pool.stats().starts
            report[name]["sandbox_failures"] = pool.stats().failures
    report["leaks"] = leaks(before, census(backend))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["bubblewrap", "docker"], default="bubblewrap")
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--quiet", type=int, default=100, help="honest episodes of the baseline")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "sandbox_stress.json")
    options = parser.parse_args()
    report = asyncio.run(
        stress(options.backend, episodes=options.episodes, concurrency=options.concurrency, quiet=options.quiet)
    )
    shown = {"concurrency": options.concurrency, "cpus": os.cpu_count(), **report}
    print(json.dumps({options.backend: shown}, indent=2))
    earlier = json.loads(options.output.read_text()) if options.output.exists() else {}
    options.output.write_text(json.dumps({**earlier, options.backend: shown}, indent=2) + "\n")
    sys.exit(1 if report["leaks"] or any(report[run]["faults"] for run in ("quiet", "with_hostile")) else 0)


if __name__ == "__main__":
    main()
