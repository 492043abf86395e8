"""`python -m ace_learn.reasoner train|evaluate [RECIPE.yaml]`: makes or measures the embedded reasoner."""

import sys
from collections.abc import Sequence

from ace_learn.cli.common import USER_ERROR, run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one of the two commands."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command == "train":
        _train(rest)
    elif command == "evaluate":
        _evaluate(rest)
    else:
        print("usage: python -m ace_learn.reasoner {train,evaluate} [RECIPE.yaml] [--help]", file=sys.stderr)
        sys.exit(0 if command in ("-h", "--help") else USER_ERROR)


def _train(argv: Sequence[str]) -> None:
    from ace_learn.reasoner.config import ReasonerTrainingConfig
    from ace_learn.reasoner.training import train_reasoner

    run_command(
        ReasonerTrainingConfig,
        train_reasoner,
        description="Train the embedded reasoner on generated traces, or go on with a run that was cut short.",
        argv=argv,
    )


def _evaluate(argv: Sequence[str]) -> None:
    from ace_learn.evaluate.reasoner import ReasonerEvaluation, evaluate_reasoner

    run_command(
        ReasonerEvaluation,
        evaluate_reasoner,
        description="Accuracy, first-paragraph accuracy, repairs and minimal reasoning of the embedded reasoner.",
        resumes=False,
        argv=argv,
    )
