"""Every typed error of agentrl, and the one table that says what each means for a rollout.

The vocabulary is closed: a room raises one of these, the episode's driver (`agentrl.rollout.driver`) is the one
boundary that turns an error into a rollout's status by looking it up in `handling`, and the command line turns an
error that reaches it into one screen of text and an exit code. A bad rollout is data, not a crash.

Every error says *what* happened, *where* (the file, key, rollout, phase …) and the *remedy*.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class AgentRLError(Exception):
    """Base of all our errors.

    `what` is one sentence, `where` names the place, `remedy` says what to do. `exit_code` is what the command line
    ends with: 1 failed, 2 usage, 3 infrastructure failure.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where:  {self.where}")
        if self.remedy:
            lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)


# --- what the user wrote ------------------------------------------------------------------------------------------


class UsageError(AgentRLError):
    """The command, the configuration or the data cannot mean anything."""

    exit_code = 2


class ConfigError(UsageError):
    """An unknown key, a value out of range, an option without effect, or an impossible combination."""


class NoTeacherError(ConfigError):
    """None of several teachers serves a task: the run ends, as it would learn from the other tasks alone."""

    @classmethod
    def of(cls, task: str, *, route: str, value: str, names: Iterable[str]) -> NoTeacherError:
        """`route` of `task` has `value`, and the teachers are called `names`."""
        return cls(
            f"no teacher is named {value!r}, which task {task} has as {route}",
            where="distill.route",
            remedy=f"give one: --teacher {value}=T; there are: {', '.join(sorted(names))}",
        )


class UnknownEnvironmentError(UsageError):
    """No installed distribution registers an environment of that name."""


class DatasetError(UsageError):
    """A task row cannot be used; the message names the row and the field."""


class RunFolderError(UsageError):
    """The run folder is used, unreadable, or is no run folder."""


class RunFailedError(AgentRLError):
    """The run itself cannot go on (every group filtered, every rollout failing, …)."""


class DiskFullError(AgentRLError):
    """The run folder's file system is full."""


# --- the record ---------------------------------------------------------------------------------------------------


class RecordError(AgentRLError):
    """A trajectory breaks an invariant of the record; the message names the trajectory and the invariant."""


class StalenessError(AgentRLError):
    """A token about to be trained was sampled by a version further back than the schedule allows."""


# --- infrastructure -----------------------------------------------------------------------------------------------


class InfrastructureError(AgentRLError):
    """A machine, process or daemon failed. Never scored, never the policy's fault."""

    exit_code = 3


class SandboxError(InfrastructureError):
    """Base of what goes wrong with a sandbox."""


class NoSandboxBackendError(SandboxError):
    """Neither a Docker daemon nor bubblewrap is usable here. Nothing broke: something is to be installed."""

    exit_code = 1


class SandboxStartError(SandboxError):
    """A sandbox did not come up."""


class SandboxDeadError(SandboxError):
    """A sandbox's server is gone or does not answer."""


class SandboxOutOfMemoryError(SandboxError):
    """A sandbox as a whole ran out of memory."""


class DaemonUnreachableError(SandboxError):
    """The Docker daemon does not answer."""


class ImageMissingError(SandboxError):
    """The image (or root file system) of a task is not here and cannot be built."""


class ImageUnfitError(SandboxError):
    """The image is here but can be no sandbox: it lacks what one needs, or its work tree exceeds the limits."""


class SetupFailedError(SandboxError):
    """A task's work tree could not be prepared in a sandbox."""


class CommandTimeoutError(SandboxError):
    """A command that preparing, collecting or grading needs did not end in time. The agent's own commands are
    results, not errors."""


class GradingTimeoutError(SandboxError):
    """Grading did not end within its own allowance."""


class PolicyError(InfrastructureError):
    """Base of what goes wrong with a policy server."""


class PolicyStartError(PolicyError):
    """The policy server did not come up."""


class PolicyDeadError(PolicyError):
    """The policy server's process ended or does not answer."""


class PolicyRequestError(PolicyError):
    """The policy server refused a request."""


class WeightDeliveryError(PolicyError):
    """The policy server does not hold the weights that were published (version or probe mismatch)."""


class TeacherError(InfrastructureError):
    """Base of what goes wrong with a teacher. A segment without its scores is never trained."""


class TeacherStartError(TeacherError):
    """The teacher did not come up."""


class TeacherDeadError(TeacherError):
    """The teacher is gone or does not answer any more: the run ends, and can go on with --resume."""


class TeacherRequestError(TeacherError):
    """The teacher refused a segment, or answered with what cannot be its scores (NaN, too few positions, …)."""


class TeacherRefusedError(TeacherRequestError):
    """The teacher refused a segment for what it is (too long, a token it does not know): asking again is useless."""


class SegmentUnfitError(TeacherRefusedError):
    """The segment itself cannot be scored (it does not fit the teacher's window, or there is nothing to tell of its
    task): it is left unscored, and its rollout stays."""


class TeacherUnfitError(ConfigError):
    """The teacher cannot teach this student: another tokenizer, too short a window, no log-probabilities, …"""


class TrainerError(InfrastructureError):
    """The trainer process failed or ended."""


class DeadlineError(InfrastructureError):
    """A wait ran past its deadline; the message names the rollout, the phase and the sandbox."""


class MissingRequirementError(InfrastructureError):
    """A program or package that this machine lacks; the remedy is the command that installs it."""


_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def disk_full_is_typed(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the operating system's "no space left" within the block into a `DiskFullError` naming `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise DiskFullError(
            "no space left on the file system of the run folder",
            where=os.fspath(path),
            remedy="free space there (`df -h`), then go on with --resume",
        ) from error


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of nested task groups: what struck first; the others are its consequences."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# --- the one table ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Handling:
    """What an error means for the rollout it struck.

    retry: try again in a fresh sandbox, within the retry budget · graded: the work done so far is still graded ·
    counted: the rollout takes part in its group's statistics.
    """

    retry: bool
    graded: bool
    counted: bool


_TABLE: tuple[tuple[type[BaseException], Handling], ...] = (
    # The first row whose class matches decides, so the special stand above the general.
    (NoSandboxBackendError, Handling(retry=False, graded=False, counted=False)),
    (ImageMissingError, Handling(retry=False, graded=False, counted=False)),
    (ImageUnfitError, Handling(retry=False, graded=False, counted=False)),
    (PolicyDeadError, Handling(retry=False, graded=False, counted=False)),
    (TeacherError, Handling(retry=False, graded=False, counted=False)),  # the teacher itself has tried again
    (TrainerError, Handling(retry=False, graded=False, counted=False)),
    (CommandTimeoutError, Handling(retry=True, graded=False, counted=False)),
    (SandboxError, Handling(retry=True, graded=False, counted=False)),
    (DeadlineError, Handling(retry=True, graded=False, counted=False)),
    (PolicyError, Handling(retry=True, graded=False, counted=False)),
    (InfrastructureError, Handling(retry=True, graded=False, counted=False)),
    (UsageError, Handling(retry=False, graded=False, counted=False)),
)


def handling(error: BaseException) -> Handling | None:
    """The table's row for `error`; None for an error that is no rollout's status but a fault of the program."""
    for cls, row in _TABLE:
        if isinstance(error, cls):
            return row
    return None
