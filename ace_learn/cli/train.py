"""`python -m ace_learn.train RECIPE.yaml`: a data set to a signal head, or to a draft module; `kind` says which."""

import sys
from collections.abc import Sequence

from ace_learn.cli.common import read_choice, run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command with the given arguments, or those of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if read_choice(arguments, "kind", default="head") in ("eagle3", "mtp"):
        _train_draft(arguments)
    else:
        _train_head(arguments)


def _train_head(argv: Sequence[str]) -> None:
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
        description="Train a signal head on a data set that `build` has made, and export it. For the options of draft "
        "modules: --kind eagle3 --help, or --kind mtp --help.",
        argv=argv,
    )


def _train_draft(argv: Sequence[str]) -> None:
    from ace_learn.drafts.config import DraftTrainConfig
    from ace_learn.drafts.train import train_draft

    def train(config: DraftTrainConfig) -> None:
        report = train_draft(config)
        print(f"{config.output}: {config.kind} draft; " + "\n".join(report.lines()))

    run_command(
        DraftTrainConfig,
        train,
        description="Train a draft module, and signals with it, on the traces of a data set that `build` has made.",
        argv=argv,
    )
