"""Servers and ranks on devices."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.run.placement import Placement, available_devices, place


def config(schedule: str = "sync", **placement: Any) -> RunConfig:
    return RunConfig.model_validate({"rollout": {"schedule": schedule}, "placement": placement})


def test_sync_shares_devices_and_async_gives_each_its_own() -> None:
    both = {"replicas": 2, "ranks": 2}
    assert place(config(**both), available=[4, 5, 6], bind=True) == Placement((4, 5), (4, 5), 2, True)
    assert place(config("async", **both), available=[0, 1, 2, 3], bind=True) == Placement((0, 1), (2, 3), 4, False)
    uneven = place(config(replicas=1, ranks=3), available=[0, 1, 2], bind=True)
    assert uneven == Placement((0,), (0, 1, 2), 3, True)


def test_named_devices_come_in_their_order() -> None:
    assert place(config("async", devices=(3, 1)), available=[0, 1, 2, 3], bind=True) == Placement((3,), (1,), 2, False)


def test_unbound_processes_count_every_device() -> None:
    assert place(config("async"), available=[0], bind=False) == Placement((None,), (None,), 1, False)
    assert place(config(), available=[0, 1], bind=False) == Placement((None,), (None,), 2, True)


def test_devices_without_binding_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"placement\.devices has no effect") as error:
        place(config(devices=(0,)), available=[0, 1], bind=False)
    assert "placement.pin" in error.value.remedy


def test_an_evaluation_places_servers_only() -> None:
    assert place(config("async"), available=[7], bind=True, train=False) == Placement((7,), (), 1, False)


@pytest.mark.parametrize(
    ("schedule", "placement", "available", "words"),
    [
        ("async", {}, [0], r"1 policy server\(s\) and 1 trainer rank\(s\) need 2 devices"),
        ("sync", {"replicas": 3}, [0, 1], "need 3 devices"),
        ("sync", {"devices": (9,)}, [0, 1], "no device 9"),
    ],
)
def test_too_few_devices_are_refused(
    schedule: str, placement: dict[str, Any], available: list[int], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        place(config(schedule, **placement), available=available, bind=True)
    assert error.value.remedy


def test_what_is_refused_is_told_in_terms_of_what_was_asked_for() -> None:
    with pytest.raises(ConfigError) as error:
        place(config(replicas=3), available=[0, 1], bind=True, train=False)
    assert error.value.what == "3 policy server(s) need 3 devices; there are 2: 0, 1"
    assert error.value.where == "placement.replicas"
    for schedule, advised in (("sync", False), ("async", True)):
        with pytest.raises(ConfigError) as error:
            place(config(schedule, replicas=3), available=[0, 1], bind=True)
        assert ("rollout.schedule=sync" in error.value.remedy) is advised


def test_visible_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert available_devices(cuda=True) == [2, 5]
    assert available_devices(cuda=False)


def test_a_teacher_that_is_started_here_has_a_device_of_its_own() -> None:
    teachers = [{"model": "a", "name": "a"}, {"model": "http://h", "name": "b"}, {"model": "c", "name": "c"}]
    distill = {"teachers": teachers, "route": "family"}
    config = RunConfig.model_validate({"distill": distill, "rollout": {"schedule": "async"}})
    placed = place(config, available=range(4), bind=True)
    assert (placed.replicas, placed.ranks, placed.teachers, placed.devices) == ((0,), (1,), (2, 3), 4)
    shared = RunConfig.model_validate({"distill": distill})
    assert place(shared, available=range(4), bind=True).teachers == (1, 2)
    assert place(config, available=range(2), bind=False).teachers == (None, None)
    assert place(config, available=range(4), bind=True, train=False).teachers == ()
    with pytest.raises(
        ConfigError, match=r"1 policy server\(s\) and 1 trainer rank\(s\) and 2 teacher\(s\) need 4"
    ) as e:
        place(config, available=range(3), bind=True)
    assert "--teacher URL" in e.value.remedy
