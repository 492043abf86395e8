"""HumanEval+: Python functions, scored by the tests of the data set."""

import re
from dataclasses import dataclass, field

from ace_learn.contracts import JSON, Tag
from ace_learn.tasks.base import Example, read_gold, user_message
from ace_learn.tasks.data_set import DataSet, Row
from ace_learn.tasks.execution import passes

_CONTRACT = Tag(tag="code")
_FENCE = re.compile(r"```\w*\n(.*?)\n?```", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class RunsTests:
    """Whether a function passes its tests; what it said of an answer is kept, since many probes give the same one."""

    prompt: str
    """Imports, helpers, and the function's head with its docstring."""
    test: str
    """Defines `check(candidate)`, which raises."""
    entry_point: str
    """The function's name."""
    _known: dict[str, bool] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, answer: JSON) -> bool:
        """Runs the tests, unless this answer is known.

        The prompt comes before the answer: it has the imports, and its own function, a bare docstring, is defined anew
        by the answer's.
        """
        if not isinstance(answer, str):
            return False
        if answer not in self._known:
            fenced = _FENCE.fullmatch(answer.strip())
            code = answer if fenced is None else fenced.group(1)
            self._known[answer] = passes(f"{self.prompt}\n\n{code}\n\n{self.test}\n\ncheck({self.entry_point})\n")
        return self._known[answer]


def _example(row: Row) -> Example:
    prompt, name = row.text("prompt"), row.text("entry_point")
    ask = f"Complete this Python function. Give the whole function `{name}`, with the imports that it needs."
    return Example(
        family="humaneval_plus",
        messages=user_message(f"{ask}\n\n```python\n{prompt.strip()}\n```"),
        contract=_CONTRACT,
        gold=read_gold(_CONTRACT, f"{prompt}{row.text('canonical_solution')}".strip(), where=row.where),
        verifier=RunsTests(prompt=prompt, test=row.text("test"), entry_point=name),
    )


DATA_SET = DataSet(
    hub="evalplus/humanevalplus",
    split="test",
    columns=("prompt", "canonical_solution", "entry_point", "test"),
    example=_example,
    executes_code=True,
)  # 164 rows
