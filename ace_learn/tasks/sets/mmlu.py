"""MMLU: four options, 57 subjects."""

from ace_learn.tasks.base import Example
from ace_learn.tasks.data_set import DataSet, Row, choice_example


def _example(row: Row) -> Example:
    return choice_example(
        row,
        question=row.text("question"),
        options=row.texts("choices"),
        right=row.integer("answer"),
        family=row.text("subject"),
    )


DATA_SET = DataSet(
    hub="cais/mmlu",
    subset="all",
    split="test",
    columns=("question", "subject", "choices", "answer"),
    example=_example,
)  # 14,042 rows; validation: 1,531
