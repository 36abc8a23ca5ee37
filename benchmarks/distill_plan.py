"""What `benchmarks/distill.py` runs: teachers to build, and runs of `agentrl train` and `agentrl distill`, by case.

All students begin with the shipped policy, but those of two families with one that knows both a little; they have one
policy server and one trainer (`async`), and are evaluated on the same fresh tasks at temperature 1, before and after.
Evaluations in between would run beside the rollouts of an `async` run and lengthen its steps, so the kept checkpoints
are evaluated afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.distill import parse_teacher
from agentrl.config.load import load_config
from agentrl.errors import ConfigError
from agentrl.run.bench_plan import BenchRun
from agentrl.run.folder import is_run_folder

CASES = ("rl", "kinds", "two-teachers", "cross-tokenizer", "offline")
DEFAULT_CASES = tuple(case for case in CASES if case != "kinds")
MIN_TASKS = 512
ENVIRONMENT = "swe-gym"
BOTH_FAMILIES = '--environment.families=["functions", "settings"]'
# The fastest schedule that `agentrl bench schedules` measures on two devices.
RL_WORDS = ("--rollout.schedule=async", "--placement.replicas=1", "--placement.ranks=1")
RL_EVERY = 8
"""Deliveries between the points of RL's curve."""
RL_FINEST = 2
"""… in the stretch in which its level was reached. A delivery has twice the rollouts of distillation's."""
# What learns fastest from a teacher that can score any token: all of its distribution, and a larger step (10 deliveries
# from the shipped policy: 35 % → 71 % of 512 fresh tasks, 37 % → 62 % by the sampled token alone at half the rate).
WHOLE_VOCABULARY = (
    "--train.divergence.name=reverse_kl",
    "--distill.support=full",
    "--train.optimizer.learning-rate=1e-3",
)
# RL's last evaluation may be a lucky one, and distillation has to reach it: it goes on for longer than its preset.
STEPS = 14
KINDS = ("transformers", "vllm")
KIND_STEPS = 8


@dataclass(frozen=True, slots=True)
class TeacherModel:
    """A teacher, or the student of both families: built by `agentrl sft --preset PRESET` into `folder`, or given."""

    name: str
    preset: str
    folder: Path
    given: bool

    def command(self) -> list[str]:
        """The words after `agentrl` that build it."""
        return ["sft", ENVIRONMENT, "--preset", self.preset, "--out", str(self.folder)]


STUDENT = "student"
PRESETS = {
    "teacher": "tiny-teacher",
    "settings": "tiny-teacher-settings",
    "other": "tiny-teacher-other",
    STUDENT: "tiny-both",
}


@dataclass(frozen=True, slots=True)
class StudentRun(BenchRun):
    """One run. `schedule` is its part in the case; `options` are those that are no dotted ones (`--teacher …`)."""

    case: str
    verb: str
    preset: str
    options: tuple[str, ...]

    def command(self) -> list[str]:
        """The words after `agentrl` that start the run, or go on with it where it was begun."""
        place = ["--run-dir", str(self.folder), "--plain"]
        if is_run_folder(self.folder):
            return [self.verb, ENVIRONMENT, *place, "--resume"]
        return [self.verb, ENVIRONMENT, "--preset", self.preset, *place, *self.options, *self.words]


@dataclass(frozen=True, slots=True)
class Choice:
    """What the command line says. `extra` dotted options hold for every run that distils."""

    work: Path
    seeds: tuple[int, ...]
    tasks: int
    kind: str
    given: dict[str, Path]
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Teachers by name, the runs of all cases (what there is of them is read), and those of them that are `chosen`, in
    the order in which they are run."""

    choice: Choice
    teachers: dict[str, TeacherModel]
    runs: tuple[StudentRun, ...]
    chosen: tuple[StudentRun, ...]

    def of(self, case: str, part: str | None = None) -> list[StudentRun]:
        """A case's runs, or those of one part, by seed."""
        return [run for run in self.runs if run.case == case and part in (None, run.schedule)]

    def needed(self) -> list[TeacherModel]:
        """The teachers of the chosen runs, and what their students begin with."""
        models = {teacher.model for run in self.chosen for teacher in run.config.distill.teachers}
        models |= {run.config.policy.model for run in self.chosen}
        return [teacher for teacher in self.teachers.values() if str(teacher.folder) in models]

    def curve(self, run: StudentRun) -> dict[int, tuple[Path, Path]]:
        """By step: the checkpoints of a run that may be evaluated afterwards, and the folder of that evaluation."""
        if run.case != "rl":
            return {}
        every = run.config.checkpoint.every_steps
        place = self.choice.work / "curves"
        return {
            step: (run.folder / "checkpoints" / f"step_{step:06d}", place / f"{run.name}-step{step:06d}")
            for step in range(every, run.config.steps, every)
        }


def make_plan(choice: Choice, only: Sequence[str] = ()) -> Plan:
    """All runs, and of them those of the cases that `only` names; of `DEFAULT_CASES` where it names none.

    Raises `ConfigError` for a case that there is not, too few tasks, settings that cannot be, or a work folder with
    runs of another plan.
    """
    wanted = only or DEFAULT_CASES
    if unknown := [case for case in wanted if case not in CASES]:
        raise ConfigError(f"no case {unknown[0]!r}", where="--only", remedy=f"one of {', '.join(CASES)}")
    if choice.tasks < MIN_TASKS:
        raise ConfigError(
            f"{choice.tasks} tasks say too little", where="--tasks", remedy=f"{MIN_TASKS} or more, as the result claims"
        )
    maker = _Maker(choice)
    by_case: dict[str, list[StudentRun]] = {}
    for case in CASES:
        try:
            by_case[case] = maker.runs(case)
        except ConfigError:
            # Further options that this case cannot have: it is left out unless it is wanted, or begun without them.
            if case in wanted or any(map(is_run_folder, choice.work.glob(f"{case}-*seed*"))):
                raise
    runs = {run.folder: run for planned in by_case.values() for run in planned}  # `offline` needs a run of `rl`
    _refuse_others(choice.work, runs)
    chosen = {run.folder for case in wanted for run in by_case[case]}
    every = tuple(runs.values())
    return Plan(choice, maker.used, every, tuple(run for run in every if run.folder in chosen))


def _refuse_others(work: Path, known: Collection[Path]) -> None:
    """Raise `ConfigError` where a run was begun there that is not planned: its result would be lost."""
    for folder in sorted(work.glob("*-seed*")):
        if is_run_folder(folder) and folder not in known:
            raise ConfigError(
                f"a run was begun there that this command does not name: {folder.name}",
                where=str(work),
                remedy="name all seeds of the comparison (--only chooses its parts), or begin another one (--work DIR)",
            )


class _Maker:
    """Makes runs, and notes which teachers they need."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self.used: dict[str, TeacherModel] = {}

    def runs(self, case: str) -> list[StudentRun]:
        """A case's runs. RL comes before the distillation that is measured by its level."""
        seeds = self._choice.seeds
        if case == "rl":
            more = _kept(1)
            return [run for seed in seeds for run in (self._rl(seed), self._distill(case, "distill", seed, more=more))]
        if case == "kinds":
            return [self._kind(kind) for kind in KINDS]
        if case == "two-teachers":
            return self._two_teachers(seeds[0])
        if case == "cross-tokenizer":
            return [self._distill(case, "other", seeds[0], "other", more=("--distill.align=bytes",))]
        recorded = self._choice.work / f"rl-seed{seeds[0]}"
        return [self._rl(seeds[0]), self._distill(case, "recorded", seeds[0], options=("--from-run", str(recorded)))]

    def _two_teachers(self, seed: int) -> list[StudentRun]:
        """The mixture of both families, taught by both teachers and by either alone."""
        case = "two-teachers"
        both = ("--route", "family", "--teacher", self._spec("settings", "settings"))
        more = (BOTH_FAMILIES, f"--policy.model={self._folder(STUDENT)}")
        return [
            self._distill(case, "both", seed, "teacher", "functions", options=both, more=more),
            self._distill(case, "functions", seed, "teacher", more=more),
            self._distill(case, "settings", seed, "settings", more=more),
        ]

    def _rl(self, seed: int) -> StudentRun:
        words = (*RL_WORDS, *_kept(RL_FINEST), *self._evaluation())
        return self._run("rl", "rl", seed, "train", "demo", (), words)

    def _kind(self, kind: str) -> StudentRun:
        """A short run that says how fast a kind of teacher is here; evaluated so little that it says no more."""
        words = (f"--steps={KIND_STEPS}", "--eval.every-steps=0", "--eval.fresh-tasks=32", "--eval.unseen-tasks=0")
        options = ("--teacher", self._spec("teacher", kind=kind))
        return self._run("kinds", kind, self._choice.seeds[0], "distill", "distill", options, words)

    def _distill(
        self,
        case: str,
        part: str,
        seed: int,
        teacher: str = "teacher",
        name: str = "",
        *,
        options: tuple[str, ...] = (),
        more: tuple[str, ...] = (),
    ) -> StudentRun:
        given = ("--teacher", self._spec(teacher, name), *options)
        whole = self._choice.kind == "transformers" and case != "cross-tokenizer"
        way = WHOLE_VOCABULARY if whole else ()
        words = (f"--steps={STEPS}", *way, *more, *self._evaluation(), *self._choice.extra)
        return self._run(case, part, seed, "distill", "distill", given, words)

    def _evaluation(self) -> tuple[str, ...]:
        return (f"--eval.fresh-tasks={self._choice.tasks}", "--eval.unseen-tasks=0", "--eval.every-steps=0")

    def _spec(self, teacher: str, name: str = "", *, kind: str | None = None) -> str:
        """`[NAME=]KIND:FOLDER` of a teacher, which is needed then."""
        return f"{f'{name}=' if name else ''}{kind or self._choice.kind}:{self._folder(teacher)}"

    def _folder(self, model: str) -> Path:
        """Of a model that is needed then."""
        given = self._choice.given.get(model)
        folder = given or self._choice.work / f"model-{model}"
        self.used[model] = TeacherModel(model, PRESETS[model], folder, given is not None)
        return folder

    def _run(
        self,
        case: str,
        part: str,
        seed: int,
        verb: str,
        preset: str,
        options: tuple[str, ...],
        words: tuple[str, ...],
    ) -> StudentRun:
        prefix = "" if case in ("rl", part) else f"{case}-"
        folder = self._choice.work / f"{prefix}{part}-seed{seed}"
        words = (*words, f"--seed={seed}")
        config = load_config(preset=preset, overrides=[*_dotted(options), *words], run_dir=str(folder))
        return StudentRun(part, seed, words, config, case, verb, preset, options)


def _kept(every: int) -> tuple[str, ...]:
    """The checkpoints of `Plan.curve`."""
    return (f"--checkpoint.every-steps={every}", "--checkpoint.keep=1000")


def _dotted(options: Sequence[str]) -> list[str]:
    """The command's own options as the settings that they stand for."""
    found, teachers = [], []
    for key, value in zip(options[::2], options[1::2], strict=True):
        if key == "--teacher":
            table = parse_teacher(value)
            teachers.append("{" + ", ".join(f'{name} = "{part}"' for name, part in table.items()) + "}")
        else:
            found.append(f"--distill.{key.removeprefix('--')}={value}")
    return [*found, *([f"--distill.teachers=[{', '.join(teachers)}]"] if teachers else [])]
