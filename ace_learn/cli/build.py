"""`python -m ace_learn.build RECIPE.yaml`: prompts to traces, probes, labels and features."""

from collections.abc import Sequence

from ace_learn.cli.common import run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command with the given arguments, or those of the process."""
    from ace_learn.labels.build import BuildConfig, build_dataset

    run_command(
        BuildConfig,
        build_dataset,
        description="Let a model solve problems, probe its answer at every paragraph end, write labels and features.",
        argv=argv,
    )
