"""A tiny reasoner that ships with the package: problems, the traces it learned from, its weights and its drafter.

The weights are a plain Hugging Face folder: `AutoModelForCausalLM.from_pretrained(weights_path())`.
"""

from pathlib import Path

from ace_learn.reasoner.problems import (
    ANSWER_FORMATS,
    FAMILIES,
    AnswerFormat,
    Family,
    Problem,
    contract_spec,
    generate_problems,
    score,
)
from ace_learn.reasoner.traces import Trace, compose_trace, write_trace

__all__ = [
    "ANSWER_FORMATS",
    "FAMILIES",
    "AnswerFormat",
    "Family",
    "Problem",
    "Trace",
    "compose_trace",
    "contract_spec",
    "drafter_path",
    "generate_problems",
    "score",
    "weights_path",
    "write_trace",
]


def weights_path() -> Path:
    """Return the folder with the committed weights and tokenizer."""
    return Path(__file__).parent / "weights"


def drafter_path() -> Path:
    """Return the folder with the committed EAGLE-3 drafter of the reasoner, which vLLM and `load_draft` read."""
    return Path(__file__).parent / "drafter"
