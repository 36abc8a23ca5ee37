"""The resident runner: pytest and the editor imported once, used in forks.

A fork costs a few milliseconds where a new interpreter with pytest costs some 300. What the fork sees must be
what a new `pytest` would see: `sys.path`, `sys.argv`, `__main__`, the environment, no module of the editor.
"""

import contextlib
import gc
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator

from .processes import Child, Processes
from .settings import Settings

LOADED_WITH_PYTEST = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "packaging"})
_USED_BY_A_RUN = (
    "_pytest._code.source",
    "_pytest.assertion.rewrite",
    "_pytest.assertion.truncate",
    "_pytest.config.argparsing",
    "_pytest.config.findpaths",
    "_pytest._io.pprint",
    "concurrent.futures",
    "difflib",
    "doctest",
    "email.parser",
    "faulthandler",
    "getpass",
    "importlib.metadata",
    "json",
    "pdb",
    "readline",
    "random",
    "tomllib",
    "unittest.mock",
)


class Resident:
    """pytest and the editor, imported on first use or while the server is idle."""

    def __init__(self, processes: Processes, settings: Settings) -> None:
        self._processes = processes
        self._settings = settings
        self._base_path = list(sys.path)
        self._pytest = False
        self._editor = False
        self._editor_modules: list[str] = []
        tree = os.path.join(settings.tools, "pytest")
        if tree not in self._base_path:
            self._base_path.append(tree)
        # An image may have put folders of the work tree on the path; this process itself never imports from them.
        sys.path[:] = [each for each in self._base_path if not self._is_work(each)]

    @property
    def warm(self) -> bool:
        return (self._pytest or not self._settings.resident) and self._editor

    def warm_one(self) -> None:
        """Import what is not imported yet, one part per call."""
        if not self._pytest and self._settings.resident:
            self.load_pytest()
        else:
            self.load_editor()

    def load_pytest(self) -> None:
        """Import pytest with its plugins, and what a run of it imports later: never from the work tree, which may
        hold anything by the time of the first test."""
        if self._pytest:
            return
        sys.path[:] = [each for each in self._base_path if not self._is_work(each)]
        with self._with_a_temporary_folder():
            config = importlib.import_module("_pytest.config")
            importlib.import_module("pytest")
            for name in config.default_plugins:
                importlib.import_module(f"_pytest.{name}")
            for name in _USED_BY_A_RUN:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
            importlib.import_module(".reporting", __package__)
        self._pytest = True
        self._settle()

    @contextlib.contextmanager
    def _with_a_temporary_folder(self) -> Iterator[None]:
        """For modules that look for one when they are imported: where the agent has filled the disks there is none, and
        the server would end."""
        before, tempfile.tempdir = tempfile.tempdir, self._settings.writable[0]
        try:
            yield
        finally:
            tempfile.tempdir = before

    def _is_work(self, path: str) -> bool:
        work = os.path.realpath(self._settings.work)
        return os.path.commonpath([os.path.realpath(path), work]) == work

    def load_editor(self) -> None:
        """Import the editor; note its modules, which forks for tests must not see."""
        if self._editor:
            return
        before = set(sys.modules)
        tree = os.path.join(self._settings.tools, "editor")
        sys.path.insert(0, tree)
        try:
            with self._with_a_temporary_folder():
                importlib.import_module(".editing", __package__)
        finally:
            sys.path.remove(tree)
        new = set(sys.modules) - before
        keep = sys.stdlib_module_names | {__package__.partition(".")[0]}
        self._editor_modules = [name for name in new if name.partition(".")[0] not in keep]
        self._editor = True
        self._settle()

    def _settle(self) -> None:
        """Move what is loaded out of the collector's sight: a fork's first collection would copy every
        page."""
        gc.collect()
        gc.freeze()

    def start_pytest(
        self, arguments: list[str], module: bool, environment: dict[str, str], cwd: str, *, feed: bool
    ) -> Child:
        """Fork what `pytest ARGUMENTS` or `python -m pytest ARGUMENTS` would be."""
        self.load_pytest()

        def work(_: int) -> int:
            self.become_pytest(arguments, module=module, cwd=cwd)
            import pytest

            return int(pytest.console_main())

        return self._processes.fork(work, environment=environment | {"PWD": cwd}, cwd=cwd, feed=feed)

    def become_pytest(self, arguments: list[str], *, module: bool, cwd: str) -> None:
        """In a fork: make the interpreter look like one that has just started on pytest."""
        for name in self._editor_modules:
            sys.modules.pop(name, None)
        from .reporting import look_started

        package = os.path.dirname(sys.modules["pytest"].__file__ or "")
        script = os.path.join(package, "__main__.py") if module else "/usr/local/bin/pytest"
        # `python -m` puts the working folder first, a script its own folder.
        added = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
        first = os.path.realpath(cwd) if module else os.path.dirname(script)
        sys.path[:] = [*added, *self._base_path]
        for each in [path for path in sys.path_importer_cache if self._is_work(path)]:
            del sys.path_importer_cache[each]  # what was there, or not, when this process started
        sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
        look_started(script, first, arguments)
