"""ARC-Challenge: school science with three to five options, called A-E or 1-5 in the data and A-E in the prompt."""

from ace_learn.tasks.base import Example
from ace_learn.tasks.data_set import DataSet, Row, choice_example


def _example(row: Row) -> Example:
    choices, key = row.columns["choices"], row.text("answerKey")
    if not isinstance(choices, dict):
        raise row.wrong("choices", "an object of lists, text and label")
    labels = row.checked_texts("choices", choices.get("label"))
    options = row.checked_texts("choices", choices.get("text"))
    if len(labels) != len(options) or key not in labels:
        raise row.wrong("choices", f"as many labels as texts, the answer key {key!r} among them")
    return choice_example(
        row, question=row.text("question"), options=options, right=labels.index(key), family="arc_challenge"
    )


DATA_SET = DataSet(
    hub="allenai/ai2_arc",
    subset="ARC-Challenge",
    split="test",
    columns=("question", "choices", "answerKey"),
    example=_example,
)  # 1,172 rows; train: 1,119, validation: 299
