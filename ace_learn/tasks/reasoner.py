"""Problems of the embedded reasoner's own families."""

import json
import sys
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import cast

from ace_learn.contracts import JSON, Contract
from ace_learn.reasoner.problems import (
    FAMILIES,
    Family,
    Problem,
    contract_spec,
    generate_problems,
    score,
)
from ace_learn.tasks.base import Example, distinct, interleave, read_gold, user_message

_ENDLESS = sys.maxsize


class ReasonerTask:
    """A mix of families in equal shares."""

    def __init__(self, families: Sequence[str] = ()) -> None:
        """Chooses the families.

        Args:
            families: Names among `ace_learn.reasoner.problems.FAMILIES`; all of them if empty.

        Raises:
            ValueError: A family is unknown.
        """
        unknown = [family for family in families if family not in FAMILIES]
        if unknown:
            raise ValueError(f"unknown families {', '.join(unknown)}; known: {', '.join(FAMILIES)}")
        self.families = tuple(family for family in FAMILIES if not families or family in families)

    def examples(self, count: int, seed: int) -> Iterator[Example]:
        """Yields `count` distinct problems; see `Task`."""
        mix = interleave({family: _stream(family, seed) for family in self.families}, seed)
        return distinct(mix, count, source=f"the reasoner's families {', '.join(self.families)}")


def _stream(family: Family, seed: int) -> Iterator[Example]:
    return map(problem_example, generate_problems(family, _ENDLESS, seed))


def problem_example(problem: Problem) -> Example:
    """A problem as a task's example; the answers of `legs` are scored by reasoning-gym's own verifier."""
    contract = _contract(json.dumps(contract_spec(problem)))
    return Example(
        family=problem.family,
        messages=user_message(problem.prompt),
        contract=contract,
        gold=read_gold(contract, cast("JSON", problem.gold), where=f"reasoner, family {problem.family}"),
        verifier=partial(_verify, problem) if problem.family == "legs" else None,
    )


def _verify(problem: Problem, answer: JSON) -> bool:
    if problem.options is not None:
        return score(problem, int(str(answer)))
    value = answer["answer"] if isinstance(answer, dict) else answer
    return isinstance(value, int | float | str) and score(problem, int(value))


@cache
def _contract(spec: str) -> Contract:
    """Building a contract may compile a schema; problems share few of them."""
    return Contract.from_spec(spec)
