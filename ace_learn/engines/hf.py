"""The HF reference engine: the slow, readable truth for the exit rule, contracts and speculation.

Plain PyTorch on any causal language model of transformers, batched, with and without a drafter, on CPU and CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ace_learn.contracts import Contract
from ace_learn.engines.acceptance_reader import AcceptanceReader
from ace_learn.engines.batch import DecodeBatch, Decoding, TokenListener
from ace_learn.engines.capture import Capture, CapturedRows, CaptureRows
from ace_learn.engines.live import LiveRequest, context_room
from ace_learn.engines.requests import EosInThink, Output, Request
from ace_learn.engines.sampling import Sampling
from ace_learn.engines.signaller import HeadSignaller
from ace_learn.exit.candidates import CandidateReader
from ace_learn.exit.policy import ExitPolicy
from ace_learn.exit.tracker import ExitTracker, Signaller
from ace_learn.json_type import JSON
from ace_learn.models.target import Target
from ace_learn.signals import sources_of
from ace_learn.speculation.adaptive import AdaptiveVerifier
from ace_learn.speculation.drafters import Drafter, DraftStates
from ace_learn.speculation.rules import AcceptanceConfig
from ace_learn.tasks import render_prompt
from ace_learn.tasks.base import user_message


class Branch(NamedTuple):
    """A cut through a trace: think up to `length` output tokens, then the think end."""

    request: int
    """Index of the request in its batch."""
    length: int
    """Output tokens kept."""
    key: int | None = None
    """Names the noise of the answer; None: the request's own, which a live exit there would see."""


class Rollouts(NamedTuple):
    """A finished batch that can still be branched."""

    requests: list[Request]
    outputs: list[Output]
    rows: CapturedRows
    batch: DecodeBatch


class HFEngine:
    """Decodes requests on one target."""

    def __init__(
        self,
        target: Target,
        *,
        sampling: Sampling | None = None,
        policy: ExitPolicy | None = None,
        signaller: Signaller | None = None,
        drafter: Drafter | None = None,
        num_draft_tokens: int = 0,
        acceptance: AcceptanceConfig | None = None,
        verifier: AdaptiveVerifier | None = None,
        aux_layers: tuple[int, ...] = (),
        candidates: bool = False,
        acceptance_columns: bool = False,
        batch_size: int = 64,
    ) -> None:
        """Configures an engine.

        Args:
            target: The model.
            sampling: Temperature, truncation and seed.
            policy: When to end thinking; None: never.
            signaller: Computes the policy's signals (`HeadSignaller`).
            drafter: Proposes tokens; None: no speculation.
            num_draft_tokens: Drafted tokens per step, K; 0 with a drafter whose states are read and nothing is drafted.
            acceptance: When a drafted token is accepted; None: the lossless rule.
            verifier: Predicts which drafts are accepted; it needs a drafter with probabilities. None: all are verified.
            aux_layers: Layers that the signals read.
            candidates: Capture the answers that the thinking states; a head or a policy that reads them gets them
                anyway.
            acceptance_columns: Capture what the signal `acceptance` is computed from; a policy that reads it gets it
                anyway. It needs a drafter that gives its states, and a verifier.
            batch_size: Requests decoded together.

        Raises:
            ValueError: A drafter without draft tokens or the reverse, a lossy rule or a verifier without a drafter, a
                head that reads states which the drafter does not give, a policy that reads `acceptance` where it
                cannot be given, or a batch size below 1.
        """
        states = None if drafter is None else drafter.states
        if num_draft_tokens < 0 or (states is None and (drafter is None) != (num_draft_tokens == 0)):
            raise ValueError(f"a drafter needs num_draft_tokens >= 1 and the reverse, not {num_draft_tokens}")
        if drafter is None and (verifier is not None or (acceptance is not None and not acceptance.is_lossless)):
            raise ValueError("acceptance rules and adaptive verification do nothing without a drafter; name one")
        _check_states(states, signaller, num_draft_tokens)
        if batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, not {batch_size}")
        self.target = target
        self.sampling = sampling or Sampling()
        self.policy = policy or ExitPolicy.never()
        self.signaller = signaller
        self.drafter, self.num_draft_tokens = drafter, num_draft_tokens
        self.acceptance, self.verifier = acceptance or AcceptanceConfig(), verifier
        self.aux_layers = aux_layers
        self.candidates = candidates or _reads_candidates(self.policy, signaller)
        reads_acceptance = acceptance_columns or "acceptance" in self.policy.signals
        self.acceptance_reader = AcceptanceReader(drafter, verifier) if reads_acceptance else None
        self.batch_size = batch_size
        self.forward_tokens = 0
        """Tokens run through the target so far."""

    def ask(
        self,
        prompt: str,
        *,
        contract: Mapping[str, JSON] | None = None,
        key: int = 0,
        max_new_tokens: int = 4096,
        eos_in_think: EosInThink = "force_think_end",
        listener: TokenListener | None = None,
    ) -> Output:
        """Answers one user message.

        Args:
            prompt: The message.
            contract: Spec of the output contract, such as {"kind": "integer"}; it ends the request at the answer.
            key: Names the noise; another key gives another sample.
            max_new_tokens: Cap on the output.
            eos_in_think: What a stop token inside the thinking does.
            listener: Sees the tokens as they come.

        Raises:
            ValueError: The contract is malformed, or the tokenizer has no chat template.
        """
        target = self.target
        ids = render_prompt(target.tokenizer, user_message(prompt), thinking=True, markers=target.markers)
        request = Request(
            key=key,
            prompt_ids=tuple(ids),
            contract=None if contract is None else Contract.from_spec(contract),
            max_new_tokens=max_new_tokens,
            eos_in_think=eos_in_think,
        )
        return self.generate([request], listener=listener)[0]

    def generate(self, requests: Sequence[Request], *, listener: TokenListener | None = None) -> list[Output]:
        """Decodes all requests, in batches; outputs are in the order of the requests."""
        return [output for outputs in self.stream_batches(requests, listener=listener) for output in outputs]

    def stream_batches(
        self, requests: Sequence[Request], *, listener: TokenListener | None = None
    ) -> Iterator[list[Output]]:
        """Decodes batch by batch, for progress bars and incremental writers.

        Raises:
            ValueError: A prompt is empty or leaves no room in the model's context; nothing is decoded then.
        """
        for request in requests:
            context_room(request, self.target)
        for start in range(0, len(requests), self.batch_size):
            lives = [LiveRequest(request, self.target) for request in requests[start : start + self.batch_size]]
            batch = DecodeBatch(self._decoding(len(lives), listener=listener), lives)
            self._run(batch)
            yield [live.output() for live in lives]

    def rollout(self, requests: Sequence[Request], rows: CaptureRows) -> Rollouts:
        """Decodes one batch, capturing features, and keeps its cache for `branch`."""
        lives = [LiveRequest(request, self.target) for request in requests]
        capture = Capture(
            rows,
            hidden_size=self.target.identity.hidden_size,
            num_aux=len(self.aux_layers),
            dtype=self.target.output_layer.weight.dtype,
            candidates=self.candidates,
            draft_size=0 if self.drafter is None or self.drafter.states is None else self.drafter.states.size,
            acceptance=self.acceptance_reader is not None,
        )
        batch = DecodeBatch(self._decoding(len(lives), capture=capture), lives)
        self._run(batch)
        return Rollouts(list(requests), [live.output() for live in lives], capture.finish(), batch)

    def branch(self, rollouts: Rollouts, branches: Sequence[Branch]) -> list[Output]:
        """Regenerates answers from cuts through a batch's traces.

        The traces' keys and values are reused: a branch costs the tokens of its think end and of its answer alone.
        """
        outputs: list[Output] = []
        for start in range(0, len(branches), self.batch_size):
            chunk = branches[start : start + self.batch_size]
            outputs.extend(self._branch(rollouts, chunk))
        return outputs

    def _branch(self, rollouts: Rollouts, branches: Sequence[Branch]) -> list[Output]:
        lives = []
        for branch in branches:
            request, output = rollouts.requests[branch.request], rollouts.outputs[branch.request]
            prefix = [*output.token_ids[: branch.length], *self.target.markers.end]
            if branch.key is not None:
                request = replace(request, key=branch.key)
            lives.append(LiveRequest(request, self.target, prefix=prefix))
        cached = [len(live.request.prompt_ids) + branch.length for live, branch in zip(lives, branches, strict=True)]
        slots = torch.tensor([rollouts.batch.slot_of(branch.request) for branch in branches], device=self.target.device)
        room = len(self.target.markers.end) + max(live.max_answer_room for live in lives)
        cache = rollouts.batch.cache.fork(slots, max(cached), room=room)
        batch = DecodeBatch(Decoding(target=self.target, sampling=self.sampling), lives, cache)
        self._run(batch, cached)
        return [live.output() for live in lives]

    def _run(self, batch: DecodeBatch, num_cached: Sequence[int] | None = None) -> None:
        batch.run(num_cached)
        self.forward_tokens += batch.forward_tokens

    def _decoding(
        self, num_slots: int, *, capture: Capture | None = None, listener: TokenListener | None = None
    ) -> Decoding:
        untracked = Decoding(
            target=self.target,
            sampling=self.sampling,
            drafter=self.drafter,
            num_draft_tokens=self.num_draft_tokens,
            acceptance=self.acceptance,
            verifier=self.verifier,
        )
        watched = capture is not None or listener is not None or self.acceptance.only_in_think
        if self.policy.predicate == "never" and not watched:
            return untracked
        tracker = ExitTracker(
            markers=self.target.markers,
            tables=self.target.tables,
            policy=self.policy,
            signaller=self.signaller,
            num_slots=num_slots,
            window=2 * (self.num_draft_tokens + 1),
            device=self.target.device,
            candidates=CandidateReader(self.target.decode, num_slots) if self.candidates else None,
        )
        return replace(
            untracked,
            tracker=tracker,
            acceptance_reader=self.acceptance_reader,
            aux_layers=self.aux_layers,
            capture=capture,
            listener=listener,
        )


def _check_states(states: DraftStates | None, signaller: Signaller | None, num_draft_tokens: int) -> None:
    """Refuses a drafter whose states a head does not know, and drafts so long that they would come too late."""
    wanted = signaller.spec.draft if isinstance(signaller, HeadSignaller) else None
    if wanted is not None and wanted != states:
        raise ValueError(
            f"the head reads the states of a drafter, {wanted}, and the engine's drafter gives {states}; decode with "
            "the drafter that the head was trained with"
        )
    if states is not None and num_draft_tokens >= states.delay:
        raise ValueError(
            f"signals read the drafter's states {states.delay} positions late, so at most {states.delay - 1} tokens "
            f"can be drafted, not {num_draft_tokens}"
        )


def _reads_candidates(policy: ExitPolicy, signaller: Signaller | None) -> bool:
    """Whether a policy or a head needs the answers that the thinking states."""
    of_head = signaller.spec.sources if isinstance(signaller, HeadSignaller) else ()
    return "candidates" in of_head or any("candidates" in read for read in sources_of(policy.signals).values())
