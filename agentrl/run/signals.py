"""Ctrl-C and SIGTERM: the run is cancelled, cleans up, and can be resumed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentrl.errors import AgentRLError, first_error

Result = TypeVar("Result")
INTERRUPTED = 130
"""The exit code of a command that a signal ended: the shell's 128 + SIGINT, whichever signal it was."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """A signal ended the work; everything it had started is closed."""


class ReaderGone(Exception):
    """Whoever read our output went away (`agentrl … | head`): SIGPIPE, as Python has it, before click calls it 1."""


def run_interruptible(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` to its end. A signal cancels it once, so that its clean-up is not cut short by an impatient second.

    Raises Interrupted after the clean-up.
    """

    async def main() -> Result:
        task = asyncio.ensure_future(work)
        interrupted = False

        def interrupt() -> None:
            nonlocal interrupted
            if not interrupted:
                interrupted = True
                task.cancel()

        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, interrupt)
        try:
            return await task
        except (asyncio.CancelledError, AgentRLError, BaseExceptionGroup) as error:
            # Parts that are torn down may report their own end as an error; what happened is the signal.
            if interrupted:
                raise Interrupted from error
            if isinstance(error, BaseExceptionGroup):
                raise first_error(error) from None
            raise
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    return asyncio.run(main())
