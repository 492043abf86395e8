"""Public data sets: where one lies, which columns it has, and how a row becomes a problem.

Each module of `ace_learn.tasks.sets` describes one, as `DATA_SET`; its name is the task's.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from datasets import Dataset

from ace_learn.contracts import JSON, Choice, Contract, Integer
from ace_learn.tasks import sets
from ace_learn.tasks.base import Example, read_gold, sample, user_message, with_instruction

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""What the options of a multiple-choice question are called."""
_AIME = Integer(minimum=0, maximum=999)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a data set, whose columns are read with the type that is expected there."""

    columns: dict[str, JSON]
    """Values by name."""
    where: str
    """The data set and the row's number, for messages."""

    def text(self, column: str) -> str:
        """A text that is not blank.

        Raises:
            ValueError: The column holds something else.
        """
        value = self.columns[column]
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(column, "a text")
        return value

    def integer(self, column: str) -> int:
        """An integer, as a number or in digits.

        Raises:
            ValueError: The column holds something else.
        """
        value = self.columns[column]
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and value.strip().removeprefix("-").isdecimal():
            return int(value)
        raise self.wrong(column, "an integer")

    def texts(self, column: str) -> list[str]:
        """A list of texts.

        Raises:
            ValueError: The column holds something else.
        """
        return self.checked_texts(column, self.columns[column])

    def checked_texts(self, column: str, value: JSON) -> list[str]:
        """A list of texts that is, or stands in, a column's value.

        Raises:
            ValueError: It is something else.
        """
        texts = [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
        if not isinstance(value, list) or not texts or len(texts) != len(value):
            raise self.wrong(column, "a list of texts")
        return texts

    def wrong(self, column: str, expected: str) -> ValueError:
        """The error that says what the column should hold."""
        return ValueError(
            f"{self.where}: column {column!r} holds {repr(self.columns[column])[:200]}, but it should hold {expected}; "
            "fix the copy, or fetch the data set again"
        )


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A public data set."""

    hub: str
    """Its name on the Hugging Face hub."""
    subset: str | None = None
    """The subset that is meant; None: the default one."""
    split: str
    """The split that is read unless the recipe names another."""
    columns: tuple[str, ...]
    """The columns that `example` reads."""
    example: Callable[[Row], Example]
    """A row as a problem, without the contract's instruction. A pure function: the same row, the same problem."""
    gated: bool = False
    """The hub asks for its terms to be accepted."""
    executes_code: bool = False
    """Its verifier runs what the model wrote; the recipe must allow it."""


class DataSetTask:
    """The rows of a public data set."""

    def __init__(self, name: str, data_set: DataSet, rows: Dataset, *, instruct: bool) -> None:
        """Looks at the columns; the rows are read by `examples`.

        Args:
            name: The task's name.
            data_set: Its description.
            rows: Its rows, from the hub or from a copy.
            instruct: End each prompt with the contract's own instruction.

        Raises:
            ValueError: There is no row, or a column is missing.
        """
        if not len(rows):
            raise ValueError(f"{name} is empty; choose another split with --task.split")
        missing = [column for column in data_set.columns if column not in rows.column_names]
        if missing:
            raise ValueError(
                f"{name} has no column {', '.join(map(repr, missing))}; it has {', '.join(rows.column_names)}. Give a "
                f"copy of {data_set.hub} with --task.path, or read other columns with the task `table` or `hub`"
            )
        self.name = name
        self._data_set = data_set
        self._rows = rows
        self._instruct = instruct

    def examples(self, count: int, seed: int) -> Iterator[Example]:
        """Yields `count` distinct rows in a random order, after a look at all of them; see `Task`."""
        return sample(map(self._example, range(len(self._rows))), count, seed, source=self.name)

    def _example(self, index: int) -> Example:
        example = self._data_set.example(Row(columns=self._rows[index], where=f"{self.name}, row {index + 1}"))
        if not self._instruct:
            return example
        return Example(
            family=example.family,
            messages=with_instruction(example.messages, example.contract),
            contract=example.contract,
            gold=example.gold,
            verifier=example.verifier,
        )


def find_data_set(name: str) -> DataSet:
    """The data set of a name among `ace_learn.tasks.sets.data_set_names`.

    Raises:
        TypeError: Its module has no `DATA_SET`.
    """
    found = vars(importlib.import_module(f"{sets.__name__}.{name}")).get("DATA_SET")
    if not isinstance(found, DataSet):
        raise TypeError(f"{sets.__name__}.{name} must define DATA_SET, a DataSet")
    return found


def answer_example(row: Row, *, question: str, contract: Contract, gold: JSON, family: str) -> Example:
    """A question whose right answer is compared under the contract's equality.

    Raises:
        ValueError: The gold answer is no legal answer of the contract.
    """
    return Example(
        family=family,
        messages=user_message(question),
        contract=contract,
        gold=read_gold(contract, gold, where=row.where),
    )


def aime_example(row: Row, *, family: str) -> Example:
    """A problem of the AIME; its answer may have leading zeros.

    Raises:
        ValueError: The answer is no integer from 0 to 999.
    """
    gold = str(row.integer("answer"))
    return answer_example(row, question=row.text("problem"), contract=_AIME, gold=gold, family=family)


def choice_example(row: Row, *, question: str, options: Sequence[str], right: int, family: str) -> Example:
    """A multiple-choice question; the options are called A, B, C, ...

    Args:
        row: The row, for messages.
        question: The question.
        options: The options' texts, 2 to 26 of them.
        right: Position of the right one.
        family: Kind of problem.

    Raises:
        ValueError: There are too few or too many options, or the right one is not among them.
    """
    if not 2 <= len(options) <= len(LETTERS) or not 0 <= right < len(options):
        raise ValueError(f"{row.where}: option {right} of {len(options)} cannot be the right one; fix the copy")
    lines = "\n".join(f"{letter}) {option.strip()}" for letter, option in zip(LETTERS, options, strict=False))
    return answer_example(
        row,
        question=f"{question.strip()}\n\n{lines}",
        contract=choice_contract(len(options)),
        gold=LETTERS[right],
        family=family,
    )


@cache
def choice_contract(count: int) -> Contract:
    """The contract of `count` options."""
    return Choice(options=tuple(LETTERS[:count]))
