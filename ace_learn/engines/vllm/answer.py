"""Host-side state of one request in vLLM's engine core: think spans, answer, and the tokens that may leave. No vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ace_learn.engines.follower import FollowRules, TokenFollower
from ace_learn.speculation.window import Finish
from ace_learn.thinking import AFTER_NEWLINE, IN_BREAK, TEXT, BoundaryTables


class TokenEffect(NamedTuple):
    """What one token's text does to a paragraph: a row of `BoundaryTables`."""

    breaks: bool
    ends_newline: bool
    blank: bool
    newline: bool


class TokenEffects:
    """`BoundaryTables` on the host, filled as tokens come; shared by all requests of a tokenizer."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Reads each token's text by itself, special tokens included."""
        self._decode = decode
        self._known: dict[int, TokenEffect] = {}

    def __getitem__(self, token: int) -> TokenEffect:
        effect = self._known.get(token)
        if effect is None:
            tables = BoundaryTables.from_texts([self._decode([token])])
            effect = self._known[token] = TokenEffect(*(bool(table[0]) for table in tables))
        return effect


def advance(effect: TokenEffect, standing: float) -> tuple[float, bool]:
    """`BoundaryTables.advance` for one token: the new standing, and whether the token is a boundary."""
    if standing == IN_BREAK and effect.blank:
        return IN_BREAK, False
    if effect.breaks or (standing == AFTER_NEWLINE and effect.newline):
        return IN_BREAK, True
    after = effect.ends_newline or (standing == AFTER_NEWLINE and effect.blank)
    return (AFTER_NEWLINE if after else TEXT), False


class RequestFollower(TokenFollower):
    """Follows one request of the engine core through the windows of accepted tokens.

    Tokens that may only serve to decide whether the answer is complete are held back: `take` says how many may leave,
    and at the end those up to the end have left and no others.
    """

    def __init__(self, prompt_ids: Sequence[int], rules: FollowRules, effects: TokenEffects) -> None:
        """Starts behind a prompt.

        Args:
            prompt_ids: The prompt.
            rules: Markers, limits, contract and stop strings.
            effects: What tokens do to paragraphs.
        """
        super().__init__(prompt_ids, rules)
        self._effects = effects
        self._standing = IN_BREAK
        self.paragraphs = 0
        """Boundaries of the first think span."""
        self.tokens_thought = 0
        """Tokens of the first think span, as far as it has come; markers left out."""
        self.verify_steps = self.drafted = 0
        self._drafted: list[bool] = []
        self.sent = 0
        """Output tokens that have left the engine core."""

    @property
    def accepted(self) -> int:
        """Accepted drafts among the output tokens."""
        return sum(self._drafted[: self.length])

    def push(self, window: Sequence[int], *, num_drafted: int = 0) -> Finish | None:
        """Reads the tokens of a step, the last of which was no draft; says where the request ends, if it does.

        Args:
            window: Accepted tokens, in order.
            num_drafted: Tokens that were drafted for the step.
        """
        self.verify_steps += 1
        self.drafted += num_drafted
        for i, token in enumerate(window):
            self._drafted.append(num_drafted > 0 and i < len(window) - 1)
            if self.follow(token) is not None:
                break
        return self.finish

    def append(self, token: int) -> None:
        """Reads one token without looking for an end."""
        in_first = self.thinking and self.think_end is None
        super().append(token)
        if not in_first:
            return
        if not self.thinking:  # the tokens before the last of a think end were taken for thought
            self.tokens_thought -= len(self.rules.markers.end) - 1
            return
        self.tokens_thought += 1
        self._standing, closed = advance(self._effects[token], self._standing)
        self.paragraphs += closed

    def take(self, *, everything: bool = False) -> int:
        """How many more output tokens leave now: those that are sure to stay, or `everything`; at the end, all."""
        until = self.length if everything or self.finish is not None else self.sure_length
        count = max(0, until - self.sent)
        self.sent += count
        return count

    @property
    def surplus(self) -> int:
        """Tokens that left and do not belong to the output; none where `take` was never told `everything`."""
        return max(0, self.sent - self.length)

    @property
    def cut(self) -> int:
        """Characters of the output's last token that stand behind the answer."""
        by_contract = self.finish is not None and self.finish.reason == "contract"
        return self.commit.surplus if by_contract and self.commit is not None else 0
