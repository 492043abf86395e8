"""What the rows of a step say by themselves: hidden states, entropies, and how likely each input token was."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ace_learn.engines.vllm.rows import Layout, StepRows
from ace_learn.engines.vllm.slots import NOWHERE, HiddenRing, SlotTable
from ace_learn.engines.vllm.statistics import logit_statistics
from ace_learn.exit.policy import ExitPolicy
from ace_learn.exit.tracker import Hidden
from ace_learn.features.spec import FeatureSpec
from ace_learn.signals import DERIVED, SCALARS

TokenLogits = Callable[[Int[Tensor, " R"], Float[Tensor, "R H"]], Float[Tensor, " R"]]
"""Raw logit of one token per row: tokens [R] and the hidden states [R, H] that they follow to logits [R]."""

_COUNTS = {"log_tokens", "log_paragraphs"}
"""Running scalars that need no logits."""


class Reads(NamedTuple):
    """What must be measured for a head and a policy."""

    aux: bool
    entropy: bool
    logprobs: bool

    @classmethod
    def of(cls, policy: ExitPolicy, spec: FeatureSpec | None) -> Reads:
        """What a policy, and a head with these features, read.

        Raises:
            ValueError: They read what a runner cannot give.
        """
        sources = set(() if spec is None else spec.sources)
        columns = {column for signal in DERIVED if signal.name in policy.signals for column in signal.reads}
        if "scalars" in sources:
            columns |= set(SCALARS)
        if unknown := sorted((sources | columns) - {"target_last", "target_aux", "scalars", *SCALARS}):
            raise ValueError(
                f"the head or the exit policy reads {', '.join(unknown)}, which the vLLM plugin cannot give: train a "
                "head on the sources target_last, target_aux and scalars, and calibrate without signals made of others"
            )
        return cls(
            aux="target_aux" in sources,
            entropy="entropy" in columns,
            logprobs=bool(columns - _COUNTS - {"entropy"}),
        )


class Measured(NamedTuple):
    """What the rows of a layout say, before any state is known."""

    tokens: Int[Tensor, " N"]
    """-1 for a placeholder."""
    positions: Int[Tensor, " N"]
    logprobs: Float[Tensor, " N"]
    """Raw log-probability of each input token given its prefix, nats; NaN where nothing reads it."""
    follows: Bool[Tensor, " N"]
    """Whether that is known, or nothing reads it."""
    entropy: Float[Tensor, " N"]
    """Entropy of the next-token distribution, nats; NaN where nothing reads it."""
    totals: Float[Tensor, " N"]
    """Log-sum-exp of the logits; NaN where nothing reads it."""
    hidden: Hidden
    """[1, N, ...]."""
    allowed: Bool[Tensor, "N E"] | None
    """Whether the grammar allows each token of the think end; None: no grammar."""

    def select(self, rows: slice | Int[Tensor, " M"]) -> Measured:
        """Some of the rows."""
        return Measured(
            tokens=self.tokens[rows],
            positions=self.positions[rows],
            logprobs=self.logprobs[rows],
            follows=self.follows[rows],
            entropy=self.entropy[rows],
            totals=self.totals[rows],
            hidden=Hidden(self.hidden.last[:, rows], self.hidden.aux[:, rows]),
            allowed=None if self.allowed is None else self.allowed[rows],
        )


class Meter:
    """Measures rows; remembers hidden states, since the next step's first rows hold tokens that follow them."""

    def __init__(self, *, reads: Reads, token_logits: TokenLogits, vocab_size: int, window: int) -> None:
        """Remembers nothing yet.

        Args:
            reads: What is to be measured.
            token_logits: Computes one logit per row.
            vocab_size: Tokens at or above it are of no request's output.
            window: Positions of each request whose hidden states are remembered.
        """
        self.reads, self._token_logits = reads, token_logits
        self._vocab_size, self._window = vocab_size, window
        self._ring: HiddenRing | None = None

    def measure(self, rows: StepRows, layout: Layout, table: SlotTable) -> Measured:
        """Measures the rows of a layout.

        Raises:
            ValueError: The rows bring no tapped layers, and the head reads them.
        """
        tokens, positions = layout.gather(rows.tokens).long(), layout.gather(rows.positions).long()
        hidden = layout.gather(rows.hidden)
        unknown = torch.full(tokens.shape, torch.nan, device=tokens.device)
        totals, entropy, logprobs, follows = unknown, unknown, unknown, torch.ones_like(tokens, dtype=torch.bool)
        if self.reads.entropy or self.reads.logprobs:
            totals, entropy = logit_statistics(rows.logits, layout.chosen)
        if self.reads.logprobs:
            logprobs, follows = self._logprobs(layout, tokens, positions, hidden, totals, table)
        if self.reads.aux and rows.aux is None:
            raise ValueError("the head reads target_aux, and the rows bring no aux")
        aux = layout.gather(rows.aux) if self.reads.aux and rows.aux is not None else hidden.new_zeros(len(hidden), 0)
        return Measured(
            tokens=tokens,
            positions=positions,
            logprobs=logprobs,
            follows=follows,
            entropy=entropy,
            totals=totals,
            hidden=Hidden(hidden[None], aux[None]),
            allowed=None if rows.allowed is None else layout.gather(rows.allowed),
        )

    def keep(self, layout: Layout, measured: Measured, known: Bool[Tensor, "B W"]) -> None:
        """Remembers the hidden states of rows whose state is known.

        A prompt's last row that is run again after a preemption does not take the place of a later one.
        """
        if self._ring is None:
            return
        mine = known & (self._ring.latest(layout.slots, layout.to_grid(measured.positions)))
        slots = torch.where(mine, layout.slots[:, None], NOWHERE)
        self._ring.store(layout.to_rows(slots), measured.positions, measured.hidden.last[0], measured.totals)

    def _logprobs(
        self,
        layout: Layout,
        tokens: Int[Tensor, " N"],
        positions: Int[Tensor, " N"],
        hidden: Float[Tensor, "N H"],
        totals: Float[Tensor, " N"],
        table: SlotTable,
    ) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]:
        """Log-probability of every input token, and whether what it follows is known.

        It follows the row above, or, in a request's first row, one of an earlier step.
        """
        if self._ring is None:
            self._ring = HiddenRing(self._window, len(table.settings), hidden)
            table.rings.append(self._ring)
        (last, total), held = self._ring.load(layout.slots, positions[layout.first] - 1)
        above = hidden.roll(1, 0).index_copy_(0, layout.first, last)
        logits = self._token_logits(tokens.clamp(0, self._vocab_size - 1), above)
        follows = torch.ones_like(tokens, dtype=torch.bool).index_copy_(0, layout.first, held)
        return logits.float() - totals.roll(1, 0).index_copy_(0, layout.first, total), follows
