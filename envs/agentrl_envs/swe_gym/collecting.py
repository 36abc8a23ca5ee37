"""What an agent changed in a row's work tree, as a patch.

Its repository is not asked: index flags, settings, branches, commits, a repository that is gone and a full disk change
nothing. A repository of our own in /tmp takes the agent's files in and borrows the objects of the agent's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from agentrl.errors import CommandTimeoutError
from agentrl.wire import Sandbox
from agentrl_envs.swe_gym.archives import entering
from agentrl_envs.swe_gym.trees import Tree

GIT = (
    "export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1; git() { command git "
    "-c safe.directory=* -c core.fsmonitor=false -c core.hooksPath=/dev/null -c core.quotePath=true "
    '-c user.name=base -c user.email=base@localhost "$@"; }; '
)
_TIMEOUT_S = 120.0
_LIMIT_BYTES = 11 * 1024 * 1024  # the most that a sandbox's server reads at once
_HOME = "/tmp/.agentrl-collect"
_PATCH = f"{_HOME}/patch"
# What the agent made unreadable is readable, and a repository that it made in a folder is plain files (git would keep
# nothing but its commit's name, or fail).
_TIDY = (
    r"find . -path ./.git -prune "
    r"-o -type d ! -perm -u=rwx -exec chmod u+rwx {} \; -false "
    r"-o -type f ! -perm -u=r -exec chmod u+r {} \; -false "
    r"-o -name .git -prune \( -exec chmod -R u+rwX {} \; -o -true \) -exec rm -rf {} + || true; "
)
_CLEAN_HOME = f"chmod u+rwx /tmp/. 2>/dev/null; chmod -R u+rwX {_HOME} 2>/dev/null; rm -rf {_HOME}; "
_SETTINGS = r"printf '[core]\n\trepositoryformatversion = 0\n\tbare = false\n' "
_OPEN = (
    f"set -e; base=$(git --git-dir=.git rev-parse --verify -q '{{base}}^{{{{commit}}}}'); "
    f"mkdir -p {_HOME}/objects/info {_HOME}/refs; "
    f"{_SETTINGS} > {_HOME}/config; echo 'ref: refs/heads/main' > {_HOME}/HEAD; "
    f'echo "$PWD/.git/objects" > {_HOME}/objects/info/alternates; '
)
_OPEN_OURS = f"set -e; base={{base}}; mkdir -p {_HOME}; tar -x -f - -C {_HOME}; rm -f {_HOME}/index; "
_TAKE_IN = (
    f"mkdir -p {_HOME}/info; if [ -f .git/info/exclude ]; then cat .git/info/exclude > {_HOME}/info/exclude; fi; "
    f"echo '* binary' > {_HOME}/attributes; index() {{{{ {{index}}; }}}}; "
    f'export GIT_DIR={_HOME} GIT_WORK_TREE="$PWD"; index || git read-tree "$base"; git add {{new}}; '
)
# The agent's index saves reading each file again, and knows those that git would write otherwise than they are. Its
# date tells which files may have changed unseen after it.
_THEIR_INDEX = (
    f"[ -f .git/index ] && cp -p .git/index {_HOME}/index && git ls-files -z > {_HOME}/names "
    f"&& git update-index -z --no-assume-unchanged --stdin < {_HOME}/names "
    f"&& git update-index -z --no-skip-worktree --stdin < {_HOME}/names "
    f"|| {{ rm -f {_HOME}/index {_HOME}/index.lock; false; }}"
)
_ALL_NEW = "-A"
# New files of up to 1 MB, and none of installed packages.
_SMALL_NEW = (
    f"-u; git ls-files -o -z --exclude-standard -x node_modules/ -x site-packages/ > {_HOME}/names; "
    f"xargs -0 -r -a {_HOME}/names sh -c 'find \"$@\" -maxdepth 0 ! -type d -size -2049 -print0' _ > {_HOME}/small; "
    f"git --literal-pathspecs add --pathspec-from-file={_HOME}/small --pathspec-file-nul"
)
_DIFF = (
    "git {attributes}diff --cached --binary --full-index --no-color --no-ext-diff --no-textconv --no-renames "
    f'--src-prefix=a/ --dst-prefix=b/ "$base" -- > {_PATCH}'
)
_ALL_BINARY = f"-c core.attributesFile={_HOME}/attributes "
_MAKE_ROOM = "find /tmp/ -mindepth 1 -exec chmod u+rwx {} \\; -delete 2>/dev/null; "


async def collect_patch(sandbox: Sandbox, *, base: str, tree: Callable[[], Awaitable[Tree | None]]) -> str:
    """`git diff --binary` of the work tree against the commit `base` (a name in the agent's repository), new files
    included, ignored ones not.

    Where that gives no patch (the disk is full, the repository broken), `/tmp` is emptied and the repository comes from
    `tree`, if there is one. Where the patch is too large to be read, new files of over 1 MB and installed packages are
    left out. What still gives no patch is an empty one: the agent made it so. Bytes that are no UTF-8 are surrogate
    escapes. Raises `CommandTimeoutError` where git does not end.
    """
    collector = _Collector(sandbox, base)
    patch = await collector.attempt()
    if patch is None:
        await collector.make_room(await tree())
        patch = await collector.attempt()
    if patch is None or len(patch) >= _LIMIT_BYTES:
        patch = await collector.attempt(new=_SMALL_NEW)
    if patch is None or len(patch) >= _LIMIT_BYTES:
        return ""
    try:
        return patch.decode()
    except UnicodeDecodeError:
        # text in another encoding: as binary hunks the same change is plain ASCII, but for a link's target
        patch = await collector.attempt(new=collector.new, attributes=_ALL_BINARY) or b""
        return patch.decode("utf-8", "surrogateescape") if len(patch) < _LIMIT_BYTES else ""


class _Collector:
    """Attempts in one sandbox. `new`: how the last one took in new files."""

    def __init__(self, sandbox: Sandbox, base: str) -> None:
        self._sandbox = sandbox
        self._base = base
        self._repository: bytes | None = None
        self._index = _THEIR_INDEX
        self.new = _ALL_NEW

    async def make_room(self, tree: Tree | None) -> None:
        """For the attempts to come: nothing of the agent's in /tmp, its index not used, nor its objects where the
        host has the tree."""
        await self._run(f"chmod u+rwx /tmp/.; {_MAKE_ROOM}")
        self._repository = None if tree is None else tree.repository()
        self._index = "false"

    async def attempt(self, *, new: str = _ALL_NEW, attributes: str = "") -> bytes | None:
        """The patch, up to the limit; None where git makes none."""
        self.new = new
        opening = (_OPEN if self._repository is None else _OPEN_OURS).format(base=self._base)
        taking = _TAKE_IN.format(index=self._index, new=new)
        command = GIT + _CLEAN_HOME + _TIDY + opening + taking + _DIFF.format(attributes=attributes)
        if not await self._run(entering(self._sandbox.workdir) + command, self._repository or b""):
            return None
        return await self._sandbox.read_file(_PATCH, limit_bytes=_LIMIT_BYTES)

    async def _run(self, command: str, stdin: bytes = b"") -> bool:
        result = await self._sandbox.run(command, timeout_s=_TIMEOUT_S, cwd="/", stdin=stdin)
        if result.timed_out:
            raise CommandTimeoutError(
                f"git diff did not end within {_TIMEOUT_S:.0f} s", where=f"sandbox {self._sandbox.id}"
            )
        return result.exit_code == 0
