"""`python -m ace_learn.calibrate RECIPE.yaml`: a head and labels to an exit policy with its certificate."""

from collections.abc import Sequence

from ace_learn.cli.common import run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command with the given arguments, or those of the process."""
    from ace_learn.evaluate.calibrate import CalibrateConfig, run_calibration

    run_command(
        CalibrateConfig,
        run_calibration,
        description="Choose the exit policy of a head on the calibration split, and certify what it may cost.",
        argv=argv,
    )
