"""What pytest runs tests with, as it was before any code under test could exchange it.

Python 3.6 and pytest 3 or later: this also runs in an image's own Python.
"""

import builtins
import sys
import unittest
from typing import Any, List, Tuple

from _pytest import python, runner
from _pytest import unittest as cases

Members = Tuple[str, ...]

_RUN_BY: Tuple[Tuple[Any, Members], ...] = (
    (python, ("pytest_pyfunc_call",)),
    (python.Function, ("runtest", "setup", "_getobj")),
    (python.PyobjMixin, ("obj",)),
    (runner, ("call_and_report", "call_runtest_hook", "runtestprotocol", "pytest_runtest_call")),
    (runner, ("pytest_runtest_makereport",)),
    (runner.CallInfo, ("__init__", "from_call")),
    (runner.TestReport, ("__init__", "from_item_and_call")),
    (cases.TestCaseFunction, ("runtest", "setup", "addError", "addFailure")),
    (unittest.TestCase, ("run", "__call__", "_callTestMethod")),
    # What calls hooks; its module has another name in each version of pluggy.
    *(
        (module, ("_multicall",))
        for name, module in sorted(sys.modules.items())
        if name.startswith(("pluggy.", "_pytest.vendored_packages.pluggy")) and hasattr(module, "_multicall")
    ),
)


def _identity() -> List[object]:
    """What runs a test and judges it, with the code inside, which can be exchanged in place."""
    found: List[object] = []
    for owner, names in _RUN_BY:
        for name in names:
            value = vars(owner).get(name)
            found += [value, getattr(getattr(value, "__func__", value), "__code__", None)]
    return found


# Taken when this module is imported: by the server before a sandbox is used, or by an image's Python before its
# path leads to the work tree's code.
_ORIGINAL = _identity()


_MOCKED = frozenset({"__import__", "breakpoint", "exit", "help", "input", "open", "print", "quit", "_"})
"""Names that projects and interactive programs exchange; no test compares with them."""
_BUILTINS = {name: value for name, value in vars(builtins).items() if name not in _MOCKED}


def is_tampered() -> bool:
    """Whether anything of it has been exchanged since."""
    now = _identity()
    return any(now[index] is not then for index, then in enumerate(_ORIGINAL))


def has_other_builtins() -> bool:
    """Whether a name that is everywhere means something else than before. A test's own fixtures may do that for the
    time of the test."""
    now = vars(builtins)
    return any(now.get(name) is not value for name, value in _BUILTINS.items())
