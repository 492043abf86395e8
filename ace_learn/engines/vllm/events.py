"""What the exit hook is asked by a request, and what it tells the host about a step."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from ace_learn.exit.policy import ExitPolicy


class ExitEvent(NamedTuple):
    """A row at which the exit rule fired.

    It counts only where its row was kept: where `row` is less than the number of tokens that the step sampled for the
    request, since then the row's input token stands in the output.
    """

    request_id: str
    row: int
    """Which of the request's rows in the step, from 0."""
    position: int
    """Of the row's input token, the boundary, in prompt and output together."""
    tokens_thought: int
    paragraphs: int
    signals: tuple[float, ...]
    """Smoothed, in the order of `SIGNALS`; NaN where one is not computed."""
    forced: bool
    """Whether the think end was forced there; False in shadow mode."""


class StepReport(NamedTuple):
    """What a step gave; it rides on the runner's output as attribute `ace_learn`."""

    exits: list[ExitEvent]
    blocked: list[tuple[str, int]]
    """Requests and rows at which the grammar forbade the think end; a row counts as `ExitEvent.row` does."""
    failures: list[tuple[str, str]]
    """Requests whose exits were given up, and what happened; they go on as stock."""
    off: bool
    """Whether the hook is off for the process, after too many failures."""


@runtime_checkable
class ExitOptions(Protocol):
    """What the hook reads of a request's options."""

    @property
    def exits(self) -> bool:
        """Whether the rule runs."""
        ...

    @property
    def shadow(self) -> bool:
        """Whether it only records."""
        ...

    @property
    def policy(self) -> ExitPolicy | None:
        """With which bounds; of the same family as the server's policy."""
        ...
