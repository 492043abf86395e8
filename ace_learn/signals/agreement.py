"""How often the thinking has stated the answer that it states now."""

from jaxtyping import Float
from torch import Tensor

from ace_learn.signals import DerivedSignal


def stated(columns: Float[Tensor, "*rows 2"]) -> Float[Tensor, "*rows"]:
    """Paragraphs that stated the current candidate, the first one included; 0 without a candidate."""
    present, log_repeats = columns.unbind(-1)
    return present + log_repeats.expm1()


SIGNAL = DerivedSignal(
    name="agreement",
    description="paragraphs that have stated the current answer candidate",
    reads=("candidate_present", "candidate_log_repeats"),
    compute=stated,
    score_transform="log1p",
)
