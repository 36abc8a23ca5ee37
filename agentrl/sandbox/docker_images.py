"""Images on one Docker daemon: built (`agentrl/…`), found, or pulled with patience; blocking, for its worker threads.

A pull that the registry *refuses* (no such image, no right to it) fails at once with the registry's own words. One
that merely fails (network, registry overloaded, daemon's fault) is tried again with growing pauses until its deadline.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import docker
import docker.errors
import requests
import urllib3.exceptions

from agentrl.errors import ImageMissingError
from agentrl.sandbox import foreign
from agentrl.sandbox.docker_client import NOT_FOUND, gave_no_answer, named, unreachable
from agentrl.sandbox.images import OWN_PREFIX, ensure_docker_image
from agentrl.sandbox.limits import ENVIRONMENT, SERVER_COMMAND, Limits

log = logging.getLogger("agentrl.sandbox")

PULL_TIMEOUT_S = 1800.0  # in all
SILENCE_S = 180.0  # of tries that brought nothing
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_UNAUTHORIZED, _FORBIDDEN, _BAD_REQUEST, _TOO_MANY = 401, 403, 400, 429
_REFUSALS = (
    "not found",
    "does not exist",
    "manifest unknown",
    "name unknown",
    "access denied",
    "access to the resource is denied",
    "unauthorized",
    "no basic auth credentials",
    "no matching manifest",
    "invalid reference format",
)
_PASSING = ("toomanyrequests", "too many requests", "no such host", "server misbehaving")


@dataclass(frozen=True, slots=True)
class Prepared:
    """An image that containers can be made of now: its tag there, its id (of which they are made: the tag may be
    given to another image), and what its containers need."""

    tag: str
    image_id: str
    equipment: foreign.Equipment


def is_own(image: str) -> bool:
    """Whether `image` is built here rather than found or pulled."""
    return image.startswith(OWN_PREFIX)


class ImageStore:
    """The images of one daemon. Safe for several threads; the caller asks for one image once at a time."""

    def __init__(
        self,
        client: docker.DockerClient,
        address: str,
        *,
        limits: Limits,
        pull: Literal["missing", "never"],
        recipes: Path | None = None,
    ) -> None:
        self._client = client
        self._address = address
        self._limits = limits
        self._pull = pull
        self._recipes = recipes
        self._stop = threading.Event()

    def stop(self) -> None:
        """Give up pulls, the waits between them, and the filling of volumes."""
        self._stop.set()

    def find(self, image: str) -> str | None:
        """The id of `image`, None where the daemon has none. Raises `DaemonUnreachableError`."""
        try:
            return str(self._client.api.inspect_image(image)["Id"])
        except docker.errors.ImageNotFound:
            return None
        except requests.RequestException as error:
            raise unreachable(error, self._address) from error

    def prepare(self, image: str, *, on_pulled: Callable[[str], None]) -> Prepared:
        """Have `image`. May take minutes. Where it had to be pulled `on_pulled(image id)` is called as soon as it is
        there, so that it is known for ours whatever comes.

        Raises `ImageMissingError`, `DaemonUnreachableError`, and what building raises."""
        if is_own(image):
            tag = ensure_docker_image(self._client, image, recipes=self._recipes)
            equipment = foreign.Equipment(command=SERVER_COMMAND, volumes={}, environment=ENVIRONMENT)
            return Prepared(tag, self.find(tag) or tag, equipment)
        found = self.find(image)
        if found is None:
            self._fetch(image)
            found = self.find(image)
            if found is None:
                why = "it was gone again after it had been pulled"
                raise self._missing(image, why, "free space on the daemon's disk")
            on_pulled(found)
        # By its id, and so its containers: the name may mean another image by then.
        equipment = foreign.equip(
            self._client, found, limits=self._limits, name=image, address=self._address, stop=self._stop
        )
        return Prepared(image, found, equipment)

    def _missing(self, image: str, why: str, remedy: str) -> ImageMissingError:
        return ImageMissingError(
            f"the Docker daemon has no image {image}: {why}", where=f"{image} at {named(self._address)}", remedy=remedy
        )

    def _fetch(self, image: str) -> None:
        """Pull, again and again while it makes sense."""
        if self._pull == "never":
            raise self._missing(image, "and sandbox.pull is never", f"docker pull {image}, or sandbox.pull=missing")
        began = moved = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        while True:
            log.info("pulling %s on %s", image, named(self._address))
            try:
                self._pull_once(image, began + PULL_TIMEOUT_S)
                return
            except PullError as fault:
                if fault.is_final:
                    raise self._missing(image, fault.said, _remedy(image, fault)) from fault
                if fault.brought_something:
                    moved, pause_s = time.monotonic(), _FIRST_PAUSE_S
                end = min(began + PULL_TIMEOUT_S, moved + SILENCE_S)
                if time.monotonic() + pause_s > end or self._stop.is_set():
                    why = f"no pull succeeded in {time.monotonic() - began:.0f} s, the last one: {fault.said}"
                    raise self._missing(image, why, f"`docker pull {image}` shows why; or `docker load` it") from fault
                log.warning("pull of %s failed and is tried again in %.0f s: %s", image, pause_s, fault.said)
            self._stop.wait(pause_s * random.uniform(0.75, 1.25))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _pull_once(self, image: str, end: float) -> None:
        """One pull. Raises `PullError`, or `DaemonUnreachableError` where the daemon has gone meanwhile."""
        repository, tag = docker.utils.parse_repository_tag(image)
        bytes_came = False
        try:
            for event in _events(self._client, repository, tag or "latest"):
                bytes_came |= bool((event.get("progressDetail") or {}).get("current"))
                if "error" in event:
                    raise PullError(str(event["error"])[:500], brought_something=bytes_came)
                if self._stop.is_set() or time.monotonic() > end:
                    raise PullError("it was given up")
        except docker.errors.APIError as error:
            raise PullError(str(error.explanation or error)[:500], status=error.status_code) from error
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            if not self._answers():
                raise unreachable(error, self._address) from error
            why = f"the stream of its progress broke off: {str(error)[:200]}"
            raise PullError(why, brought_something=bytes_came) from error

    def _answers(self) -> bool:
        try:
            return bool(self._client.ping())
        except Exception as error:
            if gave_no_answer(error):
                return False
            raise


def _events(client: docker.DockerClient, repository: str, tag: str) -> Iterator[Mapping[str, Any]]:
    yield from client.api.pull(repository, tag=tag, stream=True, decode=True)


class PullError(Exception):
    """A pull failed, in the daemon's or the registry's words. `is_final`: trying again would change nothing;
    `brought_something`: part of the image came."""

    def __init__(self, said: str, *, status: int | None = None, brought_something: bool = False) -> None:
        super().__init__(said)
        self.said = said
        self.brought_something = brought_something
        words = said.lower()
        passing = status == _TOO_MANY or any(part in words for part in _PASSING)
        refused = status in (_BAD_REQUEST, _UNAUTHORIZED, _FORBIDDEN, NOT_FOUND)
        self.is_final = not passing and (refused or any(part in words for part in _REFUSALS))


def _remedy(image: str, fault: PullError) -> str:
    if "denied" in fault.said or "auth" in fault.said.lower():
        return "correct the name, or `docker login` if it is private"
    return f"correct the name (is the tag right?); `docker pull {image}` must succeed"
