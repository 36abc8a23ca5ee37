"""Weights out: one safetensors file per policy version, and the manifest that the delivery is checked by.

The file appears under its name only when it is whole (temporary name, then rename), and older versions are
removed once it does: a version is published only after the one before it was taken. The probe's
log-probabilities are computed from the tensors *read back from the file*, so a server that agrees with them
holds what was written.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.errors import WeightDeliveryError
from agentrl.train.storage import full_disk_named
from agentrl.wire import WeightManifest

PROBE_TOKENS = 32
_PATTERN = "policy-*.safetensors"


def weight_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every tensor under its Hugging Face name; one name where weights are tied (the embedding's, not the
    head's)."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for (
        name,
        value,
    ) in model.state_dict().items():  # in registration order: the embedding stands before the head
        if value.data_ptr() not in seen:
            tensors[name] = value
            seen.add(value.data_ptr())
    return tensors


def probe_token_ids(vocabulary: int) -> np.ndarray:
    """A fixed prompt, int32 [PROBE_TOKENS], spread over the vocabulary: it touches many rows of the
    embedding."""
    drawn = torch.randint(vocabulary, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))
    return drawn.numpy().astype(np.int32)


@torch.no_grad()
def probe_logprobs(model: PreTrainedModel, tensors: dict[str, Tensor], token_ids: np.ndarray) -> np.ndarray:
    """float32 [N − 1]: log p(token i + 1 | tokens ≤ i) at temperature 1 under `tensors`, in `model`'s
    architecture."""
    ids = torch.from_numpy(token_ids.astype(np.int64)).to(model.device).unsqueeze(0)
    placed = {name: value.to(model.device) for name, value in tensors.items()}
    output = torch.func.functional_call(model, placed, kwargs={"input_ids": ids, "use_cache": False})
    logprobs = output.logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy()


def publish_weights(model: PreTrainedModel, *, version: int, folder: Path) -> WeightManifest:
    """Write `model`'s weights as `version` into `folder`. Raises `DiskFullError`, or `WeightDeliveryError`
    where the
    file's weights give a non-finite probe."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"policy-{version:06d}.safetensors"
    partial = folder / f".{path.name}.{os.getpid()}"
    tensors = {name: value.contiguous() for name, value in weight_tensors(model).items()}
    try:
        with full_disk_named(folder, purpose=f"the weights of policy version {version}"):
            save_file(tensors, partial, metadata={"format": "pt", "version": str(version)})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    for old in folder.glob(_PATTERN):
        if old != path:
            old.unlink(missing_ok=True)
    ids = probe_token_ids(model.config.vocab_size)
    logprobs = probe_logprobs(model, load_file(path), ids)
    if not np.isfinite(logprobs).all():
        raise WeightDeliveryError(
            f"policy version {version} gives a non-finite log-probability on the probe prompt",
            where=str(path),
            remedy="resume from the last checkpoint with a lower train.optimizer.learning_rate",
        )
    return WeightManifest(
        version=version,
        path=str(path),
        tensors=len(tensors),
        num_bytes=path.stat().st_size,
        probe_token_ids=ids,
        probe_logprobs=logprobs,
    )
