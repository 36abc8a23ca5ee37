"""`agentrl sandbox {ps,stats,reap,build}`: this machine's sandboxes and images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (ps, stats, reap, build):
        app.command()(command)


Hosts = Annotated[
    list[str] | None, typer.Option("--host", help="A Docker daemon's address, may be given several times.")
]


def ps(hosts: Hosts = None) -> int:
    """The sandboxes that live on this machine and its daemons."""
    from agentrl.run.sandboxes import show_sandboxes

    return show_sandboxes(tuple(hosts or ()))


def stats(hosts: Hosts = None) -> int:
    """Images with sizes and last uses, caches, disks and daemons."""
    from agentrl.run.sandboxes import show_stats

    return show_stats(tuple(hosts or ()))


def reap(hosts: Hosts = None) -> int:
    """Remove what dead runs left: containers, control groups, folders."""
    from agentrl.run.sandboxes import reap_all

    print(reap_all(tuple(hosts or ())))
    return 0


def build(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME…]", help="Images, e.g. agentrl/base; default: the base image.")
    ] = None,
    backend: Annotated[str, typer.Option("--backend", help="bubblewrap, docker or auto.")] = "auto",
    recipes: Annotated[
        Path | None, typer.Option("--recipes", help="A folder of further recipes, as in sandbox.recipes.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List what can be built here, and build nothing.")] = False,
) -> int:
    """Build images, where they are not built yet."""
    from agentrl.run.sandboxes import build_images, list_images

    if list_:
        print("\n".join(list_images(recipes)))
        return 0
    for built in build_images(names or [], backend, recipes):
        print(built, flush=True)
    return 0
