"""A rank of the trainer: `python -m agentrl.train.worker --connect ipc://… --config FILE --model DIR …`.

Life of rank 0: load → TrainerReady → (one request → one answer)* → Shutdown, or the first error → TrainerFailed and
exit 1. The other ranks load and follow rank 0; one that fails leaves its error in a file. A rank that loses another
exits with `PEER_LOST`, and every rank exits at once when its parent ends.

Requests are served one at a time by one thread; a second thread does nothing but wait for the parent's end, because a
training step may last minutes and must not outlive a run.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import shutil
import sys
import threading
import tomllib
import traceback
from pathlib import Path
from typing import NoReturn

import zmq

from agentrl.config import RunConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.train.processes import PARENT_GONE, PEER_LOST
from agentrl.train.ranks import Alone, PeerLostError, ProcessRanks, Ranks
from agentrl.train.trainer import Trainer
from agentrl.wire import Batch, FromTrainer, Publish, Save, Shutdown, ToTrainer, TrainerFailed, TrainerReady
from agentrl.wire.codec import decode_to_trainer, encode

_LINGER_MS = 5_000
_POLL_MS = 1_000


def main(arguments: list[str] | None = None) -> int:
    """Serve, or follow, until told to end; the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    end_with_parent(options.parent or os.getppid(), scratch=options.scratch)
    if options.rank > 0:
        return _follow(options)
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.linger = _LINGER_MS
    socket.connect(options.connect)
    try:
        return _serve(socket, options)
    finally:
        socket.close()
        context.term()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agentrl.train.worker", description="The trainer's process.")
    parser.add_argument("--connect", help="ZeroMQ endpoint of the orchestrator; rank 0's alone")
    parser.add_argument("--config", required=True, type=Path, help="the run's configuration, TOML or JSON")
    parser.add_argument("--model", required=True, type=Path, help="model folder (Hugging Face format)")
    parser.add_argument("--publish-dir", required=True, type=Path, help="where weights are published")
    parser.add_argument("--checkpoint-dir", type=Path, help="where checkpoints go; default: RUN_DIR/checkpoints")
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    parser.add_argument("--parent", type=int, help="process whose end ends this one; default: the parent")
    parser.add_argument(
        "--scratch", required=True, type=Path, help="where ranks meet; removed where the parent ended first"
    )
    parser.add_argument("--rank", type=int, default=0, help="this process among the trainer's ranks")
    parser.add_argument("--ranks", type=int, default=1, help="how many there are")
    parser.add_argument("--device", type=int, help="core, or CUDA device, to be bound to")
    parser.add_argument("--failure", type=Path, help="where a rank other than 0 leaves its error")
    return parser


def end_with_parent(parent: int, *, scratch: Path | None = None) -> None:
    """Leave as soon as process `parent` ends, whatever this one is doing; now where it is gone already.

    `scratch` (published weights in memory, the socket) has no owner left then and is removed.
    """

    def leave() -> None:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        os._exit(PARENT_GONE)

    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        leave()

    def wait() -> None:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.poll()
        leave()

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def load_config(path: Path) -> RunConfig:
    """The configuration in a TOML or JSON file. Raises `ConfigError`."""
    try:
        text = path.read_text()
        return RunConfig.model_validate(json.loads(text) if path.suffix == ".json" else tomllib.loads(text))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the trainer cannot read its configuration: {error}", where=str(path)) from error


def _serve(socket: zmq.Socket[bytes], options: argparse.Namespace) -> int:
    try:
        trainer = _load(options)
        ready = TrainerReady(
            step=trainer.state.step,
            updates=trainer.state.updates,
            parameters=trainer.parameters,
            state=trainer.state.orchestrator,
        )
        socket.send_multipart(encode(ready))
        while not isinstance(request := _receive(socket), Shutdown):
            socket.send_multipart(encode(_answer(trainer, request)))
        trainer.dismiss()
    except PeerLostError:
        traceback.print_exc()
        return PEER_LOST
    except Exception as error:
        traceback.print_exc()
        socket.send_multipart(encode(_failure(error)))
        return 1
    return 0


def _follow(options: argparse.Namespace) -> int:
    try:
        _load(options).follow()
    except PeerLostError:
        traceback.print_exc()
        return PEER_LOST
    except Exception as error:
        traceback.print_exc()
        options.failure.write_bytes(b"".join(encode(_failure(error))))
        return 1
    return 0


def _load(options: argparse.Namespace) -> Trainer:
    import torch

    config = load_config(options.config)
    bind_to_device(options.device, rank=options.rank, ranks=options.ranks)
    torch.set_num_threads(min(config.train.threads, len(os.sched_getaffinity(0))))
    torch.manual_seed(config.seed)
    return Trainer.load(
        model_folder=options.model,
        config=config.train,
        checkpoint=config.checkpoint,
        checkpoint_folder=options.checkpoint_dir or config.run_dir / "checkpoints",
        publish_folder=options.publish_dir,
        resume=options.resume,
        ranks=_meet(options, deadline_s=config.train.step_timeout_s),
    )


def _meet(options: argparse.Namespace, *, deadline_s: float) -> Ranks:
    if options.ranks == 1:
        return Alone()
    return ProcessRanks(
        rank=options.rank, size=options.ranks, meeting_file=options.scratch / "ranks", timeout_s=deadline_s
    )


def bind_to_device(device: int | None, *, rank: int, ranks: int) -> None:
    """Bind this process to a core, or to a CUDA device where there are any; there several ranks that were given none
    take one each. Raises `ConfigError` where there is no such device."""
    import torch

    if torch.cuda.is_available():
        ordinal = _ordinal(device) if device is not None else rank if ranks > 1 else None
        if ordinal is not None and ordinal >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {rank} has no CUDA device {device if device is not None else ordinal}: there are "
                f"{torch.cuda.device_count()}",
                where="placement",
                remedy="lower placement.ranks, or name other placement.devices",
            )
        if ordinal is not None:
            torch.cuda.set_device(ordinal)
    elif device is not None:
        try:
            for thread in os.listdir("/proc/self/task"):  # those that the imports have started, too
                os.sched_setaffinity(int(thread), {device})
        except OSError as error:
            raise ConfigError(
                f"rank {rank} cannot be bound to core {device} ({error.strerror})",
                where="placement",
                remedy="name other placement.devices, or placement.pin=false",
            ) from error


def _ordinal(device: int) -> int:
    """torch's number of a CUDA device: it counts the devices that CUDA_VISIBLE_DEVICES lists, in that order, while a
    placement names them as that variable does."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible is not None else []
    return names.index(str(device)) if str(device) in names else device


def _receive(socket: zmq.Socket[bytes]) -> ToTrainer:
    """The next request. There is no deadline: an idle trainer waits as long as its parent lives."""
    while not socket.poll(_POLL_MS):
        pass
    return decode_to_trainer(socket.recv_multipart())


def _answer(trainer: Trainer, request: ToTrainer) -> FromTrainer:
    match request:
        case Batch():
            return trainer.train(request)
        case Publish():
            return trainer.publish(request.version)
        case Save():
            return trainer.save(request.step, request.state, score=request.score)
        case _:
            raise TypeError(f"no request: {type(request).__name__}")


def _failure(error: Exception) -> TrainerFailed:
    trace = "".join(traceback.format_exception(error))
    if not isinstance(error, AgentRLError):
        return TrainerFailed(
            what=f"{type(error).__name__}: {error}", where="trainer", remedy="", traceback=trace, kind=""
        )
    return TrainerFailed(
        what=error.what, where=error.where, remedy=error.remedy, traceback=trace, kind=type(error).__name__
    )


def _leave(code: int) -> NoReturn:
    """End without the interpreter's farewell, in which a broken process group aborts and hides the exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
