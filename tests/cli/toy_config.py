"""A config with one field of each kind that recipes use."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ace_learn.tasks import JsonObject


@dataclass(frozen=True, kw_only=True)
class ToyHead:
    """The part with a choice."""

    arch: Literal["linear", "mlp"] = "mlp"
    """Kind of head."""
    width: int = 64
    """Hidden units."""

    def __post_init__(self):
        if self.width < 1:
            raise ValueError("width must be positive")


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    """A toy."""

    model: Path
    """Folder of the model."""
    head: ToyHead = field(default_factory=ToyHead)
    """The head."""
    spare: ToyHead | None = None
    """Another head."""
    splits: dict[str, int] = field(default_factory=lambda: {"train": 1})
    """Problems per split."""
    names: tuple[str, ...] = ("a",)
    """Names."""
    contract: JsonObject | None = None
    """What counts as an answer."""
    bounds: tuple[int, int] | None = (0, 9)
    """Smallest and largest."""
    rate: float = 1e-3
    """Learning rate."""
    label: str = "x"
    """A text."""
