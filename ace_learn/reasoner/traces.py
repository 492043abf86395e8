"""What the embedded reasoner learns to write: thoughts with slips, checks and repairs, then an answer.

Every thought has the same shape: a derivation (one paragraph per step; a step may slip, and its wrong result is carried
on), the stated answer, and checking passes that go on after the answer is known. A pass that finds a slip says so,
redoes the rest from the right value, and states the repaired answer. Every intermediate value is written out, so that a
model of a million parameters can follow.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ace_learn.reasoner.problems import Family, Problem, Step, Update

Mode = Literal["full", "unchecked", "direct"]
"""`full`: checked thought. `unchecked`: closed right after the stated answer. `direct`: no thought at all."""

BREAK = "\n\n"
UNCHECKED_SHARE = 0.05
DIRECT_SHARE = 0.11
MAX_PASSES = 6


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one family thinks."""

    slip: float
    """Probability that a step of the first derivation goes wrong."""
    notice: float
    """Probability that a checking pass notices a wrong step."""
    plan: float
    """Probability of a plan paragraph before the first step."""
    passes: tuple[int, ...]
    """Numbers of checking passes to draw from."""
    max_tokens: int
    """Passes after the first are dropped where the thought would become longer than about this."""


STYLES: Mapping[Family, Style] = {
    "chain": Style(slip=0.12, notice=0.96, plan=0.3, passes=(1, 2, 2, 3, 3, 4), max_tokens=190),
    "shop": Style(slip=0.09, notice=0.96, plan=0.0, passes=(1, 2, 2, 3), max_tokens=190),
    "legs": Style(slip=0.06, notice=0.96, plan=0.0, passes=(1, 2, 2, 3, 3), max_tokens=215),
}

_CHECKS = ("Let me check.", "Let me verify that.", "I check each step.", "Check it again.")
_TAILS = (
    "I checked it twice.",
    "Let me know if you want the steps.",
    "I went through every step and checked the result.",
    "Ask me if you have more questions.",
    "That was a nice problem.",
    "The steps are in my notes above.",
)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A written solution."""

    think: str
    """The thought; every paragraph, the last one included, ends in a blank line. Empty in mode `direct`."""
    answer: str
    stated: int
    """The value that the answer gives; differs from the true one where a slip went unrepaired."""
    slips: int
    """How many steps of the first derivation slipped."""
    first_stated: int
    """The value stated at the end of the first derivation."""

    @property
    def repaired(self) -> bool:
        """Whether the first stated value was given up for another."""
        return self.first_stated != self.stated


def write_trace(problem: Problem, rng: random.Random) -> Trace:
    """Write one trace in a mode drawn by the training shares."""
    draw = rng.random()
    if draw < DIRECT_SHARE:
        return compose_trace(problem, rng, mode="direct")
    return compose_trace(problem, rng, mode="unchecked" if draw < DIRECT_SHARE + UNCHECKED_SHARE else "full")


def compose_trace(problem: Problem, rng: random.Random, *, mode: Mode) -> Trace:
    """Write one trace in the given mode; all randomness comes from `rng`."""
    if mode == "direct":
        answer = _write_answer(problem, problem.value, rng)
        return Trace(think="", answer=answer, stated=problem.value, slips=0, first_stated=problem.value)
    thought = _Thought(problem, rng)
    thought.derive()
    thought.conclude()
    first = thought.value
    if mode == "full" or thought.lost:
        thought.check_repeatedly()
    think = "".join(paragraph + BREAK for paragraph in thought.paragraphs)
    answer = _write_answer(problem, thought.value, rng)
    return Trace(think=think, answer=answer, stated=thought.value, slips=thought.slips, first_stated=first)


class _Thought:
    """A thought while it is written: what was derived so far, and the paragraphs."""

    def __init__(self, problem: Problem, rng: random.Random) -> None:
        self.problem = problem
        self.style = STYLES[problem.family]
        self.rng = rng
        self.paragraphs: list[str] = []
        self.results: list[tuple[int, ...]] = []
        """What the thought believes about each step."""
        self.slips = 0
        self.wrong: int | None = None
        """The value just given up, until the next conclusion names it."""

    @property
    def value(self) -> int:
        """The answer as believed now."""
        return self._values(len(self.results))[self.problem.asked]

    @property
    def lost(self) -> bool:
        """Whether the believed answer is not on offer in a multiple choice."""
        return self.problem.options is not None and self.value not in self.problem.options

    def derive(self) -> None:
        """Write the plan and the first derivation, in which steps may slip."""
        if self.rng.random() < self.style.plan:
            self.paragraphs.append(_plan(self.problem))
        for index, step in enumerate(self.problem.steps):
            values = self._values(index)
            results = _true_results(step, values)
            if self.rng.random() < self.style.slip:
                slipped = self._slip(step, values)
                if self._is_sound(index, slipped):
                    results = slipped
                    self.slips += 1
            self.results.append(results)
            self.paragraphs.append(_write_step(step, values, results, first=True))

    def conclude(self) -> None:
        """State the answer."""
        wrong, self.wrong = self.wrong, None
        text = f"So the answer is {self.value}"
        if wrong is not None and wrong != self.value:
            text += f", not {wrong}"
        self.paragraphs.append(text + ".")

    def check_repeatedly(self) -> None:
        """Write checking passes: a full one first, then others that no longer change what is right."""
        planned, round_length = self.rng.choice(self.style.passes), self._length()
        for done in range(MAX_PASSES):
            too_long = done > 0 and self._length() + round_length > self.style.max_tokens
            if not self.lost and (done >= planned or too_long):
                return
            if done > 0 and self.rng.random() < 0.85 and self._is_right():
                self._confirm()
            else:
                self._check_forward()

    def _check_forward(self) -> None:
        """Derive every step again; redo the rest where one was wrong."""
        self.paragraphs.append(self.rng.choice(_CHECKS))
        wrong = self.value
        repaired = False
        for index, step in enumerate(self.problem.steps):
            values = self._values(index)
            truth, believed = _true_results(step, values), self.results[index]
            if repaired:
                self.results[index] = truth
                self.paragraphs.append(_write_step(step, values, truth))
            elif truth == believed or not (self.lost or self.rng.random() < self.style.notice):
                self.paragraphs.append(f"{_write_step(step, values, believed, earlier=believed)} Yes.")
            else:
                repaired = True
                self.results[index] = truth
                self.paragraphs.append(self._write_repair(index, truth, believed))
        if repaired:
            self.wrong = wrong
            self.conclude()
            return
        self.paragraphs.append(f"So {self.value} is right.")

    def _write_repair(self, index: int, truth: tuple[int, ...], believed: tuple[int, ...]) -> str:
        step = self.problem.steps[index]
        line = _write_step(step, self._values(index), truth, earlier=believed)
        place = next(at for at, pair in enumerate(zip(truth, believed, strict=True)) if pair[0] != pair[1])
        text = f"{line} Wait, it is {truth[place]}, not {believed[place]}."
        if index + 1 == len(self.problem.steps):
            return text
        return f"{text} I go on from {self._values(index + 1)[self.problem.asked]}."

    def _confirm(self) -> None:
        """Confirm a right answer: derive it once more, or in a way of the family's own."""
        check = _OTHER_CHECKS.get(self.problem.family)
        if check is None or self.rng.random() < 0.5:
            steps = enumerate(zip(self.problem.steps, self.results, strict=True))
            lines = [_write_step(step, self._values(index), results) for index, (step, results) in steps]
            self.paragraphs.extend(["Once more.", *lines])
        else:
            self.paragraphs.extend(check(self.problem, self._values(len(self.results)), self.results))
        self.paragraphs.append(f"So it is {self.value}.")

    def _is_right(self) -> bool:
        return all(
            _true_results(step, self._values(index)) == self.results[index]
            for index, step in enumerate(self.problem.steps)
        )

    def _values(self, index: int) -> dict[str, int]:
        """The believed numbers before step `index`."""
        values = dict(self.problem.start)
        for step, results in zip(self.problem.steps[:index], self.results, strict=False):
            values.update(zip((update.target for update in step.updates), results, strict=True))
        return values

    def _slip(self, step: Step, values: Mapping[str, int]) -> tuple[int, ...]:
        """Get one equation of a step wrong, and whatever follows from it in the same step."""
        chosen = self.rng.randrange(len(step.updates))
        known, results = dict(values), []
        for position, update in enumerate(step.updates):
            result = update.evaluate(known)
            if position == chosen:
                result += self._error(update)
            known[update.target] = result
            results.append(result)
        return tuple(results)

    def _error(self, update: Update) -> int:
        if update.op == "*" and isinstance(update.left, int) and self.rng.random() < 0.5:
            return self.rng.choice((-2, 2)) * update.left
        return self.rng.choice((-10, 10, -1, 1, -1, 1, -2, 2))

    def _is_sound(self, index: int, slipped: tuple[int, ...]) -> bool:
        """Whether all that follows from a slip stays within 0 and 999."""
        values = self._values(index)
        step = self.problem.steps[index]
        values.update(zip((update.target for update in step.updates), slipped, strict=True))
        results = list(slipped)
        for later in self.problem.steps[index + 1 :]:
            for update in later.updates:
                values[update.target] = update.evaluate(values)
                results.append(values[update.target])
        return all(0 <= result <= 999 for result in results)

    def _length(self) -> int:
        return sum(len(_ROUGH_TOKEN.findall(paragraph)) + 1 for paragraph in self.paragraphs)


_ROUGH_TOKEN = re.compile(r"\d|[A-Za-z]+|[^\sA-Za-z\d]")


def _true_results(step: Step, values: Mapping[str, int]) -> tuple[int, ...]:
    known, results = dict(values), []
    for update in step.updates:
        known[update.target] = update.evaluate(known)
        results.append(known[update.target])
    return tuple(results)


def _write_step(
    step: Step,
    values: Mapping[str, int],
    results: tuple[int, ...],
    *,
    first: bool = False,
    earlier: tuple[int, ...] | None = None,
) -> str:
    """Write a step's equations, with the `earlier` results recalled beside the new ones.

    What is spelled out the `first` time only stays away later.
    """
    known, lines = dict(values), []
    for index, (update, result) in enumerate(zip(step.updates, results, strict=True)):
        left, right = update.operands(known)
        recalled = "" if earlier is None else f", had {earlier[index]}"
        lines.append(f"{left} {update.op} {right} = {result}{recalled}")
        known[update.target] = result
    label = step.label if first or not step.label_once else ""
    return f"{label}{', '.join(lines)}."


def _plan(problem: Problem) -> str:
    return f"I start from {next(iter(problem.start.values()))} and take {len(problem.steps)} steps."


def _undo_chain(problem: Problem, values: Mapping[str, int], results: list[tuple[int, ...]]) -> list[str]:
    """Walk back from the answer to the start."""
    value, lines = values[problem.asked], []
    for step in reversed(problem.steps):
        update = step.updates[0]
        amount = update.operands(values)[1]
        back = value - amount if update.op == "+" else value + amount
        lines.append(f"{value} {'-' if update.op == '+' else '+'} {amount} = {back}.")
        value = back
    return ["Now backwards.", *lines, f"That is the start, {value}."]


def _sum_legs(problem: Problem, values: Mapping[str, int], results: list[tuple[int, ...]]) -> list[str]:
    """Add the products in the opposite order."""
    products = [result[0] for result in reversed(results)]
    total, lines = products[0], []
    for product in products[1:]:
        lines.append(f"{total} + {product} = {total + product}.")
        total += product
    return ["Now from the last to the first.", *lines]


_OTHER_CHECKS = {"chain": _undo_chain, "legs": _sum_legs}


def _write_answer(problem: Problem, value: int, rng: random.Random) -> str:
    """Write the answer in the format the prompt asks for, sometimes framed by talk."""
    if problem.answer_format == "boxed":
        lead = rng.choice(("", "", "The answer is ", "The result is "))
        text = f"{lead}\\boxed{{{value}}}"
        text += "." if lead else ""
    elif problem.answer_format == "json":
        text = rng.choice(("", "", "Here it is: ")) + f'{{"answer": {value}}}'
    else:
        assert problem.options is not None
        chosen = value if value in problem.options else rng.choice(problem.options)
        text = rng.choice(("", "", f"The result is {value}. ")) + f"Answer: {chosen}"
    if rng.random() < 0.5:
        text += "\n" + " ".join(rng.sample(_TAILS, rng.choice((1, 1, 2))))
    return text
