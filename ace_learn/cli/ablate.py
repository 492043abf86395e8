"""`python -m ace_learn.ablate RECIPE.yaml`: every variant of heads and policies on the same probes, in one report."""

from collections.abc import Sequence

from ace_learn.cli.common import run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command with the given arguments, or those of the process."""
    from ace_learn.evaluate.ablation.config import AblateConfig
    from ace_learn.evaluate.ablation.run import run_ablation

    run_command(
        AblateConfig,
        run_ablation,
        description="Compare heads and exit policies at the same certified risk on stored probes, and report.",
        argv=argv,
    )
