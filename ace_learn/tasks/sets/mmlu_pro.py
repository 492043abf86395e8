"""MMLU-Pro: up to ten options, 14 categories."""

from ace_learn.tasks.base import Example
from ace_learn.tasks.data_set import DataSet, Row, choice_example


def _example(row: Row) -> Example:
    return choice_example(
        row,
        question=row.text("question"),
        options=row.texts("options"),
        right=row.integer("answer_index"),
        family=row.text("category"),
    )


DATA_SET = DataSet(
    hub="TIGER-Lab/MMLU-Pro",
    split="test",
    columns=("question", "options", "answer_index", "category"),
    example=_example,
)  # 12,032 rows; validation: 70
