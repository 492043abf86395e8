"""What the layouts of draft modules have in common."""

from __future__ import annotations

from torch import Tensor, nn

from ace_learn.artifacts import JSON, JsonFields
from ace_learn.models.draft_module import SIGNAL_LAYER
from ace_learn.models.target import Target

SIGNAL_ROWS = f"{SIGNAL_LAYER}.weight"
"""Name of the extra rows of the output projection that give signals."""

OWN = "ace_learn"
"""Where our own fields stand in `config.json`."""


def shared_embeddings(target: Target) -> Tensor:
    """The target's embeddings, [V H]."""
    embedding = target.model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding), "the target has no embeddings"
    return embedding.weight.detach()


def signals_of(fields: JsonFields) -> tuple[str, ...]:
    """The signals that a draft's config names."""
    return fields.fields(OWN).texts("signals") if OWN in fields.data else ()


def refuse(fields: JsonFields, plain: dict[str, JSON]) -> None:
    """Refuses settings that change the arithmetic in a way that is not supported.

    Raises:
        ValueError: A setting is there, and is another than the one given.
    """
    for name, value in plain.items():
        found = fields.data.get(name)
        if found is not None and found != value:
            raise ValueError(f"{fields.where}: {name} is {found!r}; a draft is supported with {value!r} alone")
