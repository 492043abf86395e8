"""`python -m ace_learn.train RECIPE.yaml`: features to a signal head."""

from collections.abc import Sequence

from ace_learn.cli.common import run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command with the given arguments, or those of the process."""
    from ace_learn.heads.config import TrainConfig
    from ace_learn.heads.train import train_head

    def train(config: TrainConfig) -> None:
        report = train_head(config)
        kept = report.history[report.best_epoch]["validation"]
        print(
            f"{config.output}: a head from {report.rows[0]:,} rows; epoch {report.best_epoch + 1} of "
            f"{len(report.history)} is kept, validation loss {kept:.4f}"
        )

    run_command(
        TrainConfig,
        train,
        description="Train a signal head on a data set that `build` has made, and export it.",
        argv=argv,
    )
