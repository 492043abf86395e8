"""The course of a training run: one entry per finished epoch, in the checkpoints and in metrics.json."""

from __future__ import annotations

from typing import TypedDict

from ace_learn.artifacts import JSON, JsonFields


class EpochLosses(TypedDict):
    """What an epoch gave; the tables have one entry per signal.

    Attributes:
        train: The training objective, with the weights of each step: mean over the epoch's steps.
        validation: The objective of the averaged members on the validation split after the epoch, with the fixed
            weights of `losses` whatever the weighting is.
        train_losses: The loss of each signal before it is weighted, mean over members and steps.
        validation_losses: The loss of each signal on the validation split.
        weights: The weight of each signal in the training objective, mean over members and steps.
        gradient_norms: The norm of each signal's gradient on the shared layer, mean over members and steps; empty
            where the weights are fixed.
    """

    train: float
    validation: float
    train_losses: dict[str, float]
    validation_losses: dict[str, float]
    weights: dict[str, float]
    gradient_norms: dict[str, float]


def epoch_to_json(epoch: EpochLosses) -> dict[str, JSON]:
    """An epoch as a JSON object."""
    return {
        "train": epoch["train"],
        "validation": epoch["validation"],
        "train_losses": {**epoch["train_losses"]},
        "validation_losses": {**epoch["validation_losses"]},
        "weights": {**epoch["weights"]},
        "gradient_norms": {**epoch["gradient_norms"]},
    }


def epoch_from_json(value: JSON, *, where: str) -> EpochLosses:
    """Reads an epoch; runs of ace_learn 0.1 have no tables, which are then empty.

    Raises:
        ValueError: A field is missing or wrong.
    """
    fields = JsonFields.of(value, where=where)
    return EpochLosses(
        train=fields.number("train"),
        validation=fields.number("validation"),
        train_losses=_table(fields, "train_losses"),
        validation_losses=_table(fields, "validation_losses"),
        weights=_table(fields, "weights"),
        gradient_norms=_table(fields, "gradient_norms"),
    )


def _table(fields: JsonFields, name: str) -> dict[str, float]:
    if name not in fields.data:
        return {}
    table = fields.fields(name)
    return {signal: table.number(signal) for signal in table.data}
