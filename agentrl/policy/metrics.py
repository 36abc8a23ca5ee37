"""The server's `/metrics` page as numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentrl.errors import PolicyRequestError

_LINE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+(?P<value>\S+)")
_NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_used_fraction",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prefix_cache_queries_total": "cache_query_tokens",
    "vllm:prefix_cache_hits_total": "cache_hit_tokens",
}
_KV_TOKENS = re.compile(r'^vllm:cache_config_info\{.*\bkv_cache_size_tokens="(?P<tokens>\d+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ServerStats:
    """What a server does now (`running`, `waiting` requests, `kv_used_fraction` in [0, 1]) and did since it
    started. `kv_tokens` is its KV room, None where it does not tell.

    A preempted request is counted when it samples again, which may be long after; until then it is `waiting`.
    """

    running: int
    waiting: int
    kv_used_fraction: float
    preemptions: int
    generation_tokens: int
    prompt_tokens: int
    cache_query_tokens: int
    cache_hit_tokens: int
    kv_tokens: int | None = None


def parse_metrics(text: str) -> ServerStats:
    """Parse Prometheus text, summed over engines (the fraction: averaged). Raises `PolicyRequestError`
    where a metric is missing."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and match["name"] in _NAMES:
            found.setdefault(_NAMES[match["name"]], []).append(float(match["value"]))
    missing = sorted(set(_NAMES.values()) - set(found))
    if missing:
        raise PolicyRequestError(
            f"the policy server does not report {', '.join(missing)}",
            where="/metrics",
            remedy="use the vLLM version that pyproject.toml names",
        )
    sums = {name: sum(values) for name, values in found.items()}
    fraction = sums["kv_used_fraction"] / len(found["kv_used_fraction"])
    counts = {name: int(value) for name, value in sums.items() if name != "kv_used_fraction"}
    rooms = [int(match["tokens"]) for match in _KV_TOKENS.finditer(text)]
    return ServerStats(kv_used_fraction=fraction, kv_tokens=sum(rooms) if rooms else None, **counts)
