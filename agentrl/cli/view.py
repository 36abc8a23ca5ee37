"""`agentrl view RUN`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def view(
        run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
        port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.")] = 0,
    ) -> int:
        """A page per trajectory, served on this machine.

        It shows tokens, log-probabilities, versions, advantages and weights.
        """
        from agentrl.run.folder import check_run_folder
        from agentrl.telemetry.viewer import serve

        check_run_folder(run)
        serve(run, port=port)
        return 0
