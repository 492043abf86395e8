"""MATH-500: competition problems whose answers are expressions in a box, by subject."""

from functools import cache

from ace_learn.contracts import Boxed
from ace_learn.tasks.base import Example
from ace_learn.tasks.data_set import DataSet, Row, answer_example


@cache
def _contract() -> Boxed:
    """Made when it is needed, since it asks for math-verify."""
    return Boxed(equality="math")


def _example(row: Row) -> Example:
    return answer_example(
        row, question=row.text("problem"), contract=_contract(), gold=row.text("answer"), family=row.text("subject")
    )


DATA_SET = DataSet(
    hub="HuggingFaceH4/MATH-500", split="test", columns=("problem", "answer", "subject"), example=_example
)  # 500 rows
