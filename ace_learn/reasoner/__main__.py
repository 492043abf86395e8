"""`python -m ace_learn.reasoner train --config training/reasoner.yaml`."""

from jsonargparse import auto_cli

from ace_learn.reasoner.config import ReasonerTrainingConfig
from ace_learn.reasoner.training import train_reasoner


def train(config: ReasonerTrainingConfig) -> None:
    """Train the embedded reasoner, or go on with a run that was cut short, and export its weights.

    Args:
        config: The training run.
    """
    print(train_reasoner(config))


if __name__ == "__main__":
    auto_cli({"train": train})
