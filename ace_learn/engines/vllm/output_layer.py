"""The target's output layer inside a vLLM model: what it reads, and single logits of it."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class OutputLayer:
    """Finds the output layer of a loaded model and keeps what it read last.

    The hidden states are taken at the layer's own input, behind whatever norm a family applies on the way there, so
    that they are what the HF engine captures as `target_last` and what the logits are linear in.

    Attributes:
        hidden: What the layer read in the last call, [R, H]; None before the first.
    """

    def __init__(self, model: nn.Module) -> None:
        """Hooks into the model.

        Args:
            model: The target, as vLLM has loaded it.

        Raises:
            ValueError: The model has no output layer of the usual make, or one that the logits are not linear in.
        """
        name = type(model).__name__
        owner = next((m for m in model.modules() if hasattr(m, "logits_processor") and hasattr(m, "lm_head")), None)
        if owner is None:
            raise ValueError(
                f"{name} has no output layer (lm_head, logits_processor) that exits could read; serve it without a head"
            )
        processor, layer = owner.logits_processor, owner.lm_head
        assert isinstance(processor, nn.Module)
        assert isinstance(layer, nn.Module)
        _check_linear(name, processor, layer)
        assert isinstance(layer, VocabParallelEmbedding)
        self.weight: Tensor = layer.weight
        self.bias: Tensor | None = getattr(layer, "bias", None)
        self.first: int = layer.shard_indices.org_vocab_start_index
        self.size: int = layer.shard_indices.num_org_elements
        self.split: bool = layer.tp_size > 1
        self.hidden: Tensor | None = None
        processor.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        hidden = args[1] if len(args) > 1 else kwargs["hidden_states"]
        assert isinstance(hidden, Tensor)
        self.hidden = hidden

    def token_logits(self, tokens: Int[Tensor, " R"], hidden: Float[Tensor, "R H"]) -> Float[Tensor, " R"]:
        """One raw logit per row: that of `tokens` behind the prefix whose hidden state is `hidden`.

        The vocabulary may be split over tensor-parallel ranks, which then must all call this; one vector is reduced.
        """
        local = tokens.long() - self.first
        mine = (local >= 0) & (local < self.size)
        local = torch.where(mine, local, 0)
        logits = (self.weight[local].float() * hidden.float()).sum(-1)
        if self.bias is not None:
            logits = logits + self.bias[local].float()
        logits = torch.where(mine, logits, 0.0).to(self.weight.dtype).float()  # as coarse as those of the layer
        if self.split:
            reduced: Tensor = tensor_model_parallel_all_reduce(logits)
            return reduced
        return logits


def _check_linear(name: str, processor: nn.Module, layer: nn.Module) -> None:
    if getattr(processor, "soft_cap", None) is not None or getattr(processor, "scale", 1.0) != 1.0:
        raise ValueError(
            f"{name} caps or scales its logits (soft_cap {getattr(processor, 'soft_cap', None)}, scale "
            f"{getattr(processor, 'scale', 1.0)}); exits read the probabilities of tokens from a linear output layer, "
            "so serve it without a head"
        )
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or getattr(processor, "logits_as_input", False):
        raise ValueError(
            f"the output layer of {name} is quantised or computed elsewhere, and exits read its rows; leave lm_head "
            "out of the quantisation, or serve without a head"
        )
