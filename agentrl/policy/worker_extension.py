"""What runs inside vLLM's workers: the `file` weight-transfer backend and two repairs of the CPU build.

Loaded through `--worker-extension-cls`; importing the module registers the backend and patches what is
broken.

Repairs, both without effect on a GPU:

* each Linear is prepacked for the CPU and its parameter emptied, so weights must pass through vLLM's
  layerwise reload; that reload forgets a *tied* lm_head, whose own prepacked copy would go on giving logits
  of the old embedding;
* a request with `seed` whose prefill is done again (chunked, preempted, or kept over a delivery) asks the CPU
  generator for an offset that it does not have, which ends the engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

BACKEND = "file"


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing to agree on: each update names its file."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """A safetensors file in Hugging Face names, how many tensors it holds and how many bytes it has."""

    path: str
    tensors: int
    num_bytes: int


def read_weights(update: FileUpdate) -> dict[str, torch.Tensor]:
    """The file's tensors. Raises ValueError where it is not the file that was published."""
    size = os.path.getsize(update.path)
    if size != update.num_bytes:
        raise ValueError(f"{update.path} has {size} bytes, published were {update.num_bytes}")
    weights = load_file(update.path)
    if len(weights) != update.tensors:
        raise ValueError(f"{update.path} holds {len(weights)} tensors, published were {update.tensors}")
    return weights


def refresh_tied_head(model: torch.nn.Module) -> None:
    """Prepack a tied lm_head's weight anew after the embedding changed."""
    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class FileTransferEngine(WeightTransferEngine):
    """Loads published weights from a file that the worker can read (a shared-memory folder on one host).

    The whole exchange happens in `update_weights`: a file that cannot be read, or is another one than
    published, is refused *before* the model is touched, so that the old weights stay in force.
    """

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Nothing yet: see the class."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Exchange every weight of the model. Raises ValueError where the file does not cover the model."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Read, then load layer by layer."""
        self._exchange(read_weights(update_info))

    def _exchange(self, weights: Mapping[str, torch.Tensor]) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self.model)
        needed = {name for name, _ in self.model.named_parameters()}
        if self.model_config.hf_config.tie_word_embeddings:
            needed.discard("lm_head.weight")  # it is the embedding
        try:
            loaded = self.model.load_weights(weights.items())
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
            refresh_tied_head(self.model)
        missing = sorted(needed - (loaded or set()))
        if missing:
            raise ValueError(f"the file lacks {len(missing)} of {len(needed)} weights, first {missing[0]}")
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Nothing left: see the class."""

    def shutdown(self) -> None:
        """Nothing is held."""


class _CpuGenerator(torch.Generator):
    """A CPU generator that answers for the offset that CUDA's has. Nothing of a CPU generator depends on
    it.
    """

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self


def install() -> None:
    """Register the backend and apply the repairs; called once, at import inside the worker."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileTransferEngine)
    if current_platform.is_cpu():
        torch.Generator = _CpuGenerator  # type: ignore[misc]


class PolicyWorkerExtension:
    """The class vLLM mixes into its worker. The module's import is what matters."""


install()
