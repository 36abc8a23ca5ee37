"""One rollout: phases, deadlines, retries, outcomes (K19, K42, K47)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentrl.errors import (
    AgentRLError,
    GradingTimeoutError,
    ImageMissingError,
    PolicyDeadError,
    PolicyRequestError,
    SandboxDeadError,
    SandboxOutOfMemoryError,
)
from agentrl.rollout.driver import RolloutDriver
from agentrl.rollout.status import RolloutPhase, RolloutStatus
from agentrl.trajectory import OutcomeKind, Trajectory


def fails(*errors: Exception) -> Callable[[Any], Any]:
    """A hook that raises these in turn, then works."""
    left = list(errors)

    async def hook(_: Any) -> None:
        if left:
            raise left.pop(0)

    return hook


async def forever(_: Any) -> None:
    await asyncio.Event().wait()


class World:
    """A driver in the toy world, and what it said."""

    def __init__(self, toys: Any, *, environment: Any = None, pool: Any = None, **limits: Any) -> None:
        self.toys = toys
        self.environment = environment or toys.Environment()
        self.pool = pool or toys.Pool()
        self.notes: list[str] = []
        self.status = RolloutStatus("g0-0", "task-g0", 0.0)
        self.driver = RolloutDriver(
            self.environment, self.pool, toys.limits(**limits), time.monotonic, time.time, self.notes.append
        )

    def run(self, episode: Any = None) -> Trajectory:
        return asyncio.run(self.go(episode))

    async def go(self, episode: Any = None) -> Trajectory:
        episode = episode or self.toys.Episode()
        return await self.driver.run(self.toys.request(), 0, episode=episode, status=self.status)


def test_a_solved_rollout_is_graded_in_another_sandbox(toys: Any) -> None:
    world = World(toys)
    t = world.run()
    assert (t.outcome.kind, t.reward, t.patch, t.trajectory_id) == (OutcomeKind.SOLVED, 1.0, "good", "g0-0")
    assert world.environment.sandboxes == [("prepare", "s1"), ("collect", "s1"), ("grade", "s2")]
    assert (t.info["submitted"], t.info["resolved"], t.info["graded"], t.info["attempts"]) == (1, 1, 1, 1)
    assert (t.image, t.temperature) == ("toy/image", 1.0)
    assert world.status.phase is RolloutPhase.DONE


def test_the_episodes_sandbox_is_given_back_before_grading_asks_for_one(toys: Any) -> None:
    """With one sandbox in all, a rollout that held it while it waits for another would wait for ever."""
    world = World(toys)
    world.run()
    assert (world.pool.out_max, world.pool.out) == (1, 0)


@pytest.mark.parametrize(
    ("stop", "kind"),
    [
        ("tokens", OutcomeKind.TRUNCATED_TOKENS),
        ("turns", OutcomeKind.TRUNCATED_TURNS),
        ("time", OutcomeKind.TRUNCATED_TIME),
    ],
)
def test_a_truncated_episode_is_graded_where_the_environment_says_so(toys: Any, stop: str, kind: OutcomeKind) -> None:
    t = World(toys, environment=toys.Environment(grade_unsubmitted=True)).run(toys.Episode(stop=stop))
    assert (t.outcome.kind, t.reward, t.info["resolved"], t.patch) == (kind, 1.0, 1, "good")


def test_an_episode_without_submit_gets_nothing_ungraded_where_the_environment_says_so(toys: Any) -> None:
    world = World(toys)
    t = world.run(toys.Episode(stop="turns"))
    assert (t.outcome.kind, t.reward, t.info["graded"], t.patch) == (OutcomeKind.TRUNCATED_TURNS, 0.0, 0, "")
    assert [step for step, _ in world.environment.sandboxes] == ["prepare"]


@pytest.mark.parametrize("error", [SandboxDeadError("gone"), SandboxOutOfMemoryError("oom"), PolicyRequestError("500")])
def test_k42_an_infrastructure_failure_is_tried_again_in_a_fresh_sandbox(toys: Any, error: AgentRLError) -> None:
    world = World(toys)
    t = world.run(toys.Episode(hook=fails(error, error)))
    assert (t.outcome.kind, t.reward, t.info["attempts"]) == (OutcomeKind.SOLVED, 1.0, 3)
    assert [sandbox for step, sandbox in world.environment.sandboxes if step == "prepare"] == [
        "s1",
        "s2",
        "s3",
    ]
    assert [event["attempt"] for event in t.events] == [1, 2]
    assert len(world.notes) == 2
    assert world.pool.out == 0


def test_k42_beyond_the_budget_it_is_recorded_with_its_cause_and_no_reward(toys: Any) -> None:
    t = World(toys, retries=1).run(toys.Episode(hook=fails(*[SandboxDeadError("server gone")] * 2)))
    assert (t.outcome.kind, t.reward, t.segments) == (OutcomeKind.INFRASTRUCTURE, None, ())
    for part in ("SandboxDeadError: server gone", "rollout g0-0", "phase episode", "sandbox s2", "attempt 2"):
        assert part in t.outcome.cause


def test_an_error_the_table_does_not_retry_is_recorded_at_once(toys: Any) -> None:
    environment = toys.Environment(hooks={"prepare": fails(ImageMissingError("no image"))})
    t = World(toys, environment=environment).run()
    assert (t.outcome.kind, t.info["attempts"]) == (OutcomeKind.INFRASTRUCTURE, 1)


def test_a_failure_while_grading_repeats_the_grading_alone(toys: Any) -> None:
    environment = toys.Environment(hooks={"grade": fails(SandboxDeadError("gone"))})
    t = World(toys, environment=environment).run()
    assert t.reward == 1.0
    assert [step for step, _ in environment.sandboxes] == ["prepare", "collect", "grade", "grade"]
    assert [sandbox for step, sandbox in environment.sandboxes if step == "grade"] == ["s2", "s3"]


def test_k47_grading_has_its_own_allowance(toys: Any) -> None:
    """Time spent before does not shorten it; past it the rollout is invalid, and what was sampled is kept."""

    async def slow(_: Any) -> None:
        await asyncio.sleep(0.3)

    world = World(toys, environment=toys.Environment(hooks={"prepare": slow, "collect": slow}), grade_s=0.5)
    assert world.run(toys.Episode(hook=slow)).reward == 1.0
    late = World(toys, environment=toys.Environment(hooks={"grade": forever}), grade_s=0.02, retries=0).run()
    assert (late.outcome.kind, late.reward, len(late.segments)) == (OutcomeKind.INFRASTRUCTURE, None, 1)
    assert GradingTimeoutError.__name__ in late.outcome.cause
    assert "phase grade, sandbox s2" in late.outcome.cause


@pytest.mark.parametrize("phase", ["prepare", "collect"])
def test_k19_every_phase_has_a_deadline_with_its_name(toys: Any, phase: str) -> None:
    environment = toys.Environment(hooks={phase: forever})
    t = World(toys, environment=environment, retries=0, **{f"{phase}_s": 0.02}).run()
    assert f"phase {phase}, sandbox s1" in t.outcome.cause
    assert "DeadlineError" in t.outcome.cause


def test_k19_the_whole_rollout_has_a_deadline_that_names_turn_and_sandbox(toys: Any) -> None:
    world = World(toys, rollout_s=0.5)
    t = world.run(toys.Episode(hook=forever))
    assert "the whole rollout ran past its deadline" in t.outcome.cause
    assert "phase episode, turn 0 sampling, sandbox s1" in t.outcome.cause
    assert world.pool.out == 0


def test_a_sandbox_that_never_comes_is_given_up(toys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.rollout.driver._GRACE_S", 0.0)
    t = World(toys, pool=toys.Pool(on_lease=forever), lease_s=0.02, retries=0).run()
    assert "phase lease" in t.outcome.cause


@pytest.mark.parametrize("error", [ZeroDivisionError("bug"), PolicyDeadError("server ended"), TimeoutError("own")])
def test_faults_of_the_program_and_a_dead_server_pass_through(toys: Any, error: Exception) -> None:
    world = World(toys)
    with pytest.raises(type(error), match=str(error)):
        world.run(toys.Episode(hook=fails(error)))
    assert world.pool.out == 0


def test_cancelling_is_not_swallowed_by_a_sandbox_that_fails_while_torn_down(toys: Any) -> None:
    async def dies_when_cancelled(_: Any) -> None:
        reached.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise SandboxDeadError("torn down") from None

    async def scenario() -> None:
        task = asyncio.create_task(world.go(toys.Episode(hook=dies_when_cancelled)))
        await asyncio.wait_for(reached.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)

    world, reached = World(toys), asyncio.Event()
    asyncio.run(scenario())
    assert len(world.pool.leases) == 1
