"""A model that scores tokens, in a process of its own: `python -m agentrl_teachers.worker --socket FD --model DIR …`.

Life: load → Ready (or Failed and exit 1) → each Score is answered, in batches of what waits → the owner's end.
What does not go through the model (out of memory) is refused; a CUDA device that has failed itself ends the process.

    reader thread ──▶ waiting ──▶ main thread: a batch ──▶ forward ──▶ answers

The reader sees the owner's end at once, whatever the main thread is doing: the socket is closed by the kernel however
the owner died, and its process is watched beside it (a fork of the owner may hold the socket open).
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from agentrl.errors import AgentRLError
from agentrl_teachers.worker_messages import Drop, Failed, FromWorker, Ready, Refused, Score, Scored, frame, receive

if TYPE_CHECKING:
    from agentrl_teachers.forward import ScoringModel

log = logging.getLogger("agentrl.teacher")

OWNER_GONE = 70
"""Exit code of a process whose owner ended."""
_MOST_PADDING = 1.25
_FAILS = (RuntimeError, MemoryError)  # torch out of memory is a RuntimeError
_SMALLER = "lower agent.max_tokens; distill.support=full takes the most memory, distill.support=teacher the least"


def choose_batch(lengths: Sequence[int], *, budget: int) -> list[int]:
    """Which of the waiting, given by length in order of arrival, go together: the oldest, and those nearest to it in
    length while rows times the longest stay within `budget` tokens and at most a quarter is added as padding."""
    chosen, tokens, longest = [0], lengths[0], lengths[0]
    for index in sorted(range(1, len(lengths)), key=lambda index: abs(lengths[index] - lengths[0])):
        length = lengths[index]
        padded = max(longest, length) * (len(chosen) + 1)
        if padded > budget or padded > _MOST_PADDING * (tokens + length):
            break
        chosen.append(index)
        tokens, longest = tokens + length, max(longest, length)
    return chosen


class Waiting:
    """What is still to be scored, in order of arrival. The reader puts and drops, the main thread takes."""

    def __init__(self) -> None:
        self._requests: dict[int, Score] = {}
        self._changed = threading.Condition()

    def put(self, request: Score) -> None:
        """Add it at the end."""
        with self._changed:
            self._requests[request.number] = request
            self._changed.notify()

    def drop(self, number: int) -> None:
        """Forget it, where it still waits."""
        with self._changed:
            self._requests.pop(number, None)

    def take(self, *, budget: int) -> list[Score]:
        """The next batch. There is no deadline: an idle process waits as long as its owner lives."""
        with self._changed:
            while not self._requests:
                self._changed.wait()
            requests = list(self._requests.values())
            chosen = [requests[i] for i in choose_batch([len(r.token_ids) for r in requests], budget=budget)]
            for request in chosen:
                del self._requests[request.number]
            return chosen


def read_requests(connection: socket.socket, waiting: Waiting, *, owner: int) -> NoReturn:
    """Take in requests until the owner is gone, then end the process at once."""
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(OWNER_GONE)
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    poller.register(connection.fileno(), select.POLLIN)
    while True:
        if descriptor in {fd for fd, _ in poller.poll()}:
            os._exit(OWNER_GONE)
        try:
            message = receive(connection)
        except OSError:
            os._exit(OWNER_GONE)
        match message:
            case Score():
                waiting.put(message)
            case Drop():
                waiting.drop(message.number)
            case None:
                os._exit(OWNER_GONE)


def answers(model: ScoringModel, requests: Sequence[Score]) -> Iterator[Scored | Refused]:
    """One answer per request, each as soon as it is there. One that cannot be scored does not spoil the others.

    Answers over the whole vocabulary are made, and to be sent, one at a time: each may be GiBs.
    """
    together: list[Score] = []
    for request in requests:
        if (what := model.fault(request)) is not None:
            yield Refused(number=request.number, what=what)
        elif request.vocabulary:
            yield _alone(model, request)
        else:
            together.append(request)
    if together:
        yield from _scored(model, together)


def _scored(model: ScoringModel, requests: Sequence[Score]) -> Iterator[Scored | Refused]:
    """All at once, or one by one where that fails."""
    try:
        scored = model.score(requests)
    except _FAILS as error:
        log.warning("%d segments at once: %s", len(requests), _said(error))
    else:
        yield from scored
        return
    model.free()  # past the handler: until there the error holds the tensors of the frames that it came through
    for request in requests:
        yield _alone(model, request)


def _alone(model: ScoringModel, request: Score) -> Scored | Refused:
    try:
        (scored,) = model.score([request])
    except _FAILS as error:
        log.warning("a segment of %d tokens", len(request.token_ids), exc_info=error)
        refused = Refused(number=request.number, what=_said(error), remedy=_SMALLER)
    else:
        return scored
    model.free()
    return refused


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


def _serve(connection: socket.socket, options: argparse.Namespace) -> int:
    def send(message: FromWorker) -> None:
        connection.sendall(frame(message))

    waiting = Waiting()
    reader = threading.Thread(
        target=read_requests, args=(connection, waiting), kwargs={"owner": options.owner}, name="reader", daemon=True
    )
    reader.start()
    try:
        from agentrl_teachers.forward import ScoringModel

        model = ScoringModel.load(options.model, dtype=options.dtype, threads=options.threads, core=options.core)
    except Exception as error:
        traceback.print_exc()
        send(_failure(error))
        return 1
    log.info("%s: %d parameters on %s", options.model, model.parameters, model.device)
    send(Ready(window=model.window, device=str(model.device)))
    while True:
        for answer in answers(model, waiting.take(budget=model.batch_tokens)):
            send(answer)
            del answer  # it may be GiBs, and the next one is made now


def _failure(error: Exception) -> Failed:
    if isinstance(error, AgentRLError):
        return Failed(what=error.what, remedy=error.remedy)
    return Failed(what=f"{type(error).__name__}: {str(error).strip()[:600]}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agentrl_teachers.worker", description="Scores tokens by a model.")
    parser.add_argument("--socket", required=True, type=int, help="descriptor of the socket to the owner")
    parser.add_argument("--owner", required=True, type=int, help="process whose end ends this one")
    parser.add_argument("--model", required=True, type=Path, help="model folder (Hugging Face format)")
    parser.add_argument("--dtype", required=True, choices=("float32", "bfloat16"), help="of weights and products")
    parser.add_argument("--core", type=int, help="the one to compute on, where there is no CUDA device")
    parser.add_argument("--threads", required=True, type=int, help="threads of a matrix product on a CPU")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Serve until the owner is gone; the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    with socket.socket(fileno=options.socket) as connection:
        return _serve(connection, options)


if __name__ == "__main__":
    sys.exit(main())
