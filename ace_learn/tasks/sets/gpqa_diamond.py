"""GPQA-Diamond: graduate-level science, four options.

The data set lists the right option first, so the options are shuffled. The order depends on the question alone: it is
the same in every copy, whatever the order of the rows.
"""

import random

from ace_learn.tasks.base import Example
from ace_learn.tasks.data_set import DataSet, Row, choice_example

_OPTIONS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def _example(row: Row) -> Example:
    question = row.text("Question")
    order = list(range(len(_OPTIONS)))
    random.Random(f"gpqa/{question}").shuffle(order)
    return choice_example(
        row,
        question=question,
        options=[row.text(_OPTIONS[index]) for index in order],
        right=order.index(0),
        family=row.text("High-level domain"),
    )


DATA_SET = DataSet(
    hub="Idavidrein/gpqa",
    subset="gpqa_diamond",
    split="train",
    columns=("Question", *_OPTIONS, "High-level domain"),
    example=_example,
    gated=True,
)  # 198 rows
