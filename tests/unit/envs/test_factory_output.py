"""The folder of rows: what is on disk whatever ends a run, and how the next run goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer

from agentrl.cli.task_factory import register
from agentrl.errors import ConfigError, DatasetError, UnknownEnvironmentError
from agentrl.run.factory import Machines, describe, factory_command, load_factory, mine_command, sandbox_config
from agentrl.wire import FactoryReport, InjectRequest, MineRequest
from agentrl_envs.swe_gym.factory.git import Repository
from agentrl_envs.swe_gym.factory.in_order import in_order
from agentrl_envs.swe_gym.factory.output import OutputFolder
from agentrl_envs.swe_gym.row_files import read_raw
from agentrl_envs.swe_gym.rows import TreeRef
from agentrl_envs.swe_gym.trees import build_tree


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1\n")
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=A", "-c", "user.email=a@b", "commit", "-qm", "m"]):
        subprocess.run(["git", *command], cwd=folder, check=True, timeout=60)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return Repository.copy(folder, scratch)


@contextmanager
def opened(repository: Repository, tmp_path: Path, repo: str = "o/r", source: str = "mined") -> Iterator[OutputFolder]:
    scratch = tmp_path / f"scratch-{len(list(tmp_path.iterdir()))}"
    scratch.mkdir()
    folder = OutputFolder(tmp_path / "out", repo=repo, source=source, repository=repository, scratch=scratch)
    try:
        yield folder
    finally:
        folder.close()


def accept(folder: OutputFolder, repository: Repository, key: str, text: str, scratch: Path) -> str:
    """Add a row whose tree holds `text`; the tree's name."""
    head = repository.tree(repository.resolve(None))
    tree = repository.tree_with(head, {"a.py": text.encode()}, scratch=scratch)
    row = {"instance_id": folder.instance_id(key), "repo": folder.repo, "x_source": "mined", "x_kind": "good"}
    folder.accept(key, row, repository.commit_alone(tree))
    return tree


def ids(tmp_path: Path) -> list[str]:
    lines = (tmp_path / "out" / "instances.jsonl").read_text().splitlines()
    return [json.loads(line)["instance_id"] for line in lines]


def test_rows_have_their_trees_and_the_next_run_goes_on(repository: Repository, tmp_path: Path) -> None:
    with opened(repository, tmp_path) as folder:
        first = accept(folder, repository, "0000000001", "x = 2\n", tmp_path)
        folder.reject("0000000002", "unstable")
    with opened(repository, tmp_path) as folder:
        assert folder.is_decided("0000000001")
        assert folder.is_decided("0000000002")
        assert not folder.is_decided("0000000003")
        assert (len(folder.rows), folder.new_rows, dict(folder.kinds)) == (1, 0, {"good": 1})
        second = accept(folder, repository, "0000000003", "x = 3\n", tmp_path)
    assert ids(tmp_path) == ["o__r-0000000001", "o__r-0000000003"]
    for name, tree in (("o__r-0000000001", first), ("o__r-0000000003", second)):
        build_tree(tmp_path / "out" / "o__r.bundle", TreeRef("o__r.bundle", name, tree), where="test")


def test_a_bundle_holds_parentless_commits_and_no_history(repository: Repository, tmp_path: Path) -> None:
    with opened(repository, tmp_path) as folder:
        accept(folder, repository, "0000000001", "x = 2\n", tmp_path)
    bundle = tmp_path / "out" / "o__r.bundle"
    heads = subprocess.run(["git", "bundle", "list-heads", bundle], capture_output=True, check=True, timeout=60)
    assert [line.split()[1] for line in heads.stdout.decode().splitlines()] == ["refs/heads/o__r-0000000001"]
    clone = ["git", "clone", "-q", "--single-branch", "-b", "o__r-0000000001", str(bundle), str(tmp_path / "clone")]
    subprocess.run(clone, check=True, timeout=60)
    log = subprocess.run(
        ["git", "log", "--format=%P %an %s"], cwd=tmp_path / "clone", capture_output=True, check=True, timeout=60
    )
    assert log.stdout == b" base base\n"


def test_a_line_cut_short_is_cut_off(repository: Repository, tmp_path: Path) -> None:
    """A run that was killed while it wrote."""
    with opened(repository, tmp_path) as folder:
        accept(folder, repository, "0000000001", "x = 2\n", tmp_path)
        folder.reject("0000000002", "unstable")
    for name in ("instances.jsonl", "decided.log"):
        with (tmp_path / "out" / name).open("a") as file:
            file.write('{"instance_id": "o__r-00000')
    with opened(repository, tmp_path) as folder:
        assert len(folder.rows) == 1
        accept(folder, repository, "0000000003", "x = 3\n", tmp_path)
    assert ids(tmp_path) == ["o__r-0000000001", "o__r-0000000003"]


def test_the_folder_can_be_named_as_a_data_set(repository: Repository, tmp_path: Path) -> None:
    """What else lies in it is no file of rows."""
    with opened(repository, tmp_path) as folder:
        accept(folder, repository, "0000000001", "x = 2\n", tmp_path)
        folder.reject("0000000002", "unstable")
    read = [row.fields["instance_id"] for row in read_raw(str(tmp_path / "out"), hub_split="train")]
    assert read == ["o__r-0000000001"]


def test_a_row_whose_decision_was_not_noted_is_decided(repository: Repository, tmp_path: Path) -> None:
    with opened(repository, tmp_path) as folder:
        accept(folder, repository, "0000000001", "x = 2\n", tmp_path)
    (tmp_path / "out" / "decided.log").unlink()
    with opened(repository, tmp_path) as folder:
        assert folder.is_decided("0000000001")


def test_what_waits_is_written_when_the_run_is_cancelled(repository: Repository, tmp_path: Path) -> None:
    def interrupted() -> None:
        with opened(repository, tmp_path) as folder:
            accept(folder, repository, "0000000001", "x = 2\n", tmp_path)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert ids(tmp_path) == ["o__r-0000000001"]


def test_a_bundle_that_went_missing_is_an_error(repository: Repository, tmp_path: Path) -> None:
    with opened(repository, tmp_path) as folder:
        accept(folder, repository, "0000000001", "x = 2\n", tmp_path)
    (tmp_path / "out" / "o__r.bundle").unlink()
    with pytest.raises(DatasetError, match="lacks the tree"), opened(repository, tmp_path):
        pass


def test_two_runs_do_not_share_a_folder_at_once(repository: Repository, tmp_path: Path) -> None:
    with opened(repository, tmp_path):  # noqa: SIM117
        with pytest.raises(DatasetError, match="another process"), opened(repository, tmp_path):
            pass


def test_repositories_and_sources_do_not_see_each_other_s_decisions(repository: Repository, tmp_path: Path) -> None:
    with opened(repository, tmp_path) as folder:
        folder.reject("0000000001", "unstable")
    with opened(repository, tmp_path, repo="o/other") as folder:
        assert not folder.is_decided("0000000001")
    with opened(repository, tmp_path, source="injected") as folder:
        assert not folder.is_decided("0000000001")


# --- work in order ---------------------------------------------------------------------------------------------


async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


def test_results_come_in_order_and_work_is_bounded() -> None:
    busy, most = 0, 0

    async def work(number: int) -> int:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.002 * (number % 3))
        busy -= 1
        return -number

    async def main() -> list[tuple[int, int]]:
        async with aclosing(in_order(numbers(30), work, jobs=3)) as results:
            return [pair async for pair in results]

    assert asyncio.run(main()) == [(n, -n) for n in range(30)]
    assert most == 3


def test_leaving_early_ends_what_is_at_work() -> None:
    ended: list[int] = []

    async def work(number: int) -> int:
        try:
            await asyncio.sleep(0 if number == 0 else 60)
        finally:
            ended.append(number)
        return number

    async def main() -> None:
        async with asyncio.timeout(10), aclosing(in_order(numbers(9), work, jobs=2)) as results:
            async for _ in results:
                break

    asyncio.run(main())
    assert 0 in ended
    assert len(ended) <= 3


def test_an_error_ends_the_rest() -> None:
    async def work(number: int) -> int:
        if number == 1:
            raise ValueError("one")
        await asyncio.sleep(0 if number == 0 else 60)
        return number

    async def main() -> None:
        async with asyncio.timeout(10), aclosing(in_order(numbers(9), work, jobs=4)) as results:
            async for _ in results:
                pass

    with pytest.raises(ValueError, match="one"):
        asyncio.run(main())


# --- the command -----------------------------------------------------------------------------------------------


def test_an_unknown_environment_lists_the_installed() -> None:
    with pytest.raises(UnknownEnvironmentError, match="no task factory"):
        load_factory("swe-gim")


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["--sandbox.size", "8"], "--jobs"),
        (["--sandbox.image", "x"], "--image"),
        (["--rollout.group-size", "8"], "leave it out"),
    ],
)
def test_settings_without_effect_are_refused(words: list[str], instead: str) -> None:
    with pytest.raises(ConfigError, match=instead):
        sandbox_config(MineRequest(repository="r"), Machines(overrides=words))


def test_the_pool_is_as_large_as_the_jobs() -> None:
    request = MineRequest(repository="r", jobs=3, image="some/image")
    config = sandbox_config(request, Machines(backend="bubblewrap", overrides=["--sandbox.memory-mb", "512"]))
    assert (config.size, config.starters, config.image) == (3, 3, "some/image")
    assert (config.backend, config.memory_mb) == ("bubblewrap", 512)


def test_a_wrong_date_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match="no date"):
        mine_command(MineRequest(repository="r", since="last year"), Machines())


def test_the_report_is_one_line_a_reason() -> None:
    facts: dict[str, Any] = {"folder": "tasks/r", "rows": 3, "new_rows": 1, "looked_at": 20}
    text = describe(FactoryReport(**facts, left_out={"merge": 12, "message says nothing": 5}, kinds={"good": 3}))
    assert text.splitlines() == [
        "3 rows in tasks/r (3 good), 1 of them new",
        "looked at 20; left out: 17",
        "  12  merge",
        "   5  message says nothing",
        "check them: agentrl sandbox verify swe-gym --data tasks/r",
    ]
    told = describe(FactoryReport(**facts, left_out={}, kinds={"good": 3}), recipes=Path("my recipes"))
    assert told.endswith("--data tasks/r --sandbox.recipes 'my recipes'")


@pytest.mark.parametrize(("command", "kind"), [("mine", MineRequest), ("inject", InjectRequest)])
def test_the_commands_defaults_are_the_requests(
    monkeypatch: pytest.MonkeyPatch, command: str, kind: type[MineRequest | InjectRequest]
) -> None:
    """They are written twice, because the command line must not import what the requests are made of."""
    asked: list[MineRequest | InjectRequest] = []

    def noted(request: MineRequest | InjectRequest, machines: Machines) -> int:
        asked.append(request)
        assert machines == Machines(overrides=[])
        return 0

    monkeypatch.setattr("agentrl.run.factory.factory_command", noted)
    app = typer.Typer()
    register(app)
    assert app([command, "some/repo"], standalone_mode=False) == 0
    assert asked == [kind(repository="some/repo")]


def test_rows_are_exit_code_0_and_none_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rows, code in ((2, 0), (0, 1)):
        report = FactoryReport(folder="t", rows=rows, new_rows=0, looked_at=1, left_out={}, kinds={})

        async def done(*_: object, report: FactoryReport = report) -> FactoryReport:
            return report

        monkeypatch.setattr("agentrl.run.factory.load_factory", lambda name: None)
        monkeypatch.setattr("agentrl.run.factory._run", done)
        assert factory_command(MineRequest(repository="r"), Machines(backend="bubblewrap")) == code
        assert f"{rows} rows in t" in capsys.readouterr().out


def test_an_interrupted_run_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(*_: object) -> FactoryReport:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setattr("agentrl.run.factory.load_factory", lambda name: None)
    monkeypatch.setattr("agentrl.run.factory._run", interrupted)
    assert factory_command(MineRequest(repository="r"), Machines(backend="bubblewrap")) == 130
    assert "goes on from there" in capsys.readouterr().out
