"""The frozen target, teacher-forced: what it says of whole traces, made when it is needed and never stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ace_learn.models.target import Target


class TargetStates(NamedTuple):
    """What the target says behind each token of some traces; no gradient flows into it."""

    logits: Float[Tensor, "B T V"]
    aux: Float[Tensor, "B T A"]
    """The tapped hidden states, side by side."""


def target_states(target: Target, tokens: Int[Tensor, "B T"], taps: Sequence[int]) -> TargetStates:
    """Runs the target over whole traces; padding on the right changes nothing before it.

    Args:
        target: The target.
        tokens: The traces; the states come back to their device.
        taps: Layers whose inputs are wanted, as `Target.forward` numbers them.
    """
    batch, width = tokens.shape
    inputs = tokens.to(target.device)
    places = torch.arange(width, device=inputs.device).expand(batch, -1)
    outputs = target.forward(inputs, places, target.new_cache(batch), longest=width, aux_layers=taps)
    # Tensors of inference mode cannot be saved for a backward pass; copies can.
    copies = (part.to(tokens.device, torch.float32, copy=True) for part in (outputs.logits, outputs.aux))
    return TargetStates(*copies)
