"""The exit rule over the rows of a step: reads the states before them, and writes nothing.

Whatever fails here can be tried again for a single request.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ace_learn.engines.vllm.measure import Grid, Seen
from ace_learn.engines.vllm.slots import SlotTable
from ace_learn.exit.policy import ExitPolicy
from ace_learn.exit.rule import PolicyRows, limits_of
from ace_learn.exit.state import DECISION_SIZE, SPAN_SIZE, Decision, Span, SpanMachine, decide
from ace_learn.exit.tracker import Signaller
from ace_learn.signals import LEARNED, SIGNALS, with_derived

STATE_SIZE = SPAN_SIZE + DECISION_SIZE


def settings_of(policy: ExitPolicy, family: ExitPolicy, *, prompt_length: int, forces: bool) -> tuple[float, ...]:
    """What stays with a request, as the judge reads it from its slot.

    Args:
        policy: The request's policy.
        family: The server's.
        prompt_length: Tokens of the prompt.
        forces: Whether the think end is forced, and not only recorded.

    Raises:
        ValueError: The policy is of another family.
    """
    return (float(prompt_length), float(forces), *limits_of(policy, family))


class Judged(NamedTuple):
    """What the rule says of the rows of a grid."""

    forced: Int[Tensor, "B W"]
    """Token that must follow, or -1."""
    fired: Bool[Tensor, "B W"]
    """Whether a think end begins behind the row, or would without shadow mode."""
    blocked: Bool[Tensor, "B W"]
    """Whether the grammar forbids the token of the think end that would follow."""
    forces: Bool[Tensor, " B"]
    """Whether the request is not in shadow mode."""
    known: Bool[Tensor, "B W"]
    """Whether the state after the row is known: it hangs on nothing but the prefix, and may be kept."""
    broken: Bool[Tensor, " B"]
    """Whether a signal that the policy reads was NaN before the first row."""
    over: Bool[Tensor, " B"]
    """Whether the think block was closed by the first row or before it."""
    states: Float[Tensor, "B W D"]
    smoothed: Float[Tensor, "B W S"]
    span: Span
    """After each row, [B, W]."""

    def thinking(self) -> Bool[Tensor, "B W"]:
        """Whether the token behind the row is thought, as far as the row's state is known."""
        return self.known & (self.span.in_think > 0)


class Judge:
    """The rule for one target, one head and one family of policies."""

    def __init__(
        self, *, machine: SpanMachine, family: ExitPolicy, signaller: Signaller | None, end: Int[Tensor, " E"]
    ) -> None:
        """Puts the parts together.

        Args:
            machine: Follows the think span.
            family: Predicate, smoothing, and the signals that are read.
            signaller: The head; None where no learned signal is read.
            end: The tokens of the think end.
        """
        self.machine, self.family, self.signaller, self.end = machine, family, signaller, end
        self.vocab_size = len(machine.tables.breaks)
        self._read = torch.tensor([name in family.signals for name in SIGNALS], device=end.device)

    def __call__(self, seen: Seen, table: SlotTable) -> Judged:
        """Judges the rows of the grid.

        Raises:
            ValueError: The head gives another shape than one row of learned signals per row.
        """
        grid = seen.grid
        settings = table.settings[grid.slots]
        first = grid.positions[:, 0]
        opening = first == settings[:, 0].long() - 1  # the prompt's last token: the state after it is there already
        (before,), found = table.states.load(grid.slots, torch.where(opening, first, first - 1))
        found = found & (opening | seen.likelihood.known)
        known = found[:, None] & ((grid.real & (grid.tokens >= 0)).long().cumprod(1) > 0)
        decision, span = Decision.unpack(before[:, SPAN_SIZE:]), Span.unpack(before[:, :SPAN_SIZE])
        tokens = grid.tokens.clamp(0, self.vocab_size - 1)
        span = self.machine.advance(span, tokens, seen.likelihood.logprobs, follows=~opening)
        verdicts = decide(
            decision,
            span,
            self._signals(grid, span),
            PolicyRows.unpack(self.family, settings[:, 2:]),
            len(self.end),
            allowed=grid.allowed,
        )
        after, forces = verdicts.decision, settings[:, 1] > 0
        due = verdicts.due & known & ~self._broken(after.smoothed)
        blocked = torch.zeros_like(due) if verdicts.blocked is None else due & verdicts.blocked
        token = self.end[(after.forcing.long() - 1).clamp_min(0)]
        return Judged(
            forced=torch.where(due & ~blocked & forces[:, None], token, -1),
            fired=due & (after.forcing == 1),
            blocked=blocked,
            forces=forces,
            known=known,
            broken=found & self._broken(decision.smoothed),
            over=known[:, 0] & (span.in_think[:, 0] == 0) & (span.tokens[:, 0] > 0),
            states=torch.cat((span.pack(), after.pack()), dim=-1),
            smoothed=after.smoothed,
            span=span,
        )

    def _signals(self, grid: Grid, span: Span) -> Float[Tensor, "B W S"]:
        """Every signal of every row, NaN where it is not computed."""
        scalars = span.scalars(grid.entropy)
        expected = (*scalars.shape[:2], len(LEARNED))
        if self.signaller is None:
            learned = scalars.new_full(expected, torch.nan)
        else:
            learned = self.signaller(scalars, scalars[..., :0], grid.hidden)
            if learned.shape != expected:
                raise ValueError(f"the head gave signals of shape {list(learned.shape)}, not {list(expected)}")
        return with_derived(learned, {"scalars": scalars})

    def _broken(self, smoothed: Float[Tensor, "*rows S"]) -> Bool[Tensor, "*rows"]:
        """Whether a signal that the policy reads is NaN."""
        return (smoothed.isnan() & self._read).any(-1)
