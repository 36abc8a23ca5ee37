"""`agentrl`: one thin module per command. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import traceback

import typer

from agentrl.errors import AgentRLError, DiskFullError, UsageError
from agentrl.run.signals import Interrupted, ReaderGone

BROKEN_PIPE = 128 + signal.SIGPIPE  # as a shell shows a program that ends by it

app = typer.Typer(
    name="agentrl",
    help="Train software-engineering agents: real sandboxes, a real vLLM policy, learning by reward or by teacher.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
sandbox_app = typer.Typer(help="Debug in tasks' sandboxes, make tasks, look after the machine.", no_args_is_help=True)
bench_app = typer.Typer(help="Compare schedules, measure generation alone.", no_args_is_help=True)

for _name in ("train", "distill", "sft", "evaluate", "report", "view", "doctor"):
    importlib.import_module(f"agentrl.cli.{_name}").register(app)
importlib.import_module("agentrl.cli.sandbox").register(sandbox_app)
app.add_typer(sandbox_app, name="sandbox")
importlib.import_module("agentrl.cli.bench").register(bench_app)
app.add_typer(bench_app, name="bench")


def fail(error: AgentRLError) -> int:
    """One screen on stderr: what, where, remedy. Returns the exit code."""
    if os.environ.get("AGENTRL_TRACEBACK"):
        traceback.print_exception(error)
    print(f"agentrl: {error}", file=sys.stderr)
    return error.exit_code


def run() -> int:
    """Run the command line. 0 done, 1 failed, 2 usage, 3 infrastructure failure, 130 interrupted, 141 broken pipe."""
    try:
        return int(app(standalone_mode=False) or 0)
    except AgentRLError as error:
        return fail(error)
    except typer.TyperException as error:
        # What typer finds wrong with a command line says so itself; every kind of it is a usage error.
        getattr(error, "show", lambda: print(f"agentrl: {error}", file=sys.stderr))()
        return UsageError.exit_code
    except (KeyboardInterrupt, Interrupted, typer.Abort):
        print("agentrl: interrupted", file=sys.stderr)
        return 130
    except (BrokenPipeError, ReaderGone):
        # The reader of our output went away (`agentrl … | head`): nobody is left to tell. 1 may be a verdict.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return fail(
            DiskFullError("the disk is full", where=str(error.filename or ""), remedy="free some room, then --resume")
        )


def main() -> None:
    """Entry point of the `agentrl` script."""
    sys.exit(run())


if __name__ == "__main__":
    main()
