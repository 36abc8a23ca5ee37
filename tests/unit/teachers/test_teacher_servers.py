"""A server of ours as a teacher: how it is started, and what its end means; vLLM itself is a stand-in here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import policy_stand_in
import pytest
from teacher_toys import TINY, request, teacher_spec

from agentrl.errors import ConfigError, PolicyStartError, TeacherDeadError, TeacherRequestError, TeacherStartError
from agentrl.policy import ServerExit
from agentrl_teachers import checked, servers


class Started:
    """In place of `VllmServer`: the stand-in at `url`, alive until `end` is set."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.end = asyncio.Event()

    async def wait_dead(self) -> ServerExit:
        await self.end.wait()
        return ServerExit(exit_code=-9, log_tail="last words")

    async def __aenter__(self) -> Started:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end.set()


class Starts:
    """`VllmServer.start`: what it was given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.url = "http://127.0.0.1:9"
        self.server: Any = None
        self.given: dict[str, Any] = {}

    async def start(self, config: Any, **given: Any) -> Started:
        if self.error is not None:
            raise self.error
        self.given = {"config": config, **given}
        self.server = Started(self.url)
        return self.server


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    found = Starts()
    monkeypatch.setattr(servers, "VllmServer", found)
    monkeypatch.setattr(checked, "_FIRST_WAIT_S", 0.001)
    return found


def test_the_server_is_started_for_what_is_asked(starts: Starts, tmp_path: Path) -> None:
    async def run() -> None:
        spec = teacher_spec(tmp_path, name="t", model="tiny", top_k=100, concurrency=3, dtype="bfloat16")
        async with servers.open_vllm(spec) as teacher:
            assert teacher.name == "t"
        assert starts.server.end.is_set()

    asyncio.run(run())
    config, arguments = starts.given["config"], starts.given["extra_arguments"]
    assert (config.model, config.dtype, config.max_model_len) == (str(TINY), "bfloat16", 512)
    assert config.max_num_seqs == 3
    assert arguments[arguments.index("--max-logprobs") + 1] == "100"
    assert starts.given["log_path"] == tmp_path / "teacher-t.log"


def test_its_death_is_the_teachers_death_with_its_last_words(starts: Starts, tmp_path: Path) -> None:
    """Killed mid-run: named at once, and the run can go on later."""

    async def run() -> None:
        async with policy_stand_in.serving() as stand_in:
            starts.url = stand_in.url
            await killed(stand_in)

    async def killed(stand_in: policy_stand_in.StandIn) -> None:
        async with servers.open_vllm(teacher_spec(tmp_path, top_k=0)) as teacher:
            with pytest.raises(TeacherRequestError, match="teacher teacher answered 400: Token id out of vocabulary"):
                await teacher.score(request(), timeout_s=10)
            stand_in.drop_connections = 1000
            starts.server.end.set()
            with pytest.raises(TeacherDeadError, match=r"teacher teacher at .* ended with exit code -9") as caught:
                await teacher.score(request(), timeout_s=10)
        assert "last words" in caught.value.where
        assert "trajectory r, segment 0" in caught.value.where
        assert str(teacher_spec(tmp_path).log_path) in caught.value.remedy

    asyncio.run(run())


def test_a_server_that_does_not_start_is_the_teachers_error(starts: Starts, tmp_path: Path) -> None:
    starts.error = PolicyStartError("it did not start", where="teacher-teacher.log\nthe last lines")

    async def run() -> None:
        async with servers.open_vllm(teacher_spec(tmp_path)):
            pass

    with pytest.raises(TeacherStartError, match="teacher teacher did not start") as caught:
        asyncio.run(run())
    assert "the last lines" in caught.value.where


def test_a_model_that_is_not_there(starts: Starts, tmp_path: Path) -> None:
    async def run() -> None:
        async with servers.open_vllm(teacher_spec(tmp_path, model=str(tmp_path / "none"))):
            pass

    with pytest.raises(ConfigError, match="teacher teacher: there is no folder") as caught:
        asyncio.run(run())
    assert "distill.teachers" in caught.value.where
