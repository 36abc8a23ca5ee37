"""An `interrupt` among the requests ends the command in progress and nothing else."""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

INTERRUPT = b'{"op":"interrupt","id":0}'


def answers(server: Any, count: int) -> list[dict[str, Any]]:
    """The next `count` answers, which may come at once."""
    fd, data, end = server.process.stdout.fileno(), b"", time.monotonic() + 30
    while data.count(b"\n") < count:
        assert select.select([fd], [], [], max(0.0, end - time.monotonic()))[0], data
        data += os.read(fd, 65536)
    return [json.loads(line) for line in data.splitlines()]


def begin(server: Any, command: str, *, number: int) -> None:
    """Start a command without waiting for its answer; return once it has written `begun`."""
    request = {"id": number, "op": "run", "command": f"echo begun > begun; {command}", "timeout_s": 60}
    server.send_line(json.dumps(request).encode())
    end = time.monotonic() + 20
    while not (server.work / "begun").is_file() and time.monotonic() < end:
        time.sleep(0.01)


def test_an_interrupt_ends_the_command_as_ctrl_c_does(server: Any) -> None:
    begin(server, "echo shown; sleep 50", number=1)
    began = time.monotonic()
    server.send_line(INTERRUPT)
    answer, of_interrupt = answers(server, 2)
    assert (answer["id"], answer["exit_code"], answer["output"]) == (1, 130, "shown\n")
    assert not answer["timed_out"]
    assert time.monotonic() - began < 10
    assert of_interrupt == {"id": 0, "ok": True}
    assert server.run("echo alive")["output"] == "alive\n"


def test_a_command_that_ignores_it_is_killed_soon(server: Any) -> None:
    """K40: nothing of it is left running."""
    begin(server, "trap '' INT; (setsid sleep 51 &); sleep 50", number=1)
    server.send_line(INTERRUPT)
    answer, of_interrupt = answers(server, 2)
    assert answer["exit_code"] is None
    assert answer["duration_s"] < 20
    assert of_interrupt["ok"]
    assert server.run("pgrep -f 'sleep 5[01]' || echo none")["output"].splitlines()[-1] == "none"


def test_an_interrupt_while_nothing_runs_is_answered(server: Any) -> None:
    server.send_line(INTERRUPT)
    assert server.receive() == {"id": 0, "ok": True}
    assert server.run("echo alive")["output"] == "alive\n"


def test_another_request_that_waits_interrupts_nothing(server: Any) -> None:
    begin(server, "sleep 0.5; echo done", number=1)
    server.send_line(
        json.dumps({"id": 2, "op": "run", "command": 'echo \'{"op":"interrupt"\'', "timeout_s": 9}).encode()
    )
    first, second = answers(server, 2)
    assert (first["output"], second["output"]) == ("done\n", '{"op":"interrupt"\n')
