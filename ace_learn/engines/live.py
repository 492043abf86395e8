"""Host-side state of one running request of the reference engine."""

from __future__ import annotations

from collections.abc import Sequence

from ace_learn.engines.follower import FollowRules, TokenFollower
from ace_learn.engines.requests import ExitRecord, Output, Request, SpeculationStats
from ace_learn.models.target import Target
from ace_learn.speculation.window import Finish, FinishLimits


def context_room(request: Request, target: Target) -> int:
    """Output tokens that fit into the model's context behind a request's prompt.

    Raises:
        ValueError: The prompt is empty, or none fit.
    """
    length = len(request.prompt_ids)
    if not length:
        raise ValueError(f"request {request.key} has an empty prompt; give it at least one token")
    if length >= target.context_length:
        raise ValueError(
            f"request {request.key} has a prompt of {length} tokens, which leaves no room for an answer in the model's "
            f"context of {target.context_length}; shorten the prompt"
        )
    return target.context_length - length


class LiveRequest(TokenFollower):
    """Follows one request through its windows of accepted tokens."""

    def __init__(self, request: Request, target: Target, *, prefix: Sequence[int] = ()) -> None:
        """Starts a request.

        Args:
            request: What to run.
            target: Names stop tokens, markers and the tokenizer.
            prefix: Output tokens that stand already (a probe: the trace up to a boundary and the think end).

        Raises:
            ValueError: The prompt is empty or leaves no room in the model's context.
        """
        limits = FinishLimits(
            stop_ids=target.stop_ids,
            max_new_tokens=request.max_new_tokens,
            context_room=context_room(request, target),
            min_tokens=request.min_tokens,
        )
        rules = FollowRules(
            markers=target.markers,
            decode=target.decode,
            limits=limits,
            contract=request.contract,
            stop=request.stop,
            max_answer_tokens=request.max_answer_tokens,
        )
        super().__init__(request.prompt_ids, rules)
        self.request, self.target, self.limits = request, target, limits
        self.forces_think_end = request.eos_in_think == "force_think_end"
        self.logprobs: list[float] = []
        self._drafted: list[bool] = []
        self.pending: list[int] = []
        """Tokens that must come next."""
        self.stats = SpeculationStats()
        self.exit: ExitRecord | None = None
        self.seconds = 0.0
        self._prefix_length = len(prefix)
        for token in prefix:
            self.append(token)

    @property
    def room(self) -> int:
        """Tokens that may still be kept."""
        return min(self.limits.max_new_tokens, self.limits.context_room) - self.length

    @property
    def max_answer_room(self) -> int:
        """Most tokens that an answer from here on may take."""
        cap = self.answer_cap()
        return self.room if cap is None else min(self.room, cap - self.length)

    def push(self, window: Sequence[int], logprobs: Sequence[float], *, num_accepted: int = 0) -> int:
        """Appends the tokens of a step, the first `num_accepted` of them accepted drafts; returns how many were kept.

        The window is read token by token, so that what a request answers does not depend on how many tokens a step
        accepts. Sets `finish` when the request ends in this window. A stop token in the thinking becomes the think end,
        unless the request says otherwise, and cuts the window.
        """
        before = self.length
        for i, (token, logprob) in enumerate(zip(window, logprobs, strict=True)):
            ends_thought = self.forces_think_end and self.thinking and token in self.limits.stop_ids
            if ends_thought:
                end = self.target.markers.end
                token, self.pending = end[0], list(end[1:])
            self.logprobs.append(logprob)
            self._drafted.append(i < num_accepted and not ends_thought)
            if self.follow(token) is not None or ends_thought:
                break
        return max(0, self.length - before)

    def accepted_since(self, before: int) -> int:
        """Accepted drafts among the output tokens from index `before` on."""
        start = self._prefix_length
        return sum(self._drafted[before - start : max(before, self.length) - start])

    def settle(self, finish: Finish) -> None:
        """Cuts the request at its end, log-probabilities and counts as well."""
        super().settle(finish)
        kept = max(0, self.length - self._prefix_length)
        del self.logprobs[kept:]
        self.stats.accepted = sum(self._drafted[:kept])

    def output(self) -> Output:
        """The finished request."""
        assert self.finish is not None, "output of a request that is still running"
        return Output(
            key=self.request.key,
            token_ids=tuple(self.output_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish.reason,
            think_start=self.think_start,
            think_end=self.think_end,
            answer=self.answer,
            answer_text=self.answer_text(),
            exit=self.exit,
            stats=self.stats,
            seconds=self.seconds,
        )
