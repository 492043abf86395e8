"""Which features a head reads, in which order, and how wide they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ace_learn.artifacts import JSON, JsonFields
from ace_learn.signals import COLUMNS
from ace_learn.speculation.drafters import DraftStates

Source: TypeAlias = Literal["target_last", "target_aux", "scalars", "candidates", "draft", "acceptance"]

#: Every source, in the order in which their columns stand side by side in a feature row.
SOURCES: tuple[Source, ...] = get_args(Source)

#: What data sets hold and heads read unless told otherwise.
DEFAULT_SOURCES: tuple[Source, ...] = ("target_last", "target_aux", "scalars")


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """What one feature row [F] is made of.

    Attributes:
        sources: `target_last` (final hidden state), `target_aux` (hidden states of `aux_layers`, concatenated),
            `scalars` (running scalars of the prefix), `candidates` (answers that the thinking has stated), `draft`
            (the drafter's hidden state over verified tokens) and `acceptance` (how sure the drafter is there); given in
            any order, kept in the order of `SOURCES`.
        hidden_size: H of the target.
        aux_layers: The target layers behind `target_aux`, in their order of concatenation.
        draft: What is behind `draft` and `acceptance`: which drafter, and how many positions late.
    """

    sources: tuple[Source, ...]
    hidden_size: int
    aux_layers: tuple[int, ...]
    draft: DraftStates | None = None

    def __post_init__(self) -> None:
        """Checks the sources and puts them into their order.

        Raises:
            ValueError: A source is unknown or repeated, there is none, or a needed size is missing.
        """
        sources = _checked(self.sources)
        if self.hidden_size < 1:
            raise ValueError(f"the hidden size must be at least 1; got {self.hidden_size}")
        if "target_aux" in self.sources and not self.aux_layers:
            raise ValueError("the feature source target_aux needs aux_layers; name at least one layer or leave it out")
        if needs_drafter(self.sources) != (self.draft is not None):
            raise ValueError(
                "the feature sources draft and acceptance and the drafter behind them go together; name both or neither"
            )
        object.__setattr__(self, "sources", sources)

    @property
    def size(self) -> int:
        """F, the number of columns of a feature row."""
        return sum(self.width(source) for source in self.sources)

    def width(self, source: Source) -> int:
        """The number of columns of one source, whether the spec holds it or not."""
        if source == "target_last":
            return self.hidden_size
        if source == "target_aux":
            return self.hidden_size * len(self.aux_layers)
        if source == "draft":
            return 0 if self.draft is None else self.draft.size
        return len(COLUMNS[source])

    def subset(self, sources: Sequence[Source]) -> FeatureSpec:
        """The spec of some of the sources.

        Raises:
            ValueError: A source is not in this spec.
        """
        missing = [source for source in sources if source not in self.sources]
        if missing:
            raise ValueError(
                f"the features hold {', '.join(self.sources)} but not {', '.join(missing)}; "
                "choose among the former, or build the data set again with the latter"
            )
        return FeatureSpec(
            sources=tuple(sources),
            hidden_size=self.hidden_size,
            aux_layers=self.aux_layers,
            draft=self.draft if needs_drafter(sources) else None,
        )

    def to_json(self) -> dict[str, JSON]:
        """The spec as a JSON object."""
        data: dict[str, JSON] = {
            "sources": list(self.sources),
            "hidden_size": self.hidden_size,
            "aux_layers": list(self.aux_layers),
        }
        return data if self.draft is None else data | {"draft": self.draft.to_json()}

    @classmethod
    def from_json(cls, value: JSON, *, where: str = "feature spec") -> FeatureSpec:
        """Reads a spec.

        Args:
            value: What `to_json` gave.
            where: What to call it in messages.

        Raises:
            ValueError: A field is missing or wrong.
        """
        fields = JsonFields.of(value, where=where)
        return cls(
            sources=_checked(fields.texts("sources")),
            hidden_size=fields.integer("hidden_size"),
            aux_layers=fields.integers("aux_layers"),
            draft=DraftStates.from_json(fields.fields("draft")) if "draft" in fields.data else None,
        )


def needs_drafter(sources: Sequence[Source]) -> bool:
    """Whether some of the sources come from a drafter's hidden states."""
    return "draft" in sources or "acceptance" in sources


def _checked(names: Sequence[str]) -> tuple[Source, ...]:
    """The sources of these names, in the order of `SOURCES`."""
    if not names or len(set(names)) != len(names) or not set(names).issubset(SOURCES):
        raise ValueError(
            f"feature sources must be one or more of {', '.join(SOURCES)}, each once; got {', '.join(names) or 'none'}"
        )
    return tuple(source for source in SOURCES if source in names)
