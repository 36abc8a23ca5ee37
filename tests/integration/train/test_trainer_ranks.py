"""A trainer of several processes: what one trains, to 1e-6; and no rank outlives another, or the orchestrator."""

from __future__ import annotations

import asyncio
import multiprocessing
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
from safetensors.torch import load_file
from thread_ranks import rank_contract
from toy_qwen import VOCABULARY, toy_config
from transformers import Qwen3ForCausalLM

from agentrl.config import CorrectionConfig, LossConfig, OptimizerConfig, RejectionRule, RunConfig, TrainConfig
from agentrl.errors import ConfigError, TrainerError
from agentrl.train.client import TrainerProcess
from agentrl.train.ranks import PeerLostError, ProcessRanks
from agentrl.wire import Batch, StepResult, TrainSequence

DEADLINE_S = 180.0
EXACT = 1e-6
SENSITIVE = "correction/chi2_sequence"
"""A mean of squared exponentials of sums over sequences: it shows float32's rounding a hundredfold."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(toy_config(positions=256)).save_pretrained(folder)
    return folder


def sequence(seed: int, *, length: int = 12, update: int = 0, ce: bool = False, teacher: bool = False) -> TrainSequence:
    draw = np.random.default_rng(seed)
    mask = np.arange(length) >= min(4, length - 1)
    return TrainSequence(
        trajectory_id=f"t{seed}",
        group_id="g",
        segment=0,
        update=update,
        token_ids=draw.integers(0, VOCABULARY, length).astype(np.int32),
        pg_mask=mask,
        advantages=draw.normal(size=length).astype(np.float32),
        behaviour_logprobs=-np.abs(draw.normal(3.9, 0.5, length)).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        ce_weights=np.where(np.arange(length) > 0, 0.5, 0.0).astype(np.float32) if ce else None,
        teacher_logprobs=np.full(length, -3.0, np.float32) if teacher else None,
        teacher_weights=mask.astype(np.float32) if teacher else None,
    )


def batch(*sequences: TrainSequence, step: int = 1, updates: int = 1) -> Batch:
    return Batch(step=step, version=0, updates=updates, temperature=1.0, sequences=sequences)


def long_batch() -> Batch:
    """Many seconds of work for each of two ranks."""
    return batch(*(sequence(i, length=250) for i in range(1500)))


def batches() -> list[Batch]:
    """One update and one stream; one sequence only; k updates, one with a single sequence and one without any; all
    streams with far-off tokens."""
    return [
        batch(*(sequence(i, length=5 + 3 * i) for i in range(9)), step=1),
        batch(sequence(20, length=30), step=2),
        batch(*(sequence(30 + i, length=9 + 5 * i, update=(0, 0, 0, 2)[i % 4]) for i in range(5)), step=3, updates=4),
        batch(*(sequence(40 + i, length=20 + i, ce=i == 2, teacher=i == 4) for i in range(7)), step=4),
    ]


def run_config(folder: Path, **train) -> RunConfig:
    return RunConfig(run_dir=folder, train=TrainConfig(**train))


REJECTION = CorrectionConfig(
    action="mask",
    lower=0.3,
    upper=3.0,
    reject=(RejectionRule(stat="k3", level="sequence", agg="mean", upper=0.25),),
)
SETTINGS = {
    "decoupled": {},
    "bypass and rejection": {"loss": LossConfig(mode="bypass", name="cispo"), "correction": REJECTION},
}


async def start(model_dir: Path, folder: Path, *, ranks: int = 2, config: RunConfig | None = None, **arguments):
    return await TrainerProcess.start(
        config=config or RunConfig(run_dir=folder),
        model_dir=model_dir,
        checkpoint_dir=folder / "checkpoints",
        log_path=folder / "logs" / "trainer.log",
        ranks=ranks,
        timeout_s=DEADLINE_S,
        **arguments,
    )


def alive(pid: int) -> bool:
    """Running: not gone, and no zombie that its parent has yet to collect."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(pids: tuple[int, ...], *, within_s: float) -> None:
    until = time.monotonic() + within_s
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]


def assert_same(one: StepResult, other: StepResult) -> None:
    assert (one.step, one.updates) == (other.step, other.updates)
    metrics = [{k: v for k, v in r.metrics.items() if k not in (SENSITIVE, "time/train_s")} for r in (one, other)]
    assert one.metrics[SENSITIVE] == pytest.approx(other.metrics[SENSITIVE], rel=100 * EXACT)
    assert metrics[0] == pytest.approx(metrics[1], rel=EXACT, abs=EXACT)
    for x, y in zip(one.sequences, other.sequences, strict=True):
        assert (x.trajectory_id, x.segment) == (y.trajectory_id, y.segment)
        np.testing.assert_array_equal(x.mask, y.mask)
        np.testing.assert_allclose(x.weights, y.weights, rtol=EXACT, atol=EXACT)


def assert_same_weights(one: str, other: str) -> None:
    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=EXACT, rtol=0)


@pytest.mark.parametrize("case", sorted(SETTINGS))
def test_k31_two_ranks_train_what_one_trains(model_dir, tmp_path, case):
    """K31, through real processes: loss, gradient norm, metrics, records and published weights; then a checkpoint of
    either goes on as the other."""
    # AdamW divides by the gradient's size: a large eps keeps rounding of near-zero gradients what it is.
    optimizer = OptimizerConfig(learning_rate=1e-3, eps=1e-3, warmup_updates=2)

    async def story() -> None:
        config = run_config(tmp_path, optimizer=optimizer, **SETTINGS[case])
        folders = [tmp_path / "one", tmp_path / "two"]
        trainers = await asyncio.gather(
            *(start(model_dir, f, ranks=r, config=config) for f, r in zip(folders, (1, 2), strict=True))
        )
        saved = []
        try:
            for item in batches():
                one, two = await asyncio.gather(*(t.train(item, timeout_s=DEADLINE_S) for t in trainers))
                assert_same(one, two)
                manifests = [await t.publish(item.step, timeout_s=DEADLINE_S) for t in trainers]
                assert_same_weights(*(m.path for m in manifests))
            saved = [await t.save(4, b"state", score=None, timeout_s=DEADLINE_S) for t in trainers]
        finally:
            for trainer in trainers:
                await trainer.close()
        swapped = await asyncio.gather(
            *(
                start(model_dir, f, ranks=r, config=config, resume=Path(s.path))
                for f, r, s in zip(folders, (2, 1), saved, strict=True)
            )
        )
        try:
            assert [(t.ready.step, t.ready.state) for t in swapped] == [(4, b"state")] * 2
            assert_same(*(await asyncio.gather(*(t.train(batches()[0], timeout_s=DEADLINE_S) for t in swapped))))
        finally:
            for trainer in swapped:
                await trainer.close()

    asyncio.run(story())


class TestDeaths:
    @pytest.mark.parametrize("rank", [0, 1])
    def test_k19_kill_of_a_rank_in_the_middle_of_a_step(self, model_dir, tmp_path, rank):
        """K19, K20: the call fails at once and names the rank; the other one is gone after `close`."""

        async def story() -> None:
            trainer = await start(model_dir, tmp_path)
            watch = asyncio.ensure_future(trainer.wait_ended())
            call = asyncio.ensure_future(trainer.train(long_batch(), timeout_s=DEADLINE_S))
            await asyncio.sleep(1.0)
            assert not call.done()
            killed = time.monotonic()
            os.kill(trainer.pids[rank], signal.SIGKILL)
            with pytest.raises(TrainerError, match=f"the trainer's process of rank {rank} was killed by signal 9") as e:
                await call
            assert await asyncio.wait_for(watch, 5) is e.value  # whichever of the two reaches the user
            assert time.monotonic() - killed < 5
            assert "training step 1" in e.value.where
            assert f"trainer-{rank}.log" in e.value.where
            with pytest.raises(TrainerError, match="failed before"):
                await trainer.publish(1, timeout_s=1)
            await trainer.close()
            assert not any(alive(pid) for pid in trainer.pids)
            assert not trainer.publish_dir.parent.exists()

        asyncio.run(story())

    @pytest.mark.parametrize("rank", [0, 1])
    def test_k20_death_between_calls_is_told_by_the_watch(self, model_dir, tmp_path, rank):
        async def story() -> None:
            trainer = await start(model_dir, tmp_path)
            watch = asyncio.ensure_future(trainer.wait_ended())
            await trainer.train(batch(sequence(1), sequence(2)), timeout_s=DEADLINE_S)
            await asyncio.sleep(0.2)
            assert not watch.done()
            os.kill(trainer.pids[rank], signal.SIGKILL)
            error = await asyncio.wait_for(watch, 2)
            assert isinstance(error, TrainerError)
            assert f"rank {rank} was killed by signal 9" in error.what
            with pytest.raises(TrainerError, match=f"rank {rank} was killed by signal 9"):
                await trainer.train(batch(sequence(1)), timeout_s=DEADLINE_S)
            await trainer.close()
            assert not any(alive(pid) for pid in trainer.pids)

        asyncio.run(story())

    def test_k41_no_rank_outlives_the_orchestrator(self, model_dir, tmp_path):
        """K41: kill -9 of an orchestrator of two trainers, one in the middle of a step and one between two."""
        script = textwrap.dedent(
            """
            import asyncio, sys
            from pathlib import Path
            sys.path[:0] = sys.argv[3:]
            from test_trainer_ranks import long_batch, start

            async def main():
                model, folder = Path(sys.argv[1]), Path(sys.argv[2])
                working, idle = await asyncio.gather(*(start(model, folder / name) for name in ("working", "idle")))
                call = asyncio.ensure_future(working.train(long_batch(), timeout_s=600))
                await asyncio.sleep(1)
                assert not call.done()
                print(*working.pids, *idle.pids, working.publish_dir.parent, idle.publish_dir.parent, flush=True)
                await asyncio.sleep(600)

            asyncio.run(main())
            """
        )
        folders = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "shared")]
        parent = subprocess.Popen(
            [sys.executable, "-c", script, str(model_dir), str(tmp_path), *folders], stdout=subprocess.PIPE, text=True
        )
        try:
            words = parent.stdout.readline().split()
            pids, scratch = tuple(int(word) for word in words[:4]), [Path(word) for word in words[4:]]
            assert len(pids) == 4
            assert all(alive(pid) for pid in pids)
            assert all(folder.exists() for folder in scratch)
            parent.kill()
            parent.wait(timeout=10)
            wait_gone(pids, within_s=10)
            assert not any(folder.exists() for folder in scratch)
        finally:
            parent.kill()

    def test_a_rank_that_hangs_meets_the_deadline(self, model_dir, tmp_path):
        """K19: the others wait for it no longer than the call does, and nothing is left."""

        async def story() -> None:
            trainer = await start(model_dir, tmp_path)
            os.kill(trainer.pids[1], signal.SIGSTOP)
            with pytest.raises(TrainerError, match=r"no answer within 1 s"):
                await trainer.train(batch(sequence(1), sequence(2)), timeout_s=1)
            await trainer.close(timeout_s=1)
            assert not any(alive(pid) for pid in trainer.pids)

        asyncio.run(story())


class TestErrors:
    def test_an_error_of_rank_1_arrives_with_its_traceback(self, model_dir, tmp_path):
        """What struck first is told, not that rank 0 then lost its peer."""
        wild = sequence(5, length=14)
        wild.token_ids[:] = 10_000  # no row of the embedding; the second longest is rank 1's

        async def story() -> None:
            trainer = await start(model_dir, tmp_path)
            with pytest.raises(TrainerError, match="IndexError") as caught:
                await trainer.train(batch(sequence(1, length=20), wild), timeout_s=DEADLINE_S)
            assert "Traceback" in caught.value.what
            assert "trainer-1.log" in caught.value.where
            await trainer.close()

        asyncio.run(story())

    def test_what_a_rank_cannot_start_with_is_typed(self, model_dir, tmp_path):
        async def story() -> None:
            with pytest.raises(ConfigError, match=r"rank 1 cannot be bound to core 9999"):
                await start(model_dir, tmp_path, devices=(min(os.sched_getaffinity(0)), 9999))
            with pytest.raises(ConfigError, match="2 ranks do not fit the devices"):
                await start(model_dir, tmp_path, devices=(0,))

        asyncio.run(story())


def test_each_rank_is_bound_to_its_core_and_a_close_ends_all_in_good_order(model_dir, tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    devices = (cores[-1], cores[0])

    async def story() -> None:
        trainer = await start(model_dir, tmp_path, devices=devices)
        watch = asyncio.ensure_future(trainer.wait_ended())
        await trainer.train(batch(sequence(1), sequence(2)), timeout_s=DEADLINE_S)
        for pid, core in zip(trainer.pids, devices, strict=True):
            threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
            assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {frozenset({core})}
        processes = list(trainer._ranks)
        assert not watch.done()
        await trainer.close(timeout_s=DEADLINE_S)
        assert [process.code for process in processes] == [0, 0]
        assert "closed" in (await asyncio.wait_for(watch, 2)).what
        assert not trainer.publish_dir.parent.exists()
        for rank in (0, 1):
            assert "Error" not in (tmp_path / "logs" / f"trainer-{rank}.log").read_text()

    asyncio.run(story())


def _meet(rank: int, folder: str, answers) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = ProcessRanks(rank=rank, size=2, meeting_file=Path(folder) / "ranks", timeout_s=20)
    rank_contract(ranks)
    answers.put((rank, "kept the contract"))
    if rank == 1:
        time.sleep(1.0)
        os._exit(0)
    try:
        ranks.add(torch.ones(3))
    except PeerLostError as error:
        answers.put((rank, error.what))
    os._exit(0)


def test_process_ranks_keep_the_contract_and_notice_a_lost_peer(tmp_path):
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    processes = [context.Process(target=_meet, args=(rank, str(tmp_path), answers)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=90)
    found = []
    while not answers.empty():
        found.append(answers.get())
    assert sorted(found[:2]) == [(0, "kept the contract"), (1, "kept the contract")]
    assert len(found) == 3
    assert found[2][1].startswith("a rank is lost")
