"""`agentrl sandbox …`: debugging on tasks, making tasks, and this machine's sandboxes."""

from __future__ import annotations

import typer

from agentrl.cli import sandbox_machine, sandbox_tasks, task_factory


def register(app: typer.Typer) -> None:
    """Add the commands."""
    sandbox_tasks.register(app)
    task_factory.register(app)
    sandbox_machine.register(app)
