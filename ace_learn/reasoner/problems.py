"""Problems for the embedded reasoner: three families, each a short straight-line program over named numbers.

A problem carries its own solution program (`Problem.steps`), so that the trace writer can evaluate it with slips and
redo parts of it. The `legs` family comes from `reasoning_gym` and keeps that library's entry, so that its own verifier
can score answers.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypedDict

AnswerFormat = Literal["boxed", "choice", "json"]
Family = Literal["chain", "shop", "legs"]
Operand = int | str
"""A literal number, or the name of a number that an earlier step computed."""

FAMILIES: tuple[Family, ...] = ("chain", "shop", "legs")
ANSWER_FORMATS: tuple[AnswerFormat, ...] = ("boxed", "choice", "json")
NUM_OPTIONS = 4
"""Values on offer in a multiple choice."""
RESULT = "result"
"""The name of the number that programs compute, unless the question asks for a named one."""

MAX_VALUE = 99
"""Chains never hold more."""
GOODS = ("pens", "books", "cups", "maps", "keys", "bags", "hats", "pots")
_JSON_SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
_INSTRUCTIONS: Mapping[AnswerFormat, str] = {
    "boxed": "Put the final integer in \\boxed{}.",
    "choice": 'End with "Answer: " and one of them.',
    "json": 'Reply with JSON: {"answer": integer}.',
}


@dataclass(frozen=True, kw_only=True)
class Update:
    """One equation of a solution: `target = left op right`."""

    target: str
    left: Operand
    op: Literal["+", "-", "*"]
    right: Operand

    def operands(self, values: Mapping[str, int]) -> tuple[int, int]:
        """Return both operands as numbers."""
        left = values[self.left] if isinstance(self.left, str) else self.left
        right = values[self.right] if isinstance(self.right, str) else self.right
        return left, right

    def evaluate(self, values: Mapping[str, int]) -> int:
        """Return the true result for the given values."""
        left, right = self.operands(values)
        if self.op == "*":
            return left * right
        return left + right if self.op == "+" else left - right


@dataclass(frozen=True, kw_only=True)
class Step:
    """The equations that one paragraph of the solution holds."""

    updates: tuple[Update, ...]
    label: str = ""
    """Text before the equations."""
    label_once: bool = False
    """Leave the label away when the step is checked or redone."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One question with its answer and the program that solves it."""

    family: Family
    question: str
    answer_format: AnswerFormat
    gold: int | str | dict[str, int]
    """What the answer contract should yield: an int (boxed), an option's text (choice) or an object (json)."""
    value: int
    """The answer as a number, whatever the format."""
    options: tuple[int, ...] | None
    """The four values on offer, A to D; None unless the format is `choice`."""
    start: dict[str, int]
    """Numbers that are known before the first step."""
    steps: tuple[Step, ...]
    asked: str
    """The name under which the program leaves its answer."""
    metadata: dict[str, object]
    """For `legs` the reasoning-gym entry under the key `entry`; empty elsewhere."""

    @property
    def prompt(self) -> str:
        """The question, the options of a multiple choice, and how to answer."""
        parts = [self.question]
        if self.options is not None:
            parts.append(f"Options: {', '.join(map(str, self.options))}.")
        return " ".join([*parts, _INSTRUCTIONS[self.answer_format]])


@dataclass(frozen=True, kw_only=True)
class _Draft:
    """A problem before an answer format is chosen."""

    question: str
    value: int
    start: dict[str, int]
    steps: tuple[Step, ...]
    asked: str = RESULT
    metadata: dict[str, object] = field(default_factory=dict)


def generate_problems(
    family: Family, count: int, seed: int, *, answer_format: AnswerFormat | None = None
) -> Iterator[Problem]:
    """Yield problems of one family; the same arguments give the same problems.

    Args:
        family: One of `FAMILIES`.
        count: How many problems.
        seed: Problems of different seeds are drawn independently.
        answer_format: Use one format throughout; None draws one per problem.
    """
    rng = random.Random(f"{family}/{seed}")
    for _ in range(count):
        yield draw_problem(family, rng, answer_format=answer_format)


def draw_problem(family: Family, rng: random.Random, *, answer_format: AnswerFormat | None = None) -> Problem:
    """Draw one problem; all randomness comes from `rng`."""
    draft = _DRAFTERS[family](rng)
    drawn = rng.choice(ANSWER_FORMATS)
    chosen = drawn if answer_format is None else answer_format
    options = _draw_options(draft.value, rng) if chosen == "choice" else None
    gold: int | str | dict[str, int] = draft.value
    if options is not None:
        gold = str(draft.value)
    elif chosen == "json":
        gold = {"answer": draft.value}
    return Problem(
        family=family,
        question=draft.question,
        answer_format=chosen,
        gold=gold,
        value=draft.value,
        options=options,
        start=draft.start,
        steps=draft.steps,
        asked=draft.asked,
        metadata=draft.metadata,
    )


def contract_spec(problem: Problem) -> dict[str, object]:
    """Return the output contract that the problem's prompt asks for, as a plain dictionary."""
    if problem.answer_format == "boxed":
        return {"kind": "integer", "minimum": -9999, "maximum": 9999}
    if problem.answer_format == "choice":
        assert problem.options is not None
        return {"kind": "choice", "options": [str(option) for option in problem.options]}
    return {"kind": "json", "schema": _JSON_SCHEMA}


def score(problem: Problem, value: int) -> bool:
    """Say whether a numeric answer is right; for `legs` by reasoning-gym's own verifier."""
    if problem.family != "legs":
        return value == problem.value
    from reasoning_gym import get_score_answer_fn

    verifier = get_score_answer_fn("leg_counting")
    return float(verifier(str(value), problem.metadata["entry"])) == 1.0


def _draw_options(value: int, rng: random.Random) -> tuple[int, ...]:
    """Draw four values near the answer, no two with the same last digit."""
    options = [value]
    while len(options) < NUM_OPTIONS:
        other = value + rng.choice((-12, -11, -9, -3, -2, -2, -1, -1, 1, 1, 2, 2, 3, 9, 11, 12))
        if other >= 0 and other % 10 not in {option % 10 for option in options}:
            options.append(other)
    rng.shuffle(options)
    return tuple(options)


def _chain_story(start: int, moves: list[int], rng: random.Random) -> str:
    """Tell additions and subtractions in one of several surface forms."""
    form = rng.randrange(5)
    if form == 0:
        return f"Compute {start}" + "".join(f" {'+' if move > 0 else '-'} {abs(move)}" for move in moves) + "."
    if form == 1:
        told = [f"{'Add' if move > 0 else 'Subtract'} {abs(move)}." for move in moves]
        return " ".join([f"Start with {start}.", *told, "What is the result?"])
    if form == 2:
        told = [f"{abs(move)} get {'on' if move > 0 else 'off'}" for move in moves]
        return f"A bus has {start} people. Then {', '.join(told)}. How many people are on the bus?"
    if form == 3:
        name = rng.choice(("Mia", "Tom", "Ben", "Ana"))
        told = [f"{'wins' if move > 0 else 'loses'} {abs(move)}" for move in moves]
        return f"{name} has {start} coins, then {', '.join(told)}. How many coins are left?"
    told = [f"{abs(move)} {'come' if move > 0 else 'leave'}" for move in moves]
    return f"A shop has {start} books: {', '.join(told)}. How many books are there now?"


def _draft_chain(rng: random.Random) -> _Draft:
    start = value = rng.randint(10, MAX_VALUE)
    moves: list[int] = []
    for _ in range(rng.choice((3, 4, 4, 5, 5, 6))):
        up, down = MAX_VALUE - value, value
        rise = rng.random() < 0.5
        if (up if rise else down) < 3:
            rise = not rise
        move = rng.randint(2, up) if rise else -rng.randint(2, down)
        moves.append(move)
        value += move
    steps = tuple(
        Step(updates=(Update(target=RESULT, left=RESULT, op="+" if move > 0 else "-", right=abs(move)),))
        for move in moves
    )
    question = _chain_story(start, moves, rng)
    return _Draft(question=question, value=value, start={RESULT: start}, steps=steps)


def _draft_shop(rng: random.Random) -> _Draft:
    names = rng.sample(GOODS, rng.choice((2, 3, 3)))
    told: list[str] = []
    steps: list[Step] = []
    for name in names:
        count, price = rng.randint(2, 9), rng.randint(2, 12)
        told.append(f"{count} {name} at {price}")
        updates = [Update(target=name if steps else RESULT, left=count, op="*", right=price)]
        if steps:
            updates.append(Update(target=RESULT, left=RESULT, op="+", right=name))
        steps.append(Step(updates=tuple(updates), label=f"{count} {name}: ", label_once=True))
    question = f"Buy {', '.join(told)}."
    kind = rng.choice(("none", "post", "coupon"))
    total = _run(steps, {})[RESULT]
    if kind != "none":
        amount = rng.randint(3, 20) if kind == "post" else rng.randint(2, min(20, total - 1))
        update = Update(target=RESULT, left=RESULT, op="+" if kind == "post" else "-", right=amount)
        steps.append(Step(updates=(update,), label=f"{kind}: ", label_once=True))
        question += f" The post costs {amount}." if kind == "post" else f" A coupon takes off {amount}."
    value = _run(steps, {})[RESULT]
    return _Draft(question=f"{question} What do you pay?", value=value, start={}, steps=tuple(steps))


def _run(steps: Iterable[Step], start: Mapping[str, int]) -> dict[str, int]:
    values = dict(start)
    for step in steps:
        for update in step.updates:
            values[update.target] = update.evaluate(values)
    return values


class _LegMetadata(TypedDict):
    animals: dict[str, int]


class _LegEntry(TypedDict):
    """What the program reads of a reasoning-gym entry."""

    question: str
    answer: str
    metadata: _LegMetadata


def _leg_entry(seed: int) -> _LegEntry:
    import reasoning_gym  # takes a second, which only this family should cost

    config = {"min_animals": 3, "max_animals": 5, "min_instances": 1, "max_instances": 9}
    entry: _LegEntry = reasoning_gym.create_dataset("leg_counting", seed=seed, size=1, **config)[0]
    return entry


def _draft_legs(rng: random.Random) -> _Draft:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    entry = _leg_entry(rng.getrandbits(48))
    question = entry["question"].strip().split("Now, ")[-1]
    steps: list[Step] = []
    for name, count in entry["metadata"]["animals"].items():
        target = name if steps else RESULT
        updates = [Update(target=target, left=count, op="*", right=ANIMALS[name])]
        if steps:
            updates.append(Update(target=RESULT, left=RESULT, op="+", right=name))
        steps.append(Step(updates=tuple(updates), label=f"{count} {name}{'s' if count > 1 else ''}: ", label_once=True))
    return _Draft(
        question=question[0].upper() + question[1:],
        value=int(entry["answer"]),
        start={},
        steps=tuple(steps),
        metadata={"entry": entry},
    )


_DRAFTERS: Mapping[Family, Callable[[random.Random], _Draft]] = {
    "chain": _draft_chain,
    "shop": _draft_shop,
    "legs": _draft_legs,
}
