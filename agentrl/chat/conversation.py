"""One conversation's way through a chat template, watching for templates that rewrite history.

    prompt_ids ─▶ sampled ids ─▶ answer(sampled, results) ─▶ Continuation ─▶ sampled ids ─▶ …

Most templates only append: each continuation is the delta. Some strip old reasoning or merge messages once a
later turn follows; the tokens that the policy saw are then no prefix of the new prompt, and the continuation
says so: the caller seals its segment and opens a new one whose prompt is the continuation's ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.chat.format import END_OF_TURN, ChatFormat
from agentrl.wire import ChatMessage


@dataclass(frozen=True, slots=True)
class Continuation:
    """What comes after a sampled turn.

    `ids` are environment tokens to append; where `rewritten`, they are instead the whole prompt of a new
    segment.
    """

    ids: list[int]
    rewritten: bool = False


class Conversation:
    """Sampled ids go in, environment ids come out; while history stands nothing is tokenised twice."""

    def __init__(
        self,
        chat: ChatFormat,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self._chat = chat
        self._tools = tools
        self._messages = list(messages)
        self._text = chat.render(messages, tools=tools, add_generation_prompt=True)
        self.prompt_ids: list[int] = chat.tokenizer.encode(self._text)

    def answer(self, sampled: Sequence[int], results: Sequence[str]) -> Continuation:
        """What follows the turn `sampled` when its calls gave `results`."""
        chat = self._chat
        if chat.rewrites_history and self._rewritten(sampled, results):
            return Continuation(chat.tokenizer.encode(self._text), rewritten=True)
        return Continuation(chat.close_turn(sampled) + chat.observe(results))

    def _rewritten(self, sampled: Sequence[int], results: Sequence[str]) -> bool:
        """Take the turn in as text and say whether the template's render still begins with what was seen."""
        said = self._chat.agent_text(sampled)
        seen = self._text + said + END_OF_TURN + self._chat.observe_text(results)
        self._messages.append(ChatMessage(role="assistant", content=said))
        self._messages += [ChatMessage(role="tool", content=text) for text in results]
        self._text = self._chat.render(self._messages, tools=self._tools, add_generation_prompt=True)
        return self._text != seen
