"""A plain vLLM OpenAI server, started as its users start one: by its own entry point, with nothing of ours."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrl.policy.server import free_port, log_tail

_START_S = 300.0
# What makes two cores enough: one thread, no compiler, the worker inside the engine's process.
_SMALL = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
_QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@contextmanager
def plain_vllm(model: Path, log_path: Path, *, arguments: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """(URL, process group) of a server for `model`. vLLM's defaults: 20 log-probabilities at most, prefix cache on."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(128 << 20), "--distributed-executor-backend", "uni", *arguments]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **_SMALL, **_QUIET}, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url, log_path)
        yield url, process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def _wait(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url + "/health", timeout=2):
            return
        time.sleep(0.5)
    raise RuntimeError(f"the plain server did not start:\n{log_tail(log_path)}")
