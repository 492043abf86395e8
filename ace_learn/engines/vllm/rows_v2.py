"""Where the rows of a Model Runner V2 step stand. Private name of vLLM: `InputBatch.expanded_idx_mapping`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxtyping import Int
from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


def first_row(slots: Int[Tensor, " rows"], batch: InputBatch) -> int:
    """Which row of the step a slice of its row-to-request mapping begins with; long steps are verified in pieces."""
    whole: Tensor = batch.expanded_idx_mapping
    return (slots.data_ptr() - whole.data_ptr()) // whole.element_size()
