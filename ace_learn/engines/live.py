"""Host-side state of one running request: tokens, think span, answer stream, finish."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from ace_learn.contracts import JSON, Commit, TokenCommit, TokenStream
from ace_learn.contracts.stream import TextCommitter
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
        if not request.prompt_ids:
            raise ValueError(f"request {request.key} has an empty prompt; give it at least one token")
        self.request, self.target = request, target
        self.limits = FinishLimits(
            stop_ids=target.stop_ids,
            max_new_tokens=request.max_new_tokens,
            context_room=target.context_length - len(request.prompt_ids),
            min_tokens=request.min_tokens,
        )
        self.ids = list(request.prompt_ids)
        self.logprobs: list[float] = []
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
        self._committer = None if request.contract is None else self._stream(request.contract.committer())
        self._stopper = self._stream(StopStrings(request.stop)) if request.stop else None
        self._commit: Ending | None = None
        self._stop: Ending | None = None
        self._answer: list[int] = []
        self._answer_lengths: list[int] = []
        """Tokens outside the thinking, and the output length at each."""
        self._prefix_length = len(prefix)
        self._append(prefix)

    def _stream(self, committer: TextCommitter) -> TokenStream:
        return TokenStream(committer, self.target.decode)

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

    def push(self, window: Sequence[int], logprobs: Sequence[float]) -> int:
        """Appends the tokens that a step accepted; returns how many of them were kept.

        Sets `finish` when the request ends in this window. A stop token inside the think span becomes the think end.
        """
        before = self.length
        window = self._end_of_text_in_think(window)
        self.logprobs.extend(logprobs[: len(window)])
        self._append(window)
        self.finish = finish_window(
            window,
            before=before,
            limits=self.limits,
            committed=self._commit and self._commit.length,
            stop_string=self._stop and self._stop.length,
            answer_cap=self._cap(),
        )
        if self.finish is not None:
            self._settle(self.finish)
        return max(0, self.length - before)

    def _append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.ids.append(token)
            was_thinking = self.thinking
            self._follow_think()
            if was_thinking or self.thinking or token in self.limits.stop_ids:
                continue
            self._answer.append(token)
            self._answer_lengths.append(self.length)
            if self._committer is not None and self._commit is None:
                self._commit = self._ending(self._committer.push([token]))
            if self._stopper is not None and self._stop is None:
                self._stop = self._ending(self._stopper.push([token]))

    def _ending(self, found: TokenCommit | None) -> Ending | None:
        return None if found is None else Ending(self._answer_lengths[found.num_tokens - 1], found.commit)

    def _follow_think(self) -> None:
        """Keeps track of the think spans; `think_start` and `think_end` are those of the first."""
        start, end = self.target.markers
        if not self.thinking and tuple(self.ids[-len(start) :]) == start:
            self.thinking = True
            if self.think_start is None:
                self.think_start, self.answer_start = self.length, None
        elif self.thinking and tuple(self.ids[-len(end) :]) == end:
            self.thinking = False
            if self.think_end is None:
                self.think_end, self.answer_start = self.length - len(end), self.length

    def _end_of_text_in_think(self, window: Sequence[int]) -> list[int]:
        """Cuts a window at a stop token that is thought, and schedules the think end in its place."""
        end = self.target.markers.end
        thinking = self.thinking
        for i, token in enumerate(window):
            thinking = (thinking or token == self.target.markers.start[-1]) and token != end[-1]
            if thinking and token in self.limits.stop_ids:
                self.pending = list(end[1:])
                return [*window[:i], end[0]]
        return list(window)

    def _cap(self) -> int | None:
        if self.request.max_answer_tokens is None or self.answer_start is None:
            return None
        return self.answer_start + self.request.max_answer_tokens

    def _settle(self, finish: Finish) -> None:
        """Cuts the request at its end; a contract may settle only now, where the text ended by itself."""
        if self._commit is None and self._committer is not None:
            self._commit = self._ending(self._committer.close(truncated=finish.reason != "stop"))
            if self._commit is not None:
                finish = Finish(min(finish.length, self._commit.length), "contract")
        if self._commit is not None and self._commit.length <= finish.length:
            self.answer = self._commit.commit.answer
        self.finish = finish
        del self.ids[len(self.request.prompt_ids) + finish.length :]
        del self.logprobs[max(0, finish.length - self._prefix_length) :]

    def _answer_text(self) -> str:
        assert self.finish is not None
        text = self.target.decode(self._answer[: bisect_right(self._answer_lengths, self.finish.length)])
        if self.finish.reason == "contract" and self._commit is not None:
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
