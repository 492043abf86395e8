"""Repairs speculation on the V1 runner of CPU builds of vLLM: its law at temperature > 0, and its top-k.

vLLM's substitute for the Triton kernel that repeats a per-request value over the request's draft rows
(`vllm.utils.cpu_triton_utils._expand_kernel_impl`) hands the C++ operator a converted *copy* of any output that is not
int64. Temperatures and top-p (float32) and top-k (int32) of draft rows then stay uninitialised memory, and the verified
tokens follow the wrong law. Greedy requests are not touched, nor is Model Runner V2, nor any GPU. Seen in vLLM 0.32.0;
whether a version needs the repair is found out by trying the kernel, not by its number.

Top-k (`vllm.v1.sample.ops.topk_topp_sampler.apply_top_k_only`) takes the maximum over the draft rows of a step, and
ends the engine at a step of requests that have top-k and no drafts, such as the first one. Seen in vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from jaxtyping import Shaped
from torch import Tensor

KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand(
    output: Shaped[Tensor, " T"],
    input_val: Shaped[Tensor, " B"],
    cu_num_tokens: Shaped[Tensor, " B"],
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Repeats each request's value over its draft rows, in place.

    Args:
        output: Written.
        input_val: One value per request.
        cu_num_tokens: Cumulative number of draft rows, this request's included.
        replace_from: Value that is replaced (a greedy request's temperature).
        replace_to: By which.
        MAX_NUM_TOKENS: Of the Triton kernel; unused.
    """
    ends = cu_num_tokens.long()
    value = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    output.copy_(torch.repeat_interleave(value, torch.diff(ends, prepend=ends.new_zeros(1))).to(output.dtype))


def install() -> None:
    """Puts `expand` in the place of vLLM's substitute, where that is in use and wrong, and lets top-k see no rows."""
    from vllm.v1.sample.ops import topk_topp_sampler

    if not hasattr(topk_topp_sampler.apply_top_k_only, "__wrapped__"):
        topk_topp_sampler.apply_top_k_only = none_of_none(topk_topp_sampler.apply_top_k_only)
    _install_expand()


def none_of_none(top_k: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """`apply_top_k_only`, which leaves a step without rows as it is."""

    @wraps(top_k)
    def apply_top_k_only(logits: Tensor, k: Tensor) -> Tensor:
        return top_k(logits, k) if len(k) else logits

    return apply_top_k_only


def _install_expand() -> None:
    from vllm.triton_utils import HAS_TRITON
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.sample import rejection_sampler

    kernel = rejection_sampler.expand_kernel
    if HAS_TRITON or getattr(kernel, "func", None) is expand:
        return
    written = torch.full((2,), -1.0)
    kernel[(1,)](written, torch.tensor([0.5]), torch.tensor([2]), 0, 1, MAX_NUM_TOKENS=2)
    if written.tolist() != [0.5, 0.5]:
        register_kernels({KERNEL: expand})
