"""A key-value cache with one row per request and explicit positions.

Every token is written at its own sequence position of its own row, and attention is masked by position. Ragged batches,
rejected drafts (overwritten later) and forks of a trace (copied rows) then need no bookkeeping at all.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

_GROWTH = 64


def grown_capacity(first: int, last: int) -> int:
    """Positions that a cache holds in the end, whose first step reaches `first` and whose longest row `last`."""
    capacity = _larger(_GROWTH, first)
    while capacity < last:
        capacity = _larger(capacity, capacity + 1)
    return capacity


def _larger(capacity: int, needed: int) -> int:
    """By quarters, so that growing costs little in the end."""
    return capacity if needed <= capacity else max(needed, capacity + max(_GROWTH, capacity // 4))


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [slots, heads, length, head_dim]."""

    def __init__(self, cache: SlotCache) -> None:
        """Belongs to a cache, which knows the rows and positions of the current step."""
        self.cache = cache
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates on the first update, when heads, head size and dtype are known."""
        slots, length = self.cache.num_slots, self.cache.capacity
        self.keys = key_states.new_zeros(slots, key_states.shape[1], length, key_states.shape[3])
        self.values = value_states.new_zeros(slots, value_states.shape[1], length, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes the step's keys and values at their positions; returns the visible part of the active rows."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        positions = self.cache.positions
        first, active, visible = self.cache.first_slot, len(positions), self.cache.visible
        rows = first + torch.arange(active, device=positions.device)[:, None]
        self.keys[rows, :, positions] = key_states.transpose(1, 2)
        self.values[rows, :, positions] = value_states.transpose(1, 2)
        active_rows = slice(first, first + active)
        return self.keys[active_rows, :, :visible], self.values[active_rows, :, :visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Visible length and offset."""
        return self.cache.visible, 0

    def get_seq_length(self) -> int:
        """Visible length."""
        return self.cache.visible

    def get_max_length(self) -> int:
        """No maximum: the cache grows."""
        return -1

    def grow(self, capacity: int) -> None:
        """Makes room for `capacity` positions."""
        if self.keys is not None and self.values is not None:
            extra = (0, 0, 0, capacity - self.keys.shape[2])
            self.keys = torch.nn.functional.pad(self.keys, extra)
            self.values = torch.nn.functional.pad(self.values, extra)

    def swap(self, a: int, b: int) -> None:
        """Exchanges two rows."""
        if self.keys is not None and self.values is not None:
            used = self.cache.visible
            self.keys[[a, b], :, :used] = self.keys[[b, a], :, :used]
            self.values[[a, b], :, :used] = self.values[[b, a], :, :used]


class SlotCache(Cache):
    """The cache of a batch: rows 0..n-1 are active, finished rows stand behind them and keep their contents."""

    def __init__(self, num_layers: int, num_slots: int, capacity: int = _GROWTH) -> None:
        """An empty cache; memory is allocated on the first step and grows with the positions used."""
        self.num_slots = num_slots
        self.capacity = capacity
        self.visible = 0
        self.first_slot = 0
        self.positions = torch.empty(0, 0, dtype=torch.long)
        self.slot_layers = [SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.slot_layers))

    def begin(self, positions: Int[Tensor, "B Q"], longest: int, first_slot: int = 0) -> Bool[Tensor, "B 1 Q L"]:
        """Prepares a step that writes at `positions` (all below `longest`) of the slots from `first_slot` on.

        Returns:
            The step's attention mask.
        """
        if longest > self.capacity:
            self.capacity = _larger(self.capacity, longest)
            for layer in self.slot_layers:
                layer.grow(self.capacity)
        self.positions, self.visible, self.first_slot = positions, longest, first_slot
        slots = torch.arange(longest, device=positions.device)
        return slots <= positions[:, None, :, None]

    @torch.inference_mode()
    def swap(self, a: int, b: int) -> None:
        """Exchanges two rows."""
        for layer in self.slot_layers:
            layer.swap(a, b)

    @torch.inference_mode()
    def fork(self, rows: Int[Tensor, " n"], length: int, *, room: int = 0) -> SlotCache:
        """A new cache whose row i is a copy of the first `length` positions of `rows[i]`, with `room` behind them."""
        fork = SlotCache(len(self.slot_layers), len(rows), length + room)
        for source, copy in zip(self.slot_layers, fork.slot_layers, strict=True):
            assert source.keys is not None, "fork of a cache that was never written"
            assert source.values is not None
            copy.lazy_initialization(source.keys, source.values)
            assert copy.keys is not None
            assert copy.values is not None
            copy.keys[:, :, :length] = source.keys[rows, :, :length]
            copy.values[:, :, :length] = source.values[rows, :, :length]
        return fork
