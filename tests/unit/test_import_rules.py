"""Who may import whom. The rooms' table is written once, here, and every module is held against it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EVERYONE = {"errors"}

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": EVERYONE,
    "trajectory": EVERYONE,
    "wire": {*EVERYONE, "trajectory"},
    "chat": {*EVERYONE, "config", "trajectory", "wire"},
    "sandbox": {*EVERYONE, "config", "wire"},
    "policy": {*EVERYONE, "config", "trajectory", "wire"},
    "agent": {*EVERYONE, "config", "chat", "sandbox", "trajectory", "wire"},
    "rollout": {*EVERYONE, "config", "agent", "trajectory", "wire"},
    "train": {*EVERYONE, "config", "trajectory", "wire"},
    "telemetry": {*EVERYONE, "config", "trajectory", "wire"},
    "run": {
        *EVERYONE,
        *("config", "trajectory", "wire", "chat", "sandbox", "policy", "agent", "rollout", "train", "telemetry"),
    },
}
ALLOWED["cli"] = {*ALLOWED["run"], "run"}
ENVIRONMENTS = {*EVERYONE, "config", "chat", "sandbox", "agent", "trajectory", "wire"}
TEACHERS = {*EVERYONE, "config", "chat", "policy", "trajectory", "wire"}
HEAVY = {"torch", "vllm", "transformers"}
LIGHT_ROOMS = ("errors", "config", "trajectory", "wire", "sandbox", "rollout", "telemetry", "cli")


def modules() -> list[tuple[Path, str, str]]:
    """(file, distribution root, room) of every module."""
    found = []
    for top in ("agentrl", "envs/agentrl_envs", "teachers/agentrl_teachers"):
        base = ROOT / top
        for path in sorted(base.rglob("*.py")):
            parts = path.relative_to(base).parts
            room = parts[0].removesuffix(".py") if top == "agentrl" else base.name
            found.append((path, base.name, room))
    return found


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in the file, those inside functions too, relative ones resolved."""
    names = []
    top = ROOT if path.is_relative_to(ROOT / "agentrl") else path.parents[len(path.relative_to(ROOT).parts) - 2]
    package = path.relative_to(top).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*base, *([node.module] if node.module else [])])
            names += [(node.lineno, f"{source}.{alias.name}") for alias in node.names]
    return names


def forbidden(room: str, root: str, name: str) -> str | None:
    """Why `room` may not import `name`; None where it may."""
    parts = name.split(".")
    if parts[0] in ("agentrl_envs", "agentrl_teachers") and parts[0] != root:
        return "environments and teachers are found by entry point, never imported by name"
    if parts[0] != "agentrl" or len(parts) < 2:
        return None
    target = parts[1]
    if root == "agentrl_envs":
        return None if target in ENVIRONMENTS else f"environments may not import agentrl.{target}"
    if root == "agentrl_teachers":
        return None if target in TEACHERS else f"teachers may not import agentrl.{target}"
    if target == room or target not in ALLOWED or target in ALLOWED[room]:
        return None
    return f"{room} may not import {target}"


def test_every_module_keeps_to_its_rooms() -> None:
    faults = []
    for path, root, room in modules():
        if root == "agentrl" and room == "__init__":
            continue
        assert root != "agentrl" or room in ALLOWED, f"{path}: no such room in the table"
        for line, name in imports(path):
            if why := forbidden(room, root, name):
                faults.append(f"{path.relative_to(ROOT)}:{line}: {name}: {why}")
    assert not faults, "\n".join(faults)


def test_the_rule_catches_a_breach() -> None:
    assert forbidden("train", "agentrl", "agentrl.sandbox.pool")
    assert forbidden("trajectory", "agentrl", "agentrl.config.models")
    assert forbidden("rollout", "agentrl", "agentrl_envs.swe_gym")
    assert forbidden("agentrl_envs", "agentrl_envs", "agentrl.policy.client")
    assert forbidden("run", "agentrl", "agentrl.train.client") is None


def test_light_rooms_never_import_torch() -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, root, room in modules()
        if root == "agentrl" and room in LIGHT_ROOMS
        for line, name in imports(path)
        if name.split(".")[0] in HEAVY
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("module", ["agentrl.cli.main", "agentrl.config", "agentrl.wire", "agentrl.trajectory"])
def test_importing_it_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {sorted(HEAVY)!r} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "[]"
