"""`agentrl sandbox …`."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands."""

    @app.command()
    def build(
        backend: Annotated[str, typer.Option("--backend", help="bubblewrap, docker or auto.")] = "auto",
    ) -> int:
        """Build the base image (cached by content)."""
        from agentrl.run.sandboxes import build_image

        print(build_image(backend))
        return 0

    @app.command()
    def reap() -> int:
        """Remove what crashed runs left: containers, control groups, folders."""
        from agentrl.run.sandboxes import reap_all

        print(reap_all())
        return 0
