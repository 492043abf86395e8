"""How a broken law is reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

_SHOWN = 400
"""Longest value in a message, in characters."""


class LawError(AssertionError):
    """A law that does not hold.

    Attributes:
        law: Its name.
    """

    def __init__(self, law: str, *, given: object, expected: object, got: object) -> None:
        """Names the law, what was given, and both values."""
        super().__init__(f"{law}: given {_shown(given)}: expected {_shown(expected)}, got {_shown(got)}")
        self.law = law


def same(law: str, got: object, expected: object, *, given: object) -> None:
    """Asks for equal values.

    Raises:
        LawError: They differ.
    """
    if got != expected:
        raise LawError(law, given=given, expected=expected, got=got)


def holds(law: str, fact: bool, *, given: object, expected: str, got: object) -> None:
    """Asks for a fact.

    Raises:
        LawError: It is none.
    """
    if not fact:
        raise LawError(law, given=given, expected=Words(expected), got=got)


class RaisesNothing:
    """A block that must raise nothing; an error is turned into a broken law, a broken law stays as it is."""

    def __init__(self, law: str, *, given: object) -> None:
        """Names the law, and what the block is given."""
        self._law = law
        self._given = given

    def __enter__(self) -> None:
        """Begins the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the block.

        Raises:
            LawError: It has raised something else.
        """
        if isinstance(error, Exception) and not isinstance(error, LawError):
            raise LawError(self._law, given=self._given, expected=Words("no error"), got=error) from error


@contextmanager
def refuses(law: str, *, given: object) -> Iterator[None]:
    """Asks the block for a ValueError.

    Raises:
        LawError: The block has come to its end.
    """
    try:
        yield
    except ValueError:
        return
    raise LawError(law, given=given, expected=Words("a ValueError"), got=Words("no error"))


class Words(str):
    """Text that stands in a message as it is, not as a value."""

    __slots__ = ()


def _shown(value: object) -> str:
    text = str(value) if isinstance(value, Words) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
