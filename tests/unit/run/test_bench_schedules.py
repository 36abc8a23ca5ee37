"""`agentrl bench schedules`: its plan, and that it goes on where it was. The runs' processes are a stand-in."""

from __future__ import annotations

import asyncio
import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_runs import step, write_run

from agentrl.config.load import dump_toml
from agentrl.errors import ConfigError, RunFailedError, RunFolderError
from agentrl.run import bench_schedules
from agentrl.run.bench_plan import SCHEDULES, check_settings, choose, clear_unborn, is_finished, make_plan, settings_of
from agentrl.run.bench_schedules import run_child, schedules_command

# --- the plan -----------------------------------------------------------------------------------------------------


def test_four_schedules_by_seed(tmp_path: Path) -> None:
    plan = make_plan(work=tmp_path, seeds=2)
    assert [run.name for run in plan] == [
        *("sync-1-seed0", "sync-2-seed0", "async-1-seed0", "async-2-seed0"),
        *("sync-1-seed1", "sync-2-seed1", "async-1-seed1", "async-2-seed1"),
    ]
    shapes = {
        run.schedule: (
            run.config.rollout.schedule,
            run.config.train.updates_per_step,
            run.config.placement.replicas,
            run.config.placement.ranks,
        )
        for run in plan
    }
    assert shapes == {
        "sync-1": ("sync", 1, 2, 2),
        "sync-2": ("sync", 2, 2, 2),
        "async-1": ("async", 1, 1, 1),
        "async-2": ("async", 2, 1, 1),
    }
    assert [run.config.seed for run in plan] == [0] * 4 + [1] * 4
    assert plan[0].folder == tmp_path / "sync-1-seed0"


def test_all_else_is_the_same_for_every_schedule(tmp_path: Path) -> None:
    """One P, one slot cap, one latency, one evaluation: what makes the comparison fair."""
    found = [settings_of(run.config) for run in make_plan(work=tmp_path, seeds=1, max_staleness=2)]
    differ = {key for each in found for key in each if any(other.get(key) != each[key] for other in found)}
    assert differ == {
        *("rollout.schedule", "rollout.max_staleness", "train.updates_per_step"),
        *("placement.replicas", "placement.ranks"),
    }
    assert [each["rollout.max_staleness"] for each in found] == [1, 1, 2, 2], "in sync it has no effect"
    first = found[0]
    assert first["placement.pin"] is True
    assert first["environment.tool_latency_median_s"] > 0
    assert "environment.tool_latency_p95_ratio" not in first, "the environment's own default, four medians"
    assert (first["eval.every_steps"], first["eval.fresh_tasks"], first["eval.unseen_tasks"]) == (0, 256, 0)
    assert first["sandbox.size"] >= first["rollout.concurrency"] + first["rollout.ready_ahead"]


def test_a_run_s_words_give_its_configuration(tmp_path: Path) -> None:
    run = make_plan(work=tmp_path, seeds=1, deliveries=7, max_staleness=3, overrides=["--rollout.groups", "4"])[3]
    assert run.config.steps == 7
    assert run.config.rollout.groups == 4
    assert run.config.rollout.max_staleness == 3
    words = run.command()
    assert words[:4] == ["train", "swe-gym", "--preset", "schedules"]
    assert {"--steps=7", "--rollout.max-staleness=3", "--seed=0"} <= set(words)
    assert "--resume" not in words


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--steps=3", "--deliveries"),
        ("--seed=3", "--seeds"),
        ("--rollout.max-staleness=2", "--max-staleness"),
        ("--rollout.schedule=async", "--only"),
        ("--placement.replicas=4", "leave it out"),
    ],
)
def test_what_makes_the_comparison_is_not_overridden(tmp_path: Path, word: str, says: str) -> None:
    with pytest.raises(ConfigError, match="what makes the comparison") as caught:
        make_plan(work=tmp_path, seeds=1, overrides=[word])
    assert says in caught.value.remedy


def test_only(tmp_path: Path) -> None:
    plan = make_plan(work=tmp_path, seeds=2)
    assert choose(plan, ()) == plan
    assert [run.name for run in choose(plan, ["async-2", "sync-1-seed1"])] == [
        *("async-2-seed0", "sync-1-seed1", "async-2-seed1"),
    ]
    with pytest.raises(ConfigError, match="async-3"):
        choose(plan, ["async-3"])


def test_a_run_begun_with_other_settings_is_named(tmp_path: Path) -> None:
    run = make_plan(work=tmp_path, seeds=1)[0]
    write_run(run, [step(1, tokens=1, concurrency=1)], solve=(0, 1))
    check_settings(run)
    other = make_plan(work=tmp_path, seeds=1, overrides=["--environment.tool-latency-median-s=0.9"])[0]
    with pytest.raises(ConfigError, match=r"`environment.tool_latency_median_s` is 0.9, the run has 0.8"):
        check_settings(other)


def test_a_folder_in_which_no_run_began_is_made_anew(tmp_path: Path) -> None:
    """A run that was killed before its configuration was written can be neither started nor resumed."""
    folder = tmp_path / "run"
    clear_unborn(folder)
    (folder / "logs").mkdir(parents=True)
    (folder / ".lock").write_text("1\n")
    (folder / "logs" / "policy.log").write_text("x")
    clear_unborn(folder)
    assert not folder.exists()
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    with pytest.raises(RunFolderError, match="something else"):
        clear_unborn(folder)
    assert (folder / "thesis.tex").exists()


# --- the runs -----------------------------------------------------------------------------------------------------

CHILD = """#!{python}
import json, os, pathlib, signal, sys, time
words = sys.argv[3:]
folder = pathlib.Path(words[words.index("--run-dir") + 1])
home = pathlib.Path({home!r})
with (home / "calls").open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
mode = (home / "mode").read_text() if (home / "mode").exists() else ""
folder.mkdir(exist_ok=True)
if "--resume" not in words:
    (folder / "config.toml").write_text((home / folder.name).read_text())
if mode == "fail":
    print("the disk is on fire")
    sys.exit(3)
if mode == "hang":
    def stop(*_):
        (home / "stopped").write_text("")
        sys.exit(130)
    signal.signal(signal.SIGINT, stop)
    (home / "hanging").write_text("")
    time.sleep(60)
rows = [{{"step": 0, "time": 1.0, "solve/fresh": 0.3}}]
for step in (1, 2):
    rows.append({{"step": step, "time": 2.0, "time/step_s": 9.0, "time/train_s": 1.0, "updates": 1.0,
                 "throughput/tokens_per_device_minute": 100.0, "throughput/devices": 2.0,
                 "concurrency/per_replica_mean": 3.0}})
if mode != "unfinished":
    rows[-1]["solve/fresh"] = 0.4
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which stand-in children find what to do and note their calls; WORK is its `work`."""
    folder = tmp_path / "home"
    folder.mkdir()
    program = folder / "python"
    program.write_text(CHILD.format(python=sys.executable, home=str(folder)))
    program.chmod(0o755)
    for run in make_plan(work=folder / "work", seeds=2, deliveries=2):
        (folder / run.name).write_text(dump_toml(run.config))
    monkeypatch.setattr(bench_schedules.sys, "executable", str(program))
    return folder


@pytest.fixture
def bench(home: Path) -> Callable[..., int]:
    """The command, two deliveries a run."""

    def call(*only: str, seeds: int = 1, **more: Any) -> int:
        settings: dict[str, Any] = {"out": None, "max_staleness": None, "dry_run": False, "overrides": (), **more}
        return schedules_command(work=home / "work", seeds=seeds, only=only, deliveries=2, **settings)

    return call


def calls(home: Path) -> list[list[str]]:
    return [json.loads(line) for line in (home / "calls").read_text().splitlines()]


def test_the_whole_comparison(bench: Callable[..., int], home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = home / "results" / "schedules.json"
    assert bench(seeds=2, out=out) == 0
    found = json.loads(out.read_text())
    assert len(calls(home)) == 8
    assert found["complete"] is True
    assert (found["seeds"], found["deliveries"], found["max_staleness"]) == ([0, 1], 2, 1)
    assert found["summary"]["async2_vs_sync1_tokens"] == 1.0
    assert found["summary"]["async2_vs_sync1_tokens_interval"] == [1.0, 1.0]
    assert found["tool_latency"] == {"tool_latency_median_s": 0.8}
    assert out.with_suffix(".html").is_file()
    shown = capsys.readouterr().out
    for title in ("Throughput", "Reward per 100 updates", "Reward per device-hour", "Where the time goes"):
        assert title in shown
    assert "async-2-seed1: done after" in shown
    assert set(found["schedules"]) == set(SCHEDULES)


def test_finished_runs_are_skipped_and_begun_ones_resumed(
    bench: Callable[..., int], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("sync-1") == 0
    assert "1 of 4 runs are finished" in capsys.readouterr().out
    half = make_plan(work=home / "work", seeds=1, deliveries=2)[1]
    half.folder.mkdir()
    (half.folder / "config.toml").write_text(dump_toml(half.config))
    (half.folder / "metrics.jsonl").write_text('{"step": 0, "time": 1.0, "solve/fresh": 0.3}\n{"step": 1, "time": 2}\n')
    assert bench(dry_run=True) == 0
    states = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert states[:3] == [
        *("sync-1-seed0: finished", "sync-2-seed0: goes on after 1 of 2 deliveries", "async-1-seed0: to be run"),
    ]
    assert len(calls(home)) == 1, "a dry run runs nothing"
    assert bench("sync-1", "sync-2") == 0
    first, second = calls(home)
    assert "--resume" not in first
    assert second == ["train", "swe-gym", "--run-dir", str(half.folder), "--plain", "--resume"]
    assert json.loads((home / "work" / "schedules.json").read_text())["complete"] is False


@pytest.mark.parametrize(("mode", "says"), [("fail", "exit code 3"), ("unfinished", "without its last evaluation")])
def test_a_run_that_fails_ends_the_command_with_its_log(
    bench: Callable[..., int], home: Path, mode: str, says: str
) -> None:
    (home / "mode").write_text(mode)
    with pytest.raises(RunFailedError, match=says) as caught:
        bench()
    assert len(calls(home)) == 1, "what follows would fail alike"
    assert "sync-1-seed0.log" in caught.value.where
    assert ("the disk is on fire" in caught.value.what) == (mode == "fail")


def test_an_interrupted_run_stops_in_good_order(home: Path) -> None:
    (home / "mode").write_text("hang")
    run = make_plan(work=home / "work", seeds=1, deliveries=2)[0]

    async def interrupt() -> None:
        child = asyncio.create_task(run_child(run))
        async with asyncio.timeout(20):
            while not (home / "hanging").exists():  # noqa: ASYNC110 - another process says so
                await asyncio.sleep(0.02)
            child.cancel()
            await asyncio.gather(child, return_exceptions=True)
        assert child.cancelled()

    asyncio.run(interrupt())
    assert (home / "stopped").exists(), "the child had time for its clean-up"
    assert not is_finished(run.folder, 2)


def test_the_stand_in_writes_what_a_run_writes(home: Path) -> None:
    """Its configuration is the plan's, as `agentrl train` dumps it."""
    run = make_plan(work=home / "work", seeds=1, deliveries=2)[2]
    asyncio.run(run_child(run))
    assert tomllib.loads((run.folder / "config.toml").read_text())["rollout"]["schedule"] == "async"
    check_settings(run)
