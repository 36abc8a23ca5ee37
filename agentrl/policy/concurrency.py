"""How many trajectories may be active at once: a state machine fed with numbers, without a server or a clock.

    doubling ──first back-off──▶ stepping ⟲

What fills a server is KV room, and active trajectories fill it, so they are what is limited, not requests:

* *raise* while the limit is what holds trajectories back (active ≥ limit), nothing waits at a server and KV has room:
  doubling at first, by steps of a sixteenth after the first back-off; at most once per `settle_s`, so that what a
  raise does is seen before the next one;
* *back off* where KV room is short, to 0.8 of those active, then hold for a cool-down, in which further signs are the
  same shortage's. The signs: requests wait at a server that is full (a server counts a preemption only when the
  request samples again, and it waits until then), or new preemptions;
* *hold* otherwise.

Invariant: floor ≤ limit ≤ cap.
"""

from __future__ import annotations

from dataclasses import dataclass

_KV_ROOM = 0.85
_KV_FULL = 0.95
_BACK_OFF = 0.8
_STEPS = 16


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """A look at all servers: the fullest one's KV use in [0, 1], requests running and waiting, preemptions since
    start, active trajectories, and when (seconds of a clock that never goes back)."""

    kv_used_fraction: float
    running: int
    waiting: int
    preemptions: int
    active: int
    now: float


class ConcurrencyController:
    """See the module. `observe` answers each sample with the limit from now on."""

    def __init__(
        self, cap: int, *, start: int | None = None, floor: int = 1, settle_s: float = 2.0, cool_down_s: float = 10.0
    ) -> None:
        if not 1 <= floor <= cap:
            raise ValueError(f"a floor of {floor} with a cap of {cap}")
        self._cap, self._floor = cap, floor
        self._limit = min(cap, max(floor, cap if start is None else start))
        self._settle_s, self._cool_down_s = settle_s, cool_down_s
        self._step: int | None = None  # None: still doubling
        self._preemptions: int | None = None  # most seen so far
        self._cool_until = self._settled_at = float("-inf")

    @property
    def limit(self) -> int:
        """Trajectories that may be active now."""
        return self._limit

    @property
    def doubling(self) -> bool:
        """Whether no back-off has happened yet."""
        return self._step is None

    def observe(self, sample: ServerLoad) -> int:
        """The new limit. Samples come in the order of their `now`."""
        before = sample.preemptions if self._preemptions is None else self._preemptions
        self._preemptions = max(before, sample.preemptions)
        if sample.now < self._cool_until:
            return self._limit
        if sample.preemptions > before or (sample.waiting and sample.kv_used_fraction >= _KV_FULL):
            self._back_off(sample)
        elif self._has_room(sample):
            self._raise(sample)
        return self._limit

    def _has_room(self, sample: ServerLoad) -> bool:
        """Whether more trajectories would run: the last raise has shown what it does, and all are well served."""
        settled = sample.now >= self._settled_at and sample.active >= self._limit
        return settled and not sample.waiting and sample.kv_used_fraction < _KV_ROOM

    def _back_off(self, sample: ServerLoad) -> None:
        target = int(_BACK_OFF * min(sample.active, self._limit))
        self._limit = max(self._floor, min(target, self._limit - 1))
        self._step = max(1, self._limit // _STEPS)
        self._cool_until = sample.now + self._cool_down_s

    def _raise(self, sample: ServerLoad) -> None:
        self._limit = min(self._cap, self._limit * 2 if self._step is None else self._limit + self._step)
        self._settled_at = sample.now + self._settle_s


def start_limit(kv_tokens: int, *, tokens_per_trajectory: int, cap: int) -> int:
    """Trajectories that fit into `kv_tokens` of all servers' KV room together where each grows to
    `tokens_per_trajectory`; within 1 … `cap`. Safe to start from, whatever the trajectories turn out to be."""
    return max(1, min(cap, kv_tokens // max(1, tokens_per_trajectory)))
