"""`agentrl sandbox replay` of a recorded run, on bubblewrap."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sandbox_command import sandbox

from agentrl.agent import run_episode
from agentrl.chat import ChatFormat, render_call
from agentrl.config import RunConfig
from agentrl.config.load import dump_toml, load_config
from agentrl.policy import local_model
from agentrl.run.environments import load_environment
from agentrl.run.folder import open_run_folder
from agentrl.run.recorder import keep_tokenizer
from agentrl.sandbox import open_pool
from agentrl.trajectory import FinishReason, Outcome, OutcomeKind, Split, Trajectory, write_rows
from agentrl.wire import Generation, SamplingParams, ToolCall

pytestmark = [pytest.mark.bubblewrap, pytest.mark.usefixtures("bubblewrap")]


class Scripted:
    """A `PolicyClient` that says one text after another."""

    max_model_len = 4096

    def __init__(self, chat: ChatFormat, texts: list[str]) -> None:
        self._chat, self._texts = chat, texts

    async def generate(
        self, prompt_ids: Any, params: SamplingParams, *, request_id: str, timeout_s: float
    ) -> Generation:
        ids = self._chat.tokenizer.encode(self._texts.pop(0) + "<|im_end|>")
        return Generation(
            token_ids=np.asarray(ids, np.int32),
            logprobs=np.full(len(ids), -1.0, np.float32),
            versions=np.zeros(len(ids), np.int32),
            finish_reason=FinishReason.STOP,
            prompt_tokens=len(prompt_ids),
        )


def call(name: str, **arguments: str) -> str:
    return render_call(ToolCall(name=name, arguments=arguments), "qwen3_coder")


FIX = ("str_replace", {"path": "ber.py", "old_str": "high * high", "new_str": "bonus * high"})
EPISODES = {
    "train-000000-0": [
        call("view", path="ber.py"),
        "no call at all",
        call("bash", command="pytest -q 2>&1 | tail -1"),
        call(FIX[0], **FIX[1]),
        call("submit"),
    ],
    "train-000000-1": [
        call("bash", command="cat /proc/uptime"),
        call("bash", command="uuidgen || cat /proc/sys/kernel/random/uuid"),
        call("submit"),
    ],
}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two scripted episodes, recorded as a run records."""
    path = tmp_path_factory.mktemp("runs") / "mine"
    config = load_config(
        preset="demo", overrides=[f"--run-dir={path}", "--agent.max-tokens=2000", "--policy.max-model-len=2000"]
    )
    folder = open_run_folder(path, resume=False)
    folder.write_config(dump_toml(config))
    keep_tokenizer(local_model("tiny"), folder)
    items = asyncio.run(episodes(config))
    write_rows(folder.trajectories / "step_000001-train.parquet", [(each, None) for each in items], run="mine")
    folder.close()
    return path


async def episodes(config: RunConfig) -> list[Trajectory]:
    environment = load_environment(config.environment)
    task = environment.tasks(Split.FRESH, start=0, count=1, seed=0)[0]
    chat = ChatFormat.load(local_model("tiny"))
    found = []
    async with open_pool(config.sandbox.model_copy(update={"size": 1, "starters": 1}), run_id="record") as pool:
        for name, texts in EPISODES.items():
            async with pool.lease("agentrl/base", timeout_s=60) as box:
                await environment.prepare(task, box)
                result = await run_episode(
                    task=task,
                    environment=environment,
                    sandbox=box,
                    policy=Scripted(chat, list(texts)),
                    chat=chat,
                    config=config.agent,
                    sampling=SamplingParams(max_tokens=90),
                    request_id=name,
                )
                assert result.submitted
                patch = await environment.collect(task, box)
            found.append(
                Trajectory(
                    trajectory_id=name,
                    group_id=name[:-2],
                    task_id=task.id,
                    environment=environment.name,
                    split=Split.TRAIN,
                    segments=result.segments,
                    outcome=Outcome(OutcomeKind.SOLVED),
                    reward=1.0,
                    turns=result.turns,
                    info=dict(result.info),
                    patch=patch,
                )
            )
    return found


def test_replay_of_what_repeats(run_folder: Path, tmp_path: Path) -> None:
    done = sandbox("replay", f"{run_folder}/train-000000-0", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert [line.split()[2] for line in lines if line.startswith("turn")] == ["same", "same", "same", "same", "not"]
    assert "change   same" in lines
    assert lines[-1].endswith("4 same, 1 not recorded; the change is the same")
    assert done.returncode == 0, done.stdout + done.stderr


def test_replay_of_what_differs(run_folder: Path, tmp_path: Path) -> None:
    done = sandbox("replay", f"{run_folder}/train-000000-1", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    turns = [line for line in done.stdout.splitlines() if line.startswith("turn")]
    assert "numbers differ" in turns[0]
    assert "differs  " in turns[1]
    assert "      --- recorded" in done.stdout


def test_replay_to_a_turn_and_a_shell_there(run_folder: Path, tmp_path: Path) -> None:
    words = ["replay", f"{run_folder}/train-000000-0", "--to", "2", "--shell"]
    done = sandbox(*words, stdin=b"grep return ber.py\n:diff\n", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "high * high" in done.stdout
    assert "(no change)" in done.stdout
    assert len([line for line in done.stdout.splitlines() if line.startswith("turn")]) == 3
    ambiguous = sandbox("replay", f"{run_folder}/train", cwd=tmp_path)
    assert ambiguous.returncode == 2
    assert "train-000000-0, train-000000-1" in ambiguous.stderr
    late = sandbox("replay", f"{run_folder}/train-000000-1", "--to", "9", cwd=tmp_path)
    assert late.returncode == 2
    assert "0 to 2" in late.stderr
