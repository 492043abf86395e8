"""A user's own data: a file (jsonl, json, parquet, csv), or a data set of the Hugging Face hub."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from datasets import Dataset

from ace_learn.contracts import JSON, Contract
from ace_learn.tasks.base import Example, Message, read_gold, sample, user_message, with_instruction

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which column holds what; None where no column does."""

    prompt: str | None
    """Text of a single user turn."""
    messages: str | None
    """Whole chats, as lists of {role, content}; beats `prompt`."""
    gold: str | None
    """Right answers; a null is one that is not known."""
    contract: str | None
    """Contract specs, as objects or as JSON text."""
    family: str | None
    """Kinds of problem."""

    def named(self) -> list[str]:
        """The columns that the data set must have."""
        chat = self.prompt if self.messages is None else self.messages
        return [name for name in (chat, self.gold, self.contract, self.family) if name is not None]


class TableTask:
    """The rows of a table."""

    def __init__(
        self, rows: Dataset, columns: Columns, *, source: str, contract: Contract | None, instruct: bool
    ) -> None:
        """Looks at the table's columns; the rows are read by `examples`.

        Args:
            rows: The table.
            columns: Which column holds what.
            source: Name of the table, for messages.
            contract: What counts as an answer, for all rows; None if a column says it.
            instruct: End each chat with the contract's own instruction.

        Raises:
            ValueError: The table is empty, a column is missing, or the contract is not given exactly once.
        """
        if not len(rows):
            raise ValueError(f"{source} is empty; give a data set with at least one row")
        missing = [name for name in columns.named() if name not in rows.column_names]
        if missing:
            raise ValueError(
                f"{source} has no column {', '.join(map(repr, missing))}; it has {', '.join(rows.column_names)}. "
                "Name yours with --task.prompt_column (or messages_, gold_, contract_, family_column), "
                "`null` where there is none"
            )
        if (contract is None) == (columns.contract is None):
            raise ValueError(f"{source}: give either contract (one for all rows) or contract_column")
        self._rows = rows
        self._columns = columns
        self._source = source
        self._contract = contract
        self._instruct = instruct

    def examples(self, count: int, seed: int) -> Iterator[Example]:
        """Yields `count` distinct rows in a random order, after a look at all of them; see `Task`."""
        rows = (self._example(row, f"{self._source}, row {number}") for number, row in enumerate(self._rows, start=1))
        return sample(rows, count, seed, source=self._source)

    def _example(self, row: dict[str, JSON], where: str) -> Example:
        columns = self._columns
        contract = self._contract_of(row, where)
        messages = _chat(row, columns, where)
        gold = None if columns.gold is None else _without_nulls(row[columns.gold])
        return Example(
            family=self._source if columns.family is None else str(row[columns.family]),
            messages=with_instruction(messages, contract) if self._instruct else messages,
            contract=contract,
            gold=read_gold(contract, gold, where=where),
        )

    def _contract_of(self, row: dict[str, JSON], where: str) -> Contract:
        if self._contract is not None:
            return self._contract
        assert self._columns.contract is not None
        spec = _without_nulls(row[self._columns.contract])
        if not isinstance(spec, dict | str):
            raise ValueError(f"{where}: column {self._columns.contract!r} holds no contract but {spec!r}")
        try:
            return Contract.from_spec(spec)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


def _chat(row: dict[str, JSON], columns: Columns, where: str) -> tuple[Message, ...]:
    if columns.messages is None:
        assert columns.prompt is not None
        prompt = row[columns.prompt]
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"{where}: column {columns.prompt!r} holds no text but {prompt!r}")
        return user_message(prompt)
    turns = row[columns.messages]
    if isinstance(turns, list) and turns:
        messages = tuple(_message(turn) for turn in turns)
        complete = [message for message in messages if message is not None]
        if len(complete) == len(messages) and complete[-1]["role"] == "user":
            return tuple(complete)
    raise ValueError(
        f"{where}: column {columns.messages!r} holds no chat that ends with a user turn "
        f"([{{role: user, content: ...}}]; roles: {', '.join(_ROLES)}) but {json.dumps(turns, default=repr)[:200]}"
    )


def _message(turn: JSON) -> Message | None:
    if not isinstance(turn, dict):
        return None
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str) or role not in _ROLES or not isinstance(content, str) or not content.strip():
        return None
    return Message(role=role, content=content)


def _without_nulls(value: JSON) -> JSON:
    """The value without absent keys: a column of objects has the keys of all rows in every row."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
