"""What the hook asks of the exit rule, wherever it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from jaxtyping import Bool, Int
from torch import Tensor

from ace_learn.engines.vllm.reports import Findings, Followed
from ace_learn.engines.vllm.rows import RowTensors, StepRows
from ace_learn.exit.policy import ExitPolicy

BROKEN = "a signal that the exit policy reads is NaN"


class ThinkingRows(NamedTuple):
    """Where a step's rows stand."""

    thinking: Bool[Tensor, " R"]
    """Rows whose next token is thought."""
    open: Bool[Tensor, " R"] | None
    """Those of `thinking` whose request may be forced; None where none may."""


Pick: TypeAlias = tuple[int, Followed]
"""A request of a step that is followed, with its place in the step."""


class Failure(NamedTuple):
    """Requests that the rule could not be applied to: one failure, be it one request's or that of several."""

    requests: Sequence[Followed]
    what: str
    error: Exception | None = None

    @classmethod
    def of(cls, requests: Sequence[Followed], error: Exception) -> Failure:
        """What an exception says."""
        return cls(requests, f"{type(error).__name__}: {error}", error)


class Ruling(NamedTuple):
    """What the rule says of a step."""

    forced: Int[Tensor, " R"] | None = None
    """Token that must follow each row, or -1; None where no row can be forced."""
    rows: ThinkingRows | None = None
    """None where no request was followed."""
    read: Callable[[], Findings] | None = None
    """What came of the step, once its copies to the host are done; None: nothing."""
    failures: Sequence[Failure] = ()


@runtime_checkable
class Rule(Protocol):
    """The exit rule over the requests of a runner."""

    @property
    def full(self) -> bool:
        """Whether there is no room for one more request."""
        ...

    @property
    def num_taken(self) -> int:
        """Slots in use."""
        ...

    def admit(
        self, request_id: str, prompt_length: int, policy: ExitPolicy, *, forces: bool, in_think: bool
    ) -> Followed:
        """Follows a request.

        Raises:
            ValueError: The policy is of another family than the server's.
        """
        ...

    def drop(self, followed: Followed) -> None:
        """Forgets a request."""
        ...

    def count_failure(self) -> None:
        """Counts a failure that the host has seen."""
        ...

    def warm_up(self, rows: RowTensors) -> None:
        """Compiles what is to be compiled, on two rows like all to come."""
        ...

    def apply(self, rows: StepRows, picks: Sequence[Pick]) -> Ruling:
        """Applies the rule to the picked requests of a step. Whatever it raises is the failure of all of them."""
        ...
