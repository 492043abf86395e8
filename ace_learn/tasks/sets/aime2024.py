"""AIME 2024, both papers; of the copies on the hub the one that keeps problem, answer and source apart."""

from ace_learn.tasks.base import Example
from ace_learn.tasks.data_set import DataSet, Row, aime_example


def _example(row: Row) -> Example:
    return aime_example(row, family="aime2024")


DATA_SET = DataSet(
    hub="HuggingFaceH4/aime_2024", split="train", columns=("problem", "answer"), example=_example
)  # 30 rows
