"""What a teacher would leave in a fake run: scores of segments and the figures of its steps."""

from __future__ import annotations

import numpy as np

from agentrl.trajectory.record import Segment, TeacherScores

K = 4
VOCABULARY = 700


def fake_scores(segment: Segment, teacher: str, rng: np.random.Generator, *, spans: bool = False) -> TeacherScores:
    """Close to the student but for one token in twelve; each first choice is the token itself unless they part there.

    `spans`: as of a teacher with another tokenizer, two tokens at a time and without candidates.
    """
    mask = segment.agent_mask
    mask[0] = False
    count = int(mask.sum())
    apart = rng.random(count) < 1 / 12
    own = segment.logprobs[mask] + rng.normal(0, 0.05, count) - apart * rng.exponential(3.0, count)
    logprobs = np.full(len(segment), np.nan, np.float32)
    logprobs[mask] = np.minimum(own, -1e-3)
    if spans:
        numbers = np.full(len(segment), -1, np.int32)
        numbers[mask] = np.arange(count) // 2
        return TeacherScores(teacher, _shared(logprobs, numbers), numbers)
    top1 = np.zeros(len(segment), bool)
    top1[mask] = ~apart
    ids = rng.integers(0, VOCABULARY, (count, K)).astype(np.int32)
    candidates = np.tile(np.log(np.array([0.7, 0.1, 0.05, 0.01], np.float32)), (count, 1))
    ids[~apart, 0] = segment.token_ids[mask][~apart]
    return TeacherScores(teacher, logprobs, None, ids, candidates.astype(np.float32), top1)


def _shared(logprobs: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Each span's sum in equal shares."""
    shared = logprobs.copy()
    for number in range(int(numbers.max()) + 1):
        shared[numbers == number] = logprobs[numbers == number].mean()
    return shared


def fake_teacher_metrics(part: float, teachers: tuple[str, ...]) -> dict[str, float]:
    """Figures at `part` in [0, 1] of a run: the student comes nearer, least so in late turns."""
    kl = 0.5 - 0.35 * part
    each = {f"teacher/kl/{name}": kl + 0.02 * i for i, name in enumerate(teachers)} if len(teachers) > 1 else {}
    return {
        **each,
        "teacher/kl": kl,
        **{f"teacher/kl_turn/{turn}": kl * (0.5 + turn / 4) for turn in range(4)},
        "teacher/kl_turn/10+": 3 * kl,
        "teacher/kl_purpose/act": kl,
        "teacher/kl_purpose/summarise": 2 * kl,
        "teacher/top1_agreement": 0.8 + 0.1 * part,
        "teacher/scored_tokens": 9_000.0,
        "teacher/unscored_fraction": 0.0,
        "teacher/reverse_kl": 0.9 * kl,
        "teacher/clamped_fraction": 0.01,
        "teacher/tokens_per_s": 2_400.0,
        "teacher/busy_fraction": 0.3,
        "teacher/wait_fraction": 0.02,
        "teacher/cache_hits": 3.0,
        "teacher/failures": 0.0,
        "loss/divergence": kl,
    }
