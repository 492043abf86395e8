"""MiMo for transformers, which knows no such type: a Qwen2 with a multi-token-prediction layer, which vLLM alone runs.

vLLM's `compute_logits` norms the state itself in this family; the plugin reads what the output layer reads, as here.
"""

from __future__ import annotations

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

MODEL_TYPE = "mimo"


class MiMoConfig(Qwen2Config):
    """A Qwen2 config with the number of multi-token-prediction layers."""

    model_type = MODEL_TYPE
    num_nextn_predict_layers: int = 1


class PredictionLayer(Qwen2DecoderLayer):
    """A multi-token-prediction layer: its weights alone, since it is vLLM that runs it."""

    def __init__(self, config: MiMoConfig) -> None:
        """Makes a random layer."""
        super().__init__(config, layer_idx=0)
        size = config.hidden_size
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = (
            Qwen2RMSNorm(size, eps=config.rms_norm_eps) for _ in range(3)
        )


class MiMoForCausalLM(Qwen2ForCausalLM):
    """The target of a MiMo checkpoint; the prediction layer is a part of it, and does not run here."""

    config_class = MiMoConfig

    def __init__(self, config: MiMoConfig) -> None:
        """Makes a random model."""
        super().__init__(config)
        self.model.mtp_layers = nn.ModuleList(PredictionLayer(config) for _ in range(config.num_nextn_predict_layers))
        self.post_init()


def register() -> None:
    """Makes the Auto classes, and with them vLLM, know MiMo without code from the checkpoint; idempotent."""
    if MODEL_TYPE not in CONFIG_MAPPING:
        AutoConfig.register(MODEL_TYPE, MiMoConfig)
        AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)
