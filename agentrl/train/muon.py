"""Muon, momentum whose update is orthogonalised, for weight matrices; and the warm start's AdamW beside it.

Source: Keller Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"
(kellerjordan.github.io), with its quintic Newton-Schulz coefficients. Each step replaces the momentum matrix
G = U S Vᵀ by about U Vᵀ, so every direction moves by the same amount: on this scale of model it learns a task
in a fraction of AdamW's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: Float[Tensor, "R C"], *, iterations: int = 5) -> Float[Tensor, "R C"]:
    """About U Vᵀ of `matrix` = U S Vᵀ: singular values land in roughly [0.7, 1.2], which is near enough
    here."""
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix / (matrix.norm() + 1e-7)
    x = x.T if tall else x
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, scaled by sqrt(max(1, rows/columns)). For 2-D parameters only."""

    def __init__(self, params: Iterable[torch.nn.Parameter], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                ahead = parameter.grad.lerp(state["momentum"], group["momentum"])
                rows, columns = parameter.shape
                parameter.add_(orthogonalise(ahead), alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def split_parameters(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """(weight matrices between the layers, everything else: embeddings, output head, norms)."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        outer = "embed" in name or "lm_head" in name
        (matrices if parameter.ndim == 2 and not outer else others).append(parameter)
    return matrices, others


def adamw(params: Any, *, lr: float, weight_decay: float = 0.0) -> torch.optim.AdamW:
    """AdamW with the warm start's moments."""
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.98), weight_decay=weight_decay, fused=True)
