"""`python -m ace_learn.estimate RECIPE.yaml`: memory and time of a build recipe, before it is run."""

from collections.abc import Sequence

from ace_learn.cli.common import run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command with the given arguments, or those of the process."""
    from ace_learn.labels.estimate import EstimateConfig, print_estimate

    run_command(
        EstimateConfig,
        print_estimate,
        description="Estimate the memory and the time of a build recipe, from the model's config.json alone.",
        resumes=False,
        argv=argv,
    )
