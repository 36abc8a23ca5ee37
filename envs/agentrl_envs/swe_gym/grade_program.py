"""Runs inside the grading sandbox before any test: applies a candidate patch, puts back in order what judges
it.

Standard library only, one file, Python 3.6 and later (an image may have no newer one): its text travels on stdin with
a payload and runs under `python3 -I` in the work tree, so that nothing the candidate wrote is imported or executed
here. Steps, in this order:

1. the candidate patch, by `git apply`, `--3way`, `--reject`, `patch --fuzz=5`, the tree reset between
attempts;
2. what could steer the test session (conftest.py, pytest.ini, sitecustomize.py, plugins' entry points, compiled files,
   modules that shadow the standard library or pytest, pytest sections of setup.cfg, tox.ini, pyproject.toml) goes back
   to the base commit's state where the candidate touched it;
3. the test files and folders go back to the base commit's state, then the test patch and given test files go
on
   top;
4. tests that must fail go to the end of test files: given ones, and copies of tests that are there.
"""
# ruff: noqa: UP006, UP022, UP031, UP035, UP045, SIM905 - the syntax of Python 3.6; a line of words

import ast
import os
import re
import shutil
import subprocess
import sys
from typing import Any, Dict, List, Optional, Tuple

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
        "pyvenv.cfg",
        ".gitattributes",  # decides how test files are written out
    }
)
SECTION_FILES = frozenset({"setup.cfg", "tox.ini", "pyproject.toml"})
_FRAMEWORK = frozenset(
    "pytest _pytest py pluggy iniconfig packaging tomli exceptiongroup attr attrs six more_itertools xdist "
    "pytest_asyncio hypothesis _hypothesis_pytestplugin importlib_metadata zipp pygments colorama".split()
)
_ROOTS = ("", "src", "lib")
_TWINS_PER_FILE = 2
_LEAST_ROOM = 1 << 20  # bytes
_GIT_ENV = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_AUTHOR_NAME": "base",
    "GIT_AUTHOR_EMAIL": "base@localhost",
    "GIT_COMMITTER_NAME": "base",
    "GIT_COMMITTER_EMAIL": "base@localhost",
    "LC_ALL": "C",
}


def is_configuration(path: str) -> bool:
    """True for a file that steers a test session by its presence alone."""
    folders = path.split("/")
    name = folders[-1]
    return (
        name in _CONFIG_FILES
        or name.endswith((".pth", ".pyc", ".pyo"))
        or "__pycache__" in folders
        or any(folder.endswith((".egg-info", ".dist-info")) for folder in folders)
    )


def pytest_settings(name: str, text: Optional[str]) -> object:
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
    sections = {}  # type: Dict[str, List[str]]
    current = []  # type: List[str]
    for line in text.splitlines():
        header = re.split("[#;]", line)[0].rstrip() if line.startswith("[") else ""
        if header.endswith("]"):  # as pytest's own reader finds sections
            current = sections.setdefault(header[1:-1], [])
        elif line.strip():
            current.append(line)
    return {key: value for key, value in sections.items() if key in ("pytest", "tool:pytest")} or None


def _git(*arguments: str, data: Optional[bytes] = None) -> "subprocess.CompletedProcess[bytes]":
    options = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "safe.directory=*"]
    return _run(["git", *options, *arguments], data, {**os.environ, **_GIT_ENV})


def _patch(patch: bytes, *, fuzz: int = 5) -> "subprocess.CompletedProcess[bytes]":
    """GNU patch. `--forward`, or `--batch` would apply a patch backwards where that fits better."""
    return _run(["patch", "--batch", "--forward", f"--fuzz={fuzz}", "-p1", "--no-backup-if-mismatch"], patch, None)


def _run(
    command: List[str], data: Optional[bytes], env: Optional[Dict[str, str]]
) -> "subprocess.CompletedProcess[bytes]":
    given = {"input": data} if data is not None else {"stdin": subprocess.DEVNULL}  # type: Dict[str, Any]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, check=False, **given)


def _must(result: "subprocess.CompletedProcess[bytes]") -> bytes:
    if result.returncode:
        said = result.stderr.decode(errors="replace")[-500:]
        raise RuntimeError("%s: %s" % (" ".join(map(str, result.args[7:10])), said))
    return result.stdout


def open_repository() -> str:
    """The base commit's id; a work tree without a repository becomes one with a single commit."""
    if not os.path.isdir(".git"):
        _must(_git("init", "-q", "--template="))
        _must(_git("add", "-A", "-f"))
        _must(_git("commit", "-q", "--allow-empty", "-m", "base"))
    return _must(_git("rev-parse", "HEAD")).decode().strip()


def _reset(base: str) -> None:
    _must(_git("reset", "-q", "--hard", base))
    _must(_git("clean", "-fdxq"))


def apply_candidate(base: str, patch: bytes) -> Tuple[Optional[str], List[str]]:
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
        said.append("%s: %s" % (name, (result.stderr + result.stdout).decode(errors="replace").strip()[-300:]))
        _reset(base)
    return None, said


def untracked_paths() -> "frozenset[str]":
    """Every file that git does not track, ignored ones too."""
    return _names(_git("ls-files", "-o", "-z"))


def changed_paths(base: str, before: "frozenset[str]") -> List[str]:
    """Every path that differs from the base commit; of untracked ones those that were not there `before`."""
    return sorted(_names(_git("diff", "--name-only", "-z", "--no-renames", base)) | (untracked_paths() - before))


def _names(result: "subprocess.CompletedProcess[bytes]") -> "frozenset[str]":
    return frozenset(os.fsdecode(name) for name in _must(result).split(b"\0") if name)


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


def neutralise(base: str, test_files: List[str], before: "frozenset[str]") -> List[str]:
    """Undo what the candidate changed of the test session's configuration; the paths undone."""
    undone = []
    roots = {*_ROOTS, *(_import_root(base, folder) for folder in {os.path.dirname(path) for path in test_files})}
    for path in changed_paths(base, before):
        name = path.rsplit("/", 1)[-1]
        if (
            is_configuration(path)
            or (name in SECTION_FILES and _settings_differ(base, path, name))
            or any(_shadows(base, root, path) for root in roots)
        ):
            restore(base, path)
            undone.append(path)
    return undone


def _shadows(base: str, root: str, path: str) -> bool:
    """Whether `path` makes a module, new there, that a test session would import in place of the standard library's or
    the test framework's."""
    inside = path[len(root) + 1 :] if root and path.startswith(root + "/") else path
    if root and inside == path:
        return False
    first = inside.split("/", 1)[0]
    module = first.split(".", 1)[0]
    if module not in _standard_modules() and module not in _FRAMEWORK:
        return False
    if first == inside and not first.endswith((".py", ".so")):
        return False
    there = [os.path.join(root, name) for name in (module, module + ".py")]
    return not any(_must(_git("ls-tree", "--name-only", "-z", base, "--", name)) for name in there)


def _import_root(base: str, folder: str) -> str:
    """The folder that pytest puts on the path for tests in `folder`: the first that is no package."""
    while folder and _must(_git("ls-tree", "--name-only", "-z", base, "--", folder + "/__init__.py")):
        folder = os.path.dirname(folder)
    return folder


def _standard_modules() -> "frozenset[str]":
    names = getattr(sys, "stdlib_module_names", None)  # since Python 3.10
    if names is None:
        listed = (name.split(".", 1)[0] for name in os.listdir(os.path.dirname(os.__file__)))
        names = {*sys.builtin_module_names, *listed}
    return frozenset(names)


def _settings_differ(base: str, path: str, name: str) -> bool:
    shown = _git("show", "%s:%s" % (base, path))
    before = shown.stdout.decode(errors="replace") if shown.returncode == 0 else None
    if os.path.islink(path):
        return True
    after = None
    if os.path.isfile(path):
        with open(path, encoding="utf-8", errors="replace") as file:
            after = file.read()
    return pytest_settings(name, before) != pytest_settings(name, after)


def put_tests(base: str, payload: Dict[str, Any]) -> str:
    """Restore test paths, apply the test patch and write the test files; what went wrong, or an empty text."""
    for path in payload["test_paths"]:
        restore(base, path)
    patch = payload["test_patch"].encode("utf-8", "surrogateescape")
    if patch.strip():
        result = _git("apply", "--whitespace=nowarn", "-", data=patch)
        # Without fuzz: tests put somewhere else than they belong would judge something else.
        if result.returncode and _patch(patch, fuzz=0).returncode:
            return result.stderr.decode(errors="replace")[-500:]
    for path, text in payload["test_files"].items():
        restore(base, path)
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return ""


def append_tests(appended: List[Dict[str, Any]]) -> List[str]:
    """Put tests at the end of Python files that are there; the ids of those put."""
    done = []
    for each in appended:
        path = each["path"]
        if os.path.islink(path) or not os.path.isfile(path):
            continue
        with open(path, "rb") as file:
            text = file.read()
        if not _takes_tests(text, each["parameters"]):
            continue
        with open(path, "ab") as file:
            file.write((b"" if text.endswith(b"\n") else b"\n") + each["text"].encode("ascii"))
        done.append(each["test"])
    return done


def append_twins(offered: List[Dict[str, Any]]) -> List[str]:
    """Put copies of tests, false at their end, at the end of their files; the ids of those put."""
    done = []
    for path in sorted({each["path"] for each in offered}):
        if os.path.islink(path) or not os.path.isfile(path):
            continue
        with open(path, "rb") as file:
            text = file.read()
        made = []  # type: List[str]
        for each in offered:
            copy = _twin(text, each) if each["path"] == path and len(made) < _TWINS_PER_FILE else None
            if copy is not None:
                text += (b"" if text.endswith(b"\n") else b"\n") + b"\n\n" + copy
                made.append("::".join(filter(None, (path, each["new_owner"], each["new_name"]))))
        if made:
            with open(path, "wb") as file:
                file.write(text)
        done += made
    return done


def _twin(text: bytes, twin: Dict[str, Any]) -> Optional[bytes]:
    """The copy's source; None where there is no such test, or it cannot be copied line by line."""
    try:
        found = ast.parse(text).body  # type: Any
    except (SyntaxError, ValueError):
        return None
    for name in filter(None, (twin["owner"], twin["name"])):
        node = next((each for each in reversed(found) if getattr(each, "name", None) == name), None)
        found = getattr(node, "body", [])
    decorators = getattr(node, "decorator_list", [])
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or not hasattr(node, "end_lineno"):
        return None  # Python 3.8 tells where a statement ends
    if found[0].lineno == node.lineno or any("given" in ast.dump(each) for each in decorators):
        return None  # hypothesis would look for the smallest failure, for long
    lines = text.split(b"\n")
    first = min([node.lineno, *(each.lineno for each in decorators)]) - 1
    indent = re.match(rb"\s*", lines[found[0].lineno - 1]).group()  # type: ignore[union-attr]
    name = (re.escape(twin["name"]).encode(), twin["new_name"].encode())
    head = re.sub(rb"\bdef\s+" + name[0] + rb"\b", b"def " + name[1], lines[node.lineno - 1], count=1)
    body = [*lines[first : node.lineno - 1], head, *lines[node.lineno : node.end_lineno]]
    copy = b"\n".join([*body, indent + twin["statement"].encode(), b""])
    if twin["owner"]:
        owners = (twin["new_owner"], twin["owner"])
        rest = "[setattr(%s, each, None) for each in dir(%s) if each.startswith('test')]\n" % owners
        copy = b"class %b(%b):\n" % tuple(each.encode() for each in owners) + copy + b"\n\n" + rest.encode()
    try:
        ast.parse(text + b"\n" + copy)
    except (SyntaxError, ValueError):
        return None
    return copy


def _takes_tests(text: bytes, parameters: bool) -> bool:
    """Whether a file is Python whose module gives no parameters to all its tests (`parameters`: that matters)."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    marks = [
        node
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and "'pytestmark'" in ast.dump(node)
    ]
    return not (parameters and any("parametrize" in ast.dump(node) for node in marks))


_REPORT = {
    "applied": None,
    "attempts": [],
    "undone": [],
    "test_error": "",
    "appended": [],
    "twins": [],
    "present": [],
}  # type: Dict[str, Any]


def main(payload: Dict[str, Any]) -> Dict[str, Any]:
    """All steps, in the current folder. What was done: applied (a way's name or None), attempts, undone
    (paths), test_error, appended and twins (ids), present (those of the test paths that are files)."""
    base = open_repository()
    before = untracked_paths()
    room = shutil.disk_usage(".").free
    try:
        return _grade_ready(base, before, payload)
    except (OSError, RuntimeError):
        if shutil.disk_usage(".").free >= min(room, _LEAST_ROOM):
            raise
        return {**_REPORT, "attempts": ["the patch fills the disk"]}


def _grade_ready(base: str, before: "frozenset[str]", payload: Dict[str, Any]) -> Dict[str, Any]:
    applied, attempts = apply_candidate(base, payload["patch"].encode("utf-8", "surrogateescape"))
    report = {**_REPORT, "applied": applied, "attempts": attempts}
    if applied is not None:
        _put_in_order(base, payload, before, report)
    return report


def _put_in_order(base: str, payload: Dict[str, Any], before: "frozenset[str]", report: Dict[str, Any]) -> None:
    files = payload.get("files", [])
    # names are any bytes, and the report is text
    undone = neutralise(base, files, before)
    report["undone"] = [os.fsencode(path).decode(errors="backslashreplace") for path in undone]
    report["test_error"] = put_tests(base, payload)
    report["twins"] = append_twins(payload.get("twins", []))
    report["appended"] = append_tests(payload.get("appended", []))
    report["present"] = [path for path in files if os.path.exists(path)]
