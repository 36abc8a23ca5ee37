"""A stand-in for a sandbox: a temporary folder and host processes. Fast, not isolated; for our own code only.

Its twin is the real pool of `tests/integration/envs`, which runs the same grading cases.
"""

import asyncio
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.wire import CommandResult, EditResult, TestReport

_PLUGIN = """
import json, os, pytest
_results, _canary = {}, []
_RANK = {"passed": 0, "skipped": 1, "xfailed": 1, "xpassed": 1, "failed": 2, "error": 3}

def pytest_runtest_logreport(report):
    if report.nodeid.endswith("::canary"):
        _canary.append(report.outcome == "failed") if report.when == "call" else None
        return
    outcome = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if outcome == "skipped" else "xpassed"
    elif report.when != "call" and outcome == "failed":
        outcome = "error"
    if report.when == "call" or outcome in ("error", "skipped", "xfailed"):
        if _RANK[outcome] >= _RANK.get(_results.get(report.nodeid), -1):
            _results[report.nodeid] = outcome

@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    def canary():
        raise AssertionError
    module = next((item.getparent(pytest.Module) for item in session.items), None)
    if module is not None:
        before = session.testsfailed
        item = pytest.Function.from_parent(module, name="canary", callobj=canary)
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        session.testsfailed = before
    data = {"results": _results, "canary": all(_canary) if _canary else None}
    open(os.environ["REPORT"], "w").write(json.dumps(data))
"""


class LocalSandbox:
    """Satisfies `Sandbox`. `/tmp/` in paths and commands is a folder of its own."""

    image = "local"

    def __init__(self, root: Path) -> None:
        self.id = root.name
        self._tree, self._tmp = root / "testbed", root / "tmp"
        self._tree.mkdir(parents=True)
        self._tmp.mkdir()
        (root / "agentrl_stand_in.py").write_text(_PLUGIN)
        self._root = root
        self.calls: list[str] = []

    @property
    def workdir(self) -> str:
        return str(self._tree)

    def _path(self, path: str) -> Path:
        if path.startswith("/tmp/") and not path.startswith(str(self._root)):
            return self._tmp / path.removeprefix("/tmp/")
        return self._tree / path

    async def run(
        self,
        command: str,
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        output_limit: int | None = None,
    ) -> CommandResult:
        self.calls.append("run")
        # the work tree's own path may begin with /tmp/ too
        own = command.replace(self.workdir, "$STAND_IN_TREE").replace("/tmp/", f"{self._tmp}/")
        process = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-c", own],
            cwd=cwd or self._tree,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self._tmp),
                "LANG": "C.UTF-8",
                "STAND_IN_TREE": self.workdir,
                **(env or {}),
            },
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
        return CommandResult(
            exit_code=process.returncode,
            output=process.stdout.decode(errors="replace"),
            output_bytes=len(process.stdout),
            timed_out=False,
            out_of_memory=False,
            duration_s=0.0,
        )

    async def edit(self, command: Any, *, path: str, timeout_s: float, **arguments: Any) -> EditResult:
        raise NotImplementedError("environments do not edit")

    async def run_tests(
        self,
        arguments: Sequence[str],
        *,
        timeout_s: float,
        canary: bool = False,
        test_timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> TestReport:
        self.calls.append("run_tests")
        report = self._root / "report.json"
        report.unlink(missing_ok=True)
        environment = {
            "PATH": os.environ["PATH"],
            **(env or {}),
            "PYTHONPATH": str(self._root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "REPORT": str(report),
        }
        command = [sys.executable, "-m", "pytest", "-p", "agentrl_stand_in", *arguments]
        try:
            process = await asyncio.to_thread(
                subprocess.run,
                command,
                cwd=self._tree,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return TestReport(
                exit_code=None,
                results={},
                collected=0,
                output="",
                timed_out=True,
                canary_failed=None,
                duration_s=timeout_s,
            )
        found = json.loads(report.read_text()) if report.exists() else {"results": {}, "canary": None}
        return TestReport(
            exit_code=process.returncode,
            results=found["results"],
            collected=len(found["results"]),
            output=process.stdout.decode(errors="replace"),
            timed_out=False,
            canary_failed=found["canary"] if canary else None,
            duration_s=0.0,
        )

    async def write_files(self, files: Mapping[str, bytes], *, timeout_s: float = 30.0) -> None:
        self.calls.append("write_files")
        for path, data in files.items():
            target = self._path(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

    async def read_file(self, path: str, *, limit_bytes: int = 1_000_000, timeout_s: float = 30.0) -> bytes | None:
        self.calls.append("read_file")
        target = self._path(path)
        return target.read_bytes()[:limit_bytes] if target.is_file() else None

    async def unpack(self, archive: bytes, *, timeout_s: float = 60.0) -> None:
        self.calls.append("unpack")
        shutil.rmtree(self._tree)
        self._tree.mkdir()
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(self._tree, filter="data")
