"""`python -m ace_learn.serve RECIPE.yaml`: a vLLM server with learned exits and contracts."""

from collections.abc import Sequence

from ace_learn.cli.common import run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command with the given arguments, or those of the process."""
    from ace_learn.engines.vllm.command import ServeConfig, serve

    run_command(
        ServeConfig,
        serve,
        description="Check a head against its target, print the `vllm serve` command of a recipe, and run it.",
        argv=argv,
        resumes=False,
    )
