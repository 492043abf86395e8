"""The columns of the feature source `acceptance`: what the signal of that name is computed from."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ace_learn.engines.hidden_drafter import HiddenDrafter
from ace_learn.speculation.adaptive import AdaptiveVerifier
from ace_learn.speculation.drafters import Drafter
from ace_learn.speculation.estimator import law_log_odds


class AcceptanceReader:
    """Reads a drafter's hidden states and the acceptance estimator's coefficients of the moment.

    The states are those of the source `draft`, so the log-odds are a function of the token prefix. The coefficients
    move with what is accepted: whatever reads them depends on the traffic.
    """

    def __init__(self, drafter: Drafter | None, verifier: AdaptiveVerifier | None) -> None:
        """Takes what an engine has.

        Args:
            drafter: It must give its hidden states, and draft at a temperature above 0.
            verifier: Its estimator is read; it learns as the engine decodes.

        Raises:
            ValueError: One of them is missing, or the drafter is of another kind.
        """
        if not isinstance(drafter, HiddenDrafter) or drafter.states is None:
            raise ValueError(
                "the signal acceptance is read from a drafter's hidden states, which this engine lacks; decode with a "
                "drafter of kind eagle3 or mtp that gives them (drafter.kind, drafter.model; DraftStates), or choose a "
                "policy without acceptance"
            )
        if drafter.sampling.temperature == 0.0:
            raise ValueError(
                "the signal acceptance is predicted from draft probabilities, which greedy decoding does not have; set "
                "a temperature above 0, or choose a policy without acceptance"
            )
        if verifier is None:
            raise ValueError(
                "the signal acceptance needs an acceptance estimator; pass "
                "verifier=AdaptiveVerifier(estimator=OnlineAcceptanceEstimator(K), costs=None)"
            )
        self.drafter, self.estimator = drafter, verifier.estimator

    def __call__(self, states: Float[Tensor, "B R D"]) -> Float[Tensor, "B R C"]:
        """Columns `ACCEPTANCE` of rows, from the drafter's states for them."""
        odds = law_log_odds(self.drafter.law(states))
        first = self.estimator.intercepts.flatten()[0]  # of thinking, where the answer has intercepts of its own
        return torch.stack((odds, self.estimator.slope.expand_as(odds), first.expand_as(odds)), dim=-1)
