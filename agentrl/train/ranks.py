"""The trainer's processes as one of them sees the others: who gets which sequences, and sums over all.

    rank 0                                  every other rank
    hand_out(shares) ──────────────────────▶ hand_out(None)      waits as long as its parent lives
    add(counts), add(gradients)  ◀─────────▶ the same calls, in the same order
    collect(records) ◀───────────────────── collect(records)

Every rank holds all weights and the whole optimizer state and takes the same steps; only the sequences are divided.
Sums over ranks come out the same on each of them to the last bit, so their weights stay equal: `check_same_weights`
proves it after each batch. `Alone` is the one rank of a trainer that has no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.errors import TrainerError
from agentrl.wire import TrainSequence

T = TypeVar("T")

_BUCKET_BYTES = 64 * 2**20
"""Gradients travel in pieces of this size: few enough calls, and no second copy of all of them."""
_FOR_EVER = timedelta(days=3650)


class PeerLostError(TrainerError):
    """Another rank ended, or met no collective in time. It never leaves this process: what ended the other rank is the
    error to report."""


class Ranks(Protocol):
    """What a rank may ask of all. Every method is a meeting: all ranks call it, in the same order."""

    rank: int
    size: int

    def add(self, values: Tensor) -> None:
        """Replace `values` by their sum over all ranks, in place. Raises `PeerLostError`."""
        ...

    def hand_out(self, parts: Sequence[T] | None) -> T:
        """This rank's part of what rank 0 gives (`parts`, one a rank; None elsewhere). The others wait for rank 0
        without a deadline: it has none for its next request either."""
        ...

    def collect(self, part: T) -> list[T]:
        """On rank 0 every rank's part, in order of rank; [] elsewhere. Raises `PeerLostError`."""
        ...


class Alone:
    """The only rank."""

    rank = 0
    size = 1

    def add(self, values: Tensor) -> None:
        """Nothing to add."""

    def hand_out(self, parts: Sequence[T] | None) -> T:
        """The one part. Raises ValueError unless it is one."""
        (part,) = parts or ()
        return part

    def collect(self, part: T) -> list[T]:
        """The one part."""
        return [part]


class ProcessRanks:
    """Ranks in processes of their own, joined by `torch.distributed`: gloo for what lies on the CPU, nccl for CUDA."""

    def __init__(self, *, rank: int, size: int, meeting_file: Path, timeout_s: float) -> None:
        """Meet the other ranks at `meeting_file` (absent, or touched by them only), within `timeout_s`, which is also
        each later collective's deadline. Raises `PeerLostError`."""
        self.rank = rank
        self.size = size
        with _meeting("meeting the other ranks"):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                init_method=f"file://{meeting_file}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )
            self._work = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            self._idle = dist.new_group(backend="gloo", timeout=_FOR_EVER)

    def add(self, values: Tensor) -> None:
        with _meeting("summing over ranks"):
            dist.all_reduce(values)

    def hand_out(self, parts: Sequence[T] | None) -> T:
        out: list[T | None] = [None]
        with _meeting("handing out the next request"):
            dist.scatter_object_list(out, list(parts) if parts is not None else None, src=0, group=self._idle)
        return out[0]  # type: ignore[return-value]

    def collect(self, part: T) -> list[T]:
        found: list[T] | None = [part] * self.size if self.rank == 0 else None
        with _meeting("collecting the ranks' records"):
            dist.gather_object(part, found, dst=0, group=self._work)
        return found or []


@contextmanager
def _meeting(what: str) -> Iterator[None]:
    """`torch.distributed` says everything by RuntimeError: a peer that is gone, and one that did not come in time."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"a rank is lost: {error}", where=what) from error


# --- sharing out ----------------------------------------------------------------------------------


def share_out(lengths: Sequence[int], updates: Sequence[int], *, ranks: int) -> list[list[int]]:
    """Indices of whole sequences per rank: those of each update in shares of about equal token counts.

    `lengths[i]` and `updates[i]` speak of sequence i. Longest first, each to the rank that has the fewest tokens of
    that update, then the fewest in all: a rank's excess is below one sequence. Each list is in ascending order; a rank
    may get none. The same input gives the same shares.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for update in sorted(set(updates)):
        loads = [0] * ranks
        for i in sorted((i for i, u in enumerate(updates) if u == update), key=lambda i: -lengths[i]):
            rank = min(range(ranks), key=lambda r: (loads[r], totals[r], r))
            shares[rank].append(i)
            loads[rank] += lengths[i]
            totals[rank] += lengths[i]
    return [sorted(share) for share in shares]


def takes_part(sequence: TrainSequence) -> bool:
    """True where any stream takes in any of the sequence's tokens."""
    streams = (sequence.pg_mask, sequence.ce_weights, sequence.teacher_weights)
    return any(stream is not None and bool((stream != 0).any()) for stream in streams)


# --- sums -----------------------------------------------------------------------------------------


def sum_numbers(ranks: Ranks, numbers: Sequence[float]) -> list[float]:
    """Each number's sum over ranks, in float64: counts stay exact."""
    values = torch.tensor(numbers, dtype=torch.float64)
    ranks.add(values)
    return [float(v) for v in values]


def sum_gradients(ranks: Ranks, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Each parameter's `.grad` becomes the sum over ranks, where a rank without one adds 0; None where no rank has
    one, since an optimizer moves a parameter whose gradient is 0."""
    if ranks.size == 1:
        return
    held = sum_numbers(ranks, [p.grad is not None for p in parameters])
    waiting: list[Tensor] = []
    for parameter in (p for p, ranks_with in zip(parameters, held, strict=True) if ranks_with):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        waiting.append(parameter.grad)
        if sum(g.nbytes for g in waiting) >= _BUCKET_BYTES:
            _add_together(ranks, waiting)
            waiting = []
    _add_together(ranks, waiting)


def _add_together(ranks: Ranks, tensors: Sequence[Tensor]) -> None:
    """One sum for several tensors of one dtype and device."""
    if not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    ranks.add(flat)
    for tensor, summed in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(summed.view_as(tensor))


@torch.no_grad()
def check_same_weights(ranks: Ranks, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Raise `TrainerError`, on every rank, where they do not hold the same weights to the last bit of a checksum."""
    if ranks.size == 1:
        return
    own = sum((p.sum(dtype=torch.float64).cpu() for p in parameters), torch.zeros((), dtype=torch.float64))
    sums = torch.zeros(ranks.size, dtype=torch.int64)
    sums[ranks.rank] = own.view(torch.int64)
    ranks.add(sums)
    if not bool((sums == sums[0]).all()):
        raise TrainerError(
            f"the trainer's ranks hold different weights (checksums {sums.view(torch.float64).tolist()})",
            where="after a training step, or a start",
            remedy="run all ranks on devices of one kind with one version of torch, then continue with --resume",
        )
