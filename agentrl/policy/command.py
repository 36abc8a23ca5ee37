"""The policy server's command line and environment, from its settings and the vLLM that is installed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import agentrl
from agentrl.config import PolicyConfig
from agentrl.config.distill import SERVED_LOGPROBS
from agentrl.errors import ConfigError
from agentrl.policy.requirement import Device, VllmInstall

SERVED_NAME = "policy"
LAUNCHER = ("-P", "-m", "agentrl.policy.launch")
_DEFAULT_CPU_KV_MB = 256

# What the server may see of our environment: enough to find its libraries, devices and caches, no
# credentials.
_KEPT = frozenset({"PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH"})
_KEPT_PREFIXES = (
    "LC_",
    "LD_",
    "XDG_",
    "CUDA",
    "NVIDIA",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "KMP_",
    "MKL_",
    "TORCH",
    "VLLM_",
)
_KEPT_FOR_HUB = frozenset(["HF_TOKEN", "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
_KEPT_FOR_HUB_PREFIXES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
_PLACING = ("OMP_PLACES", "OMP_PROC_BIND", "KMP_AFFINITY", "KMP_HW_SUBSET", "VLLM_CPU_OMP_THREADS_BIND")


def model_location(model: str) -> str:
    """`tiny` → the shipped policy's folder; a folder → its absolute path; anything else is a hub name,
    unchanged.

    Raises `ConfigError` for a path that is no model folder.
    """
    if model == "tiny":
        return str(resources.files("agentrl.policy") / "tiny")
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(
            f"{model} holds no config.json",
            where="policy.model",
            remedy="give a folder in Hugging Face format",
        )
    if path.is_dir():
        return str(path.resolve())
    if path.is_absolute() or model.startswith(".") or model.count("/") > 1:
        raise ConfigError(f"there is no folder {model}", where="policy.model", remedy="give a folder or a hub name")
    return model


def check_model(config: PolicyConfig) -> None:
    """Raise `ConfigError` where the model is no folder, or its window is known to be too small; before any start."""
    _check_window(config, model_location(config.model))


def _check_window(config: PolicyConfig, model: str) -> None:
    """Raise `ConfigError` where the model is known to have fewer positions than `policy.max_model_len`."""
    described = Path(model) / "config.json"
    if not described.is_file():
        return  # a hub name: vLLM checks it once it is downloaded
    positions = json.loads(described.read_bytes()).get("max_position_embeddings")
    if isinstance(positions, int) and config.max_model_len > positions:
        raise ConfigError(
            f"policy.max_model_len {config.max_model_len} exceeds the {positions} positions of {model}",
            where="policy.max_model_len",
            remedy=f"set it to {positions} or less",
        )


def serve_arguments(
    config: PolicyConfig,
    *,
    model: str,
    host: str,
    port: int,
    seed: int,
    install: VllmInstall,
    sleep_mode: bool = False,
) -> list[str]:
    """Arguments of `vllm serve` for a policy (or a teacher): token ids in and out, processed
    log-probabilities, weight transfer, no sampling default of the model folder.

    `sleep_mode`: on CUDA the server can give its device's memory to a trainer; a CPU has nothing to give."""
    _check_window(config, model)
    arguments = ["serve", model, "--host", host, "--port", str(port), "--served-model-name", SERVED_NAME]
    arguments += ["--seed", str(seed), "--dtype", config.dtype, "--max-model-len", str(config.max_model_len)]
    arguments += ["--max-num-seqs", str(config.max_num_seqs)]
    arguments += ["--max-num-batched-tokens", str(config.max_num_batched_tokens)]
    arguments += ["--block-size", str(config.block_size), "--scheduling-policy", "priority"]
    arguments += [
        "--generation-config",
        "vllm",
        "--logprobs-mode",
        "processed_logprobs",
        "--max-logprobs",
        str(SERVED_LOGPROBS),
    ]
    arguments += ["--enable-scale-out", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    arguments += ["--worker-extension-cls", "agentrl.policy.worker_extension.PolicyWorkerExtension"]
    arguments += ["--weight-transfer-config", '{"backend":"file"}']
    if config.enforce_eager:
        arguments.append("--enforce-eager")
    if install.device is Device.CPU:
        room_mb = config.kv_cache_mb or _DEFAULT_CPU_KV_MB
        arguments += ["--kv-cache-memory-bytes", str(room_mb << 20)]
        arguments += ["--distributed-executor-backend", "uni"]  # see serve_environment
    elif config.kv_cache_mb is not None:
        raise ConfigError(
            "policy.kv_cache_mb has no effect with the CUDA build of vLLM, which sizes its own cache",
            where="policy.kv_cache_mb",
            remedy="remove it",
        )
    if sleep_mode and install.device is Device.CUDA:
        arguments.append("--enable-sleep-mode")
    return arguments


def _cpu_environment(*, eager: bool) -> dict[str, str]:
    """A CPU's own settings.

    The worker runs inside the engine's process (together with executor `uni`) on one thread: as many tokens
    per second as two processes that poll each other, for 60 % of the processor time, 10 s less to start and
    half a gigabyte less. Eager means eager: without the switch the first request waits for a C++ compiler
    that the sampler calls.
    """
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    return settings | ({"TORCH_COMPILE_DISABLE": "1"} if eager else {})


def _bind(environment: dict[str, str], device: int, install: VllmInstall) -> None:
    """Bind the server to a device: that CUDA device, or one thread for that one core.

    The core itself is the affinity of the process tree (`supervise.py`): vLLM's own binding is not applied to a
    worker in the engine's process. What could place threads elsewhere is taken out.
    """
    if install.device is Device.CUDA:
        environment["CUDA_VISIBLE_DEVICES"] = str(device)
        return
    for name in _PLACING:
        environment.pop(name, None)
    environment["OMP_NUM_THREADS"] = "1"


def serve_environment(
    config: PolicyConfig,
    *,
    model: str,
    install: VllmInstall,
    device: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The server's environment: an allow-list of ours, and what makes it serve a trainer without any network.

    A hub name keeps the hub's variables (it must be downloaded); a folder needs no hub and gets none. `device`
    binds the server to a core or a CUDA device (None: whatever we may use).
    """
    source = os.environ if environ is None else environ
    on_hub = not Path(model).is_dir()
    prefixes = _KEPT_PREFIXES + (_KEPT_FOR_HUB_PREFIXES if on_hub else ())
    names = _KEPT | (_KEPT_FOR_HUB if on_hub else frozenset())
    kept = {key: value for key, value in source.items() if key in names or key.startswith(prefixes)}
    ours = str(Path(agentrl.__file__).resolve().parents[1])
    kept["PYTHONPATH"] = os.pathsep.join([ours, *filter(None, [kept.get("PYTHONPATH")])])
    kept.update(
        VLLM_SERVER_DEV_MODE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        PYTHONUNBUFFERED="1",
    )
    if install.device is Device.CPU:
        kept = _cpu_environment(eager=config.enforce_eager) | kept
    if device is not None:
        _bind(kept, device, install)
    if not on_hub:
        kept.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    return kept


def full_command(install: VllmInstall, launcher: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The command that the supervisor runs."""
    return [install.python, *launcher, *arguments]
