"""Generated tasks without a sandbox: their tests run in this process, their expert against tools in memory."""

import contextlib
import re
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from agentrl.wire import Task, ToolCall

_IMPORT = re.compile(r"^from (\w+) import (.*)$", flags=re.MULTILINE)


def sources(task: Task) -> dict[str, str]:
    """What the content hash is of: all files but tests and pytest's settings."""
    return {
        path: text for path, text in task.data["files"].items() if not path.startswith("test_") and path != "pytest.ini"
    }


def execute(files: Mapping[str, str], test: str) -> list[str]:
    """Names of the tests of file text `test` that do not pass in the repository `files`: all, where it cannot be
    loaded. For our own templates alone."""
    with contextlib.ExitStack() as stack:
        if any(not path.endswith((".py", "pytest.ini")) for path in files):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for path, text in files.items():
                (folder / path).write_text(text)
            stack.enter_context(contextlib.chdir(folder))
        names = re.findall(r"^def (test_\w+)", test, flags=re.MULTILINE)
        namespace: dict[str, Any] = {}
        try:
            exec(_with_modules(files, test, namespace), namespace)  # noqa: S102
        except Exception:  # a module, or the file it reads, cannot be loaded
            return names
        return [name for name in names if not _passes(namespace[name])]


def _with_modules(files: Mapping[str, str], test: str, namespace: dict[str, Any]) -> str:
    """The test's text from its imports on (past the limit of CPU time), with the repository's modules loaded."""

    def loaded(found: re.Match[str]) -> str:
        path = f"{found[1]}.py"
        if path not in files:
            return found[0]
        module: dict[str, Any] = {}
        exec(files[path], module)  # noqa: S102
        namespace.update({name: module[name] for name in found[2].split(", ")})
        return ""

    start = re.search(r"^(from|import) (?!signal)", test, flags=re.MULTILINE)
    assert start is not None
    return _IMPORT.sub(loaded, test[start.start() :])


def _passes(test: Any) -> bool:
    try:
        test()
    except Exception:  # an assertion, or whatever a broken function raises
        return False
    return True


def drive(turns: Generator[ToolCall, str, None], task: Task) -> tuple[list[ToolCall], dict[str, str]]:
    """Play an expert against in-memory tools; its calls and the files it leaves."""
    files, calls = dict(task.data["files"]), []
    call = next(turns)
    while True:
        calls.append(call)
        if call.name == "submit":
            assert next(turns, None) is None
            return calls, files
        observation = ""
        if call.name == "view":
            observation = files[call.arguments["path"]]
        elif call.name == "str_replace":
            old, new = call.arguments["old_str"], call.arguments["new_str"]
            path = call.arguments["path"]
            assert files[path].count(old) == 1, "the expert's old_str must name one place"
            files[path] = files[path].replace(old, new)
            observation = "Edited."
        elif "pytest" in call.arguments["command"]:
            visible = next(text for name, text in files.items() if name.startswith("test_"))
            observation = "= FAILURES =" if execute(files, visible) else "."
        call = turns.send(observation)
