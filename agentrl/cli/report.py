"""`agentrl report RUN…`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def report(
        runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="One or several run folders.")],
        out: Annotated[
            Path | None, typer.Option("--out", help="The page; default: report.html in the first run.")
        ] = None,
    ) -> int:
        """Write one self-contained report.html over one or several runs."""
        from agentrl.run.folder import check_run_folder
        from agentrl.telemetry.report import write_report

        for run in runs:
            check_run_folder(run)
        page = out or runs[0] / "report.html"
        write_report(runs, page)
        print(page)
        return 0
