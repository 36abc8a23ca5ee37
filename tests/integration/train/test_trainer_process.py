"""The trainer as a process of its own: the same answers as in process, no wait without end, nothing left
behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.config import RunConfig
from agentrl.errors import ConfigError, DiskFullError, RecordError, TrainerError
from agentrl.train.client import TrainerProcess
from agentrl.wire import Batch, TrainSequence

DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def sequence(seed: int, *, length: int = 12) -> TrainSequence:
    draw = np.random.default_rng(seed)
    mask = np.arange(length) >= 4
    return TrainSequence(
        trajectory_id=f"t{seed}",
        group_id="g",
        segment=0,
        update=0,
        token_ids=draw.integers(0, 48, length).astype(np.int32),
        pg_mask=mask,
        advantages=draw.normal(size=length).astype(np.float32),
        behaviour_logprobs=np.full(length, -3.9, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )


def batch(step: int = 1, *, count: int = 4, length: int = 12) -> Batch:
    sequences = tuple(sequence(100 * step + i, length=length) for i in range(count))
    return Batch(step=step, version=0, updates=1, temperature=1.0, sequences=sequences)


def start(model_dir: Path, folder: Path, **arguments):
    return TrainerProcess.start(
        config=RunConfig(run_dir=folder),
        model_dir=model_dir,
        checkpoint_dir=folder / "checkpoints",
        log_path=folder / "logs" / "trainer",
        timeout_s=DEADLINE_S,
        **arguments,
    )


def size(path: str) -> int:
    return os.path.getsize(path)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_train_publish_save_resume_close(model_dir, tmp_path):
    async def story() -> None:
        trainer = await start(model_dir, tmp_path)
        assert (trainer.ready.step, trainer.ready.state) == (0, b"")
        results = [await trainer.train(batch(step), timeout_s=DEADLINE_S) for step in (1, 2)]
        assert [r.step for r in results] == [1, 2]
        assert results[0].metrics["tokens/trained"] == 4 * 8
        assert results[0].sequences[0].weights.shape == (12,)
        manifest = await trainer.publish(3, timeout_s=DEADLINE_S)
        assert size(manifest.path) == manifest.num_bytes
        saved = await trainer.save(2, b"mine", score=0.5, timeout_s=DEADLINE_S)
        assert saved.is_best
        assert size(saved.path + "/tokenizer.json") == 2
        third = await trainer.train(batch(3), timeout_s=DEADLINE_S)
        pid, published = trainer.pid, trainer.publish_dir
        await trainer.close()
        await trainer.close()
        assert not alive(pid)
        assert not published.parent.exists()

        resumed = await start(model_dir, tmp_path, resume=Path(saved.path))
        assert (resumed.ready.step, resumed.ready.updates, resumed.ready.state) == (2, 2, b"mine")
        again = await resumed.train(batch(3), timeout_s=DEADLINE_S)
        assert again.metrics["loss/policy"] == third.metrics["loss/policy"]
        np.testing.assert_array_equal(again.sequences[1].weights, third.sequences[1].weights)
        await resumed.close()

    asyncio.run(story())


def test_a_killed_trainer_fails_the_pending_call_at_once(model_dir, tmp_path):
    async def story() -> None:
        trainer = await start(model_dir, tmp_path)
        os.kill(trainer.pid, signal.SIGSTOP)  # it can answer nothing, so the call is pending when it dies
        call = asyncio.ensure_future(trainer.train(batch(7), timeout_s=DEADLINE_S))
        await asyncio.sleep(0.1)
        killed = time.monotonic()
        os.kill(trainer.pid, signal.SIGKILL)
        with pytest.raises(TrainerError, match="signal 9") as caught:
            await call
        assert time.monotonic() - killed < 5
        assert "training step 7" in caught.value.where
        with pytest.raises(TrainerError, match="failed before"):
            await trainer.publish(1, timeout_s=1)
        await trainer.close()

    asyncio.run(story())


def test_a_silent_trainer_meets_the_deadline(model_dir, tmp_path):
    async def story() -> None:
        trainer = await start(model_dir, tmp_path)
        pid = trainer.pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TrainerError, match=r"no answer within 0\.3 s"):
            await trainer.train(batch(), timeout_s=0.3)
        await trainer.close(timeout_s=1)
        assert not alive(pid)

    asyncio.run(story())


def test_errors_arrive_as_themselves(model_dir, tmp_path):
    async def story() -> None:
        trainer = await start(model_dir, tmp_path)
        twice = Batch(step=1, version=0, updates=1, temperature=1.0, sequences=(sequence(1), sequence(1)))
        with pytest.raises(RecordError, match="twice") as caught:
            await trainer.train(twice, timeout_s=DEADLINE_S)
        assert "t1" in caught.value.where
        await trainer.close()
        with pytest.raises(ConfigError, match=r"config\.json"):
            await start(tmp_path / "nowhere", tmp_path)

    asyncio.run(story())


def test_an_unforeseen_error_carries_its_traceback(model_dir, tmp_path):
    async def story() -> None:
        trainer = await start(model_dir, tmp_path)
        long = batch(length=12)
        wild = sequence(5)
        wild.token_ids[:] = 10_000  # no row of the embedding
        with pytest.raises(TrainerError, match="IndexError") as caught:
            await trainer.train(
                Batch(step=1, version=0, updates=1, temperature=1.0, sequences=(wild, *long.sequences)),
                timeout_s=DEADLINE_S,
            )
        assert "Traceback" in caught.value.what
        await trainer.close()

    asyncio.run(story())


def test_the_trainer_ends_with_its_parent(model_dir, tmp_path):
    """kill -9 of the orchestrator, even while the trainer works on a long step."""
    script = textwrap.dedent(
        """
        import asyncio, sys
        from pathlib import Path
        from agentrl.config import RunConfig
        from agentrl.train.client import TrainerProcess

        async def main():
            model, folder = Path(sys.argv[1]), Path(sys.argv[2])
            trainer = await TrainerProcess.start(
                config=RunConfig(), model_dir=model, checkpoint_dir=folder, log_path=folder / "log"
            )
            print(trainer.pid, trainer.publish_dir.parent, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
        """
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(model_dir), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        line = parent.stdout.readline().split()
        pid, scratch = int(line[0]), Path(line[1])
        assert alive(pid)
        assert scratch.exists()
        parent.kill()
        parent.wait(timeout=10)
        until = time.monotonic() + 10
        while alive(pid) and time.monotonic() < until:
            time.sleep(0.05)
        assert not alive(pid)
        assert not scratch.exists()
    finally:
        parent.kill()


def test_a_really_full_file_system_is_named(model_dir, tmp_path):
    """Checkpoints on a file system of 64 kB: `DiskFullError` with the folder, and no half of a checkpoint."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"cannot mount a small file system: {made.stderr.strip()}")
    try:

        async def story() -> None:
            trainer = await TrainerProcess.start(
                config=RunConfig(),
                model_dir=model_dir,
                checkpoint_dir=mount / "checkpoints",
                log_path=tmp_path / "log",
                timeout_s=DEADLINE_S,
            )
            with pytest.raises(DiskFullError) as caught:
                await trainer.save(1, b"", score=None, timeout_s=DEADLINE_S)
            assert caught.value.where == str(mount / "checkpoints")
            await trainer.close()

        asyncio.run(story())
        assert list((mount / "checkpoints").iterdir()) == []
    finally:
        subprocess.run(["umount", str(mount)], check=False)


def test_the_client_does_not_import_torch():
    heavy = {"torch", "transformers", "vllm"}
    code = f"import sys, agentrl.train.client; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
