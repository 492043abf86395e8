"""Low-rank adapters on a draft (LoRA, Hu et al. 2021), by `peft`: put in for training, merged at export."""

from __future__ import annotations

from peft import LoraConfig
from peft.tuners.lora import LoraModel
from torch import nn

from ace_learn.drafts.config import LoraOptions
from ace_learn.models.draft_module import SIGNAL_LAYER

_LAYERS = ["fc", "input_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Linear layers that get an adapter, as far as a draft has them; the signal rows are trained in full."""


class Adapters:
    """Adapters in a draft module, which keeps its class and its place."""

    def __init__(self, draft: nn.Module, options: LoraOptions) -> None:
        """Puts adapters into the linear layers; every other weight but those of the signal rows is frozen.

        Args:
            draft: Changed in place.
            options: Rank and scale.
        """
        names = [name for name, module in draft.named_modules() if name.rpartition(".")[2] in _LAYERS]
        config = LoraConfig(
            r=options.rank,
            lora_alpha=options.alpha,
            lora_dropout=options.dropout,
            target_modules=names,
        )
        self._tuner = LoraModel(draft, {"default": config}, "default")
        for name, weight in draft.named_parameters():
            if name.startswith(SIGNAL_LAYER):
                weight.requires_grad_(True)

    def merge(self) -> None:
        """Adds the adapters to the weights that they adapt, and takes them out of the draft."""
        self._tuner.merge_and_unload()
