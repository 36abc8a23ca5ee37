"""`benchmarks/distill.py`: its plan is what the command line understands, its figures are what they say."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import distill as benchmark
import distill_figures as figures
import pytest
from bench_runs import step, write_run
from distill_figures import Learned, Point
from distill_plan import CASES, Choice, Plan, StudentRun, make_plan

from agentrl.config.load import dump_toml, load_config
from agentrl.errors import ConfigError, RunFailedError, RunFolderError
from agentrl.run.bench_plan import check_settings, settings_of


def plan_of(work: Path, *only: str, **fields: Any) -> Plan:
    return make_plan(
        Choice(**{"work": work, "seeds": (0, 1), "tasks": 512, "kind": "transformers", "given": {}, **fields}), only
    )


def learned(seed: int, *solved: float, device_s: float = 100.0, **means: float) -> Learned:
    """Evaluated before, and after each `device_s`."""
    points = tuple(Point(number, number * device_s, value) for number, value in enumerate(solved))
    return Learned(seed, points, 2.0, means)


# --- the plan ---------------------------------------------------------------------------------------------------


def test_the_cases(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert [run.name for run in plan.runs] == [
        *("distill-seed0", "rl-seed0", "distill-seed1", "rl-seed1"),
        *("kinds-transformers-seed0", "kinds-vllm-seed0"),
        *("two-teachers-both-seed0", "two-teachers-functions-seed0", "two-teachers-settings-seed0"),
        *("cross-tokenizer-other-seed0", "offline-recorded-seed0"),
    ]
    assert sorted(plan.teachers) == ["other", "settings", "teacher"]
    assert [run.name for run in plan_of(tmp_path, "offline").runs] == ["rl-seed0", "offline-recorded-seed0"]
    assert sorted(plan_of(tmp_path, "rl").teachers) == ["teacher"]
    with pytest.raises(ConfigError, match="no case 'r1'"):
        plan_of(tmp_path, "r1")
    with pytest.raises(ConfigError, match="256 tasks say too little"):
        plan_of(tmp_path, tasks=256)


def test_every_run_is_measured_alike(tmp_path: Path) -> None:
    """The same student, the same tasks at temperature 1, nothing evaluated beside a run's rollouts, two devices."""
    for run in (run for run in plan_of(tmp_path).runs if run.case != "kinds"):
        config = run.config
        assert (config.eval.fresh_tasks, config.eval.every_steps, config.eval.temperature) == (512, 0, 1.0)
        assert config.policy.model == "tiny"
        assert (config.rollout.schedule, config.placement.replicas, config.placement.ranks) == ("async", 1, 1)
        assert config.train.updates_per_step == 2
        assert config.environment.options.get("families") == (
            ["functions", "settings"] if run.case == "two-teachers" else None
        )


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


@pytest.mark.parametrize("name", ["two-teachers-both-seed0", "offline-recorded-seed0", "rl-seed0"])
def test_the_command_means_the_planned_configuration(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is started has the settings by which a begun run is recognised, and its folder decides if it goes on."""
    import typer

    from agentrl.cli.main import app

    (run,) = (run for run in plan_of(tmp_path).runs if run.name == name)
    for teacher in ("teacher", "settings"):
        (tmp_path / f"model-{teacher}").mkdir()
    typer.main.get_command(app).main([*run.command(), "--dry-run"], standalone_mode=False)
    file = tmp_path / "shown.toml"
    file.write_text(capsys.readouterr().out)
    assert settings_of(load_config(file=file, run_dir="x")) == settings_of(run.config)
    write_run(run, [step(1, tokens=1, concurrency=1)], solve=(0.1, 0.2))
    check_settings(run)
    assert run.command()[-1] == "--resume"


def test_checkpoints_that_make_the_curve_are_kept(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, every=4)
    for run in plan.of("rl"):
        ours = run.verb == "distill"
        assert run.config.checkpoint.every_steps == (4 if ours else 16)
        assert run.config.checkpoint.keep >= run.config.steps
        assert list(plan.curve(run)) == ([4, 8, 12, 16] if ours else [16]), "both ends are the run's own to evaluate"
        model, folder = plan.curve(run)[16]
        assert model == run.folder / "checkpoints" / "step_000016"
        assert folder == tmp_path / "curves" / f"{run.name}-step000016"
    assert plan.curve(plan.of("kinds")[0]) == {}


def test_help_and_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["distill.py", "--work", str(tmp_path), "--dry-run", "--seeds", "3", "--steps", "5"]
    )
    assert benchmark.main() == 0
    shown = capsys.readouterr().out
    assert shown.count("to be run") == 9
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


def test_reached_is_for_good() -> None:
    run = learned(0, 0.3, 0.5, 0.7, 0.6, 0.65, 0.8)
    assert run.reached_s(0.65) == 400, "at 200 s it was there, and fell below again"
    assert run.reached_s(0.6) == 200
    assert run.reached_s(0.2) == 0
    assert run.reached_s(0.81) is None
    assert run.gain == pytest.approx(0.5)


def test_device_time_against_rl_by_seed() -> None:
    ours = [learned(0, 0.3, 0.6, 0.7, 0.8), learned(1, 0.3, 0.5, 0.6, 0.7)]
    theirs = [learned(1, 0.3, 0.5, 0.6, device_s=400.0), learned(0, 0.3, 0.6, 0.5, 0.6, device_s=300.0)]
    found = figures.against_rl(ours, theirs)
    assert found["to_rl_level"] == [
        {"seed": 0, "level": 0.6, "rl_device_s": 900.0, "distill_device_s": 100.0, "ratio": 9.0},
        {"seed": 1, "level": 0.6, "rl_device_s": 800.0, "distill_device_s": 200.0, "ratio": 4.0},
    ]
    assert found["ratio"]["value"] == pytest.approx(6.0), "the geometric mean"
    summary = figures.summary({"rl": found}, {"teacher": {"fresh": {"solve": 0.9}}})
    assert summary["min_gain"] == pytest.approx(0.4)
    assert summary["device_time_vs_rl"] == pytest.approx(6.0)
    assert summary["teacher_solve"] == 0.9
    assert summary["two_teachers_over_best_alone"] is None


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ([learned(0, 0.3, 0.8), learned(1, 0.3, 0.5)], [learned(0, 0.3, 0.6), learned(1, 0.3, 0.6)]),
        ([learned(0, 0.3, 0.8), learned(1, 0.3, 0.8)], [learned(0, 0.3, 0.6)]),
        ([learned(0, 0.3, 0.8)], []),
    ],
    ids=["not reached", "RL not done for a seed", "no RL yet"],
)
def test_no_ratio_is_claimed_that_does_not_hold(ours: Sequence[Learned], theirs: Sequence[Learned]) -> None:
    found = figures.against_rl(ours, theirs)
    assert found["ratio"] is None
    assert figures.summary({"rl": found}, {})["device_time_vs_rl"] is None
    json.dumps(found, allow_nan=False)


def test_two_teachers_against_the_better_one() -> None:
    students = {"both": learned(0, 0.2, 0.8), "functions": learned(0, 0.2, 0.45), "settings": learned(0, 0.2, 0.5)}
    found = figures.mixture(students, {"teacher": 0.45, "settings": 0.55})
    assert found["over_best_student"] == pytest.approx(0.3)
    assert found["over_best_teacher"] == pytest.approx(0.25)
    assert figures.summary({"two-teachers": found}, {})["two_teachers_over_best_alone"] == pytest.approx(0.3)


def test_figures_of_a_run_folder(tmp_path: Path) -> None:
    """Device time is steps × devices; evaluations in between come from elsewhere."""
    (run,) = plan_of(tmp_path, "cross-tokenizer").runs
    steps = [
        step(10, tokens=1, concurrency=1, teacher__kl=0.5),
        step(30, tokens=1, concurrency=1),
        step(20, tokens=1, concurrency=1, teacher__kl=0.1),
    ]
    write_run(run, steps, solve=(0.25, 0.75))
    found = figures.read_learned(run.folder, seed=4, between={1: 0.5})
    assert found.points == (Point(0, 0, 0.25), Point(1, 20, 0.5), Point(3, 120, 0.75))
    assert (found.seed, found.step_s, found.device_s) == (4, 20.0, 120.0)
    assert found.means == {"teacher/kl": pytest.approx(0.3)}
    assert found.as_json()["curve"] == [[0, 0.0, 0.25], [1, 20.0, 0.5], [3, 120.0, 0.75]]


def test_an_unfinished_run_has_no_figures(tmp_path: Path) -> None:
    (run,) = plan_of(tmp_path, "cross-tokenizer").runs
    write_run(run, [step(10, tokens=1, concurrency=1)], solve=(0.25, 0.75), evaluated=False)
    with pytest.raises(RunFolderError, match="lacks solve/fresh"):
        figures.read_learned(run.folder, seed=0, between={})


# --- the whole, with a stand-in for its processes -----------------------------------------------------------------


class Processes:
    """`agentrl` commands that leave what the real ones do; `fail` is a word at which one fails, once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.started: list[str] = []
        self.fail = ""

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
            found = {"solve": 0.9, "low": 0.88, "high": 0.92, "n": 512, "model": "x"}
            (out / "eval.json").write_text(json.dumps(found))
        return 0

    async def run(self, run: StudentRun) -> None:
        self.started.append(run.name)
        end = 0.9 if run.verb == "distill" else 0.6
        write_run(run, [step(10, tokens=1, concurrency=1)] * run.config.steps, solve=(0.3, end))


def test_the_benchmark_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(tmp_path / "work", seeds=(0,), every=4)
    processes, output = Processes(plan), tmp_path / "distill.json"
    monkeypatch.setattr(benchmark, "run_agentrl", processes.agentrl)
    monkeypatch.setattr(benchmark, "run_child", processes.run)
    monkeypatch.setattr(benchmark, "document", lambda name: {"benchmark": name})
    processes.fail = "sft model-settings"
    with pytest.raises(RunFailedError, match="the disk is on fire"):
        asyncio.run(benchmark.run_all(plan, output))
    processes.fail = "eval rl-seed0-step000016"
    with pytest.raises(RunFailedError):
        asyncio.run(benchmark.run_all(plan, output))
    partial = json.loads(output.read_text())
    assert not partial["complete"]
    assert (partial["summary"]["min_gain"], partial["summary"]["device_time_vs_rl"]) == (pytest.approx(0.6), None)
    asyncio.run(benchmark.run_all(plan, output))
    twice = {name for name, count in Counter(processes.started).items() if count > 1}
    assert twice == {"sft model-settings", "eval rl-seed0-step000016"}
    whole = json.loads(output.read_text())
    assert whole["complete"]
    teacher = whole["teachers"]["teacher"]
    assert teacher["train_cpu_s"] == 42.0
    assert teacher["command"].startswith("agentrl sft swe-gym --preset tiny-teacher ")
    assert teacher["minutes"] >= 0
    assert (teacher["fresh"]["solve"], teacher["mixture"]["solve"]) == (0.9, 0.9)
    assert "mixture" not in whole["teachers"]["other"]
    (row,) = whole["rl"]["to_rl_level"]
    assert (row["rl_device_s"], row["distill_device_s"], row["ratio"]) == (320.0, 80.0, 4.0)
    assert set(whole) >= {"rl", "kinds", "two-teachers", "cross-tokenizer", "offline", "summary"}
    assert whole["summary"]["offline_gain"] == pytest.approx(0.6)
    before = list(processes.started)
    asyncio.run(benchmark.run_all(plan, output))
    assert processes.started == before


def test_a_run_with_other_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    (run,) = plan_of(tmp_path, "cross-tokenizer").runs
    write_run(run, [step(10, tokens=1, concurrency=1)], solve=(0.25, 0.75))
    (changed,) = plan_of(tmp_path, "cross-tokenizer", extra=("--train.optimizer.learning-rate=1e-3",)).runs
    check_settings(run)
    with pytest.raises(ConfigError, match="learning_rate"):
        check_settings(changed)
    assert dump_toml(run.config) != dump_toml(changed.config)
