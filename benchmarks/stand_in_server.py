"""A policy server that only waits, in a process of its own: what `VllmClient` and the router talk to over HTTP.

    python benchmarks/stand_in_server.py --groups 250 [--turn-s 6] [--turn-p95 2] [--seed 0]

Says, turn by turn, the scripts of the first `--groups` training tasks (`stand_ins.expert_scripts`), each turn after
its delay; all answers are made before it prints its port and serves.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from stand_ins import Delay, expert_of, expert_scripts, generated_groups, tiny_chat

_HEAD_END = b"\r\n\r\n"
_LENGTH = b"content-length:"
_STOP_S = 30.0


class _Sampling(msgspec.Struct):
    max_tokens: int


class _Request(msgspec.Struct):
    request_id: str
    token_ids: list[int]
    sampling_params: _Sampling


_decoder = msgspec.json.Decoder(_Request)


def _choice(ids: list[int], finish: str) -> bytes:
    """The part of an answer that vLLM would give for these sampled tokens."""
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": -0.5, "bytes": None, "top_logprobs": [], "token_id": token, "rank": 1}
        for token in ids
    ]
    spans = [{"version": "0", "start": 0, "end": len(ids)}]
    return msgspec.json.encode(
        {
            "index": 0,
            "token_ids": ids,
            "finish_reason": finish,
            "logprobs": {"content": content},
            "weight_versions": spans,
        }
    )


class Answers:
    """Group → turn → answer. A request is `TRAJECTORY.TURN.PART`; a trajectory `GROUP-MEMBER`."""

    def __init__(self, groups: int, *, seed: int, turn: Delay) -> None:
        environment, requests = generated_groups(groups, group_size=1, seed=seed)
        scripts = expert_scripts(requests, expert_of(environment), tiny_chat())
        self._ids = {name: [turn.tolist() for turn in script.turns] for name, script in scripts.items()}
        self._whole = {name: [_choice(ids, "stop") for ids in turns] for name, turns in self._ids.items()}
        self._turn = turn

    def answer(self, body: bytes) -> tuple[float, bytes]:
        """(seconds to wait, the whole HTTP answer)."""
        request = _decoder.decode(body)
        trajectory, number, _ = request.request_id.rsplit(".", 2)
        group, turn = trajectory.rpartition("-")[0], int(number)
        ids, room = self._ids[group][turn], request.sampling_params.max_tokens
        choice = self._whole[group][turn] if len(ids) <= room else _choice(ids[:room], "length")
        prompt = len(request.token_ids)
        delay_s = self._turn.seconds(request.request_id)
        data = (
            b'{"choices":[%b],"usage":{"prompt_tokens":%d,"completion_tokens":%d},'
            b'"timings":{"queue_s":0,"prefill_s":0,"decode_s":%f}}' % (choice, prompt, min(len(ids), room), delay_s)
        )
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
        return delay_s, head + data


class _Connection(asyncio.Protocol):
    """HTTP/1.1 as our client speaks it: one request at a time, with its length, kept open."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head_end = self._buffer.find(_HEAD_END)
        if head_end < 0:
            return
        head = bytes(self._buffer[:head_end]).lower()
        length = int(head[head.index(_LENGTH) + len(_LENGTH) :].split(b"\r\n", 1)[0])
        end = head_end + len(_HEAD_END) + length
        if len(self._buffer) < end:
            return
        delay_s, answer = self._answers.answer(bytes(self._buffer[end - length : end]))
        del self._buffer[:end]
        asyncio.get_running_loop().call_later(delay_s, self._write, answer)

    def _write(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


async def _serve(answers: Answers) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(answers), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # ends with the benchmark, however that ends
    server.close()


@contextmanager
def serving(*, groups: int, turn: Delay, seed: int = 0) -> Iterator[str]:
    """Start the process; its address. Ended when the block is left."""
    words = ["--groups", str(groups), "--turn-s", str(turn.median_s), "--turn-p95", str(turn.p95_ratio)]
    command = [sys.executable, str(Path(__file__).resolve()), *words, "--seed", str(seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            if not port:
                raise SystemExit(f"the stand-in server did not start: {' '.join(command)}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=_STOP_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--turn-s", type=float, default=6.0)
    parser.add_argument("--turn-p95", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    answers = Answers(options.groups, seed=options.seed, turn=Delay(options.turn_s, options.turn_p95))
    asyncio.run(_serve(answers))


if __name__ == "__main__":
    main()
