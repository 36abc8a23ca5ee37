"""`benchmarks/distill.py`: its plan is what the command line understands, its figures are what they say."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import distill as benchmark
import distill_figures as figures
import pytest
from bench_runs import step, write_run
from distill_figures import Point
from distill_plan import CASES, Choice, Plan, StudentRun, make_plan

from agentrl.config.load import dump_toml, load_config
from agentrl.errors import ConfigError, RunFailedError, RunFolderError
from agentrl.run.bench_plan import check_settings, settings_of


def plan_of(work: Path, *only: str, **fields: Any) -> Plan:
    return make_plan(
        Choice(**{"work": work, "seeds": (0, 1), "tasks": 512, "kind": "transformers", "given": {}, **fields}), only
    )


# --- the plan ---------------------------------------------------------------------------------------------------


def names(runs: Sequence[StudentRun]) -> list[str]:
    return [run.name for run in runs]


def test_the_cases(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    reinforced = ["rl-seed0", "distill-seed0", "rl-seed1", "distill-seed1"]  # RL first: its level is what counts
    others = [
        *("two-teachers-both-seed0", "two-teachers-functions-seed0", "two-teachers-settings-seed0"),
        *("cross-tokenizer-other-seed0", "offline-recorded-seed0"),
    ]
    short = ["kinds-transformers-seed0", "kinds-vllm-seed0"]
    assert names(plan.chosen) == [*reinforced, *others]
    assert names(plan.runs) == [*reinforced, *short, *others]
    assert [teacher.name for teacher in plan.needed()] == ["teacher", "settings", "student", "other"]
    with pytest.raises(ConfigError, match="no case 'r1'"):
        plan_of(tmp_path, "r1")
    with pytest.raises(ConfigError, match="256 tasks say too little"):
        plan_of(tmp_path, tasks=256)
    offline = plan_of(tmp_path, "offline")
    assert names(offline.chosen) == ["rl-seed0", "offline-recorded-seed0"]
    assert offline.runs == plan.runs, "all are read"
    assert names(plan_of(tmp_path, "kinds").chosen) == short
    assert [teacher.name for teacher in plan_of(tmp_path, "rl").needed()] == ["teacher"]


def test_every_run_is_measured_alike(tmp_path: Path) -> None:
    """The same student, the same tasks at temperature 1, nothing evaluated beside a run's rollouts, two devices."""
    for run in plan_of(tmp_path).chosen:
        config = run.config
        assert (config.eval.fresh_tasks, config.eval.every_steps, config.eval.temperature) == (512, 0, 1.0)
        assert config.policy.model == ("tiny" if run.case != "two-teachers" else str(tmp_path / "model-student"))
        assert (config.rollout.schedule, config.placement.replicas, config.placement.ranks) == ("async", 1, 1)
        assert config.train.updates_per_step == 2
        assert config.environment.options.get("families") == (
            ["functions", "settings"] if run.case == "two-teachers" else None
        )


def test_how_long_runs_are(tmp_path: Path) -> None:
    """Warm-up is a small share of the updates of both."""
    for run in plan_of(tmp_path).chosen:
        assert run.config.steps == (14 if run.verb == "distill" else 32)
        updates = run.config.steps * run.config.train.updates_per_step
        assert run.config.train.optimizer.warmup_updates <= updates / 10


def test_what_each_run_learns_from(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, given={"teacher": Path("/models/good")})
    taught = {
        run.name: [(teacher.name, teacher.kind, teacher.model) for teacher in run.config.distill.teachers]
        for run in plan.runs
        if run.seed == 0
    }
    made = ("transformers", str(tmp_path / "model-settings"))
    assert taught == {
        "rl-seed0": [],
        "distill-seed0": [("teacher", "transformers", "/models/good")],
        "kinds-transformers-seed0": [("teacher", "transformers", "/models/good")],
        "kinds-vllm-seed0": [("teacher", "vllm", "/models/good")],
        "two-teachers-both-seed0": [("functions", "transformers", "/models/good"), ("settings", *made)],
        "two-teachers-functions-seed0": [("teacher", "transformers", "/models/good")],
        "two-teachers-settings-seed0": [("teacher", *made)],
        "cross-tokenizer-other-seed0": [("teacher", "transformers", str(tmp_path / "model-other"))],
        "offline-recorded-seed0": [("teacher", "transformers", "/models/good")],
    }
    (both,) = plan.of("two-teachers", "both")
    assert both.config.distill.route == "family"
    begun = {run.config.policy.model for run in plan.of("two-teachers")}
    assert begun == {str(tmp_path / "model-student")}, "one that knows both families"
    needed = plan_of(tmp_path, "two-teachers").needed()
    assert [(model.name, model.preset) for model in needed] == [
        ("teacher", "tiny-teacher"),
        ("settings", "tiny-teacher-settings"),
        ("student", "tiny-both"),
    ]
    (other,) = plan.of("cross-tokenizer")
    assert other.config.distill.align == "bytes"
    (offline,) = plan.of("offline", "recorded")
    assert offline.config.distill.from_run == tmp_path / "rl-seed0"
    assert plan.teachers["teacher"].given
    assert not plan.teachers["settings"].given


def test_options_of_the_user_hold_for_what_distils(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, extra=("--train.optimizer.learning-rate=1e-3", "--steps", "12"))
    for run in plan.runs:
        changed = run.verb == "distill" and run.case != "kinds"
        assert (run.config.train.optimizer.learning_rate == 1e-3, run.config.steps == 12) == (changed, changed)
    with pytest.raises(ConfigError, match="learning_rat"):
        plan_of(tmp_path, extra=("--train.optimizer.learning-rat=1",))


def test_options_that_only_some_cases_can_have(tmp_path: Path) -> None:
    """Another tokenizer has no candidates to compare: that case is left out, but not where it has a result."""
    extra = ("--train.divergence.name=reverse_kl",)
    plan = plan_of(tmp_path, "rl", extra=extra)
    assert plan.of("cross-tokenizer") == []
    assert len(plan.of("two-teachers")) == 3
    with pytest.raises(ConfigError, match="one vocabulary"):
        plan_of(tmp_path, extra=extra)
    (run,) = plan_of(tmp_path, "cross-tokenizer").chosen
    write_run(run, [step(1, tokens=1, concurrency=1)], solve=(0.1, 0.2))
    with pytest.raises(ConfigError, match="one vocabulary"):
        plan_of(tmp_path, "rl", extra=extra)


def test_a_seed_that_was_begun_is_not_forgotten(tmp_path: Path) -> None:
    begun = plan_of(tmp_path, "rl", seeds=(0, 2)).chosen[-1]
    write_run(begun, [step(1, tokens=1, concurrency=1)], solve=(0.1, 0.2))
    with pytest.raises(ConfigError, match="distill-seed2"):
        plan_of(tmp_path, "two-teachers", seeds=(0, 1))
    assert len(plan_of(tmp_path, seeds=(0, 1, 2)).of("rl")) == 6


@pytest.mark.parametrize("name", ["two-teachers-both-seed0", "offline-recorded-seed0", "rl-seed0"])
def test_the_command_means_the_planned_configuration(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is started has the settings by which a begun run is recognised, and its folder decides if it goes on."""
    import typer

    from agentrl.cli.main import app

    (run,) = (run for run in plan_of(tmp_path).runs if run.name == name)
    for teacher in ("teacher", "settings", "student"):
        (tmp_path / f"model-{teacher}").mkdir()
    typer.main.get_command(app).main([*run.command(), "--dry-run"], standalone_mode=False)
    file = tmp_path / "shown.toml"
    file.write_text(capsys.readouterr().out)
    assert settings_of(load_config(file=file, run_dir="x")) == settings_of(run.config)
    write_run(run, [step(1, tokens=1, concurrency=1)], solve=(0.1, 0.2))
    check_settings(run)
    assert run.command()[-1] == "--resume"


def test_checkpoints_that_make_the_curve_are_kept(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    for run in plan.of("rl"):
        ours = run.verb == "distill"
        assert run.config.checkpoint.every_steps == (1 if ours else 2)
        assert run.config.checkpoint.keep >= run.config.steps
        assert list(plan.curve(run)) == list(range(1, 14) if ours else range(2, 32, 2)), "both ends are the run's own"
        model, folder = plan.curve(run)[8]
        assert model == run.folder / "checkpoints" / "step_000008"
        assert folder == tmp_path / "curves" / f"{run.name}-step000008"
    assert plan.curve(plan.of("kinds")[0]) == {}


def test_help_and_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["distill.py", "--work", str(tmp_path), "--dry-run", "--seeds", "3", "--steps", "5"]
    )
    assert benchmark.main() == 0
    shown = capsys.readouterr().out
    assert shown.count("to be run") == 7
    assert f"agentrl sft swe-gym --preset tiny-teacher --out {tmp_path}/model-teacher" in shown
    assert shown.count("--steps 5") == 6
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("sys.argv", ["distill.py", "--work", str(tmp_path), "--only", "nothing"])
    assert benchmark.main() == 2
    with pytest.raises(SystemExit):
        benchmark.parse(["--help"])
    shown = capsys.readouterr().out
    assert all(case in shown for case in CASES)


# --- figures ----------------------------------------------------------------------------------------------------


def test_figures_of_a_run_folder(tmp_path: Path) -> None:
    """Device time is steps × devices; evaluations in between come from elsewhere."""
    (run,) = plan_of(tmp_path, "cross-tokenizer").chosen
    steps = [
        step(10, tokens=1, concurrency=1, teacher__kl=0.5),
        step(30, tokens=1, concurrency=1),
        step(20, tokens=1, concurrency=1, teacher__kl=0.1),
    ]
    write_run(run, steps, solve=(0.25, 0.75))
    assert figures.own_rates(run.folder) == {0: 0.25, 3: 0.75}
    found = figures.read_learned(run.folder, seed=4, solved={0: 0.25, 1: 0.5, 3: 0.75})
    assert found.points == (Point(0, 0, 0.25), Point(1, 20, 0.5), Point(3, 120, 0.75))
    assert (found.seed, found.step_s, found.device_s, found.learning_rate) == (4, 20.0, 120.0, 5e-4)
    assert found.means == {"teacher/kl": pytest.approx(0.3)}
    assert found.as_json()["curve"] == [[0, 0.0, 0.25], [1, 20.0, 0.5], [3, 120.0, 0.75]]


def test_an_unfinished_run_has_no_figures(tmp_path: Path) -> None:
    (run,) = plan_of(tmp_path, "cross-tokenizer").chosen
    write_run(run, [step(10, tokens=1, concurrency=1)], solve=(0.25, 0.75), evaluated=False)
    with pytest.raises(RunFolderError, match="lacks solve/fresh"):
        figures.read_learned(run.folder, seed=0, solved=figures.own_rates(run.folder))


# --- the whole, with a stand-in for its processes -----------------------------------------------------------------


class Processes:
    """`agentrl` commands that leave what the real ones do; `fail` is a word at which one fails, once.

    Teachers and distilled students solve 90 %, RL's 60 % from its first checkpoint on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[str] = []
        self.fail = ""
        monkeypatch.setattr(benchmark, "run_agentrl", self.agentrl)
        monkeypatch.setattr(benchmark, "run_child", self.run)
        monkeypatch.setattr(benchmark, "document", lambda name: {"benchmark": name})

    async def agentrl(self, words: Sequence[str], log: Path, *, limit_s: float) -> int:
        return self.leave(words, log)

    def leave(self, words: Sequence[str], log: Path) -> int:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("the disk is on fire\n")
        out = Path(words[words.index("--out" if words[0] == "sft" else "--run-dir") + 1])
        self.started.append(f"{words[0]} {out.name}")
        if self.fail and self.fail in self.started[-1]:
            self.fail = ""
            out.mkdir(parents=True)  # half-done
            return 1
        assert not out.exists()
        out.mkdir(parents=True)
        if words[0] == "sft":
            (out / "warm_start.json").write_text(json.dumps({"stages": [{"cpu_s": 30.0}, {"cpu_s": 12.0}]}))
        else:
            model, tasks = (words[words.index(option) + 1] for option in ("--model", "--tasks"))
            solve = 0.6 if out.name.startswith("rl-") else 0.9
            found = {"solve": solve, "low": 0.5, "high": 0.95, "n": 512, "tasks": int(tasks), "model": model}
            (out / "eval.json").write_text(json.dumps(found))
        return 0

    async def run(self, run: StudentRun) -> None:
        self.started.append(run.name)
        end = 0.9 if run.verb == "distill" else 0.6
        write_run(run, [step(10, tokens=1, concurrency=1)] * run.config.steps, solve=(0.3, end))


def test_the_benchmark_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes, output = Processes(monkeypatch), tmp_path / "distill.json"

    def whole() -> dict[str, Any]:
        asyncio.run(benchmark.run_all(plan_of(tmp_path / "work", seeds=(0, 1, 2)), output))
        return dict(json.loads(output.read_text()))

    for failing in ("sft model-settings", "eval distill-seed0-step000002"):
        processes.fail = failing
        with pytest.raises(RunFailedError, match="the disk is on fire"):
            whole()
    partial = json.loads(output.read_text())
    assert not partial["complete"]
    assert (partial["summary"]["seeds"], partial["summary"]["min_gain"]) == (0, None)
    found = whole()
    twice = {name for name, count in Counter(processes.started).items() if count > 1}
    assert twice == {"sft model-settings", "eval distill-seed0-step000002"}
    assert found["complete"]
    teacher = found["teachers"]["teacher"]
    assert teacher["train_cpu_s"] == 42.0
    assert teacher["command"].startswith("agentrl sft swe-gym --preset tiny-teacher ")
    assert teacher["minutes"] >= 0
    assert (teacher["fresh"]["solve"], teacher["mixture"]["solve"]) == (0.9, 0.9)
    assert "mixture" not in found["teachers"]["other"]
    nearly = 0.6 - math.sqrt(0.6 * 0.4 / 512)
    for row in found["rl"]["to_rl_level"]:  # 10 s on two devices: between the start and RL's second, our first delivery
        assert row["rl_device_s"] == pytest.approx(40 * (nearly - 0.3) / 0.3, rel=1e-4)
        assert row["distill_device_s"] == pytest.approx(10)
    assert [run["learning_rate"] for run in found["rl"]["rl"]] == [2e-4] * 3
    summary = found["summary"]
    assert (summary["seeds"], summary["min_gain"]) == (3, pytest.approx(0.6))
    assert summary["device_time_vs_rl"] == pytest.approx(4 * (nearly - 0.3) / 0.3, rel=1e-4)
    assert 0 < summary["device_time_vs_rl_with_teacher"] < summary["device_time_vs_rl"]
    assert set(found) >= {"rl", "two-teachers", "cross-tokenizer", "offline", "summary"}
    assert "kinds" not in found
    assert summary["offline_gain"] == pytest.approx(0.6)
    looked_at = [name for name in processes.started if name.startswith(("eval rl-seed1", "eval distill-seed1"))]
    assert [name[-2:] for name in looked_at] == ["08", "16", "24", "04", "02", "01", "02"]
    before = list(processes.started)
    assert whole() == found
    assert processes.started == before


def test_parts_come_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that runs one case keeps what earlier calls have measured, figures of teachers among it."""
    processes, output = Processes(monkeypatch), tmp_path / "distill.json"
    seen: dict[str, Any] = {}
    for case in ("rl", "two-teachers", "kinds", "cross-tokenizer", "offline"):
        before = len(processes.started)
        asyncio.run(benchmark.run_all(plan_of(tmp_path / "work", case, seeds=(0, 1, 2)), output))
        assert not any(name.endswith("rl-seed0") for name in processes.started[before:]) or case == "rl"
        found = json.loads(output.read_text())
        assert found["complete"] == (case == "offline")
        assert found["rl"] == seen.setdefault("rl", found["rl"])
        assert found["teachers"]["teacher"]["fresh"]["solve"] == 0.9
        seen |= {name: found[name] for name in CASES if name in found}
        assert {name: found.get(name) for name in seen} == seen
    assert set(seen) == set(CASES)
    assert found["teachers"].keys() == {"teacher", "settings", "other"}
    assert found["student"]["folder"] == "model-student"
    assert found["teachers"]["settings"]["mixture"]["solve"] == 0.9
    assert found["summary"]["min_gain"] == pytest.approx(0.6)
    assert found["summary"]["two_teachers_over_best_teacher"] == pytest.approx(0)


def test_what_a_given_teacher_cost_and_can_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own files tell the cost; an evaluation of another model is none of it."""
    processes, work = Processes(monkeypatch), tmp_path / "work"
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, cpu_s in ((first, 900.0), (second, 500.0)):
        folder.mkdir()
        (folder / "warm_start.json").write_text(json.dumps({"stages": [{"cpu_s": cpu_s}]}))
    (tmp_path / "second.cost.json").write_text(json.dumps({"minutes": 20.0, "train_cpu_s": 700.0}))
    asyncio.run(benchmark.run_all(plan_of(work, "kinds", seeds=(0,), given={"teacher": first}), tmp_path / "a.json"))
    plan = plan_of(work, "kinds", seeds=(0,), given={"teacher": second})
    assert benchmark.read_teacher(plan, plan.teachers["teacher"]) == {
        "folder": second.name,
        "minutes": 20.0,
        "train_cpu_s": 700.0,
    }
    told = json.loads((tmp_path / "a.json").read_text())["teachers"]["teacher"]
    assert (told["train_cpu_s"], told["fresh"]["solve"]) == (900.0, 0.9)
    assert processes.started[0] == "eval teacher-fresh"


def test_a_run_with_other_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    (run,) = plan_of(tmp_path, "cross-tokenizer").chosen
    write_run(run, [step(10, tokens=1, concurrency=1)], solve=(0.25, 0.75))
    (changed,) = plan_of(tmp_path, "cross-tokenizer", extra=("--train.optimizer.learning-rate=1e-3",)).chosen
    check_settings(run)
    with pytest.raises(ConfigError, match="learning_rate"):
        check_settings(changed)
    assert dump_toml(run.config) != dump_toml(changed.config)
