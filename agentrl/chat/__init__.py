"""Chats as tokens: templates by delta, tool-call formats, the tiny policy's tokenizer. No torch."""

from agentrl.chat.check import check_template
from agentrl.chat.conversation import Continuation, Conversation
from agentrl.chat.format import END_OF_TURN, START_OF_TURN, ChatFormat, TemplateChoice
from agentrl.chat.prefix import common_prefix_len, longest_known_prefix
from agentrl.chat.template import chatml_template
from agentrl.chat.tokenizer import FolderTokenizer, TextTokenizer, load_tokenizer_folder
from agentrl.chat.tool_calls import (
    NO_CALL,
    CallFormat,
    MalformedCall,
    call_pattern,
    parse_calls,
    render_call,
    render_calls,
)

__all__ = [
    "END_OF_TURN",
    "NO_CALL",
    "START_OF_TURN",
    "CallFormat",
    "ChatFormat",
    "Continuation",
    "Conversation",
    "FolderTokenizer",
    "MalformedCall",
    "TemplateChoice",
    "TextTokenizer",
    "call_pattern",
    "check_template",
    "chatml_template",
    "common_prefix_len",
    "load_tokenizer_folder",
    "longest_known_prefix",
    "parse_calls",
    "render_call",
    "render_calls",
]
