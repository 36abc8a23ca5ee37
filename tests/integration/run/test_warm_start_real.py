"""`agentrl sft` whole, small: demonstrations of both families in real sandboxes, a policy from nothing, and another
that goes on from it."""

import json
from pathlib import Path

import pytest

from agentrl.chat import ChatFormat
from agentrl.run.command import sft_command

pytestmark = pytest.mark.bubblewrap

SETTINGS = """
[environment]
dataset = "generated"
families = ["functions", "settings"]

[sandbox]
backend = "bubblewrap"
size = 2

[agent]
max_turns = 10
max_tokens = 1500

[agent.tools]
observations = "compact"
command_timeout_s = 20.0

[[stages]]
steps = 2
sequences_per_batch = 3
warmup_steps = 0
demonstrations = { count = 6, profile = "thorough" }
"""


def test_from_nothing_and_on_from_that(tmp_path: Path) -> None:
    file, first, second = tmp_path / "sft.toml", tmp_path / "first", tmp_path / "second"
    file.write_text(SETTINGS)

    def sft(out: Path, *overrides: str) -> dict[str, object]:
        code = sft_command(
            environment="swe-gym",
            out=out,
            preset=None,
            file=file,
            dry_run=False,
            overrides=["--concurrency=2", *overrides],
        )
        assert code == 0
        return json.loads((out / "warm_start.json").read_text())["stages"][0]

    assert sft(first, "--vocab_size=400")["demonstrations"] == 6
    assert sft(second, f"--start={first}", "--seed=1")["steps"] == 2
    assert (second / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()
    assert (second / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()
    text = "Setting `night.rate` gives '3' but 7 is expected.\n"
    chat = ChatFormat.load(second)
    assert chat.decode(chat.tokenizer.encode(text)) == text
