"""GSM8K: grade-school word problems with integer answers."""

from ace_learn.contracts import Integer
from ace_learn.tasks.base import Example
from ace_learn.tasks.data_set import DataSet, Row, answer_example

_CONTRACT = Integer()


def _example(row: Row) -> Example:
    solution, mark, final = row.text("answer").rpartition("####")
    if not mark or not solution.strip():
        raise row.wrong("answer", "a worked solution that ends in `#### N`")
    gold = final.strip().replace(",", "")
    return answer_example(row, question=row.text("question"), contract=_CONTRACT, gold=gold, family="gsm8k")


DATA_SET = DataSet(
    hub="openai/gsm8k", subset="main", split="train", columns=("question", "answer"), example=_example
)  # 7,473 rows; test: 1,319
