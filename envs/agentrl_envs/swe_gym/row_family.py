"""Real rows as an environment's family: trees from bundles or from the image, patches by git, grading by
named tests."""

from __future__ import annotations

import asyncio
import difflib
from pathlib import Path

import msgspec

from agentrl.errors import CommandTimeoutError, ConfigError, DatasetError, SetupFailedError
from agentrl.sandbox.images import recipe_names
from agentrl.trajectory import Split
from agentrl.wire import ChatMessage, Grade, Sandbox, Task
from agentrl_envs.swe_gym.collecting import GIT, collect_patch
from agentrl_envs.swe_gym.grading import TestLimits, grade_row
from agentrl_envs.swe_gym.images import image_of
from agentrl_envs.swe_gym.options import SweGymOptions
from agentrl_envs.swe_gym.prompts import row_prompt, short_prompt
from agentrl_envs.swe_gym.rows import Row, TreeRef, load_rows
from agentrl_envs.swe_gym.splits import epoch_order, split_by_file, split_rows
from agentrl_envs.swe_gym.trees import Tree, TreeStore

_TOOLS = ("bash", "view", "create", "str_replace", "insert", "undo_edit", "submit")
_WORKDIR = "/testbed"
_SETUP_TIMEOUT_S = 120.0
_DURATION_FACTOR, _MIN_TEST_TIMEOUT_S = 5.0, 60.0
_BASE_REF = "refs/agentrl/base"  # a commit of the agent's on `main` does not move it

# Everything but caches becomes the single commit, so that a reset brings all of it back.
_CUT = (
    "find . -name .git -prune -exec rm -rf {} +; "
    '[ -n "$(ls -A)" ] || { echo "the work tree is empty"; exit 1; }; '
    "git init -q --template=; git symbolic-ref HEAD refs/heads/main; "
    "git add -A -f -- . ':!*.pyc' ':!**/__pycache__/**'; git commit -q --allow-empty -m base; "
)
_IS_CUT = '[ "$(git rev-list --all --count 2>/dev/null)" = 1 ] && [ -z "$(git remote)" ] && [ ! -e .git/shallow ]'
# The repository of an image, whose history is cut already where the sandbox's server brought it.
_PREPARE_IMAGE = f"{GIT}set -e; if ! {{ {_IS_CUT}; }}; then {_CUT} fi; git update-ref {_BASE_REF} HEAD"
# A patch on stdin first: the tree that has the bug is the base.
_PREPARE_BUG = f"{GIT}set -e; git apply --whitespace=nowarn -; {_CUT} git update-ref {_BASE_REF} HEAD"
# The tree as it was prepared, out of a repository that code under test could have changed: its objects are named by
# their content, and the rest is written anew.
_RENEW_IMAGE = GIT + (
    "set -e; rm -rf .git/hooks .git/info .git/refs/replace .git/index.lock; "
    r"printf '[core]\n\trepositoryformatversion = 0\n\tbare = false\n' > .git/config; "
    "echo 'ref: refs/heads/main' > .git/HEAD; git update-ref refs/heads/main {base}; "
    "git reset -q --hard {base}; git clean -fdxq"
)


class RowFamily:
    """Rows of one data set in three splits."""

    expert = None
    grade_unsubmitted = True

    def __init__(self, *, environment: str, options: SweGymOptions) -> None:
        self.recipes = recipe_names()
        self._environment = environment
        self._options = options
        every = load_rows(options.dataset, hub_split=options.hub_split)
        rows = _chosen(every, options)
        self._stores: dict[Path, TreeStore] = {}
        if options.split_file is not None:
            self._splits = split_by_file(rows, options.split_file.expanduser())
        else:
            self._splits = split_rows(rows, fresh_fraction=options.fresh_fraction, unseen_repos=options.unseen_repos)
        self._every = {row.instance_id: row for row in every}
        self._split_of = {row.instance_id: split for split, group in self._splits.items() for row in group}

    def find(self, task_id: str) -> Task:
        """The row of that id, whatever its kind. Raises `DatasetError` that names close ids."""
        row = self._every.get(task_id)
        if row is None:
            close = difflib.get_close_matches(task_id, self._every, n=5, cutoff=0.5)
            close += [name for name in self._every if task_id and task_id in name and name not in close][:5]
            raise DatasetError(
                f"there is no task {task_id!r}",
                where=f"{self._options.dataset}, {len(self._every)} rows",
                remedy=f"did you mean {' or '.join(close[:5])}?" if close else "give the instance_id of a row",
            )
        return self._catalogued(row)

    def every(self) -> list[Task]:
        """Every row in the data's order, of whatever split and kind."""
        return [self._catalogued(row) for row in self._every.values()]

    def _catalogued(self, row: Row) -> Task:
        """A row that no split holds (its kind is not wanted, a split file leaves it out) counts as unseen."""
        return self._task(row, self._split_of.get(row.instance_id, Split.UNSEEN))

    def tasks(self, split: Split, *, start: int, count: int, seed: int) -> list[Task]:
        """Train is endless, shuffled anew in each pass by `seed`; fresh and unseen are lists in the data's
        order."""
        if not any(self._splits.values()):  # said here: single rows of other kinds can be found and verified
            raise DatasetError(
                f"no row is of the wanted kinds {list(self._options.kinds)}",
                where=self._options.dataset,
                remedy="set environment.kinds",
            )
        rows = self._splits[split]
        if split is not Split.TRAIN:
            return [self._task(row, split) for row in rows[start : start + count]]
        if not rows:
            raise DatasetError(
                "no row is left to train on",
                where=self._options.dataset,
                remedy="lower environment.fresh_fraction, or name fewer unseen_repos",
            )
        return [self._task(row, split) for row in epoch_order(rows, seed=seed, start=start, count=count)]

    def _task(self, row: Row, split: Split) -> Task:
        return Task(id=row.instance_id, environment=self._environment, split=split, data=msgspec.to_builtins(row))

    def tool_names(self, task: Task) -> tuple[str, ...]:
        return _TOOLS

    def prompt(self, task: Task) -> list[ChatMessage]:
        row = _row(task)
        if self._options.prompt == "short":
            return short_prompt(row.problem_statement.strip())
        return row_prompt(repo=row.repo, workdir=_WORKDIR, problem_statement=row.problem_statement)

    def image(self, task: Task) -> str:
        row = _row(task)
        bundled = self._tree_ref(row) is not None
        return image_of(row, configured=self._options.image, has_bundle=bundled, recipes=self.recipes)

    def _folder(self, row: Row) -> Path | None:
        """Where a row's bundle lies: the folder of the options, else that of the row's file."""
        if self._options.bundles is not None:
            return self._options.bundles.expanduser()
        return None if row.folder is None else Path(row.folder)

    def _tree_ref(self, row: Row) -> TreeRef | None:
        """The row's tree in a bundle: the one it names, or its instance id in its repository's bundle."""
        if row.tree is not None:
            return row.tree
        name = f"{row.repo.replace('/', '__')}.bundle"
        folder = self._folder(row)
        if folder is not None and (folder / name).is_file():
            return TreeRef(bundle=name, ref=row.instance_id)
        return None

    async def _tree(self, row: Row) -> Tree | None:
        """The row's tree out of its bundle; None for a row without one, whose tree is its image's."""
        ref, folder = self._tree_ref(row), self._folder(row)
        if ref is None:
            return None
        if folder is None:
            raise ConfigError(
                "environment.bundles is not set, and the rows' trees lie in bundles",
                where=f"row {row.instance_id}",
                remedy="set environment.bundles to the folder of the bundles",
            )
        store = self._stores.setdefault(folder, TreeStore(folder))
        return await asyncio.to_thread(store.get, ref, where=f"row {row.instance_id}")

    async def prepare(self, task: Task, sandbox: Sandbox) -> None:
        row = _row(task)
        tree = await self._tree(row)
        if tree is not None:
            await sandbox.unpack(tree.archive)
        if tree is not None and not row.bug_patch:
            return
        command = _PREPARE_BUG if row.bug_patch else _PREPARE_IMAGE
        bug = row.bug_patch.encode("utf-8", "surrogateescape")
        result = await sandbox.run(command, timeout_s=_SETUP_TIMEOUT_S, cwd=sandbox.workdir, stdin=bug)
        where = f"row {row.instance_id}, image {sandbox.image}, {sandbox.workdir}"
        if result.timed_out:
            raise CommandTimeoutError(
                f"the row's repository was not prepared within {_SETUP_TIMEOUT_S:.0f} s", where=where
            )
        if result.exit_code != 0:
            raise SetupFailedError(
                f"the row's repository could not be prepared: {result.output[-300:]}",
                where=where,
                remedy="use an image with the repository in its work tree, or give bundles",
            )

    async def collect(self, task: Task, sandbox: Sandbox) -> str:
        """See `collect_patch`."""
        row = _row(task)

        async def tree() -> Tree | None:
            return None if row.bug_patch else await self._tree(row)

        known = await tree()  # the host knows a bundle's commit; another is kept under a ref of ours
        return await collect_patch(sandbox, base=_BASE_REF if known is None else known.commit, tree=tree)

    async def grade(self, task: Task, sandbox: Sandbox, patch: str) -> Grade:
        row = _row(task)
        await self.prepare(task, sandbox)
        base = await self._commit(sandbox, row)

        async def renew() -> None:
            if not row.bug_patch and await self._tree(row) is not None:
                await self.prepare(task, sandbox)
                return
            command = _RENEW_IMAGE.replace("{base}", base)
            result = await sandbox.run(command, timeout_s=_SETUP_TIMEOUT_S, cwd=sandbox.workdir)
            if result.exit_code != 0:
                raise SetupFailedError(
                    f"the row's tree could not be put back: {result.output[-300:]}", where=f"row {row.instance_id}"
                )

        return await grade_row(row, sandbox, patch, limits=self._limits(row), renew=renew)

    async def _commit(self, sandbox: Sandbox, row: Row) -> str:
        """The base commit's id, read before any code under test runs."""
        tree = None if row.bug_patch else await self._tree(row)
        if tree is not None:
            return tree.commit
        command = f"{GIT}git rev-parse {_BASE_REF}"
        return (await sandbox.run(command, timeout_s=_SETUP_TIMEOUT_S, cwd=sandbox.workdir)).output.strip()

    def _limits(self, row: Row) -> TestLimits:
        """Five times the recorded duration, at least 60 s; a single test gets the option's seconds, or all that were
        recorded where that is more, but never more than a quarter: a few may hang."""
        session_s = self._options.test_timeout_s
        if row.duration_s is not None:
            session_s = max(_MIN_TEST_TIMEOUT_S, _DURATION_FACTOR * row.duration_s)
        test_s = max(self._options.single_test_timeout_s, row.duration_s or 0.0)
        return TestLimits(session_s, min(test_s, session_s / 4))

    def reference_patch(self, task: Task) -> str:
        return _row(task).patch

    def hint(self, task: Task) -> str:
        return _row(task).patch


def _row(task: Task) -> Row:
    return msgspec.convert(task.data, Row)


def _chosen(rows: list[Row], options: SweGymOptions) -> list[Row]:
    """Rows of the wanted kinds; rows without a kind are kept."""
    kinds = {row.kind for row in rows if row.kind is not None}
    if "kinds" in options.model_fields_set and not kinds & set(options.kinds):
        raise ConfigError(
            f"environment.kinds {list(options.kinds)} matches no row",
            where=options.dataset,
            remedy=f"kinds here: {', '.join(sorted(kinds)) or 'none, the rows have no x_kind'}",
        )
    return [row for row in rows if row.kind is None or row.kind in options.kinds]
