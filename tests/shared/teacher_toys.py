"""A toy model, segments of the shipped policy's tokens, and what teachers are made from: for tests of teachers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.policy import model_location
from agentrl.trajectory import Purpose, Segment, Span, SpanKind, Split
from agentrl.wire import ScoreRequest, Task, TeacherSpec, TokenScores
from agentrl_teachers.folder_text import FolderText

TINY = Path(model_location("tiny"))
TEXT = FolderText(TINY)
VOCABULARY = 1024
PROMPT = "<|im_start|>user\nThe function total returns a wrong sum.<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "I look at it.\n<tool_call>\n<function=bash>\n<parameter=command>\ncat total.py\n</parameter>\n</function>\n"
RESULT = "<tool_response>\ndef total(items):\n    return sum(items) + 1\n</tool_response><|im_end|>\n"


class ToyModel:
    """Log-probabilities of the next token by the one before: exact, different for each pair."""

    def __init__(self, seed: int = 0, *, vocabulary: int = VOCABULARY) -> None:
        logits = np.random.default_rng(seed).normal(0.0, 2.0, (vocabulary, vocabulary))
        self.table = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def scores(self, token_ids: Sequence[int], *, top_k: int) -> TokenScores:
        ids = np.asarray(token_ids)
        rows = self.table[ids[:-1]]
        own = rows[np.arange(len(rows)), ids[1:]]
        order = np.argsort(-rows, axis=1)[:, :top_k]
        return TokenScores(
            logprobs=own.astype(np.float32),
            top1=rows.argmax(axis=1) == ids[1:],
            top_ids=order.astype(np.int32),
            top_logprobs=np.take_along_axis(rows, order, axis=1).astype(np.float32),
        )


class ToySource:
    """The toy as a source: no server."""

    def __init__(self, model: ToyModel | None = None, *, max_model_len: int = 512) -> None:
        self.model = model or ToyModel()
        self.name = "toy"
        self.max_model_len = max_model_len
        self.asked = 0

    async def score(
        self, token_ids: Sequence[int], *, top_k: int, timeout_s: float, positions: np.ndarray | None = None
    ) -> TokenScores:
        self.asked += 1
        return self.model.scores(token_ids, top_k=top_k)

    async def encode(self, text: str, *, timeout_s: float) -> list[int]:
        return TEXT.encode(text)

    async def token_bytes(self, token_ids: Sequence[int], *, timeout_s: float) -> list[bytes]:
        return TEXT.token_bytes(token_ids)


def segment(*agent: str, prompt: str = PROMPT, between: str = RESULT) -> Segment:
    """A prompt, then turns of the agent with the environment's answer between them."""
    parts = [(SpanKind.PROMPT, TEXT.encode(prompt))]
    for turn, text in enumerate(agent or (ANSWER, ANSWER)):
        if turn:
            parts.append((SpanKind.ENVIRONMENT, TEXT.encode(between)))
        parts.append((SpanKind.AGENT, TEXT.encode(text)))
    ids: list[int] = []
    spans = []
    for turn, (kind, tokens) in enumerate(parts):
        purpose = Purpose.ACT if kind is SpanKind.AGENT else None
        spans.append(Span(kind, len(ids), len(ids) + len(tokens), turn // 2, purpose))
        ids += tokens
    mask = np.zeros(len(ids), dtype=np.bool_)
    for span in spans:
        mask[span.start : span.stop] = span.kind is SpanKind.AGENT
    return Segment(
        token_ids=np.array(ids),
        spans=tuple(spans),
        logprobs=np.where(mask, -1.0, np.nan),
        versions=np.where(mask, 0, -1),
    )


def request(of: Segment | None = None, **changes: Any) -> ScoreRequest:
    """All of the agent's tokens are asked for."""
    of = of or segment()
    task = Task(id="t", environment="swe-gym", split=Split.TRAIN, data={})
    values: dict[str, Any] = {"trajectory_id": "r", "index": 0, "segment": of, "mask": of.agent_mask, "task": task}
    return ScoreRequest(**(values | changes))


def teacher_spec(folder: Path, **changes: Any) -> TeacherSpec:
    """The shipped policy as the student; nothing is kept on disk."""
    values: dict[str, Any] = {
        "name": "teacher",
        "model": str(TINY),
        "student": TINY,
        "longest": 256,
        "max_model_len": 512,
        "dtype": "float32",
        "top_k": 4,
        "align_bytes": False,
        "privileged": "patch",
        "concurrency": 4,
        "retries": 2,
        "start_timeout_s": 300.0,
        "device": None,
        "logs": folder,
        "cache": None,
        "environment": None,
        "score_student": None,
        "open_chat": None,
    }
    values |= changes
    return TeacherSpec(**({"any_token": values["top_k"] is None} | values))
