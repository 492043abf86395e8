"""`python -m ace_learn.stream RECIPE.yaml --base-url URL`: contract exits on any OpenAI-compatible server."""

from collections.abc import Sequence

from ace_learn.cli.common import run_command
from ace_learn.evaluate.served import StreamConfig, stream


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command with the given arguments, or those of the process."""
    run_command(
        StreamConfig,
        stream,
        description="Send a task's problems to a server, ending each where its answer is complete, and without that.",
        argv=argv,
        resumes=False,
    )
