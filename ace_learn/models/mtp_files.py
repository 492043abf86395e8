"""MTP drafts in the layouts of MiMo (`model.mtp_layers.0.*`) and of Qwen3-Next (`mtp.*`)."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ace_learn.artifacts import JSON, JsonFields
from ace_learn.models.draft_layers import BlockConfig
from ace_learn.models.draft_layout import OWN, SIGNAL_ROWS, refuse, shared_embeddings, signals_of
from ace_learn.models.mtp import MimoConfig, MimoDraft, MtpDraft, MtpStyle
from ace_learn.models.qwen3_next import ExpertsConfig, Qwen3NextDraft, Qwen3NextMtpConfig, partly_rotated
from ace_learn.models.target import Target

PREFIXES: dict[MtpStyle, str] = {"mimo": "model.mtp_layers.0.", "qwen3_next": "mtp."}
"""What the names of an MTP layer's weights start with."""

_EXPERTS = "layers.0.mlp.experts"


def style_of(names: Collection[str]) -> MtpStyle | None:
    """The style of the MTP layer that some weights belong to; None: there is no such layer."""
    return next((style for style, prefix in PREFIXES.items() if any(name.startswith(prefix) for name in names)), None)


def new_mtp(target: Target, config: MimoConfig | Qwen3NextMtpConfig) -> MtpDraft:
    """An MTP draft with fresh weights for a target, whose embeddings and output layer it shares."""
    shared = shared_embeddings(target), target.output_layer.weight.detach()
    if isinstance(config, Qwen3NextMtpConfig):
        return Qwen3NextDraft(config, *shared).to(target.device)
    return MimoDraft(config, *shared).to(target.device)


def load_mtp(fields: JsonFields, weights: dict[str, Tensor], target: Target, style: MtpStyle) -> MtpDraft:
    """Makes the draft that a config and weights describe.

    Raises:
        ValueError: It is of a kind that is not supported, or a draft of another target.
        RuntimeError: Weights are missing, unknown or misshapen.
    """
    block = BlockConfig.from_json(fields)
    ours = target.identity
    if (block.hidden_size, fields.integer("vocab_size")) != (ours.hidden_size, ours.vocab_size):
        raise ValueError(
            f"{fields.where} describes a draft of another target than {ours.name}: hidden size {block.hidden_size} and "
            f"{fields.integer('vocab_size')} tokens in the draft, {ours.hidden_size} and {ours.vocab_size} here"
        )
    prefix = PREFIXES[style]
    wanted = (name for name in weights if name.startswith(prefix) or name == SIGNAL_ROWS)
    held = {name.removeprefix(prefix): weights[name] for name in wanted}
    if style == "mimo":
        draft = new_mtp(target, _mimo_config(fields, block))
    else:
        config = _qwen3_next_config(fields, block)
        held = held if config.experts is None else _stacked(held, config.experts.num_experts, fields.where)
        draft = new_mtp(target, config)
    draft.load_state_dict(held)
    return draft


def _mimo_config(fields: JsonFields, block: BlockConfig) -> MimoConfig:
    refuse(fields, {"quantization_config": None, "use_sliding_window": False})
    own = fields.fields(OWN).text("tap") if OWN in fields.data else "stream"
    return MimoConfig(
        block=block,
        vocab_size=fields.integer("vocab_size"),
        tap="stream" if own == "stream" else "output",
        signals=signals_of(fields),
    )


def _qwen3_next_config(fields: JsonFields, block: BlockConfig) -> Qwen3NextMtpConfig:
    refuse(
        fields,
        {"model_type": "qwen3_next", "num_nextn_predict_layers": 1, "quantization_config": None,
         "use_sliding_window": False, "attention_bias": False, "qkv_bias": False, "attn_output_gate": True,
         "layer_scale": False},
    )  # fmt: skip
    return Qwen3NextMtpConfig(
        block=partly_rotated(block, block.rope_parameters),
        vocab_size=fields.integer("vocab_size"),
        experts=ExpertsConfig.from_json(fields),
        signals=signals_of(fields),
    )


def _stacked(weights: dict[str, Tensor], count: int, where: str) -> dict[str, Tensor]:
    """Routed experts side by side, as they run; the checkpoints hold each by itself."""
    rest = dict(weights)
    parts: dict[str, list[Tensor]] = {}
    for part in ("gate", "up", "down"):
        names = [f"{_EXPERTS}.{expert}.{part}_proj.weight" for expert in range(count)]
        missing = next((name for name in names if name not in weights), None)
        if missing is not None:
            raise ValueError(f"{where} describes {count} experts, and there is no weight {missing}; copy them again")
        parts[part] = [rest.pop(name) for name in names]
    gate_up = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
    stacks = {"gate_up_proj": torch.stack(gate_up), "down_proj": torch.stack(parts["down"])}
    return rest | {f"{_EXPERTS}.{name}": stack for name, stack in stacks.items()}


def _apart(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_stacked`."""
    rest = dict(weights)
    gate, up = rest.pop(f"{_EXPERTS}.gate_up_proj").chunk(2, dim=1)
    parts = {"gate": gate, "up": up, "down": rest.pop(f"{_EXPERTS}.down_proj")}
    return rest | {
        f"{_EXPERTS}.{expert}.{part}_proj.weight": weight
        for part, stack in parts.items()
        for expert, weight in enumerate(stack)
    }


def mtp_weights(draft: MtpDraft, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The published names, and the shared weights, which vLLM wants to find."""
    if isinstance(draft, Qwen3NextDraft) and draft.config.experts is not None:
        weights = _apart(weights)
    named = {f"{PREFIXES[draft.style]}{name}": weight for name, weight in weights.items()}
    shared = {"model.embed_tokens.weight": draft.shared_embeddings, "lm_head.weight": draft.shared_output}
    return named | {name: weight.clone() for name, weight in shared.items() if isinstance(weight, Tensor)}


def mtp_json(draft: MtpDraft, num_layers: int) -> dict[str, JSON]:
    """The config of a draft; `num_layers` is that of the target, from which MiMo's layer is counted on."""
    common: dict[str, JSON] = {
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": 1,
        "vocab_size": draft.config.vocab_size,
        "tie_word_embeddings": False,
    }
    if isinstance(draft, Qwen3NextDraft):
        kind: dict[str, JSON] = {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "layer_types": ["full_attention"] * num_layers,
        }
        return {**kind, **common, **draft.config.layer_json()}
    return {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", **common, **draft.config.block.to_json()}
