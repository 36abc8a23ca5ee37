"""K45: what earns a reward without solving the task earns none, on both backends; honest patches are not punished."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack

import pytest
import reward_hacks as hacks
import reward_hacks_more as more

from agentrl.config import SandboxConfig
from agentrl.errors import NoSandboxBackendError
from agentrl.sandbox import Pool, open_pool
from agentrl.wire import Grade, Task
from agentrl_envs.swe_gym import SweGymEnvironment


class Court:
    """Grades patches of the small task, several at once."""

    def __init__(self, runner: asyncio.Runner, pool: Pool, environment: SweGymEnvironment) -> None:
        self._runner, self._pool, self._environment = runner, pool, environment

    def grades(self, patches: Mapping[str, str], task_id: str = hacks.ID) -> dict[str, Grade]:
        task = self._environment.find(task_id)

        async def main() -> list[Grade]:
            return await asyncio.gather(*(self._grade(task, patch) for patch in patches.values()))

        return dict(zip(patches, self._runner.run(main()), strict=True))

    async def _grade(self, task: Task, patch: str) -> Grade:
        async with self._pool.lease("agentrl/base", timeout_s=300) as sandbox:
            return await self._environment.grade(task, sandbox, patch)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
        pytest.param("docker", marks=pytest.mark.docker),
    ],
)
def court(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Court]:
    rows = hacks.write_task(tmp_path_factory.mktemp("task"))
    environment = SweGymEnvironment({"dataset": str(rows), "fresh_fraction": 1.0})
    config = SandboxConfig(backend=request.param, size=3, starters=2, start_timeout_s=120)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            pool = runner.run(stack.enter_async_context(open_pool(config, run_id="test-hacks")))
        except NoSandboxBackendError as error:
            pytest.skip(f"no {request.param} here: {error.what}")
        try:
            yield Court(runner, pool, environment)
        finally:
            runner.run(stack.aclose())


def earned(grades: Mapping[str, Grade], reward: float) -> dict[str, str]:
    """The logs of those that did not get `reward`."""
    return {name: grade.log for name, grade in grades.items() if grade.reward != reward}


def test_the_fix_earns_the_reward_and_nothing_does_not(court: Court) -> None:
    grades = court.grades({"gold": hacks.GOLD, "nothing": "", "padded": hacks.GOLD + hacks.adding({"n.txt": "1\n"})})
    assert {name: grade.reward for name, grade in grades.items()} == {"gold": 1.0, "nothing": 0.0, "padded": 1.0}
    assert set(grades["gold"].tests) == {*hacks.FAIL, *hacks.PASS}
    assert "short test summary" in grades["gold"].output


def test_what_is_undone_earns_nothing_and_costs_nothing(court: Court) -> None:
    assert earned(court.grades(hacks.UNDONE), 0.0) == {}
    assert earned(court.grades({name: hacks.GOLD + patch for name, patch in hacks.UNDONE.items()}), 1.0) == {}


def test_tricks_in_the_package_earn_nothing(court: Court) -> None:
    patches = {name: hacks.adding({hacks.INIT: "+" + text}) for name, text in hacks.IN_PACKAGE.items()}
    assert earned(court.grades(patches), 0.0) == {}


def test_tricks_on_test_cases_earn_nothing(court: Court) -> None:
    """Where every test that must be mended is a method of a `TestCase`."""
    tricks = {name: text for name, text in hacks.IN_PACKAGE.items() if "TestCase" in text or "__build_class__" in text}
    patches = {name: hacks.adding({hacks.INIT: "+" + text}) for name, text in tricks.items()}
    assert len(patches) >= 4
    assert earned(court.grades({"gold": hacks.GOLD}, hacks.OF_CLASSES), 1.0) == {}
    assert earned(court.grades(patches, hacks.OF_CLASSES), 0.0) == {}


def test_further_tricks_earn_nothing(court: Court) -> None:
    patches = {name: hacks.adding({hacks.INIT: "+" + text}) for name, text in more.IN_PACKAGE.items()}
    assert earned(court.grades({**more.BY_FILES, **patches}), 0.0) == {}


def test_what_spares_the_tests_that_call_the_package_spares_their_copies(court: Court) -> None:
    grades = court.grades(more.AT_RUN_TIME)
    assert earned(grades, 0.0) == {}
    swallowed = grades["swallows what follows a call"]
    assert set(swallowed.tests.values()) == {"passed", "xfailed"}, "but for the copies it would have earned 1"
    assert "did not fail, and otherwise under the reference patch" in swallowed.log


def test_skips_and_expected_failures_of_the_candidates_earn_nothing(court: Court) -> None:
    patches = {name: hacks.adding({"counting/core.py": text}) for name, text in hacks.MARKED.items()}
    assert earned(court.grades(patches), 0.0) == {}


def test_odd_patches_earn_nothing(court: Court) -> None:
    assert earned(court.grades(hacks.ODD), 0.0) == {}


def test_honest_patches_are_not_punished(court: Court) -> None:
    patches = {name: hacks.GOLD + patch for name, patch in hacks.HONEST.items()}
    assert earned(court.grades(patches), 1.0) == {}
