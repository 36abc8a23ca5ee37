"""Write the pins of a recipe: `python -m agentrl.sandbox.recipes.pin [-c CONSTRAINTS] [--sdist NAME]… REQUIREMENT…`.

pip resolves the requirements (`pytest<8`, or `-r FILE`) for the image's Python, which has to be the one that runs
this; what it chose is printed as the pins of a recipe, each with the hashes of its wheels for every processor in
`PROCESSORS`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.sandbox.recipes.build import PYTHON_VERSION
from agentrl.sandbox.recipes.packages import wheel_options
from agentrl.sandbox.recipes.recipe import Pin

PROCESSORS = ("x86_64", "aarch64")
_TIMEOUT_S = 1800.0


@dataclass(slots=True)
class _Choice:
    version: str
    is_wheel: bool
    hashes: set[str] = field(default_factory=set)


def pins(requirements: Sequence[str], *, sdists: Sequence[str], constraints: str | None) -> list[str]:
    """The lines of a recipe. `requirements` are pip's arguments; `sdists` may come as source. Exits where pip fails."""
    wanted = ["--only-binary=:all:", *(f"--no-binary={name}" for name in sdists), *requirements]
    if constraints is not None:
        wanted += ["-c", constraints]
    chosen: dict[str, _Choice] = {}
    for name, version, file, digest in _resolve(wanted):
        chosen[name] = _Choice(version, file.endswith(".whl"), {digest})
    wheels = [f"{name}=={choice.version}" for name, choice in chosen.items() if choice.is_wheel]
    for processor in PROCESSORS if wheels else ():
        # `--target` is what pip asks for with another platform; a dry run writes nothing there.
        for name, _, _, digest in _resolve(["--no-deps", "--target", ".", *wheel_options(processor), *wheels]):
            chosen[name].hashes.add(digest)
    names = sorted(chosen, key=str.lower)
    lines = [f"# sdist: {name}" for name in names if not chosen[name].is_wheel]
    return lines + [Pin(name, chosen[name].version, tuple(sorted(chosen[name].hashes))).line for name in names]


def _resolve(arguments: Sequence[str]) -> list[tuple[str, str, str, str]]:
    """Name, version, file and SHA-256 of everything that pip would install."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--report", "-", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr.strip()[-3000:])
    found = []
    for item in json.loads(done.stdout)["install"]:
        source = item["download_info"]
        digest = source["archive_info"]["hashes"]["sha256"]
        found.append((item["metadata"]["name"], item["metadata"]["version"], source["url"], digest))
    return found


def main(arguments: Sequence[str]) -> None:
    """The program."""
    parser = argparse.ArgumentParser(prog="pin", description="Pin requirements for a recipe.")
    parser.add_argument("requirements", nargs="*", metavar="REQUIREMENT")
    parser.add_argument("-r", dest="files", action="append", default=[], metavar="FILE", help="a file of requirements")
    parser.add_argument("-c", dest="constraints", metavar="FILE", help="pip constraints")
    parser.add_argument("--sdist", action="append", default=[], metavar="NAME", help="may come as source")
    given = parser.parse_intermixed_args(arguments)
    if sys.version_info[:2] != tuple(int(part) for part in PYTHON_VERSION.split(".")):
        sys.exit(f"run this with Python {PYTHON_VERSION}, the image's: markers are evaluated by the Python that runs")
    requirements = [*given.requirements, *(word for file in given.files for word in ("-r", file))]
    if not requirements:
        parser.error("name a requirement")
    print("\n".join(pins(requirements, sdists=given.sdist, constraints=given.constraints)))


if __name__ == "__main__":
    main(sys.argv[1:])
