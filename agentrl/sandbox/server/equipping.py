"""`fill-seed FOLDER --limit-bytes N --environment JSON`, in a container of a foreign image as root without network:
its work tree with a history of one commit, and the environment of its commands.

The tree is the image's, every file as it is (compiled and ignored ones too), but: owned by user 1000; no device,
pipe or socket; in place of every `.git` one repository of ours with one commit on `main`, which holds what the
image's repository tracks and whatever else is not ignored. So neither later commits, nor branches, stashes, remotes
and what a submodule knows can be reached from it. The nearest tag before the image's commit is kept, on that one
commit: packages read their version from it.

Prints one line of JSON: `{"ok": true, "bytes": …, "files": …}`, or `{"ok": false, "what": …}`. Invariant: where
`complete.json` is, the seed is whole; a folder that a killed run left half-filled is emptied and filled again.
"""

import json
import os
import pwd
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .seed import COMPLETE, TREE
from .settings import ENVIRONMENT_FILE

USER = 1000
_WORK = "/testbed"
_PAGE = 4096
_GIT_TIMEOUT_S = 600.0
_ACTIVATION_TIMEOUT_S = 120.0
_CONDA = "/opt/miniconda3/bin/activate"
_ACTIVATE = f"source {_CONDA} && {{ [ ! -d /opt/miniconda3/envs/testbed ] || conda activate testbed; }}"
_NEEDED = ("/bin/bash", "git", "cp", "rm", "chmod", "env")

_CHANGED = re.compile(
    r"PATH|CONDA_[A-Z_0-9]+|LD_LIBRARY_PATH|LIBRARY_PATH|CPATH|MANPATH|PKG_CONFIG_PATH|JAVA_HOME|JAVA_LD_LIBRARY_PATH"
    r"|GDAL_DATA|PROJ_LIB|PROJ_DATA|XML_CATALOG_FILES|SSL_CERT_FILE|SSL_CERT_DIR"
)
"""What an activation may set."""
_NOT_THE_IMAGES = re.compile(
    r"HOME|USER|LOGNAME|PWD|OLDPWD|SHLVL|SHELL|TERM|HOSTNAME|_|BASH_ENV|ENV|PROMPT_COMMAND|LD_PRELOAD|LD_AUDIT"
    r"|AGENTRL_.*|.*_PROXY|(.*_)?(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY)(_.*)?",
    re.IGNORECASE,
)
"""What of the image's own settings commands do not get: ours to set, start-up files of root, and secrets."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SeedError(Exception):
    """What makes the image no sandbox, in words for its user."""


class Size(NamedTuple):
    """Of a tree as a file system in memory holds it."""

    bytes: int
    files: int


def main(arguments: list[str]) -> None:
    """Fill the folder unless it is complete."""
    folder, *options = arguments
    given = dict(zip(options[::2], options[1::2], strict=True))
    try:
        said = _complete(folder) or _fill(folder, int(given["--limit-bytes"]), json.loads(given["--environment"]))
    except (SeedError, OSError, subprocess.SubprocessError) as error:
        said = {"ok": False, "what": str(error)}
    print("\n" + json.dumps(said))


def _complete(folder: str) -> dict[str, object] | None:
    try:
        with open(os.path.join(folder, COMPLETE), encoding="ascii") as file:
            return dict(json.load(file))
    except FileNotFoundError:
        return None


def _fill(folder: str, limit_bytes: int, own: Mapping[str, str]) -> dict[str, object]:
    for name in _NEEDED:
        if shutil.which(name) is None:
            raise SeedError(f"it has no {name}: a sandbox needs bash at /bin/bash, git and coreutils")
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    tree = os.path.join(folder, TREE)
    size = Size(0, 0)
    if os.path.isdir(_WORK):
        size = measure(_WORK)
        if size.bytes <= limit_bytes:
            size = make_tree(_WORK, tree)
    else:
        os.mkdir(tree)
    said: dict[str, object] = {"ok": True, "bytes": size.bytes, "files": size.files}
    if size.bytes > limit_bytes:
        return said  # the caller, who set the limit, refuses it; another may allow more
    _write_json(os.path.join(folder, ENVIRONMENT_FILE), environment(own))
    os.sync()
    _write_json(os.path.join(folder, COMPLETE), said)
    return said


def _write_json(path: str, value: object) -> None:
    with open(f"{path}.new", "w", encoding="ascii") as file:
        json.dump(value, file)
    os.rename(f"{path}.new", path)


# --- the tree -----------------------------------------------------------------------------------------------


def measure(root: str, *, skip: Sequence[str] = (".git",)) -> Size:
    """Of the regular files below `root`, in whole pages, a file of several names once; without `skip`."""
    total, files = 0, 0
    seen: set[tuple[int, int]] = set()
    for entry in _walk(root, skip):
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            total += -(-status.st_size // _PAGE) * _PAGE
            files += 1
    return Size(total, files)


def _walk(root: str, skip: Sequence[str]) -> Iterator[os.DirEntry[str]]:
    with os.scandir(root) as entries:
        found = [entry for entry in entries if entry.name not in skip]
    for entry in found:
        yield entry
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, skip)


def make_tree(work: str, tree: str) -> Size:
    """Copy `work` to `tree` with the repository replaced; its size afterwards."""
    tracked, tag = _looked_up(work)
    _copy(work, tree)
    _commit(tree, tracked, tag)
    _give_away(tree)
    return measure(tree, skip=())


def _copy(work: str, tree: str) -> None:
    """Files, folders and links as they are, a file of several names as one; no repository, device, pipe or socket."""
    copied: dict[tuple[int, int], str] = {}
    folders = [(work, tree)]
    os.mkdir(tree)
    for entry in _walk(work, (".git",)):
        target = tree + entry.path[len(work) :]
        status = entry.stat(follow_symlinks=False)
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFDIR:
            os.mkdir(target)
            folders.append((entry.path, target))
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(entry.path), target)
            shutil.copystat(entry.path, target, follow_symlinks=False)
        elif kind == stat.S_IFREG:
            key = (status.st_dev, status.st_ino)
            if key in copied:
                os.link(copied[key], target)
            else:
                shutil.copy2(entry.path, target)
                copied[key] = target
    for source, target in reversed(folders):
        shutil.copystat(source, target)


def _give_away(tree: str) -> None:
    """To the sandbox's user, who can read and write all of it; times stay."""
    for entry in [tree, *(each.path for each in _walk(tree, ()))]:
        kind = os.lstat(entry).st_mode
        if not stat.S_ISLNK(kind):
            os.chmod(entry, stat.S_IMODE(kind) & 0o777 | (0o700 if stat.S_ISDIR(kind) else 0o600))
        os.lchown(entry, USER, USER)


# --- its repository -----------------------------------------------------------------------------------------


def _git(tree: str, *arguments: str, stdin: bytes = b"", check: bool = True) -> bytes:
    """One git command in `tree` with no configuration but the repository's own, and none of its programs."""
    command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "gc.auto=0", *arguments]
    env = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": _git_home(),
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
        "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
        "GIT_TERMINAL_PROMPT": "0",
    }
    done = subprocess.run(command, cwd=tree, input=stdin, capture_output=True, env=env, timeout=_GIT_TIMEOUT_S)
    if check and done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip()[-500:]
        raise SeedError(f"git {arguments[0]} failed in its {_WORK}: {said}")
    return done.stdout if done.returncode == 0 else b""


def _git_home() -> str:
    """A home whose configuration lets root work in a repository of someone else's; old versions of git take that
    from nowhere else."""
    home = "/tmp/.agentrl-git"
    os.makedirs(home, exist_ok=True)
    with open(os.path.join(home, ".gitconfig"), "w", encoding="ascii") as file:
        file.write("[safe]\n\tdirectory = *\n")
    return home


def _looked_up(work: str) -> tuple[list[bytes], str | None]:
    """What the image's repository tracks (paths), and the nearest tag before its commit."""
    if not os.path.lexists(os.path.join(work, ".git")):
        return [], None
    tracked = [path for path in _git(work, "ls-files", "-z", check=False).split(b"\0") if path]
    tag = _git(work, "describe", "--tags", "--abbrev=0", "HEAD", check=False).decode("utf-8", "replace").strip()
    return tracked, tag or None


def _commit(tree: str, tracked: Sequence[bytes], tag: str | None) -> None:
    _git(tree, "-c", "init.defaultBranch=main", "init", "--quiet", "--template=")
    _git(tree, "symbolic-ref", "HEAD", "refs/heads/main")  # where git is too old for init.defaultBranch
    for name, value in (("user.name", "agent"), ("user.email", "agent@localhost")):
        _git(tree, "config", name, value)
    _git(tree, "add", "--all", ".")
    # What the image tracks although its .gitignore names it. Folders are submodules; the files in them are added.
    ignored = set(_git(tree, "ls-files", "-z", "--others", "--ignored", "--exclude-standard").split(b"\0"))
    missing = [path for path in tracked if path in ignored]
    if missing:
        _git(tree, "update-index", "--add", "-z", "--stdin", stdin=b"\0".join(missing) + b"\0")
    _git(tree, "commit", "--quiet", "--allow-empty", "--no-verify", "--message=base")
    if tag is not None:
        _git(tree, "tag", "--", tag, check=False)
    _git(tree, "repack", "-a", "-d", "--quiet")
    shutil.rmtree(os.path.join(tree, ".git", "logs"), ignore_errors=True)


# --- the environment ----------------------------------------------------------------------------------------


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """What commands of the image find in their environment beside what every sandbox has: the image's own settings
    (`own`) and what the activation of its Python changes, each as far as it is no secret."""
    kept = {name: value for name, value in own.items() if _NAME.fullmatch(name) and not _NOT_THE_IMAGES.fullmatch(name)}
    before, after = _environment_of(":", own), _environment_of(_activation(own), own)
    changed = {name: value for name, value in after.items() if before.get(name) != value and _CHANGED.fullmatch(name)}
    found = {**kept, **changed}
    try:
        pwd.getpwuid(USER)
    except KeyError:
        found["USER"] = found["LOGNAME"] = "agent"  # what programs ask before they look the number up
    return found


def _activation(own: Mapping[str, str]) -> str:
    if os.path.isfile(_CONDA):
        return _ACTIVATE
    start = own.get("BASH_ENV", "")
    return f"{{ source {start}; true; }}" if re.fullmatch(r"/[A-Za-z0-9_./-]+", start) else ":"


def _environment_of(command: str, own: Mapping[str, str]) -> dict[str, str]:
    """The environment after `command` in a bash that has the image's own settings."""
    base = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **own, "HOME": "/tmp"}
    base.pop("BASH_ENV", None)
    # The shell keeps it to itself until the end, so what the command prints stays out of it.
    script = f"exec 3>&1 >&2; {command} || exit 1; exec env -0 >&3"
    done = subprocess.run(
        ["/bin/bash", "-c", script], env=base, cwd="/", stdin=subprocess.DEVNULL, capture_output=True,
        timeout=_ACTIVATION_TIMEOUT_S,
    )  # fmt: skip
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip()[-300:]
        raise SeedError(f"its environment cannot be activated (`{command}`): {said}")
    pairs = (each.partition("=") for each in done.stdout.decode("utf-8", "surrogateescape").split("\0") if each)
    return {name: value for name, _, value in pairs if _NAME.fullmatch(name)}
