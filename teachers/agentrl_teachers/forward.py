"""The scoring process's model: log-probabilities of given tokens, of the most likely ones, and of candidates.

Several segments go through the body at once, padded at the right, where a causal model never looks. The head
(hidden × vocabulary) runs over a bounded number of places at a time, so [B, T, V] is never made; its softmax is in
float32 whatever the model computes in.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from agentrl.errors import ConfigError
from agentrl_teachers.worker_messages import Score, Scored

_CPU_TOKENS = 2048
_CUDA_TOKENS = 32768
_CHUNK_LOGITS = 1 << 25  # 128 MiB of float32
_BOUNDLESS = 1 << 20
_ARRAY_BYTES = 1 << 32  # an array of an answer stays below: what msgpack can write


@dataclass(frozen=True, slots=True, eq=False)
class ScoringModel:
    """`window` and `vocabulary` in tokens; `batch_tokens`: how many, padding included, go through the body at once."""

    model: PreTrainedModel
    device: torch.device
    window: int
    vocabulary: int
    parameters: int
    batch_tokens: int

    @classmethod
    def load(cls, folder: Path, *, dtype: str, threads: int, core: int | None = None) -> ScoringModel:
        """Load a model folder onto the CUDA device where there is one, else onto `core` (None: any). Raises
        `ConfigError` where its logits are more than its head's, and whatever transformers raises for a folder that it
        cannot read."""
        if core is not None and not torch.cuda.is_available():
            for thread in os.listdir("/proc/self/task"):  # those that wait already, too
                os.sched_setaffinity(int(thread), {core})
        torch.set_num_threads(max(1, min(threads, len(os.sched_getaffinity(0)))))
        disable_progress_bar()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
        model = model.to(device).eval()
        _check_head(model)
        config = model.config.get_text_config()
        return cls(
            model=model,
            device=device,
            window=int(getattr(config, "max_position_embeddings", None) or _BOUNDLESS),
            vocabulary=int(model.get_output_embeddings().weight.shape[0]),
            parameters=model.num_parameters(),
            batch_tokens=_CUDA_TOKENS if device.type == "cuda" else _CPU_TOKENS,
        )

    def fault(self, request: Score) -> str | None:
        """Why the request cannot be scored; None where it can."""
        length, ids = len(request.token_ids), request.token_ids
        if not 2 <= length <= self.window:
            return f"{length} tokens cannot be scored in a window of {self.window}"
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocabulary:
            return f"a token id is outside the vocabulary of {self.vocabulary}"
        positions, candidates = request.positions, request.candidates
        if positions.size and not 1 <= int(positions.min()) <= int(positions.max()) < length:
            return f"a position is outside [1, {length})"
        if candidates is not None and (candidates.ndim != 2 or len(candidates) != len(positions)):
            return f"candidates {list(candidates.shape)} for {len(positions)} positions"
        if candidates is not None and candidates.size and int(candidates.max()) >= self.vocabulary:
            return f"a candidate is outside the vocabulary of {self.vocabulary}"
        columns = self.vocabulary if request.vocabulary else request.top_k
        if (size := 4 * len(positions) * columns) >= _ARRAY_BYTES:
            return (
                f"{columns} log-probabilities for each of {len(positions)} tokens are {size / 1e9:.1f} GB, and an "
                "answer holds less than 4 GiB: lower agent.max_tokens, or distill.support=student"
            )
        return None

    def free(self) -> None:
        """Give back what a failed forward pass held. Raises `RuntimeError` where the CUDA device itself has failed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def score(self, requests: Sequence[Score]) -> list[Scored]:
        """One answer per request, in order; none may have a fault."""
        longest = max(len(request.token_ids) for request in requests)
        padded = np.zeros((len(requests), longest), dtype=np.int64)
        for row, request in enumerate(requests):
            padded[row, : len(request.token_ids)] = request.token_ids
        token_ids = torch.from_numpy(padded).to(self.device)
        hidden = self.model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        scored = []
        for row, request in enumerate(requests):
            positions = torch.from_numpy(request.positions.astype(np.int64)).to(self.device)
            scored.append(self._scored(request, hidden[row, positions - 1], token_ids[row, positions]))
        return scored

    def _scored(self, request: Score, hidden: Float[Tensor, "N D"], tokens: Int[Tensor, " N"]) -> Scored:
        """`hidden[i]` predicts `tokens[i]`."""
        size, most_likely = len(tokens), min(request.top_k, self.vocabulary)
        logprobs, top1 = np.empty(size, dtype=np.float32), np.empty(size, dtype=np.bool_)
        top_ids = np.full((size, request.top_k), -1, dtype=np.int32)
        top_logprobs = np.full((size, request.top_k), np.nan, dtype=np.float32)
        candidates = self._no_candidates(request)
        head = self.model.get_output_embeddings()
        step = max(1, _CHUNK_LOGITS // self.vocabulary)
        for start in range(0, size, step):
            chunk = slice(start, min(start + step, size))
            distribution = head(hidden[chunk]).float().log_softmax(-1)
            logprobs[chunk] = distribution.gather(-1, tokens[chunk, None]).squeeze(-1).cpu().numpy()
            top1[chunk] = (distribution.argmax(-1) == tokens[chunk]).cpu().numpy()
            if most_likely:
                values, ids = distribution.topk(most_likely, dim=-1)
                top_ids[chunk, :most_likely] = ids.cpu().numpy()
                top_logprobs[chunk, :most_likely] = values.cpu().numpy()
            if candidates is not None:
                wanted = None if request.candidates is None else request.candidates[chunk]
                candidates[chunk] = _of(distribution, wanted)
        return Scored(
            number=request.number,
            logprobs=logprobs,
            top1=top1,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            candidate_logprobs=candidates,
        )

    def _no_candidates(self, request: Score) -> NDArray[np.float32] | None:
        """Room [N, K] for the log-probabilities of the request's candidates, where it has any."""
        if request.candidates is not None:
            return np.empty(request.candidates.shape, dtype=np.float32)
        return np.empty((len(request.positions), self.vocabulary), dtype=np.float32) if request.vocabulary else None


def _of(distribution: Float[Tensor, "P V"], candidates: NDArray[np.int32] | None) -> NDArray[np.float32]:
    """The log-probabilities of `candidates` [P, K], NaN where one is −1; None: all of them."""
    if candidates is None:
        return distribution.cpu().numpy()
    ids = torch.from_numpy(np.maximum(candidates, 0).astype(np.int64)).to(distribution.device)
    return np.where(candidates >= 0, distribution.gather(-1, ids).cpu().numpy(), np.nan)


@torch.inference_mode()
def _check_head(model: PreTrainedModel) -> None:
    """Raise `ConfigError` where the model's logits are more than head(hidden): soft-capped or scaled logits."""
    head = model.get_output_embeddings()
    ids = torch.arange(8, device=model.device).unsqueeze(0) % head.weight.shape[0]
    whole = model(input_ids=ids, use_cache=False).logits
    parts = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    if not torch.allclose(whole.float(), parts.float(), atol=1e-3, rtol=1e-3):
        raise ConfigError(
            f"{type(model).__name__} changes its logits after the output head (scaling or soft cap)",
            remedy="let a server score with it (kind vllm)",
        )
