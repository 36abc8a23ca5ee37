"""Random weights published as the trainer publishes them, and what they must give: a float32 recompute with
transformers, which the real server equals to 1e-4 nats per token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from agentrl.wire import Generation, WeightManifest

TOLERANCE = 1e-4
PROBE = np.array([5, 17, 41, 9, 30, 77, 12, 8], dtype=np.int32)
PROMPT = [int(token) for token in np.random.default_rng(0).integers(5, 500, 300)]


class Trainer:
    """Random weights, published as the trainer publishes them, and the oracle for each."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.folder = folder

    def randomize(self, seed: int) -> None:
        """Other weights, far from any before."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.1, generator=generator)
                else:
                    parameter.uniform_(0.5, 1.5, generator=generator)

    def state(self) -> dict[str, torch.Tensor]:
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        if self.model.config.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        return weights

    def publish(self, version: int) -> WeightManifest:
        path = self.folder / f"v{version}.safetensors"
        weights = self.state()
        save_file(weights, path)
        return WeightManifest(
            version=version,
            path=str(path),
            tensors=len(weights),
            num_bytes=path.stat().st_size,
            probe_token_ids=PROBE,
            probe_logprobs=self.logprobs(PROBE.tolist()),
        )

    def logprobs(self, token_ids: list[int], *, temperature: float = 1.0) -> np.ndarray:
        """float32 [T − 1]: log-probability of each next token."""
        with torch.no_grad():
            logits = self.model(torch.tensor([token_ids])).logits[0, :-1] / temperature
        picked = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(token_ids[1:])[:, None])
        return picked[:, 0].numpy()

    def recompute(self, prompt: list[int], got: Generation, *, temperature: float = 1.0) -> np.ndarray:
        return self.logprobs([*prompt, *got.token_ids.tolist()], temperature=temperature)[len(prompt) - 1 :]
