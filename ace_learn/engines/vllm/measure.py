"""What the rows of a step say by themselves: hidden states, entropies, and how likely each input token was."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ace_learn.engines.vllm.drafted import DraftedStates
from ace_learn.engines.vllm.rows import Layout, RowTensors
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
        if unknown := sorted((sources | columns) - {"target_last", "target_aux", "scalars", "draft", *SCALARS}):
            raise ValueError(
                f"the head or the exit policy reads {', '.join(unknown)}, which the vLLM plugin cannot give: train a "
                "head on target_last, target_aux, scalars and draft, and calibrate without signals made of others"
            )
        return cls(
            aux="target_aux" in sources,
            entropy="entropy" in columns,
            logprobs=bool(columns - _COUNTS - {"entropy"}),
        )


class Grid(NamedTuple):
    """What the rows of a layout say by themselves, before any state is known; each field starts with [B]."""

    slots: Int[Tensor, " B"]
    real: Bool[Tensor, "B W"]
    tokens: Int[Tensor, "B W"]
    """-1 for a placeholder."""
    positions: Int[Tensor, "B W"]
    entropy: Float[Tensor, "B W"]
    """Entropy of the next-token distribution, nats; NaN where nothing reads it."""
    totals: Float[Tensor, "B W"]
    """Log-sum-exp of the logits; NaN where nothing reads it."""
    hidden: Hidden
    """[B, W, ...]."""
    allowed: Bool[Tensor, "B W E"] | None
    """Whether the grammar allows each token of the think end; None: no grammar."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Grid:
        """The same with every field but the slots changed."""
        draft = None if self.hidden.draft is None else change(self.hidden.draft)
        return Grid(
            slots=self.slots,
            real=change(self.real),
            tokens=change(self.tokens),
            positions=change(self.positions),
            entropy=change(self.entropy),
            totals=change(self.totals),
            hidden=Hidden(change(self.hidden.last), change(self.hidden.aux), draft),
            allowed=None if self.allowed is None else change(self.allowed),
        )


class Likelihood(NamedTuple):
    """How likely the input tokens were."""

    logprobs: Float[Tensor, "B W"]
    """Raw log-probability of each input token given its prefix, nats; NaN where nothing reads it."""
    known: Bool[Tensor, " B"]
    """Whether that of the first row is known, or nothing reads it."""


class Seen(NamedTuple):
    """What the rule reads of a step."""

    grid: Grid
    likelihood: Likelihood

    def request(self, index: int) -> Seen:
        """What it reads of one request."""
        one = slice(index, index + 1)
        return Seen(
            self.grid.map(lambda field: field[one])._replace(slots=self.grid.slots[one]),
            Likelihood(*(field[one] for field in self.likelihood)),
        )


class Meter:
    """Measures rows; remembers hidden states, since the next step's first rows hold tokens that follow them."""

    def __init__(
        self,
        *,
        reads: Reads,
        token_logits: TokenLogits,
        vocab_size: int,
        window: int,
        table: SlotTable,
        drafted: DraftedStates | None = None,
    ) -> None:
        """Remembers nothing yet.

        Args:
            reads: What is to be measured.
            token_logits: Computes one logit per row.
            vocab_size: Tokens at or above it are of no request's output.
            window: Positions of each request whose hidden states are remembered.
            table: The requests' slots.
            drafted: The drafter's states; None where nothing reads them.
        """
        self.reads, self._token_logits, self._drafted = reads, token_logits, drafted
        self._vocab_size, self._window, self._table = vocab_size, window, table
        self._ring: HiddenRing | None = None

    def prepare(self, rows: RowTensors) -> None:
        """Makes room for hidden states, before the first rows are read.

        Raises:
            ValueError: The rows bring no tapped layers, and the head reads them.
        """
        if self.reads.aux and rows.aux is None:
            raise ValueError("the head reads target_aux, and the rows bring no aux")
        if self.reads.logprobs and self._ring is None:
            self._ring = HiddenRing(self._window, len(self._table.settings), rows.hidden)
            self._table.rings.append(self._ring)
        if self._drafted is not None:
            self._drafted.prepare(rows.hidden, self._table)

    def read(self, rows: RowTensors, layout: Layout) -> Grid:
        """Reads the rows of a layout."""
        hidden, positions = layout.gather(rows.hidden), layout.gather(rows.positions).long()
        totals = entropy = torch.full(positions.shape, torch.nan, device=positions.device)
        if self.reads.entropy or self.reads.logprobs:
            totals, entropy = self._statistics(rows, layout)
        aux = layout.gather(rows.aux) if self.reads.aux and rows.aux is not None else hidden[..., :0]
        tokens, draft = layout.gather(rows.tokens).long(), None
        if self._drafted is not None:  # a row without its state is no better than a placeholder
            draft, there = self._drafted.read(layout.slots, positions, self._table)
            tokens = torch.where(there, tokens, -1)
        return Grid(
            slots=layout.slots,
            real=layout.real,
            tokens=tokens,
            positions=positions,
            entropy=entropy,
            totals=totals,
            hidden=Hidden(hidden, aux, draft),
            allowed=None if rows.allowed is None else layout.gather(rows.allowed),
        )

    @staticmethod
    def _statistics(rows: RowTensors, layout: Layout) -> tuple[Float[Tensor, "B W"], Float[Tensor, "B W"]]:
        """Log-sum-exp and entropy; each row is looked at once, in however many cells it stands."""
        found = torch.stack(logit_statistics(rows.logits, layout.chosen), dim=-1)
        if layout.chosen is not None:
            found = found.new_zeros(len(rows.tokens), 2).index_copy_(0, layout.chosen, found)
        totals, entropy = layout.gather(found).unbind(-1)
        return totals, entropy

    def follow(self, grid: Grid) -> Likelihood:
        """How likely every input token was: it follows the row above, or, in the first row, one of an earlier step."""
        if self._ring is None:
            return Likelihood(torch.full_like(grid.totals, torch.nan), torch.ones_like(grid.real[:, 0]))
        (last, total), held = self._ring.load(grid.slots, grid.positions[:, 0] - 1)
        above = torch.cat((last[:, None], grid.hidden.last[:, :-1]), dim=1)
        tokens = grid.tokens.clamp(0, self._vocab_size - 1)
        logits = self._token_logits(tokens.flatten(), above.flatten(0, 1)).view(tokens.shape)
        return Likelihood(logits.float() - torch.cat((total[:, None], grid.totals[:, :-1]), dim=1), held)

    def keep(self, grid: Grid, known: Bool[Tensor, "B W"]) -> None:
        """Remembers the hidden states of rows whose state is known.

        A prompt's last row that is run again after a preemption does not take the place of a later one.
        """
        if self._ring is None:
            return
        mine = known & self._ring.latest(grid.slots, grid.positions)
        slots = torch.where(mine, grid.slots[:, None], NOWHERE)
        self._ring.store(
            slots.flatten(), grid.positions.flatten(), grid.hidden.last.flatten(0, 1), grid.totals.flatten()
        )
