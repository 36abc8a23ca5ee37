"""A real run, struck: server, sandbox, trainer and orchestrator die, Ctrl-C comes. Nothing stays, the run goes on.

One run folder for the whole file. Each test starts the run (or goes on with it), strikes once it is where it should
be, and looks for what is left; the last one goes on to the end and reads what all of them have written.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from agentrl.telemetry.metrics import read_metrics
from agentrl.trajectory import OutcomeKind, read_trajectories

pytestmark = [pytest.mark.vllm, pytest.mark.bubblewrap]


def strike_one_at_work(sitting: Any, strike: Any, *, within_s: float = 60.0) -> bool:
    """Kill the server of a sandbox that has a command running; False where none was seen."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        servers = sitting.sandbox_servers()
        for server in servers * 100:  # a command takes milliseconds: look often
            if strike.busy(server):
                strike.kill(server)
                return True
    return False


def test_killed_sandbox_then_killed_server(run: Any, strike: Any) -> None:
    """K42: a sandbox that dies mid-command is an infrastructure failure, retried. Then kill -9 of the server."""
    with run.sit() as sitting:
        sitting.until("step 1: generating")
        assert strike_one_at_work(sitting, strike), "no sandbox was seen at work"
        sitting.until(r"^step 1/4")
        sitting.until("step 2: generating")
        time.sleep(0.3)
        strike.kill(sitting.module("agentrl.policy.launch").pid)
        assert sitting.wait(60) == 3
        assert sitting.leftovers(within_s=2) == []
    metrics = {row.step: row.values for row in read_metrics(run.path / "metrics.jsonl")}
    lost = metrics[1]["rollout/retries"] + metrics[1]["rollout/infrastructure_failures"]
    assert lost >= 1
    assert "SandboxDeadError" in "\n".join(sitting.lines)
    assert "the policy server" in sitting.stderr
    assert "ended" in sitting.stderr
    assert f"agentrl train swe-gym --run-dir {run.path} --resume" in sitting.stderr
    assert strike.fits(sitting.stderr), sitting.stderr


def test_ctrl_c_while_starting(run: Any) -> None:
    """Nothing is up yet, or only half of it."""
    with run.sit() as sitting:
        sitting.until("starting")
        end = time.monotonic() + 60
        while not any("agentrl.policy.launch" in p.command for p in sitting.look()):
            assert time.monotonic() < end
            time.sleep(0.05)
        sitting.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert sitting.wait(30) == 130
        assert time.monotonic() - began < 20
        assert sitting.leftovers(within_s=2) == []
    assert "Traceback" not in sitting.stderr


def test_ctrl_c_twice_in_a_step(run: Any) -> None:
    """The second does not cut the clean stop short."""
    with run.sit() as sitting:
        sitting.until(r"step \d: generating")
        time.sleep(0.3)
        sitting.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        time.sleep(0.1)
        sitting.look()
        sitting.process.send_signal(signal.SIGINT)
        assert sitting.wait(30) == 130
        assert time.monotonic() - began < 20
        assert sitting.leftovers(within_s=2) == []
    assert f"interrupted; to go on: agentrl train swe-gym --run-dir {run.path} --resume" in sitting.stderr
    assert len(sitting.errors) == 1


def test_killed_trainer(run: Any, strike: Any) -> None:
    with run.sit() as sitting:
        sitting.until(r"step \d: generating")
        strike.kill(sitting.module("agentrl.train.worker").pid)
        assert sitting.wait(120) == 3
        assert sitting.leftovers(within_s=2) == []
    assert "the trainer's process was killed by signal 9" in sitting.stderr
    assert "--resume" in sitting.stderr
    assert strike.fits(sitting.stderr), sitting.stderr


def test_killed_orchestrator(run: Any, strike: Any) -> None:
    """K41: its children die by themselves within seconds; the reaper clears the cgroups."""
    with run.sit() as sitting:
        sitting.until(r"step \d: generating")
        time.sleep(0.3)
        names = [p.name for p in sitting.look()]
        assert any("bwrap" in name for name in names)
        strike.kill(sitting.pid)
        assert sitting.wait(10) == -signal.SIGKILL
        left = sitting.leftovers(within_s=10)
        assert [thing for thing in left if "/cgroup/" not in thing] == []
        shown = strike.agentrl("sandbox", "reap")
        assert shown.returncode == 0, shown.stderr
        assert sitting.leftovers() == []


def test_the_run_goes_on_to_its_end_with_every_step_once(run: Any) -> None:
    with run.sit() as sitting:
        assert sitting.wait(240) == 0, sitting.stderr
        assert sitting.leftovers(within_s=2) == []
    assert (run.path / "report.html").stat().st_size > 10_000
    assert [row.step for row in read_metrics(run.path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    files = sorted(path.name for path in (run.path / "trajectories").iterdir())
    assert files == [f"step_{step:06d}-train.parquet" for step in (1, 2, 3, 4)]
    groups: dict[str, int] = {}
    version = 0
    for step, file in enumerate(files, start=1):
        items = list(read_trajectories([run.path / "trajectories" / file]))
        assert len(items) == 4
        for trajectory, trained in items:
            assert groups.setdefault(trajectory.group_id, step) == step
            counts = trajectory.outcome.kind is not OutcomeKind.INFRASTRUCTURE
            assert (trajectory.reward is not None) == counts
            if trained:
                assert {one.step for one in trained} == {step}
        sampled = [s.versions[s.versions >= 0] for t, _ in items for s in t.segments]
        assert {int(v) for versions in sampled for v in versions} == {version}, "sampled by this step's weights"
        version += any(trained for _, trained in items)
    assert sorted(groups) == [f"train-{index:06d}" for index in range(8)]


def test_a_finished_run_has_nothing_to_go_on_with(run: Any, strike: Any) -> None:
    shown = strike.agentrl("train", "swe-gym", "--run-dir", str(run.path), "--resume")
    assert shown.returncode == 0, shown.stderr
    assert "all 4 steps are done" in shown.stdout
    assert "--steps" in shown.stdout
