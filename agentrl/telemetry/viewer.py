"""`agentrl view RUN`: a small server with the table of trajectories and a token page for each.

It reads, it never writes; ids are looked up in the store's index and never become paths; it listens on the
loopback unless told otherwise, and there answers only to loopback names, so that a web page elsewhere cannot
read a run through a name that it points at 127.0.0.1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from html import escape
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from agentrl.errors import UsageError
from agentrl.telemetry.page import VIEWER_POLICY, asset, served
from agentrl.telemetry.payload import table_payload, trajectory_payload
from agentrl.telemetry.tokens import TokenDecoder
from agentrl.telemetry.trajectories import TrajectoryStore

_ASSETS = {
    "style.css": "text/css",
    "page.js": "text/javascript",
    "table.js": "text/javascript",
    "disagreements.js": "text/javascript",
    "trajectory.js": "text/javascript",
    "viewer.js": "text/javascript",
}
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_HEADERS = {
    "Content-Security-Policy": VIEWER_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_STORE = web.AppKey("store", TrajectoryStore)
_DECODER = web.AppKey("decoder", TokenDecoder)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def serve(run_dir: Path, host: str = "127.0.0.1", port: int = 0) -> None:
    """Serve the run's pages until interrupted; prints the URL. Port 0 takes a free one.

    Raises `RunFolderError` for a folder that is not there, `UsageError` where the port is taken.
    """
    app = make_app(run_dir, loopback_only=host in _LOOPBACK)
    # Ctrl-C is how a viewer ends, not a failure.
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(app, run_dir, host, port))


def make_app(run_dir: Path, *, loopback_only: bool = True) -> web.Application:
    """The viewer's application. Raises `RunFolderError`."""
    middlewares = [_headers, _loopback_names] if loopback_only else [_headers]
    app = web.Application(middlewares=middlewares)
    app[_STORE] = TrajectoryStore(run_dir)
    app[_DECODER] = TokenDecoder.of_run(run_dir)
    app.router.add_get("/", _index)
    app.router.add_get("/trajectory/{id:.+}", _trajectory)
    app.router.add_get("/assets/{name}", _asset)
    return app


async def _serve(app: web.Application, run_dir: Path, host: str, port: int) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host}:{port}: {error.strerror}",
                where="--port",
                remedy="choose another port, or leave it out and a free one is taken",
            ) from error
        bound = runner.addresses[0]
        shown = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        print(f"{run_dir}: http://{shown}:{bound[1]}/  (Ctrl-C ends)", flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


@web.middleware
async def _headers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Our headers on every answer, errors included."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        response = web.Response(status=error.status, text=error.text or error.reason)
    response.headers.update(_HEADERS)
    return response


@web.middleware
async def _loopback_names(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        name = urlsplit(f"//{request.host}").hostname
    except ValueError:
        name = None
    if name not in _LOOPBACK:
        raise web.HTTPForbidden(text="this viewer answers to 127.0.0.1 and localhost only")
    return await handler(request)


async def _index(request: web.Request) -> web.Response:
    store = request.app[_STORE]
    found = await asyncio.to_thread(store.summaries)
    problems = "".join(f'<p class="note warn">{escape(problem)}</p>' for problem in store.problems)
    name = store.run_dir.resolve().name
    body = f"""{_top(name, "")}
<main class="wrap"><section><h2>Trajectories of {escape(name)}</h2>{problems}
<p class="lead">One line per episode, the latest first. Choose one to read it token by token.</p>
<div id="trajectories"></div></section></main>"""
    data = {"table": table_payload(found), "runs": [name]}
    page = served(f"{name} · agentrl", body, data, ("page.js", "table.js", "viewer.js"))
    return web.Response(text=page, content_type="text/html")


async def _trajectory(request: web.Request) -> web.Response:
    store, trajectory_id = request.app[_STORE], request.match_info["id"]
    rows = (await asyncio.to_thread(store.load, [trajectory_id])).get(trajectory_id)
    if rows is None:
        raise web.HTTPNotFound(text="no trajectory of that id in this run")
    vocab: dict[int, str] = {}
    special: set[int] = set()
    payload = trajectory_payload(rows, request.app[_DECODER], vocab, special)
    found = await asyncio.to_thread(store.summaries)
    mates = [
        [s.trajectory_id, s.outcome if s.reward is None else f"{s.reward:g}"]
        for s in found
        if s.group_id == payload["group"]
    ]
    name = store.run_dir.resolve().name
    body = f'{_top(name, payload["id"])}\n<main class="wrap"><div id="trajectory"></div></main>'
    data = {"page": payload, "vocab": vocab, "special": sorted(special), "mates": mates}
    scripts = ("page.js", "table.js", "disagreements.js", "trajectory.js", "viewer.js")
    page = served(f"{payload['id']} · agentrl", body, data, scripts)
    return web.Response(text=page, content_type="text/html")


async def _asset(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    if name not in _ASSETS:
        raise web.HTTPNotFound(text="no such file")
    return web.Response(text=asset(name), content_type=_ASSETS[name])


def _top(name: str, crumb: str) -> str:
    trail = f'<span class="crumb">{escape(name)}{" / " + escape(crumb) if crumb else ""}</span>'
    return (
        f'<header class="top"><div class="wrap bar"><a class="brand" href="/">agentrl</a>{trail}'
        '<span class="grow"></span><button class="ghost" id="theme" title="dark or light">'
        "◐</button></div></header>"
    )
