"""Runs inside the grading sandbox before any test: applies a candidate patch, puts back in order what judges
it.

Standard library only, one file: its text travels on stdin with a payload and runs under `python3 -I` in the
work tree, so that nothing the candidate wrote is imported or executed here. Steps, in this order:

1. the candidate patch, by `git apply`, `--3way`, `--reject`, `patch --fuzz=5`, the tree reset between
attempts;
2. what could steer the test session (conftest.py, pytest.ini, sitecustomize.py, plugins' entry points, pytest
   sections of setup.cfg, tox.ini, pyproject.toml) goes back to the base commit's state where the candidate
   touched it;
3. the test files and folders go back to the base commit's state, then the test patch and given test files go
on
   top.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess

try:
    import tomllib
except ImportError:  # before Python 3.11
    tomllib = None  # type: ignore[assignment]

_CONFIG_FILES = frozenset(
    {
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "sitecustomize.py",
        "usercustomize.py",
    }
)
SECTION_FILES = frozenset({"setup.cfg", "tox.ini", "pyproject.toml"})
_GIT_ENV = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "base",
    "GIT_AUTHOR_EMAIL": "base@localhost",
    "GIT_COMMITTER_NAME": "base",
    "GIT_COMMITTER_EMAIL": "base@localhost",
    "LC_ALL": "C",
}


def is_configuration(path: str) -> bool:
    """True for a file that steers a test session by its presence alone."""
    *folders, name = path.split("/")
    return (
        name in _CONFIG_FILES
        or name.endswith(".pth")
        or any(folder.endswith((".egg-info", ".dist-info")) for folder in [*folders, name])
    )


def pytest_settings(name: str, text: str | None) -> object:
    """What pytest reads from a file that others read too; equal values mean an equal session. None: no
    settings."""
    if text is None:
        return None
    if name == "pyproject.toml":
        if tomllib is None:
            return text
        try:
            tool = tomllib.loads(text).get("tool", {})
        except tomllib.TOMLDecodeError:
            return text
        return tool.get("pytest") if isinstance(tool, dict) else tool
    sections: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        header = re.split("[#;]", line)[0].rstrip() if line.startswith("[") else ""
        if header.endswith("]"):  # as pytest's own reader finds sections
            current = sections.setdefault(header[1:-1], [])
        elif line.strip():
            current.append(line)
    return {key: value for key, value in sections.items() if key in ("pytest", "tool:pytest")} or None


def _git(*arguments: str, data: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", *arguments]
    return subprocess.run(command, input=data, capture_output=True, env={**os.environ, **_GIT_ENV}, check=False)


def _patch(patch: bytes) -> subprocess.CompletedProcess[bytes]:
    """GNU patch. `--forward`, or `--batch` would apply a patch backwards where that fits better."""
    command = ["patch", "--batch", "--forward", "--fuzz=5", "-p1", "--no-backup-if-mismatch"]
    return subprocess.run(command, input=patch, capture_output=True, check=False)


def _must(result: subprocess.CompletedProcess[bytes]) -> bytes:
    if result.returncode:
        raise RuntimeError(f"{' '.join(map(str, result.args[5:8]))}: {result.stderr.decode(errors='replace')[-500:]}")
    return result.stdout


def open_repository() -> str:
    """The base commit's id; a work tree without a repository becomes one with a single commit."""
    if not os.path.isdir(".git"):
        _must(_git("init", "-q", "--template=", "-b", "main"))
        _must(_git("add", "-A", "-f"))
        _must(_git("commit", "-q", "--allow-empty", "-m", "base"))
    return _must(_git("rev-parse", "HEAD")).decode().strip()


def _reset(base: str) -> None:
    _must(_git("reset", "-q", "--hard", base))
    _must(_git("clean", "-fdxq"))


def apply_candidate(base: str, patch: bytes) -> tuple[str | None, list[str]]:
    """(how the patch went on, what each failed attempt said); None where no way worked."""
    if not patch.strip():
        return "unchanged", []
    said = []
    for name in ("apply", "--3way", "--reject", "patch"):
        if name == "patch":
            # GNU patch, unlike git, would write into the repository's own folder
            if re.search(rb"(?mi)^(?:diff --git|---|\+\+\+|(?:rename|copy) (?:from|to)) .*\.git(?:[/\"\s]|$)", patch):
                said.append("patch: refused, the patch names the repository's own folder")
                break
            result = _patch(patch)
        else:
            options = [] if name == "apply" else [name]
            result = _git("apply", "--whitespace=nowarn", *options, "-", data=patch)
        if result.returncode == 0:
            _must(_git("reset", "-q", base))
            return name, said
        said.append(f"{name}: {(result.stderr + result.stdout).decode(errors='replace').strip()[-300:]}")
        _reset(base)
    return None, said


def changed_paths(base: str) -> list[str]:
    """Every path that differs from the base commit, ignored files too."""
    tracked = _must(_git("diff", "--name-only", "-z", "--no-renames", base))
    added = _must(_git("ls-files", "-o", "-z"))
    return sorted({os.fsdecode(name) for name in (tracked + added).split(b"\0") if name})


def restore(base: str, path: str) -> None:
    """`path` (a file or a folder) as the base commit has it: put back, or gone."""
    parts = path.split("/")
    for depth in range(1, len(parts)):
        parent = "/".join(parts[:depth])
        if os.path.islink(parent) or os.path.isfile(parent):  # the candidate put a link or a file in the way
            restore(base, parent)
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)
    if _must(_git("ls-tree", "--name-only", "-z", base, "--", path)):
        _must(_git("--literal-pathspecs", "checkout", "-q", base, "--", path))


def neutralise(base: str) -> list[str]:
    """Undo what the candidate changed of the test session's configuration; the paths undone."""
    undone = []
    for path in changed_paths(base):
        name = path.rsplit("/", 1)[-1]
        if is_configuration(path) or (name in SECTION_FILES and _settings_differ(base, path, name)):
            restore(base, path)
            undone.append(path)
    return undone


def _settings_differ(base: str, path: str, name: str) -> bool:
    shown = _git("show", f"{base}:{path}")
    before = shown.stdout.decode(errors="replace") if shown.returncode == 0 else None
    if os.path.islink(path):
        return True
    after = None
    if os.path.isfile(path):
        with open(path, encoding="utf-8", errors="replace") as file:
            after = file.read()
    return pytest_settings(name, before) != pytest_settings(name, after)


def put_tests(base: str, payload: dict) -> str:
    """Restore test paths, apply the test patch and write the test files; what went wrong, or an empty text."""
    for path in payload["test_paths"]:
        restore(base, path)
    patch = payload["test_patch"].encode("utf-8", "surrogateescape")
    if patch.strip():
        result = _git("apply", "--whitespace=nowarn", "-", data=patch)
        if result.returncode and _patch(patch).returncode:
            return result.stderr.decode(errors="replace")[-500:]
    for path, text in payload["test_files"].items():
        restore(base, path)
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return ""


def main(payload: dict) -> dict:
    """All steps, in the current folder. What was done: applied (a way's name or None), attempts, undone
    (paths), test_error."""
    base = open_repository()
    applied, attempts = apply_candidate(base, payload["patch"].encode("utf-8", "surrogateescape"))
    report: dict = {"applied": applied, "attempts": attempts, "undone": [], "test_error": ""}
    if applied is not None:
        # names are any bytes, and the report is text
        report["undone"] = [os.fsencode(path).decode(errors="backslashreplace") for path in neutralise(base)]
        report["test_error"] = put_tests(base, payload)
    return report
