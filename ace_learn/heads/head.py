"""Signal heads: small modules that turn feature rows into signals. This is the class that is shipped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ace_learn.artifacts import JSON, JsonFields
from ace_learn.signals import LEARNED

Architecture: TypeAlias = Literal["linear", "mlp", "ensemble"]

REMAINING = LEARNED.index("remaining")

#: Bound on log1p(remaining tokens), about 5e8 tokens, so that no row can give infinity.
MAX_LOG_REMAINING = 20.0


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The architecture of a signal head."""

    arch: Architecture = "ensemble"
    """`linear`: one layer; `mlp`: one hidden layer; `ensemble`: the mean of several MLPs, as one batched module."""
    width: int = 64
    """Units of the hidden layer of an MLP."""
    members: int = 3
    """MLPs in an ensemble."""
    dropout: float = 0.0
    """Dropout on the hidden layer while training."""

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: A value is out of range, or is not read by this architecture.
        """
        if self.width < 1 or self.members < 1 or not 0 <= self.dropout < 1:
            raise ValueError(
                "a head needs width >= 1, members >= 1 and 0 <= dropout < 1; "
                f"got width={self.width}, members={self.members}, dropout={self.dropout}"
            )

        unread = {"linear": ("width", "members", "dropout"), "mlp": ("members",), "ensemble": ()}[self.arch]
        set_anyway = [name for name in unread if getattr(self, name) != getattr(type(self), name)]
        if set_anyway:
            raise ValueError(f"a head of arch {self.arch} does not read {', '.join(set_anyway)}; leave them out")

    def num_values(self, feature_size: int) -> int:
        """How many numbers a head of this kind is made of, its normalisation included."""
        outputs = len(LEARNED)
        if self.arch == "linear":
            return 2 * feature_size + (feature_size + 1) * outputs
        members = self.members if self.arch == "ensemble" else 1
        return 2 * feature_size + members * ((feature_size + 1) * self.width + (self.width + 1) * outputs)

    def to_json(self) -> dict[str, JSON]:
        """The config as a JSON object."""
        return {"arch": self.arch, "width": self.width, "members": self.members, "dropout": self.dropout}

    @classmethod
    def from_json(cls, value: JSON, *, where: str = "head config") -> HeadConfig:
        """Reads a config.

        Args:
            value: What `to_json` gave.
            where: What to call it in messages.

        Raises:
            ValueError: A field is missing or wrong.
        """
        fields = JsonFields.of(value, where=where)
        found = fields.text("arch")
        known = [arch for arch in get_args(Architecture) if arch == found]
        if not known:
            raise ValueError(f"{where}: arch is {found!r}, not one of {', '.join(get_args(Architecture))}")
        return cls(
            arch=known[0],
            width=fields.integer("width"),
            members=fields.integer("members"),
            dropout=fields.number("dropout"),
        )


class SignalHead(nn.Module):
    """Signals from feature rows; normalisation included, so that it takes features as the engines have them.

    The M members share every matrix multiplication (a linear head and a single MLP have M = 1). They are averaged in
    training space, that is before the sigmoids and the exponential.

    Attributes:
        config: The architecture.
        feature_size: F.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: HeadConfig, feature_size: int) -> None:
        """Makes a head with fresh weights from torch's global generator; mean 0 and standard deviation 1.

        Args:
            config: The architecture.
            feature_size: F, the size of the spec that it will read.
        """
        super().__init__()
        self.config = config
        self.feature_size = feature_size
        self.register_buffer("mean", torch.zeros(feature_size))
        self.register_buffer("std", torch.ones(feature_size))
        members = config.members if config.arch == "ensemble" else 1
        sizes = [feature_size, len(LEARNED)] if config.arch == "linear" else [feature_size, config.width, len(LEARNED)]
        self.layers = nn.ModuleList(MemberLinear(members, inputs, outputs) for inputs, outputs in pairwise(sizes))
        self.dropout = nn.Dropout(config.dropout)

    @property
    def num_members(self) -> int:
        """M."""
        return self.config.members if self.config.arch == "ensemble" else 1

    def set_normalisation(self, mean: Float[Tensor, " F"], std: Float[Tensor, " F"]) -> None:
        """Sets what is subtracted from and divided into every feature; constant features (std 0) are only shifted."""
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std > 0, std, torch.ones_like(std)))

    @property
    def member_layers(self) -> list[MemberLinear]:
        """The layers, first to last."""
        return [layer for layer in self.layers if isinstance(layer, MemberLinear)]

    def shared_parameters(self) -> list[nn.Parameter]:
        """What all signals share: every layer but the last, the member as the first axis; none in a linear head."""
        return [parameter for layer in list(self.layers)[:-1] for parameter in layer.parameters()]

    def members_raw(self, features: Float[Tensor, "*rows F"]) -> Float[Tensor, "M *rows S"]:
        """Each member's outputs in training space: logit, logit, log1p tokens, logit."""
        rows = features.shape[:-1]
        hidden = ((features.reshape(-1, self.feature_size).float() - self.mean) / self.std).expand(
            self.num_members, -1, -1
        )
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden if index == 0 else self.dropout(nn.functional.gelu(hidden)))
        return hidden.unflatten(1, rows) if rows else hidden.squeeze(1)

    def raw(self, features: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows S"]:
        """Outputs in training space, averaged over the members, columns `LEARNED`."""
        return self.members_raw(features).mean(0)

    def forward(self, features: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows S"]:
        """Signals in natural units, float32.

        Args:
            features: Feature rows in any float dtype, columns as the spec orders them.

        Returns:
            Columns `LEARNED`: confidence (probability), progress (0 to 1), remaining (tokens, >= 0), consistency
            (probability).
        """
        return natural(self.raw(features))


class MemberLinear(nn.Module):
    """M linear layers side by side.

    Attributes:
        weight: [M, I, O].
        bias: [M, O].
    """

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        """Fresh weights from torch's global generator."""
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, outputs).uniform_(-bound, bound))

    def forward(self, rows: Float[Tensor, "M n I"]) -> Float[Tensor, "M n O"]:
        """Each member's outputs for its own rows."""
        return torch.bmm(rows, self.weight) + self.bias.unsqueeze(1)


def natural(raw: Float[Tensor, "*rows S"]) -> Float[Tensor, "*rows S"]:
    """Training space to natural units: sigmoids, and expm1 of the bounded log for `remaining`."""
    signals = raw.float().sigmoid()
    tokens = raw[..., REMAINING].float().clamp(0, MAX_LOG_REMAINING).expm1()
    return torch.cat(
        [signals[..., :REMAINING], tokens.unsqueeze(-1), signals[..., REMAINING + 1 :]],
        dim=-1,
    )
