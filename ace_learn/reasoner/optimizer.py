"""Muon for matrices and AdamW for the rest, as one optimizer.

Muon turns the momentum of a weight matrix into the nearest orthogonal matrix before the step. At this size it needs
about half the steps of AdamW; see K. Jordan, https://kellerjordan.github.io/posts/muon/.
"""

from collections.abc import Callable, Iterable
from typing import overload

import torch
from torch import Tensor

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz step: steep at zero, and roughly one between 0.7 and 1.2."""


def orthogonalize(matrix: Tensor, *, iterations: int = 5) -> Tensor:
    """Return a matrix with the same singular vectors and all singular values near one."""
    a, b, c = _QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


class MuonAdamW(torch.optim.Optimizer):
    """Muon on `matrices`, AdamW without weight decay on `others`.

    Args:
        matrices: Weights of linear layers.
        others: Embeddings and norms.
        matrix_rate: Learning rate of Muon: the spectral norm of a step.
        other_rate: Learning rate of AdamW.
        momentum: Nesterov momentum of Muon.
        betas: Decay rates of AdamW's moments.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        others: Iterable[Tensor],
        *,
        matrix_rate: float,
        other_rate: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.98),
    ) -> None:
        groups = [
            {"params": list(matrices), "lr": matrix_rate, "muon": True},
            {"params": list(others), "lr": other_rate, "muon": False},
        ]
        super().__init__(groups, {"momentum": momentum, "betas": betas})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; `closure` recomputes the loss where a trainer passes one."""
        with torch.enable_grad():
            loss = None if closure is None else float(closure())
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    if weight.grad is None:
                        continue
                    if group["muon"]:
                        self._step_matrix(weight, rate=group["lr"], momentum=group["momentum"])
                    else:
                        self._step_other(weight, rate=group["lr"], betas=group["betas"])
        return loss

    def _step_matrix(self, weight: Tensor, *, rate: float, momentum: float) -> None:
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        state["momentum"].lerp_(gradient, 1 - momentum)
        direction = orthogonalize(gradient.lerp(state["momentum"], momentum))
        scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
        weight.sub_(direction, alpha=rate * scale)

    def _step_other(self, weight: Tensor, *, rate: float, betas: tuple[float, float]) -> None:
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if not state:
            state.update(step=0, mean=torch.zeros_like(weight), square=torch.zeros_like(weight))
        state["step"] += 1
        state["mean"].lerp_(gradient, 1 - betas[0])
        state["square"].lerp_(gradient.square(), 1 - betas[1])
        mean = state["mean"] / (1 - betas[0] ** state["step"])
        square = state["square"] / (1 - betas[1] ** state["step"])
        weight.sub_(mean / (square.sqrt() + 1e-8), alpha=rate)
