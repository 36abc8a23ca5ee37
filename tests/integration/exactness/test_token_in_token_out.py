"""K2: agent tokens are exactly the sampled ones; nothing that was sampled is ever tokenised again."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.chat import ChatFormat
from agentrl.chat.template import chatml_template
from agentrl.chat.tokenizer import load_tokenizer_folder
from agentrl.trajectory import OutcomeKind, SpanKind

pytestmark = [pytest.mark.vllm, pytest.mark.bubblewrap]

_CONTROL = re.compile(r"(<\|[a-z_]+\|>|</?tool_(?:call|response)>)")


class Spy:
    """A tokenizer that counts what is encoded; with `broken`, one that never gives back the ids it decoded: it
    spells every text byte by byte where the policy uses whole words."""

    def __init__(self, inner: Any, *, broken: bool) -> None:
        self._inner, self._broken = inner, broken
        self.encoded: list[list[int]] = []

    def encode(self, text: str) -> list[int]:
        ids = self._spelled(text) if self._broken else self._inner.encode(text)
        self.encoded.append(ids)
        return ids

    def _spelled(self, text: str) -> list[int]:
        pieces: list[str] = []
        for part in _CONTROL.split(text):
            pieces += [part] if _CONTROL.fullmatch(part) else list(part)
        return [token for piece in pieces for token in self._inner.encode(piece)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(ids)

    def token_id(self, token: str) -> int | None:
        return self._inner.token_id(token)


@pytest.mark.parametrize("broken", [False, True], ids=["identity", "no-identity"])
def test_what_was_sampled_is_never_tokenised(loop: Any, broken: bool) -> None:
    folder = load_tokenizer_folder(loop.shared.model)
    spy = Spy(folder.tokenizer, broken=broken)
    chat = ChatFormat(spy, chatml_template(), special_tokens=folder.special_tokens)
    recorder = importlib.import_module(type(loop).__module__).RecordingPolicy
    policies: list[Any] = []

    def recording(client: Any) -> Any:
        policies.append(recorder(client))
        return policies[0]

    spy.encoded.clear()
    played = loop.play(2, 3, chat=chat, policy=recording)
    encodings = list(spy.encoded)

    answers: set[tuple[int, ...]] = set()
    differ = 0
    for trajectory in played:
        (segment,) = trajectory.segments
        calls = policies[0].of(trajectory.trajectory_id)
        assert calls
        agent = [s for s in segment.spans if s.kind is SpanKind.AGENT]
        assert len(agent) == len(calls)
        for span, (prompt, generation) in zip(agent, calls, strict=True):
            ids = segment.token_ids.tolist()
            assert prompt == ids[: span.start]
            assert generation.token_ids.tolist() == ids[span.start : span.stop]
            differ += spy.encode(spy.decode(ids[span.start : span.stop])) != ids[span.start : span.stop]
        for span in segment.spans:
            if span.kind is SpanKind.AGENT:
                continue
            text = segment.token_ids[span.start : span.stop].tolist()
            assert text in encodings or text[1:] in encodings  # an end-of-turn token may stand before it
            if span.start > 0:
                answers.add(tuple(text if text in encodings else text[1:]))
    # One encoding for each prompt and for each answer of the environment that was not given before, and none for
    # anything else. An answer that no longer fitted into the window ended its episode and is not in the record.
    full = sum(t.outcome.kind is OutcomeKind.TRUNCATED_TOKENS for t in played)
    assert 0 <= len(encodings) - len(played) - len(answers) <= full
    assert all(spy.decode(ids).startswith(("<|im_start|>system\n", "\n<|im_start|>user\n")) for ids in encodings)
    assert differ > 0 or not broken  # the premise: what was sampled would not have come back
