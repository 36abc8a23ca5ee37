"""What the agent is told. Never the hidden tests, the hints or the reference patch."""

from __future__ import annotations

from agentrl.wire import ChatMessage

SHORT_SYSTEM = (
    "You fix bugs in a Python repo. Tools: bash(command), view(path), str_replace(path, old_str, new_str), submit()."
)

_SYSTEM = """\
You are a software engineer who resolves issues in Python repositories, working alone in a Linux sandbox.

You act only by calling tools, and see the result of each call before the next:
- bash(command): runs in a fresh shell in the repository's folder; a change of folder does not persist, so
  write `cd folder && command`. There is no network, and nothing can be installed.
- view(path, view_range), create(path, file_text), str_replace(path, old_str, new_str),
  insert(path, insert_line, new_str), undo_edit(path): look at and edit files. `old_str` must match exactly
  one place.
- submit(): hands in the repository as it stands and ends your work."""

_USER = """\
The repository {repo} is in {workdir}, at the commit before the fix. Resolve this issue:

<issue>
{issue}
</issue>

Find the cause first: search the code, read it, and reproduce the problem with a short command. Then change
the source so that the issue is resolved, keeping everything else as it works now, and run the related tests.
Hidden tests decide whether the issue is resolved; changes to tests and to the test configuration do not
count. Call submit when you are done."""


def short_prompt(issue: str) -> list[ChatMessage]:
    """Tools and issue, no more: for a policy with a small window."""
    return [ChatMessage(role="system", content=SHORT_SYSTEM), ChatMessage(role="user", content=issue)]


def row_prompt(*, repo: str, workdir: str, problem_statement: str) -> list[ChatMessage]:
    """System and user message of a SWE-Gym or SWE-bench row."""
    user = _USER.format(repo=repo, workdir=workdir, issue=problem_statement.strip())
    return [ChatMessage(role="system", content=_SYSTEM), ChatMessage(role="user", content=user)]
