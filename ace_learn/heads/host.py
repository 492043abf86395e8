"""A head in NumPy, for a few rows on the host: there torch spends ten times its arithmetic on finding the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from scipy.special import erf
from torch import Tensor

from ace_learn.heads.head import MAX_LOG_REMAINING, REMAINING, SignalHead


class HostHead:
    """Gives what `SignalHead` gives, up to rounding. Members side by side are one layer; their mean is in the last."""

    def __init__(self, head: SignalHead) -> None:
        """Copies the weights of a head that is trained."""
        layers = [(_array(layer.weight), _array(layer.bias)) for layer in head.member_layers]
        std = _array(head.std)
        self._mean = _array(head.mean).astype(np.float32)
        first, bias = layers[0]
        weight = first.transpose(1, 0, 2).reshape(len(std), -1) / std[:, None]
        self._last: tuple[ndarray, ndarray] | None = None
        if len(layers) == 1:
            self._first = _packed(weight, bias.reshape(-1))
            return
        # gelu(x) is z (1 + erf(z)) / sqrt(2) for z = x / sqrt(2); the factors go into the layers around it.
        self._first = _packed(weight / math.sqrt(2), bias.reshape(-1) / math.sqrt(2))
        second, bias = layers[1]
        weight = second.reshape(-1, second.shape[-1]) / math.sqrt(2) / head.num_members
        self._last = _packed(weight, bias.mean(0))

    def __call__(self, features: Float[ndarray, "n F"]) -> list[list[float]]:
        """Signals of feature rows in natural units, in the order of `LEARNED`."""
        weight, bias = self._first
        values = (features - self._mean) @ weight
        values += bias
        if self._last is not None:
            weight, bias = self._last
            values *= 1 + erf(values)
            values = values @ weight
            values += bias
        return [_natural(row) for row in values.tolist()]


def _array(values: Tensor) -> ndarray:
    return values.detach().to("cpu", torch.float64).numpy()


def _packed(weight: ndarray, bias: ndarray) -> tuple[ndarray, ndarray]:
    return np.ascontiguousarray(weight, dtype=np.float32), bias.astype(np.float32)


def _natural(raw: Sequence[float]) -> list[float]:
    """`natural` for one row."""
    signals = [0.5 + 0.5 * math.tanh(value / 2) for value in raw]
    signals[REMAINING] = math.expm1(min(max(raw[REMAINING], 0.0), MAX_LOG_REMAINING))
    return signals
