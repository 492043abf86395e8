"""Who looks on while the target runs."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor


@runtime_checkable
class Observer(Protocol):
    """Sees the tapped hidden states of the rows that the target runs."""

    def observe(
        self,
        positions: Int[Tensor, "B Q"],
        hidden: Float[Tensor, "B Q A"],
        *,
        longest: int,
        first_slot: int = 0,
    ) -> None:
        """Takes the states of some rows.

        Args:
            positions: Sequence positions; what stands behind a row's sequence is padding, or a draft that may fail,
                and is given again, by position, before it counts.
            hidden: The tapped layers, concatenated.
            longest: One more than the largest position.
            first_slot: Slot of the first row.
        """
        ...
