"""The cycle collector: told to keep quiet, and left with nothing to find by what a turn does."""

from __future__ import annotations

import gc

from agentrl.chat import ChatFormat
from agentrl.policy import local_model
from agentrl.run.garbage import calm_collector


def test_the_collector_keeps_quiet_for_the_block_only() -> None:
    before = gc.get_threshold()
    with calm_collector():
        assert gc.get_threshold()[0] > before[0]
        assert gc.get_freeze_count() > 1000
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_a_turn_leaves_no_garbage() -> None:
    """A template's macros and its context hold each other until they are let go by hand."""
    chat = ChatFormat.load(local_model("tiny"))
    chat.observe(["warm"])
    gc.collect()
    gc.disable()
    try:
        for turn in range(50):
            chat.observe([f"observation {turn}", "another"])
        assert gc.collect() < 50
    finally:
        gc.enable()
