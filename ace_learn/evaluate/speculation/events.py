"""Acceptance events of real decoding: what each draft looked like, and whether the target took it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from ace_learn.engines.draft_model import ModelDrafter
from ace_learn.engines.hidden_drafter import HiddenDrafter
from ace_learn.engines.requests import Output, Request
from ace_learn.engines.sampling import Sampling
from ace_learn.evaluate.speculation.setting import Pair
from ace_learn.models.target import Target
from ace_learn.speculation.drafters import Drafter, Drafts, DraftSession
from ace_learn.speculation.estimator import MAX_LOG_ODDS, log_odds

FEATURES = ("logit_max", "max", "entropy", "margin", "logit_sampled", "loglog_sampled")
"""Columns of `Steps.features`; entropy is negated, so that all of them rise with confidence."""
LOSSLESS = ("logit_max", "max", "entropy", "margin")
"""Those that score the law alone; the others score the draft, and trimming on them biases the output."""


class Steps(NamedTuple):
    """Verify steps with drafts, in the order in which they were decoded (s of them)."""

    request: Int[ndarray, " s"]
    length: Int[ndarray, " s"]
    """Tokens before the first draft."""
    thinking: Int[ndarray, " s"]
    features: Float[ndarray, "s K C"]
    accepted: Int[ndarray, " s"]
    drafted: Int[ndarray, " s"]

    def judged(self) -> Int[ndarray, "s K"]:
        """Whether the target judged each draft: those it accepted, and the first that it rejected."""
        column = np.arange(self.features.shape[1])
        return ((column <= self.accepted[:, None]) & (column < self.drafted[:, None])).astype(int)

    def labels(self) -> Int[ndarray, "s K"]:
        """Whether it accepted each draft."""
        return (np.arange(self.features.shape[1]) < self.accepted[:, None]).astype(int)

    def rows(self, index: Int[ndarray, " n"]) -> Steps:
        """Some of the steps."""
        return Steps(*(column[index] for column in self))


class _Recorded(NamedTuple):
    length: int
    tokens: list[int]
    features: Float[ndarray, "K C"]


class _RecordingSession:
    """Passes everything on, and notes what was drafted for whom."""

    def __init__(self, session: DraftSession, keys: Sequence[int], steps: dict[int, list[_Recorded]]) -> None:
        self.session, self.slots, self.steps = session, list(keys), steps

    def observe(
        self,
        positions: Int[Tensor, "B Q"],
        hidden: Float[Tensor, "B Q A"],
        *,
        longest: int,
        first_slot: int = 0,
    ) -> None:
        """Passes on."""
        self.session.observe(positions, hidden, longest=longest, first_slot=first_slot)

    def draft(self, sequences: Sequence[Sequence[int]], room: Sequence[int]) -> Drafts:
        """Notes the drafts."""
        drafts = self.session.draft(sequences, room)
        if drafts.probabilities is not None and drafts.tokens.shape[1]:
            features = draft_features(drafts.probabilities, drafts.tokens).cpu().numpy()
            rows = zip(sequences, drafts.tokens.tolist(), drafts.num_drafted.tolist(), strict=True)
            for slot, (ids, tokens, count) in enumerate(rows):
                if count:
                    recorded = _Recorded(len(ids), tokens[:count], features[slot, :count])
                    self.steps.setdefault(self.slots[slot], []).append(recorded)
        return drafts

    def swap(self, a: int, b: int) -> None:
        """Follows the requests."""
        self.session.swap(a, b)
        self.slots[a], self.slots[b] = self.slots[b], self.slots[a]


class _RecordingDrafter:
    """A drafter whose sessions are recorded."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.taps, self.states = drafter, drafter.taps, drafter.states
        self.steps: dict[int, list[_Recorded]] = {}
        """Of each request, by its key."""

    def start(self, keys: Int[Tensor, " B"]) -> _RecordingSession:
        """Starts both."""
        return _RecordingSession(self.drafter.start(keys), keys.tolist(), self.steps)


def draft_features(law: Float[Tensor, "B K V"], drafted: Int[Tensor, "B K"]) -> Float[Tensor, "B K C"]:
    """Every feature of the study, columns `FEATURES`."""
    top = law.topk(2, dim=-1).values.clamp_min(1e-38)
    entropy = -torch.xlogy(law, law).sum(-1)
    sampled = law.gather(-1, drafted[..., None]).squeeze(-1).clamp(1e-12, 1.0 - 1e-6)
    columns = (
        log_odds(law.clamp_min(1e-38).log()),
        top[..., 0],
        -entropy,
        (top[..., 0] / top[..., 1]).log().clamp_max(MAX_LOG_ODDS),
        torch.logit(sampled.double()).float(),
        -(-sampled.log()).log(),
    )
    return torch.stack(columns, dim=-1)


def collect(
    pair: Pair,
    requests: Sequence[Request],
    *,
    temperature: float,
    draft_temperature: float | None = None,
    batch_size: int,
) -> tuple[Steps, list[Output]]:
    """Decodes losslessly and says what became of every draft.

    A draft was accepted if the output has it: what replaces a rejected one is never the same token. Drafts behind the
    output's end were not judged.

    Args:
        pair: Target and drafter.
        requests: What to decode.
        temperature: Of the target.
        draft_temperature: Of the drafter, if it is another.
        batch_size: Requests decoded together.
    """
    seed = pair.setting.seed
    own = Sampling(temperature=draft_temperature or temperature, seed=seed)
    recorder = _RecordingDrafter(pair.drafter(own))
    engine = pair.engine(Sampling(temperature=temperature, seed=seed), drafter=recorder, batch_size=batch_size)
    outputs = engine.generate(requests)
    width = pair.setting.draft_tokens
    columns: list[tuple[int, int, int, Float[ndarray, "K C"], int, int]] = []
    for request, output in zip(requests, outputs, strict=True):
        prompt = len(request.prompt_ids)
        end = len(output.token_ids) if output.think_end is None else output.think_end
        for step in recorder.steps.get(request.key, []):
            follows = output.token_ids[step.length - prompt :][: len(step.tokens)]
            accepted = next((i for i, (a, b) in enumerate(zip(step.tokens, follows)) if a != b), len(follows))  # noqa: B905
            features = np.zeros((width, len(FEATURES)), dtype=np.float32)
            features[: len(step.features)] = step.features
            thinks = int(step.length - prompt < end)
            columns.append((request.key, step.length, thinks, features, accepted, len(follows)))
    return Steps(*(np.array(column) for column in zip(*columns, strict=True))), outputs


def hidden_states(
    drafter: Drafter, target: Target, requests: Sequence[Request], outputs: Sequence[Output], steps: Steps
) -> Float[ndarray, "s K H"]:
    """The drafter's hidden states that each judged draft was drawn from, in half precision.

    The tokens before a judged draft are all in the output, so that one pass over the output gives every state.

    Args:
        drafter: One that is a model.
        target: The model that verifies.
        requests: What was decoded.
        outputs: What came of it.
        steps: The steps of these.
    """
    states: Float[ndarray, "s K H"] | None = None
    width = steps.features.shape[1]
    place = {request.key: i for i, request in enumerate(requests)}
    for key in np.unique(steps.request):
        i = place[int(key)]
        tokens = torch.tensor([[*requests[i].prompt_ids, *outputs[i].token_ids]], device=target.device)
        read = _read_states(drafter, target, tokens, width).cpu().numpy()
        if states is None:
            states = np.zeros((len(steps.request), width, read.shape[-1]), dtype=np.float16)
        rows = np.flatnonzero(steps.request == key)
        length = steps.length[rows].clip(max=tokens.shape[1])  # a step behind the output's end judged nothing
        states[rows] = read[:, length].swapaxes(0, 1)
    assert states is not None, "there is a step"
    return states


@torch.inference_mode()
def _read_states(
    drafter: Drafter, target: Target, tokens: Int[Tensor, "1 T"], width: int
) -> Float[Tensor, "{width} T1 H"]:
    """Row k, column n: the state that draft k is drawn from where n of the tokens come before the first draft."""
    longest = tokens.shape[1]
    columns = torch.arange(longest + 1, device=tokens.device)
    if isinstance(drafter, ModelDrafter):
        model = drafter.model
        last = model.forward(tokens, columns[None, :-1], model.new_cache(1), longest=longest).last[0]
        return torch.stack([last[(columns - 1 + k).clamp(0, longest - 1)] for k in range(width)])
    assert isinstance(drafter, HiddenDrafter), "the other drafters have no law, and so no event"
    module = drafter.module
    aux = target.forward(tokens, columns[None, :-1], target.new_cache(1), longest=longest, aux_layers=drafter.taps).aux
    unrolled = module.unroll(tokens, module.fuse(aux), width)
    return torch.stack([output.read[0, (columns - 2).clamp_min(0)] for output in unrolled])
