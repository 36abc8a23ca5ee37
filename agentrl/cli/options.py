"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
OVERRIDES = "Any setting can be given as a dotted option, e.g. --rollout.group-size 4."
SOME_OVERRIDES = (
    "Settings that this command reads can be given as dotted options, e.g. --sandbox.memory-mb 2048. "
    "One that it does not read is refused."
)

EnvironmentName = Annotated[str, typer.Argument(metavar="ENV", help="An installed environment, e.g. swe-gym.")]
Preset = Annotated[
    str | None, typer.Option("--preset", help="Start from a shipped preset, e.g. demo; of sft: tiny-start.")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A TOML file laid over the preset.")]
RunDir = Annotated[
    Path | None, typer.Option("--run-dir", help="The run folder; default: runs/latest, in eval runs/eval-TIME.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run folder's last checkpoint.")]
Plain = Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live table.")]
