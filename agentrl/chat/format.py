"""A chat as tokens, grown by deltas: what was sampled is kept as it is, what the environment says is
tokenised once.

    open(messages)  ─▶  prompt ids, ending in the generation prompt
    … the policy samples ids, ending in the end-of-turn token …
    close_turn(ids) ─▶  the end-of-turn token where sampling stopped short of it (environment's, not sampled)
    observe(texts)  ─▶  the newline after the end of turn, the results' turn, the next generation prompt
    … and so on

Invariant: open + sampled + close_turn + observe + … is, id for id, what the tokenizer makes of the
template's render of the whole chat, wherever the sampled ids are the ones the tokenizer would have chosen.
It holds because the end-of-turn token splits the text: nothing after it depends on what stands before. Where
the agent's text starts with white space, a tokenizer may merge it with the newline of the generation prompt;
then the delta is the truth and only the text is equal.

Control tokens spelled out in an environment's text (`<|im_end|>` in a file) are read as such, as in the
template's own render. Whose tokens they are comes from spans, so they are never trained.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from agentrl.chat.template import ChatTemplate, chatml_template
from agentrl.chat.tokenizer import TextTokenizer, load_tokenizer_folder
from agentrl.chat.tool_calls import CallFormat
from agentrl.errors import ConfigError
from agentrl.wire import ChatMessage, ToolCall

START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
TemplateChoice = Literal["model", "chatml"]

_ANCHOR = "agentrl-anchor"
# The rollouts of a group look at the same files, edits are confirmed and tests pass in the same words: of a training
# run's observations, six in seven are among the last few hundred. Short ones are remembered (12 MB at most).
_REMEMBERED = 2048
_REMEMBERED_CHARS = 2000
_PROBE_CALL = ToolCall(name="probe", arguments={})
_USER = ChatMessage(role="user", content="u")


def _clean(text: str) -> str:
    """The text with lone surrogates replaced: no tokenizer takes them."""
    return text.encode("utf-8", "replace").decode("utf-8")


class ChatFormat:
    """One model's chat as token ids. Holds no conversation: every method is a function of its arguments."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: str,
        *,
        call_format: CallFormat = "qwen3_coder",
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        special = dict(special_tokens or {})
        end = tokenizer.token_id(END_OF_TURN)
        if end is None or tokenizer.token_id(START_OF_TURN) is None:
            raise ConfigError(
                f"the tokenizer has no {START_OF_TURN} or {END_OF_TURN} token",
                where="policy.model",
                remedy="use a ChatML model (Qwen, SmolLM2, Hermes, the shipped tiny policy)",
            )
        eos = tokenizer.token_id(special["eos_token"]) if "eos_token" in special else None
        self.tokenizer = tokenizer
        self.call_format: CallFormat = call_format
        self.end_of_turn: int = end
        self.stop_token_ids: tuple[int, ...] = (end,) if eos in (None, end) else (end, int(eos or 0))
        self._template = ChatTemplate(template, {**special, "call_format": call_format})
        self._observed = functools.lru_cache(maxsize=_REMEMBERED)(self._observe)
        self.rewrites_history: bool = self._probe_rewriting()

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        call_format: CallFormat = "qwen3_coder",
        template: TemplateChoice = "model",
    ) -> ChatFormat:
        """The format of a model folder, checked by `check_template`. Raises `ConfigError` with the remedy."""
        from agentrl.chat.check import check_template

        found = load_tokenizer_folder(folder)
        source = chatml_template() if template == "chatml" else found.chat_template
        if source is None:
            raise ConfigError(
                "the tokenizer has no chat template",
                where=str(folder),
                remedy="set agent.tools.chat_template=chatml to render with agentrl's own ChatML template",
            )
        chat = cls(found.tokenizer, source, call_format=call_format, special_tokens=found.special_tokens)
        check_template(chat)
        return chat

    # --- tokens ---------------------------------------------------------------------------------------------

    def open(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Prompt ids, ending in the generation prompt. `tools` are JSON schemas for the template."""
        return self.tokenizer.encode(self.render(messages, tools=tools, add_generation_prompt=True))

    def observe(self, results: Sequence[str]) -> list[int]:
        """Ids from after the end of turn to the next generation prompt: the results of one turn's calls."""
        if sum(map(len, results)) > _REMEMBERED_CHARS:
            return self.tokenizer.encode(self.observe_text(results))
        return self._observed(tuple(results)).tolist()

    def _observe(self, results: tuple[str, ...]) -> array[int]:
        return array("i", self.tokenizer.encode(self.observe_text(results)))

    def extend(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Like `observe`, for any messages that follow an assistant's turn (a request for a summary, …)."""
        return self.tokenizer.encode(self._delta_text(messages))

    def say(self, content: str = "", calls: Sequence[ToolCall] = ()) -> list[int]:
        """Ids of an assistant's turn as the template renders it, end of turn last. For demonstrations."""
        return self.tokenizer.encode(self.say_text(content, calls))

    def close_turn(self, sampled: Sequence[int]) -> list[int]:
        """Nothing where sampling ended in the end-of-turn token, else that token: it is not the agent's."""
        return [] if len(sampled) > 0 and sampled[-1] == self.end_of_turn else [self.end_of_turn]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included."""
        return self.tokenizer.decode(ids)

    def agent_text(self, sampled: Sequence[int]) -> str:
        """What the agent said: the text of its sampled ids without the stop token at their end."""
        stopped = len(sampled) > 0 and int(sampled[-1]) in self.stop_token_ids
        return self.decode(sampled[:-1] if stopped else sampled)

    # --- text -----------------------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The template's render of the whole chat."""
        return _clean(self._template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt))

    def observe_text(self, results: Sequence[str]) -> str:
        """The text that `observe` tokenises."""
        return self._delta_text([ChatMessage(role="tool", content=text) for text in results])

    def say_text(self, content: str, calls: Sequence[ToolCall]) -> str:
        """The text that `say` tokenises: the whole render without what stands before and after the turn."""
        following = [ChatMessage(role="tool", content="r") for _ in calls] or [_USER]
        turn = ChatMessage(role="assistant", content=content, tool_calls=tuple(calls))
        whole = self.render([_USER, turn, *following], add_generation_prompt=True)
        before = self.render([_USER], add_generation_prompt=True)
        after = self._delta_text(following)
        if not whole.startswith(before) or not whole.endswith(after):
            raise ConfigError(
                "the chat template does not render an assistant's turn after its own generation prompt",
                where="chat template",
                remedy="set agent.tools.chat_template=chatml",
            )
        return whole[len(before) : len(whole) - len(after)]

    def _delta_text(self, following: Sequence[ChatMessage]) -> str:
        """What the template puts after an assistant's end-of-turn token when `following` come next."""
        calls = tuple(_PROBE_CALL for message in following if message.role == "tool")
        turn = ChatMessage(role="assistant", content=_ANCHOR, tool_calls=calls)
        whole = self.render([_USER, turn, *following], add_generation_prompt=True)
        anchor = whole.find(_ANCHOR)
        end = whole.find(END_OF_TURN, anchor)
        if anchor < 0 or end < 0:
            raise ConfigError(
                f"the chat template does not end an assistant's turn with {END_OF_TURN}",
                where="chat template",
                remedy="set agent.tools.chat_template=chatml",
            )
        return whole[end + len(END_OF_TURN) :]

    def _probe_rewriting(self) -> bool:
        """Whether the template changes an agent's turn with reasoning once a later turn follows."""
        said = "<think>\nr\n</think>\n\na"
        chat = [_USER]
        text = self.render(chat, add_generation_prompt=True)
        for _ in range(2):
            result = ChatMessage(role="tool", content="o")
            chat += [ChatMessage(role="assistant", content=said), result]
            text += said + END_OF_TURN + self.observe_text(["o"])
        return self.render(chat, add_generation_prompt=True) != text
