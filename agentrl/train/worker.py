"""The trainer's process: `python -m agentrl.train.worker --connect ipc://… --config FILE --model DIR …`.

Life: load → TrainerReady → (one request → one answer)* → Shutdown, or the first error → TrainerFailed and
exit 1, or the parent's death → exit at once. Requests are served one at a time by one thread; a second thread
does nothing but wait for the parent's end, because a training step may last minutes and must not outlive a
run.
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

import zmq

from agentrl.config import RunConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.train.trainer import Trainer
from agentrl.wire import Batch, FromTrainer, Publish, Save, Shutdown, ToTrainer, TrainerFailed, TrainerReady
from agentrl.wire.codec import decode_to_trainer, encode

PARENT_GONE = 70
"""Exit code of a worker whose parent ended."""
_LINGER_MS = 5_000
_POLL_MS = 1_000


def main(arguments: list[str] | None = None) -> int:
    """Serve until Shutdown; the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    end_with_parent(options.parent or os.getppid(), scratch=options.scratch)
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
    parser.add_argument("--connect", required=True, help="ZeroMQ endpoint of the orchestrator")
    parser.add_argument("--config", required=True, type=Path, help="the run's configuration, TOML or JSON")
    parser.add_argument("--model", required=True, type=Path, help="model folder (Hugging Face format)")
    parser.add_argument("--publish-dir", required=True, type=Path, help="where weights are published")
    parser.add_argument("--checkpoint-dir", type=Path, help="where checkpoints go; default: RUN_DIR/checkpoints")
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    parser.add_argument("--parent", type=int, help="process whose end ends this one; default: the parent")
    parser.add_argument("--scratch", type=Path, help="folder that is removed where the parent ended first")
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
    except Exception as error:
        traceback.print_exc()
        socket.send_multipart(encode(_failure(error)))
        return 1
    return 0


def _load(options: argparse.Namespace) -> Trainer:
    import torch

    config = load_config(options.config)
    torch.set_num_threads(config.train.threads)
    torch.manual_seed(config.seed)
    return Trainer.load(
        model_folder=options.model,
        config=config.train,
        checkpoint=config.checkpoint,
        checkpoint_folder=options.checkpoint_dir or config.run_dir / "checkpoints",
        publish_folder=options.publish_dir,
        resume=options.resume,
    )


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


if __name__ == "__main__":
    sys.exit(main())
