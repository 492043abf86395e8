"""What a signal is: a number per token of the thinking that an exit policy may read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from ace_learn.signals._columns import COLUMNS

ScoreTransform: TypeAlias = Literal["identity", "log1p"]


@dataclass(frozen=True, kw_only=True)
class Signal:
    """A signal and how policies read it."""

    name: str
    """What policies, recipes and reports call it."""
    description: str
    """One phrase, with the unit."""
    falls: bool = False
    """Low values speak for an exit: a threshold holds *below* its bound."""
    score_transform: ScoreTransform = "identity"
    """How the value enters a score model; `log1p` is log(1 + value), for counts."""

    def __post_init__(self) -> None:
        """Refuses what no policy could read.

        Raises:
            ValueError: The name is no lower-case identifier, there is no description, or the transform is unknown.
        """
        if not self.name.isidentifier() or self.name != self.name.lower():
            raise ValueError(f"a signal is named by a lower-case identifier such as 'entropy', not {self.name!r}")
        if not self.description:
            raise ValueError(f"signal {self.name!r} has no description; say in one phrase what it is")
        if self.score_transform not in get_args(ScoreTransform):
            known = ", ".join(get_args(ScoreTransform))
            raise ValueError(f"signal {self.name!r} has score_transform {self.score_transform!r}; known: {known}")

    def scored(self, values: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
        """The values as a score model reads them."""
        return values.log1p() if self.score_transform == "log1p" else values


@dataclass(frozen=True, kw_only=True)
class DerivedSignal(Signal):
    """A signal computed from the running columns of the prefix, without a head and without training."""

    reads: tuple[str, ...]
    """Names of the columns (those of `COLUMNS`) that `compute` gets, in this order."""
    compute: Callable[[Float[Tensor, "*rows C"]], Float[Tensor, "*rows"]] | None = None
    """Columns [*rows, C] to values [*rows]; elementwise over the rows, since rows are looked at in any grouping. None:
    the one column that it reads, as it is."""

    def __post_init__(self) -> None:
        """Refuses columns that do not exist.

        Raises:
            ValueError: As `Signal`, it reads no, unknown or repeated columns, or several without `compute`.
        """
        super().__post_init__()
        known = [column for columns in COLUMNS.values() for column in columns]
        if not self.reads or len(set(self.reads)) != len(self.reads) or not set(self.reads).issubset(known):
            raise ValueError(
                f"signal {self.name!r} must read one or more of the columns {', '.join(known)}, each once; "
                f"it reads {', '.join(self.reads) or 'none'}"
            )
        if self.compute is None and len(self.reads) > 1:
            raise ValueError(
                f"signal {self.name!r} reads {len(self.reads)} columns; give it a compute that makes one value of them"
            )

    @property
    def sources(self) -> tuple[str, ...]:
        """The feature sources that hold the columns it reads."""
        return tuple(source for source, columns in COLUMNS.items() if not set(columns).isdisjoint(self.reads))

    def values(self, features: Mapping[str, Float[Tensor, "*rows _"]]) -> Float[Tensor, "*rows"]:
        """The signal of every row.

        Args:
            features: Source -> its columns; all of `sources` must be there.

        Raises:
            ValueError: `compute` does not give one float per row.
        """
        places = {column: (source, index) for source in self.sources for index, column in enumerate(COLUMNS[source])}
        columns = [features[source][..., index] for source, index in map(places.__getitem__, self.reads)]
        if self.compute is None:
            return columns[0].float()
        inputs = torch.stack(columns, dim=-1).float()
        values = self.compute(inputs)
        if values.shape != inputs.shape[:-1] or not values.is_floating_point():
            raise ValueError(
                f"signal {self.name!r}: compute must turn columns {list(inputs.shape)} into floats "
                f"{list(inputs.shape[:-1])}, one per row; it gave {values.dtype} {list(values.shape)}"
            )
        return values
