"""Follows the tokens of one request: think spans, the answer, and where the request ends (DESIGN 7, finish window).

Shared by every engine that sees token ids, so that they end a request at the same token for the same reason.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ace_learn.contracts import JSON, Commit, Contract, TokenCommit, TokenStream
from ace_learn.speculation.window import Finish, FinishLimits, finish_window
from ace_learn.thinking import ThinkMarkers, opens_think

Decode = Callable[[Sequence[int]], str]


class Ending(NamedTuple):
    """A commit, or a completed stop string, in output tokens."""

    length: int
    """Output tokens kept."""
    commit: Commit
    surplus: int = 0
    """Characters of the kept tokens behind the end."""


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


@dataclass(frozen=True, kw_only=True)
class FollowRules:
    """What a request is followed by."""

    markers: ThinkMarkers
    decode: Decode
    """Text of output tokens, special tokens included."""
    limits: FinishLimits
    contract: Contract | None = None
    stop: tuple[str, ...] = ()
    """Stop strings."""
    decode_stop: Decode | None = None
    """Text in which stop strings are looked for, the thinking included; None: the answer's text alone."""
    max_answer_tokens: int | None = None


class AnswerText:
    """A text in which an answer and stop strings are looked for; `restart` begins anew behind a think block."""

    def __init__(self, *, contract: Contract | None, stop: tuple[str, ...], min_tokens: int, decode: Decode) -> None:
        """Reads for a contract and for stop strings, either of which may be absent."""
        self.contract, self.stop, self.min_tokens, self.decode = contract, stop, min_tokens, decode
        self.restart()

    def restart(self) -> None:
        """Begins anew: what stands before and behind a reopened block is never read together."""
        self.committer = None if self.contract is None else TokenStream(self.contract.committer(), self.decode)
        self.stopper = self._new_stopper()
        self.stopper_tokens = self.stopper_chars = 0
        """Where the stopper began to read."""
        self.ids: list[int] = []
        self.lengths: list[int] = []
        """Output length at each token."""

    def _new_stopper(self) -> TokenStream | None:
        return TokenStream(StopStrings(self.stop), self.decode) if self.stop else None

    def push(self, token: int, length: int) -> tuple[Ending | None, Ending | None]:
        """Reads one token, the `length`-th of the output; the commit and the stop string so far."""
        self.ids.append(token)
        self.lengths.append(length)
        commit = None if self.committer is None else ending(self.committer.push([token]), self.lengths)
        return commit, self._stop(token)

    def _stop(self, token: int) -> Ending | None:
        found = None if self.stopper is None else self.stopper.push([token])
        if found is None:
            return None
        length = self.lengths[self.stopper_tokens + found.num_tokens - 1]
        if length > self.min_tokens:
            return Ending(length, found.commit._replace(end=self.stopper_chars + found.commit.end), found.surplus)
        self.stopper = self._new_stopper()  # this one is hidden, later ones still count
        self.stopper_tokens, self.stopper_chars = len(self.ids), len(self.decode(self.ids))
        return None

    def close(self, *, truncated: bool) -> Ending | None:
        """What only the end of the text settles."""
        return None if self.committer is None else ending(self.committer.close(truncated=truncated), self.lengths)

    def sure_length(self, length: int) -> int:
        """Of `length` output tokens, those that a commit yet to come will keep whole."""
        sure = len(self.lengths) if self.committer is None else self.committer.num_sure
        return length if sure == len(self.lengths) else self.lengths[sure] - 1

    def text(self, length: int) -> str:
        """The text within the first `length` output tokens."""
        return self.decode(self.ids[: bisect_right(self.lengths, length)])


def ending(found: TokenCommit | None, lengths: Sequence[int]) -> Ending | None:
    """A commit of a token stream in output tokens; `lengths` is the output length at each token of the stream."""
    return None if found is None else Ending(lengths[found.num_tokens - 1], found.commit, found.surplus)


class TokenFollower:
    """Follows one request token by token, so that its outcome does not depend on how many tokens a step accepts."""

    def __init__(self, prompt_ids: Sequence[int], rules: FollowRules) -> None:
        """Starts behind a prompt."""
        self.rules = rules
        self.ids = list(prompt_ids)
        self.prompt_length = len(self.ids)
        self.think_start: int | None = None
        self.think_end: int | None = None
        """Output tokens before the first think span, and before its end."""
        self.thinking = opens_think(_tail(self.ids, rules.markers), rules.markers)
        """Whether the next token is thought, in the first think span or in a reopened one."""
        self.answer_start: int | None = None if self.thinking else 0
        """Output tokens before the answer; None in the first think span."""
        if self.thinking:
            self.think_start = 0
        self.finish: Finish | None = None
        self.answer: JSON = None
        self.commit: Ending | None = None
        self.stop: Ending | None = None
        apart = rules.decode_stop is None
        contract, minimum = rules.contract, rules.limits.min_tokens
        anywhere = contract is not None and contract.scope == "anywhere"
        self._answer = AnswerText(
            contract=None if anywhere else contract,
            stop=rules.stop if apart else (),
            min_tokens=minimum,
            decode=rules.decode,
        )
        self._thought = None
        if anywhere:
            self._thought = AnswerText(contract=contract, stop=(), min_tokens=minimum, decode=rules.decode)
        self._everywhere = None
        if rules.decode_stop is not None and rules.stop:
            self._everywhere = AnswerText(contract=None, stop=rules.stop, min_tokens=minimum, decode=rules.decode_stop)

    @property
    def length(self) -> int:
        """Output tokens so far."""
        return len(self.ids) - self.prompt_length

    @property
    def output_ids(self) -> list[int]:
        """Output tokens so far."""
        return self.ids[self.prompt_length :]

    @property
    def sure_length(self) -> int:
        """Output tokens that stay; those behind them may only serve to decide whether the answer is complete."""
        if self._thought is not None:
            return self._thought.sure_length(self.length)
        return self.length if self.thinking else self._answer.sure_length(self.length)

    def follow(self, token: int) -> Finish | None:
        """Reads one token, and settles the request where it ends there."""
        self.append(token)
        finish = finish_window(
            [token],
            before=self.length - 1,
            limits=self.rules.limits,
            committed=self.commit and self.commit.length,
            stop_string=self.stop and self.stop.length,
            answer_cap=self.answer_cap(),
        )
        if finish is not None:
            self.settle(finish)
        return self.finish

    def append(self, token: int) -> None:
        """Reads one token without looking for an end."""
        self.ids.append(token)
        was_thinking = self.thinking
        self._follow_think()
        if token in self.rules.limits.stop_ids:
            return
        if self._everywhere is not None:
            self.stop = self._everywhere.push(token, self.length)[1]
        if self._thought is not None and self.commit is None:
            self.commit = self._thought.push(token, self.length)[0]
        if was_thinking or self.thinking:
            return
        commit, stop = self._answer.push(token, self.length)
        if self.commit is None:
            self.commit = commit
        if self._everywhere is None:
            self.stop = stop

    def _follow_think(self) -> None:
        """Keeps track of the think spans; `think_start` and `think_end` are those of the first."""
        start, end = self.rules.markers
        if not self.thinking and tuple(self.ids[-len(start) :]) == start:
            self.thinking = True
            if self.think_start is None:
                self.think_start, self.answer_start = self.length, None
        elif self.thinking and tuple(self.ids[-len(end) :]) == end:
            self.thinking = False
            self._answer.restart()
            if self.think_end is None:
                self.think_end, self.answer_start = self.length - len(end), self.length

    def answer_cap(self) -> int | None:
        """Output length at which the answer's own cap is reached."""
        if self.rules.max_answer_tokens is None or self.answer_start is None:
            return None
        return self.answer_start + self.rules.max_answer_tokens

    def settle(self, finish: Finish) -> None:
        """Cuts the request at its end; a contract may settle only now, where the text ended by itself."""
        if self.commit is None:
            truncated = finish.reason != "stop"
            if self._thought is not None:
                self.commit = self._thought.close(truncated=truncated)
            elif not self.thinking:
                self.commit = self._answer.close(truncated=truncated)
            if self.commit is not None:
                finish = Finish(min(finish.length, self.commit.length), "contract")
        if self.commit is not None and self.commit.length <= finish.length:
            self.answer = self.commit.commit.answer
        self.finish = finish
        del self.ids[self.prompt_length + finish.length :]

    def answer_text(self) -> str:
        """Text outside the thinking, cut at the commit or before the stop string."""
        assert self.finish is not None, "text of a request that is still running"
        text = self._answer.text(self.finish.length)
        if self.finish.reason == "contract" and self.commit is not None and self._thought is None:
            return text[: self.commit.commit.end]
        if self.stop is not None and self.finish == Finish(self.stop.length, "stop"):
            return text[: self.stop.commit.end - len(str(self.stop.commit.answer))]
        return text


def _tail(ids: Sequence[int], markers: ThinkMarkers) -> Sequence[int]:
    """What of a prompt `opens_think` can depend on: the template's opening, and a few tokens more."""
    return ids[-(len(markers.start) + len(markers.end) + 8) :]
