"""`agentrl sft` from an existing model: its tokenizer is kept to the letter, its weights are what training begins
with."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from agentrl.chat import ChatFormat
from agentrl.config.load import load_warm_start
from agentrl.config.models import WarmStartConfig
from agentrl.errors import ConfigError
from agentrl.policy import local_model
from agentrl.run.environments import load_environment
from agentrl.run.warm_start import _build, warm_start
from agentrl.trajectory import Purpose, Span, SpanKind
from agentrl.wire import ChatMessage, ToolCall
from agentrl_envs.swe_gym import SweGymEnvironment

RECIPES = ("tiny-teacher", "tiny-teacher-settings", "tiny-teacher-other", "tiny-both")


def demonstration(chat: ChatFormat, word: str) -> list[tuple[Span, str]]:
    """A prompt and one call, as recorded: spans of some other tokenizer, and their text."""
    prompt = chat.open([ChatMessage(role="system", content="Fix."), ChatMessage(role="user", content=word)])
    said = chat.say("", [ToolCall(name="bash", arguments={"command": f"grep {word}"})])
    spans = (
        Span(kind=SpanKind.PROMPT, start=0, stop=len(prompt), turn=0),
        Span(kind=SpanKind.AGENT, start=len(prompt), stop=len(prompt) + len(said), turn=0, purpose=Purpose.ACT),
    )
    return [(span, chat.decode(ids)) for span, ids in zip(spans, (prompt, said), strict=True)]


def one_stage(**changes: object) -> WarmStartConfig:
    config = load_warm_start(preset="tiny-teacher")
    stage = config.stages[0].model_copy(update={"steps": 1, "sequences_per_batch": 2, "warmup_steps": 0, **changes})
    return config.model_copy(update={"stages": (stage,)})


def test_going_on_keeps_tokenizer_and_weights(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    tiny = local_model("tiny")
    chat = ChatFormat.load(tiny)
    recorded = [[demonstration(chat, word) for word in ("page", "order", "rate", "width")]]
    rates = {"learning_rate": 1e-4, "matrix_learning_rate": 1e-4}
    _build(one_stage(**rates), tiny, recorded, tmp_path / "new", threading.Event())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "new" / name).read_bytes() == (tiny / name).read_bytes()
    before, after = load_file(tiny / "model.safetensors"), load_file(tmp_path / "new" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = [float((after[name] - before[name]).abs().max()) for name in before]
    assert 0 < max(moved) < 0.01, "one small step from the start's weights"
    assert all(weights.dtype == torch.float32 for weights in after.values())
    said = json.loads((tmp_path / "new" / "warm_start.json").read_text())
    assert 'start = "tiny"' in said["config"]
    assert said["stages"][0]["steps"] == 1


def test_a_start_that_is_no_model_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    config = one_stage().model_copy(update={"start": str(tmp_path / "nothing")})
    with pytest.raises(ConfigError, match="there is no folder") as caught:
        asyncio.run(warm_start(config, load_environment(config.environment), tmp_path / "out"))
    assert caught.value.where == "start"
    assert list(tmp_path.iterdir()) == []


def test_what_would_have_no_effect_is_refused() -> None:
    for key in ("vocab_size", "tokenizer_demonstrations"):
        with pytest.raises(ConfigError, match=f"{key} has no effect with start"):
            load_warm_start(preset="tiny-teacher", overrides=[f"--{key}=700"])


@pytest.mark.parametrize("preset", RECIPES)
def test_the_recipes_of_teachers_and_students_play_what_the_expert_can(preset: str) -> None:
    config = load_warm_start(preset=preset)
    environment = SweGymEnvironment(config.environment.options)
    assert environment.expert is not None
    assert {stage.demonstrations.profile for stage in config.stages} <= set(environment.expert.profiles)
    shipped = load_warm_start(preset="tiny-start")
    assert (config.agent, config.sandbox) == (shipped.agent, shipped.sandbox), "the student's own tools and window"
    assert (config.start == "tiny") == (preset != "tiny-teacher-other"), "who has the student's tokenizer"
