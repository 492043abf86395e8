r"""Weights of the tasks in the training objective: fixed, or from the norms of the tasks' gradients.

With the mean loss L_s of task s and the shared parameters theta (all layers but the last, whose columns belong to one
task each), gradient weighting takes at every step

    n_s = || d L_s / d theta ||                      norm of the step, averaged over the processes
    a_s = smoothing * a_s + (1 - smoothing) * n_s    smoothed; the first step initialises
    w_s = S * (1 / (a_s + e)) / sum_j 1 / (a_j + e)  with e = 1e-5 * max_j a_j, j over the S active tasks

so that a task with a smaller gradient gets the larger weight, the weights sum to the number of tasks, and every task
moves the shared layer about as far: w_s * a_s is the same for all of them. Multiplying a loss by a constant changes
nothing but a common factor. SpecExit (arXiv:2509.24248) says that its weights follow the gradients in this direction;
it publishes no formula, so this one is ours. The norms are smoothed, not the weights: one step with a gradient near
zero would else rule the average of the reciprocals.

The members of an ensemble share nothing, so each has its own weights: it is trained as if it were alone. A task whose
fixed weight is 0, or of which no row has been seen, is not active: its weight is 0. Otherwise the fixed weights do not
enter here; they define the validation objective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

WeightingKind: TypeAlias = Literal["fixed", "gradient"]

#: Share of the largest norm that is added to every norm, which bounds the ratio of two weights.
RELATIVE_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class WeightingConfig:
    """How the tasks are weighted in the training objective."""

    kind: WeightingKind = "fixed"
    """`fixed`: by losses.*; `gradient`: at every step by the inverse of the task's gradient norm on the shared layer.
    The validation objective, and with it early stopping, keeps the fixed weights either way."""
    smoothing: float = 0.9
    """What the smoothed gradient norms keep of their past at every step, from 0 to below 1."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: A value is out of range, or would be ignored.
        """
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"weighting.smoothing must be at least 0 and below 1; got {self.smoothing}")
        if self.kind == "fixed" and self.smoothing != type(self).smoothing:
            raise ValueError(
                f"weighting.smoothing is {self.smoothing}, which fixed weights do not read; "
                "leave it out, or choose weighting.kind gradient"
            )


class Weights(NamedTuple):
    """The weights of a step.

    Attributes:
        weights: One row per member, or one for all, columns `LEARNED`; no gradient flows into them.
        norms: The gradient norms of the step; None where they are not needed.
    """

    weights: Float[Tensor, "M S"]
    norms: Float[Tensor, "M S"] | None


class FixedWeighting(nn.Module):
    """The same weights at every step."""

    def __init__(self, weights: Float[Tensor, " S"]) -> None:
        """Takes the weights."""
        super().__init__()
        self.register_buffer("_weights", weights.unsqueeze(0), persistent=False)

    def forward(
        self, losses: Float[Tensor, "M S"], seen: Bool[Tensor, " S"], shared: Sequence[nn.Parameter]
    ) -> Weights:
        """The weights; nothing is looked at."""
        return Weights(self.get_buffer("_weights"), None)


class GradientWeighting(nn.Module):
    """Weights by the inverse of the smoothed gradient norms; the smoothed norms are part of the checkpoints."""

    def __init__(
        self,
        active: Bool[Tensor, " S"],
        *,
        members: int,
        smoothing: float,
        average: Callable[[Tensor], Tensor] = lambda norms: norms,
    ) -> None:
        """Starts without a past.

        Args:
            active: The tasks that are trained at all.
            members: M.
            smoothing: What the smoothed norms keep of their past.
            average: Averages a tensor over the processes. A process sees a part of the batch, so the average of the
                norms is a little above the norm of the whole batch.
        """
        super().__init__()
        self._smoothing = smoothing
        self._average = average
        self.register_buffer("_active", active, persistent=False)
        self.register_buffer("smoothed", torch.full((members, active.shape[0]), torch.nan))

    def forward(
        self, losses: Float[Tensor, "M S"], seen: Bool[Tensor, " S"], shared: Sequence[nn.Parameter]
    ) -> Weights:
        """Takes the norms of a step in and gives its weights.

        Args:
            losses: Each member's mean loss per task, with their graph.
            seen: The tasks that have a row in this step; the others keep their smoothed norm.
            shared: The parameters that all tasks share, the member as the first axis.
        """
        return self.follow(gradient_norms(losses, shared), seen)

    def follow(self, norms: Float[Tensor, "M S"], seen: Bool[Tensor, " S"]) -> Weights:
        """Takes norms that have been computed elsewhere in, and gives the weights.

        Args:
            norms: The gradient norms of a step.
            seen: The tasks that have a row in this step; the others keep their smoothed norm.
        """
        norms = self._average(norms)
        smoothed = self.get_buffer("smoothed")
        mixed = self._smoothing * smoothed + (1 - self._smoothing) * norms
        smoothed.copy_(torch.where(seen, torch.where(smoothed.isnan(), norms, mixed), smoothed))
        return Weights(inverse_weights(smoothed, self.get_buffer("_active") & ~smoothed.isnan()), norms)


def gradient_norms(losses: Float[Tensor, "M S"], shared: Sequence[nn.Parameter]) -> Float[Tensor, "M S"]:
    """Euclidean norm of the gradient of each member's loss of each task on that member's shared parameters.

    All tasks go through one batched backward pass, which takes S times the memory of the shared parameters. Member m's
    losses depend on slice m of a parameter alone, so one sum over the members serves them all.

    Args:
        losses: Mean losses with their graph, which is kept.
        shared: Parameters whose first axis is the member.
    """
    tasks = losses.sum(0)
    each_task = torch.eye(tasks.shape[0], dtype=tasks.dtype, device=tasks.device)
    gradients = torch.autograd.grad(tasks, list(shared), each_task, retain_graph=True, is_grads_batched=True)
    squares = [gradient.flatten(2).float().square().sum(-1) for gradient in gradients]
    return torch.stack(squares).sum(0).sqrt().T


def inverse_weights(norms: Float[Tensor, "M S"], active: Bool[Tensor, "M S"]) -> Float[Tensor, "M S"]:
    """Weights inversely proportional to norms, which sum to the number of active tasks.

    Args:
        norms: Not negative where active; anything elsewhere.
        active: The tasks that count; the others get weight 0.
    """
    known = torch.where(active, norms, torch.zeros_like(norms))
    floor = RELATIVE_EPSILON * known.amax(-1, keepdim=True) + torch.finfo(norms.dtype).eps ** 2
    inverse = torch.where(active, 1 / (known + floor), torch.zeros_like(norms))
    share = inverse / inverse.sum(-1, keepdim=True).clamp(min=torch.finfo(norms.dtype).tiny)
    return share * active.sum(-1, keepdim=True)
