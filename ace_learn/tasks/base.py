"""What a task yields: prompts, each with the contract that its answer must meet and, where known, the gold answer."""

import contextlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypedDict, runtime_checkable

from ace_learn.contracts import JSON, Contract


class Message(TypedDict):
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True)
class Example:
    """One problem."""

    family: str
    """Kind of problem, for tables by kind."""
    messages: tuple[Message, ...]
    """The chat that the model continues; the last turn is the user's."""
    contract: Contract
    """What counts as an answer."""
    gold: JSON
    """The right answer in the contract's terms; None where it is not known."""
    verifier: Callable[[JSON], bool] | None = None
    """The source's own scoring of an answer in the contract's terms; None: equality with gold."""

    def correct(self, answer: JSON) -> bool:
        """Whether an answer is right; an absent one is not, and without gold and verifier none is."""
        if answer is None:
            return False
        if self.verifier is not None:
            return self.verifier(answer)
        return self.gold is not None and self.contract.equal(answer, self.gold)


@runtime_checkable
class Task(Protocol):
    """A source of examples."""

    def examples(self, count: int, seed: int) -> Iterator[Example]:
        """Yields `count` examples, no two of them with the same chat.

        So a split of the examples never has a problem on both sides. The first examples of a long stream are those of
        a short one with the same seed.

        Args:
            count: How many.
            seed: Which ones, and in which order.

        Raises:
            ValueError: The source has fewer, or one of them is malformed.
        """
        ...


def user_message(content: str) -> tuple[Message, ...]:
    """A chat of one user turn."""
    return (Message(role="user", content=content),)


def with_instruction(messages: tuple[Message, ...], contract: Contract) -> tuple[Message, ...]:
    """A chat whose last turn ends with the contract's own instruction."""
    *before, last = messages
    return (*before, Message(role=last["role"], content=f"{last['content']}\n\n{contract.instruction()}"))


def chat_key(messages: Iterable[Message]) -> str:
    """Chats with the same key are the same chat."""
    return json.dumps([(message["role"], message["content"]) for message in messages])


def distinct(
    stream: Iterator[Example], count: int, *, patience: int = 10_000, source: str = "the task"
) -> Iterator[Example]:
    """The first `count` examples of a stream that differ in their chat.

    Args:
        stream: Examples, possibly repeated, possibly without end.
        count: How many to yield.
        patience: Repetitions in a row after which an endless stream counts as exhausted.
        source: What the stream is, for the message.

    Raises:
        ValueError: The count is below 1, or (later) the stream has no `count` distinct examples.
    """
    check_count(count)
    return _distinct(stream, count, patience=patience, source=source)


MAX_PROBLEMS = 10_000_000
"""Most problems of a data set. Each costs a trace of its own, so that a larger number is a slip of the keyboard."""


def check_count(count: int) -> None:
    """Refuses a number of examples that is none, or that no data set has.

    Raises:
        ValueError: It is below 1 or above `MAX_PROBLEMS`.
    """
    if count < 1:
        raise ValueError(f"the number of problems must be >= 1, not {count}")
    if count > MAX_PROBLEMS:
        raise ValueError(f"{count} problems are wanted, but a data set has at most {MAX_PROBLEMS}; ask for fewer")


def _distinct(stream: Iterator[Example], count: int, *, patience: int, source: str) -> Iterator[Example]:
    seen: set[str] = set()
    repeated = 0
    while len(seen) < count:
        example = next(stream, None)
        if example is None or repeated == patience:
            raise ValueError(f"{source} has {len(seen)} distinct problems, but {count} are wanted; ask for fewer")
        key = chat_key(example.messages)
        repeated = repeated + 1 if key in seen else 0
        if not repeated:
            seen.add(key)
            yield example


def sample(examples: Iterable[Example], count: int, seed: int, *, source: str) -> Iterator[Example]:
    """`count` distinct examples of a finite source in a random order, after a look at all of them; see `Task`.

    Args:
        examples: All of them, read to the end.
        count: How many to yield.
        seed: Of the order.
        source: What they come from, for the message.

    Raises:
        ValueError: The count is below 1, or there are fewer distinct ones.
    """
    check_count(count)
    rows = list(examples)
    found: dict[str, Example] = {}
    for example in rows:
        found.setdefault(chat_key(example.messages), example)
    if len(found) < count:
        raise ValueError(
            f"{source} has {len(found)} distinct problems in {len(rows)} rows, but {count} are wanted; ask for fewer"
        )
    order = list(found.values())
    random.Random(f"table/{seed}").shuffle(order)
    return iter(order[:count])


def interleave(streams: Mapping[str, Iterator[Example]], seed: int) -> Iterator[Example]:
    """Draws from several streams at random, with equal shares, until one ends."""
    rng = random.Random(f"interleave/{seed}")
    names = sorted(streams)
    while True:
        example = next(streams[rng.choice(names)], None)
        if example is None:
            return
        yield example


def read_gold(contract: Contract, value: JSON, *, where: str) -> JSON:
    """A gold answer in the contract's terms, from a data set's (which often holds numbers as text).

    Raises:
        ValueError: It is no legal answer of the contract, however it is read.
    """
    if value is None:
        return None
    for reading in _readings(contract, value):
        if contract.valid(reading):
            return reading
    raise ValueError(
        f"{where}: the gold answer {value!r} is no legal answer of the contract {json.dumps(contract.to_spec())}; "
        "fix the contract or the data"
    )


def _readings(contract: Contract, value: JSON) -> Iterator[JSON]:
    """The value itself; a number as text; text as JSON; the answer that a worked solution ends with."""
    if isinstance(value, float) and value.is_integer():
        yield int(value)  # a column of integers with a gap in it comes as floats
    yield value
    if not isinstance(value, str):
        yield json.dumps(value)
        return
    text = value.strip()
    yield text
    with contextlib.suppress(ValueError):
        parsed: JSON = json.loads(text)
        yield parsed
    if (commit := contract.project(text)) is not None:
        yield commit.answer
