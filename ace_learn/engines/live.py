"""Host-side state of one running request: tokens, think span, answer stream, finish."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from ace_learn.contracts import JSON, Commit, TokenCommit, TokenStream
from ace_learn.engines.requests import ExitRecord, Output, Request, SpeculationStats
from ace_learn.models.target import Target
from ace_learn.speculation.window import Finish, FinishLimits, finish_window
from ace_learn.thinking import opens_think


class Ending(NamedTuple):
    """A commit, or a completed stop string, in output tokens."""

    length: int
    """Output tokens kept."""
    commit: Commit


class StopStrings:
    """Finds the earliest completed stop string in streamed text; a committer whose answer is the string."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Looks for non-empty `stops`."""
        if "" in stops:
            raise ValueError("an empty stop string would stop everywhere; leave it out")
        self.stops = tuple(stops)
        self._seen = ""
        self._dropped = 0

    def feed(self, text: str) -> Commit | None:
        """The stop string that completes first in the text so far."""
        self._seen += text
        hits = [(self._seen.find(stop) + len(stop), stop) for stop in self.stops if stop in self._seen]
        if hits:
            end, stop = min(hits)
            return Commit(stop, self._dropped + end)
        drop = max(0, len(self._seen) - max(map(len, self.stops)))
        self._seen, self._dropped = self._seen[drop:], self._dropped + drop
        return None

    def close(self, *, truncated: bool = False) -> Commit | None:
        """The end of the text completes no stop string."""
        return None


class _AnswerText:
    """The text outside the thinking; what stands before and behind a reopened block is never read together."""

    def __init__(self, request: Request, target: Target) -> None:
        self.request, self.target = request, target
        self.restart()

    def restart(self) -> None:
        """Begins anew behind a think block."""
        contract = self.request.contract
        self.committer = None if contract is None else TokenStream(contract.committer(), self.target.decode)
        self.stopper = self._new_stopper()
        self.stopper_tokens = self.stopper_chars = 0
        """Where the stopper began to read."""
        self.ids: list[int] = []
        self.lengths: list[int] = []
        """Output length at each token."""

    def _new_stopper(self) -> TokenStream | None:
        return TokenStream(StopStrings(self.request.stop), self.target.decode) if self.request.stop else None

    def push(self, token: int, length: int) -> tuple[Ending | None, Ending | None]:
        """Reads one token, the `length`-th of the output; the commit and the stop string so far."""
        self.ids.append(token)
        self.lengths.append(length)
        commit = None if self.committer is None else _ending(self.committer.push([token]), self.lengths)
        return commit, self._stop(token)

    def _stop(self, token: int) -> Ending | None:
        found = None if self.stopper is None else self.stopper.push([token])
        if found is None:
            return None
        length = self.lengths[self.stopper_tokens + found.num_tokens - 1]
        if length > self.request.min_tokens:
            return Ending(length, found.commit._replace(end=self.stopper_chars + found.commit.end))
        self.stopper = self._new_stopper()  # this one is hidden, later ones still count
        self.stopper_tokens, self.stopper_chars = len(self.ids), len(self.target.decode(self.ids))
        return None

    def close(self, *, truncated: bool) -> Ending | None:
        """What only the end of the text settles."""
        return None if self.committer is None else _ending(self.committer.close(truncated=truncated), self.lengths)

    def text(self, length: int) -> str:
        """The text within the first `length` output tokens."""
        return self.target.decode(self.ids[: bisect_right(self.lengths, length)])


def _ending(found: TokenCommit | None, lengths: Sequence[int]) -> Ending | None:
    return None if found is None else Ending(lengths[found.num_tokens - 1], found.commit)


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


class LiveRequest:
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
        self.request, self.target = request, target
        self.forces_think_end = request.eos_in_think == "force_think_end"
        self.limits = FinishLimits(
            stop_ids=target.stop_ids,
            max_new_tokens=request.max_new_tokens,
            context_room=context_room(request, target),
            min_tokens=request.min_tokens,
        )
        self.ids = list(request.prompt_ids)
        self.logprobs: list[float] = []
        self._drafted: list[bool] = []
        self.pending: list[int] = []
        """Tokens that must come next."""
        self.think_start: int | None = None
        self.think_end: int | None = None
        self.thinking = opens_think(self.ids, target.markers)
        """Whether the next token is thought, in the first think span or in a reopened one."""
        self.answer_start: int | None = None if self.thinking else 0
        """Output tokens before the answer; None in the first think span."""
        if self.thinking:
            self.think_start = 0
        self.stats = SpeculationStats()
        self.exit: ExitRecord | None = None
        self.finish: Finish | None = None
        self.answer: JSON = None
        self.seconds = 0.0
        self._commit: Ending | None = None
        self._stop: Ending | None = None
        self._answer = _AnswerText(request, target)
        self._thought = self._anywhere()
        self._prefix_length = len(prefix)
        for token in prefix:
            self._append(token)

    def _anywhere(self) -> TokenStream | None:
        """Reads the thinking too, for a contract whose scope is anywhere."""
        contract = self.request.contract
        if contract is None or contract.scope != "anywhere":
            return None
        return TokenStream(contract.committer(), self.target.decode)

    @property
    def length(self) -> int:
        """Output tokens so far."""
        return len(self.ids) - len(self.request.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """Output tokens so far."""
        return self.ids[len(self.request.prompt_ids) :]

    @property
    def room(self) -> int:
        """Tokens that may still be kept."""
        return min(self.limits.max_new_tokens, self.limits.context_room) - self.length

    @property
    def max_answer_room(self) -> int:
        """Most tokens that an answer from here on may take."""
        cap = self._cap()
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
            self._append(token)
            finish = self._finish(token)
            if finish is not None:
                self._settle(finish)
            if finish is not None or ends_thought:
                break
        return max(0, self.length - before)

    def accepted_since(self, before: int) -> int:
        """Accepted drafts among the output tokens from index `before` on."""
        start = self._prefix_length
        return sum(self._drafted[before - start : max(before, self.length) - start])

    def _finish(self, token: int) -> Finish | None:
        return finish_window(
            [token],
            before=self.length - 1,
            limits=self.limits,
            committed=self._commit and self._commit.length,
            stop_string=self._stop and self._stop.length,
            answer_cap=self._cap(),
        )

    def _append(self, token: int) -> None:
        self.ids.append(token)
        was_thinking = self.thinking
        self._follow_think()
        if token in self.limits.stop_ids:
            return
        if self._thought is not None and self._commit is None:
            self._commit = _ending(self._thought.push([token]), range(1, self.length + 1))
        if was_thinking or self.thinking:
            return
        commit, self._stop = self._answer.push(token, self.length)
        if self._thought is None and self._commit is None:
            self._commit = commit

    def _follow_think(self) -> None:
        """Keeps track of the think spans; `think_start` and `think_end` are those of the first."""
        start, end = self.target.markers
        if not self.thinking and tuple(self.ids[-len(start) :]) == start:
            self.thinking = True
            if self.think_start is None:
                self.think_start, self.answer_start = self.length, None
        elif self.thinking and tuple(self.ids[-len(end) :]) == end:
            self.thinking = False
            self._answer.restart()
            if self.think_end is None:
                self.think_end, self.answer_start = self.length - len(end), self.length

    def _cap(self) -> int | None:
        if self.request.max_answer_tokens is None or self.answer_start is None:
            return None
        return self.answer_start + self.request.max_answer_tokens

    def _settle(self, finish: Finish) -> None:
        """Cuts the request at its end; a contract may settle only now, where the text ended by itself."""
        if self._commit is None:
            truncated = finish.reason != "stop"
            if self._thought is not None:
                self._commit = _ending(self._thought.close(truncated=truncated), range(1, self.length + 1))
            elif not self.thinking:
                self._commit = self._answer.close(truncated=truncated)
            if self._commit is not None:
                finish = Finish(min(finish.length, self._commit.length), "contract")
        if self._commit is not None and self._commit.length <= finish.length:
            self.answer = self._commit.commit.answer
        self.finish = finish
        del self.ids[len(self.request.prompt_ids) + finish.length :]
        kept = max(0, finish.length - self._prefix_length)
        del self.logprobs[kept:]
        self.stats.accepted = sum(self._drafted[:kept])

    def _answer_text(self) -> str:
        assert self.finish is not None
        text = self._answer.text(self.finish.length)
        if self.finish.reason == "contract" and self._commit is not None and self._thought is None:
            return text[: self._commit.commit.end]
        if self._stop is not None and self.finish == Finish(self._stop.length, "stop"):
            return text[: self._stop.commit.end - len(str(self._stop.commit.answer))]
        return text

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
            answer_text=self._answer_text(),
            exit=self.exit,
            stats=self.stats,
            seconds=self.seconds,
        )
