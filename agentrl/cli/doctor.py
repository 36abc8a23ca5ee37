"""`agentrl doctor`."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def doctor() -> int:
        """What is missing on this machine, and the command that fixes it."""
        from agentrl.run.doctor import diagnose, show

        findings = diagnose()
        show(findings)
        return 0 if all(f.ok or not f.needed for f in findings) else 3
