"""AIME 2025, both papers; of the copies on the hub the one with both in one split."""

from ace_learn.tasks.base import Example
from ace_learn.tasks.data_set import DataSet, Row, aime_example


def _example(row: Row) -> Example:
    return aime_example(row, family="aime2025")


DATA_SET = DataSet(hub="math-ai/aime25", split="test", columns=("problem", "answer"), example=_example)  # 30 rows
