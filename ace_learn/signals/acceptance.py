"""How likely the drafter's first token is to be accepted: high where the text is predictable.

Experimental: the coefficients move with traffic, so that an exit by this signal depends on more than its own prefix.
"""

from jaxtyping import Float
from torch import Tensor

from ace_learn.signals import DerivedSignal


def predicted(columns: Float[Tensor, "*rows 3"]) -> Float[Tensor, "*rows"]:
    """sigmoid(w f + b), as the acceptance estimator predicts the first draft of a step."""
    log_odds, slope, intercept = columns.unbind(-1)
    return (slope * log_odds + intercept).sigmoid()


SIGNAL = DerivedSignal(
    name="acceptance",
    description="predicted probability that the drafter's first token is accepted",
    reads=("draft_log_odds", "acceptance_slope", "acceptance_intercept"),
    compute=predicted,
)
