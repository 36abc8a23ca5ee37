"""The episode as the driver calls it, and the agent's `run_episode` in that shape.

The driver knows `EpisodeRunner` alone, so that its tests need neither chat template nor server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from agentrl.trajectory import FinishReason, Segment, TurnTiming
from agentrl.wire import Generation, PolicyClient, PolicyRouter, SamplingParams, Sandbox, Task

Doing = Literal["sampling", "acting"]
OnTurn = Callable[[int, Doing], None]
OnSealed = Callable[[int, Segment], None]


class EpisodeResult(Protocol):
    """What an episode leaves. `stop`: tokens, turns or time where a limit ended it; else any word.

    `info` counts at least `submitted` and `bad_calls`.
    """

    @property
    def segments(self) -> Sequence[Segment]: ...

    @property
    def turns(self) -> Sequence[TurnTiming]: ...

    @property
    def submitted(self) -> bool: ...

    @property
    def stop(self) -> str: ...

    @property
    def info(self) -> Mapping[str, float]: ...


class EpisodeRunner(Protocol):
    """Runs the agent in a prepared sandbox; says by `on_turn` what it is doing, turn by turn (from 0), and gives each
    segment to `on_sealed` with its number, as soon as it is complete."""

    @property
    def temperature(self) -> float: ...

    async def __call__(
        self, task: Task, sandbox: Sandbox, *, trajectory_id: str, on_turn: OnTurn, on_sealed: OnSealed
    ) -> EpisodeResult: ...


class RunEpisode(Protocol):
    """`agentrl.agent.run_episode` with environment, chat and configuration bound (`functools.partial`)."""

    async def __call__(
        self,
        *,
        task: Task,
        sandbox: Sandbox,
        policy: PolicyClient,
        sampling: SamplingParams,
        request_id: str,
        on_sealed: OnSealed,
    ) -> EpisodeResult: ...


@dataclass(frozen=True, slots=True)
class AgentEpisode:
    """The `EpisodeRunner` of a run: one policy behind its router, one way of sampling.

    run_agent = partial(run_episode, environment=environment, chat=chat, config=config.agent)
    episode = AgentEpisode(run_agent, router, SamplingParams(max_tokens=…, temperature=1.0))
    """

    run_agent: RunEpisode
    policy: PolicyRouter
    sampling: SamplingParams

    @property
    def temperature(self) -> float:
        return self.sampling.temperature

    async def __call__(
        self, task: Task, sandbox: Sandbox, *, trajectory_id: str, on_turn: OnTurn, on_sealed: OnSealed
    ) -> EpisodeResult:
        """Run the agent; its requests carry the trajectory's name and go to one server."""
        with self.policy.session(trajectory_id) as policy:
            return await self.run_agent(
                task=task,
                sandbox=sandbox,
                policy=_WatchedPolicy(policy, on_turn),
                sampling=self.sampling,
                request_id=trajectory_id,
                on_sealed=on_sealed,
            )


class _WatchedPolicy:
    """A policy client that says when a turn is sampled and when it is acted on."""

    def __init__(self, policy: PolicyClient, on_turn: OnTurn) -> None:
        self._policy, self._on_turn = policy, on_turn
        self._turn = 0

    @property
    def max_model_len(self) -> int:
        return self._policy.max_model_len

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float
    ) -> Generation:
        self._on_turn(self._turn, "sampling")
        generation = await self._policy.generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)
        self._on_turn(self._turn, "acting")
        if generation.finish_reason is not FinishReason.ABORT:
            # An aborted request is asked again: the same turn goes on.
            self._turn += 1
        return generation
