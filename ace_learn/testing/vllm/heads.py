"""A head folder that makes a good test: fixed weights, a given share of requests exits, at scattered positions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ace_learn.artifacts import write_json
from ace_learn.engines.capture import CapturedRows
from ace_learn.engines.hf import HFEngine
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.exit.policy import ExitPolicy, SmoothOver, smooth
from ace_learn.features import FeatureSpec
from ace_learn.features.spec import Source
from ace_learn.heads.export import HeadCard, save_head
from ace_learn.heads.head import HeadConfig, SignalHead
from ace_learn.models.target import Target
from ace_learn.signals import LEARNED
from ace_learn.speculation.drafters import Drafter

SIGNAL = "consistency"
"""The only signal that the policy reads."""
_LEEWAY = 0.1
"""By how much the share of exits may differ from the wanted one, for the sake of a wide gap."""
_STEEP = 4.0
"""Factor on the head's output, so that values near the threshold are rare."""


def write_test_head(
    folder: Path,
    target: Target,
    requests: Sequence[Request],
    *,
    sources: tuple[Source, ...] = ("target_last", "scalars"),
    aux_layers: tuple[int, ...] = (),
    sampling: Sampling | None = None,
    drafter: Drafter | None = None,
    ewma: float = 0.5,
    smooth_over: SmoothOver = "boundaries",
    min_thinking_tokens: int = 8,
    share: float = 0.5,
) -> ExitPolicy:
    """Writes a linear head with random weights, and a policy under which a given share of the requests exit.

    The requests are decoded to the end, the features are normalised by what is found there, and the threshold stands
    in the widest gap between all smoothed values near the wanted quantile of the requests' largest ones, so that no
    engine's rounding decides.

    Args:
        folder: Where; it is made if need be.
        target: The model; float32 for exact comparisons.
        requests: What will be asked.
        sources: What the head reads.
        aux_layers: The tapped layers, where `target_aux` is among the sources.
        sampling: How the requests are decoded; None: greedily.
        drafter: Gives the states behind `draft`, where that is among the sources.
        ewma: Weight of the newest value in the moving average.
        smooth_over: What the average runs over.
        min_thinking_tokens: Fewest tokens before an exit.
        share: About how many of the requests exit.

    Raises:
        ValueError: No request passes two boundaries, so that there is nothing to choose.
    """
    states = None if drafter is None else drafter.states
    spec = FeatureSpec(sources=sources, hidden_size=target.identity.hidden_size, aux_layers=aux_layers, draft=states)
    sampling = sampling or Sampling(temperature=0.0)
    engine = HFEngine(target, sampling=sampling, aux_layers=aux_layers, drafter=drafter)
    rows = engine.rollout(requests, "all").rows
    columns = {"target_last": rows.last, "target_aux": rows.aux, "scalars": rows.scalars, "draft": rows.draft}
    features = torch.cat([columns[source].float() for source in spec.sources], dim=-1)
    head = _random_head(features)
    values = _smoothed(head(features), rows, len(requests), ewma, smooth_over, min_thinking_tokens)
    policy = ExitPolicy(
        predicate="all",
        thresholds={SIGNAL: _threshold(values, share)},
        ewma=ewma,
        smooth_over=smooth_over,
        min_thinking_tokens=min_thinking_tokens,
    )
    folder.mkdir(parents=True, exist_ok=True)
    told = json.dumps([list(request.prompt_ids) for request in requests]).encode()
    card = HeadCard(
        config=head.config,
        spec=spec,
        identity=target.identity,
        data_sha256=hashlib.sha256(told).hexdigest(),
        rows="all",
        metrics=None,
    )
    save_head(folder, head, card)
    write_json(folder / "policy.json", policy.to_json())
    return policy


@torch.no_grad()
def _random_head(features: Float[Tensor, "N F"]) -> SignalHead:
    torch.manual_seed(11)
    head = SignalHead(HeadConfig(arch="linear"), features.shape[1]).eval()
    head.set_normalisation(features.mean(0), features.std(0))
    for parameter in head.parameters():
        parameter.mul_(_STEEP)
    return head


@torch.no_grad()
def _smoothed(
    signals: Float[Tensor, "N L"],
    rows: CapturedRows,
    num_requests: int,
    ewma: float,
    smooth_over: SmoothOver,
    min_tokens: int,
) -> list[Float[Tensor, " _"]]:
    """The signal at the boundaries of each request at which it may exit."""
    found = []
    for number in range(num_requests):
        own = rows.request == number
        value, closed, position = signals[own, LEARNED.index(SIGNAL)][:, None], rows.closed[own], rows.position[own]
        averaged = smooth(value, ewma)[closed] if smooth_over == "tokens" else smooth(value[closed], ewma)
        found.append(averaged[position[closed] + 1 >= min_tokens, 0])
    return [values for values in found if len(values)]


def _threshold(values: Sequence[Float[Tensor, " _"]], share: float) -> float:
    if not values:
        raise ValueError("none of the requests passes a boundary late enough; give longer or more requests")
    largest = torch.stack([request.max() for request in values]).double()
    wanted = torch.tensor([1 - share - _LEEWAY, 1 - share + _LEEWAY], dtype=torch.float64).clamp(0, 1)
    low, high = largest.quantile(wanted).tolist()
    every = torch.cat(list(values)).double().sort().values
    near = every[(every >= low) & (every <= high)]
    if len(near) < 2:
        raise ValueError("all requests reach the same signal; give more requests")
    gap = int((near[1:] - near[:-1]).argmax())
    return float((near[gap] + near[gap + 1]) / 2)
