"""EAGLE-3 drafts in the original layout (`fc`, `midlayer.*`, `norm`, `lm_head`, `d2t`, `t2d`) and in `speculators`'."""

from __future__ import annotations

import torch
from torch import Tensor

from ace_learn.artifacts import JSON, JsonFields
from ace_learn.models.draft_layers import BlockConfig
from ace_learn.models.draft_layout import refuse, shared_embeddings, signals_of
from ace_learn.models.eagle3 import Eagle3Config, Eagle3Draft
from ace_learn.models.target import Target


def new_eagle3(target: Target, config: Eagle3Config, vocabulary: Tensor | None = None) -> Eagle3Draft:
    """A draft with fresh weights for a target, whose embeddings it shares."""
    embeddings = None if config.own_embeddings else shared_embeddings(target)
    return Eagle3Draft(config, vocabulary, embeddings).to(target.device)


def load_eagle3(fields: JsonFields, weights: dict[str, Tensor], target: Target) -> Eagle3Draft:
    """Makes the draft that a config and weights describe.

    Raises:
        ValueError: It is of a kind that is not supported, or a draft of another target.
        RuntimeError: Weights are missing, unknown or misshapen.
    """
    weights = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
    offsets, kept = weights.pop("d2t", None), weights.pop("t2d", None)
    config = _eagle3_config(fields, target, own_embeddings="embed_tokens.weight" in weights)
    if config.draft_vocab_size == config.vocab_size and "lm_head.weight" not in weights:
        weights["lm_head.weight"] = target.output_layer.weight.detach()  # shared, as in vLLM
    vocabulary = _vocabulary(config, offsets, kept, fields.where)
    draft = Eagle3Draft(config, vocabulary, None if config.own_embeddings else shared_embeddings(target))
    draft.load_state_dict(weights)
    return draft


def _eagle3_config(fields: JsonFields, target: Target, *, own_embeddings: bool) -> Eagle3Config:
    block = BlockConfig.from_json(fields)
    refuse(
        fields,
        {"num_hidden_layers": 1, "quantization_config": None, "mlp_bias": False, "bias": False, "logit_scale": 1.0,
         "use_sliding_window": False, "parallel_drafting": False},
    )  # fmt: skip
    nested = fields.fields("eagle_config") if isinstance(fields.data.get("eagle_config"), dict) else fields
    if nested.data.get("use_aux_hidden_state", True) is not True:
        raise ValueError(f"{fields.where}: a draft without auxiliary hidden states (EAGLE-1) is not supported")
    layers = next(
        (source.integers(name) for source in (fields, nested)
         for name in ("eagle_aux_hidden_state_layer_ids", "layer_ids") if source.data.get(name)),
        target.default_aux_layers(),
    )  # fmt: skip
    vocab_size = fields.integer("vocab_size")
    draft_size = fields.integer("draft_vocab_size") if fields.data.get("draft_vocab_size") else vocab_size
    theirs = fields.integer("target_hidden_size") if fields.data.get("target_hidden_size") else block.hidden_size
    ours = target.identity
    differing = [
        f"{what} {draft} in the draft, {of_target} in the target"
        for what, draft, of_target, fits in (
            ("hidden size of the target", theirs, ours.hidden_size, theirs == ours.hidden_size),
            ("vocabulary", vocab_size, ours.vocab_size, vocab_size == ours.vocab_size),
            ("tapped layers", layers, f"{ours.num_layers} layers", max(layers) <= ours.num_layers),
        )
        if not fits
    ]
    if differing:
        raise ValueError(f"{fields.where} describes a draft of another target than {ours.name}: {'; '.join(differing)}")
    return Eagle3Config(
        block=block,
        vocab_size=vocab_size,
        draft_vocab_size=draft_size,
        target_hidden_size=theirs,
        aux_layers=layers,
        norm_before_residual=bool(fields.data.get("norm_before_residual", False)),
        norm_before_fc=bool(nested.data.get("norm_before_fc", fields.data.get("norm_before_fc", False))),
        fc_norm=bool(fields.data.get("fc_norm", False)),
        norm_output=bool(fields.data.get("norm_output", False)),
        attention_bias=bool(fields.data.get("attention_bias", False)),
        qk_norm=fields.data.get("model_type") == "qwen3",
        own_embeddings=own_embeddings,
        signals=signals_of(fields),
    )


def _vocabulary(config: Eagle3Config, offsets: Tensor | None, kept: Tensor | None, where: str) -> Tensor | None:
    """The draft's tokens from the checkpoint's offsets."""
    if offsets is None:
        if config.draft_vocab_size != config.vocab_size:
            raise ValueError(f"{where}: the weights have no d2t, so the draft's tokens are unknown; copy them again")
        return None
    tokens = offsets.long() + torch.arange(len(offsets))
    ascending = bool((tokens.diff() > 0).all()) and int(tokens[0]) >= 0 and int(tokens[-1]) < config.vocab_size
    if len(tokens) != config.draft_vocab_size or not ascending:
        raise ValueError(
            f"{where}: d2t holds {len(tokens)} offsets that do not give {config.draft_vocab_size} ascending tokens "
            f"below {config.vocab_size}; the weights are those of another draft"
        )
    if kept is not None and not torch.equal(kept.nonzero()[:, 0], tokens):
        raise ValueError(f"{where}: t2d marks other tokens than d2t names; the checkpoint is damaged")
    return tokens


def eagle3_weights(draft: Eagle3Draft, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The published weights: the draft's own, and which tokens it can propose."""
    if draft.config.draft_vocab_size == draft.config.vocab_size:
        return weights
    return weights | {"d2t": draft.d2t, "t2d": draft.to_draft >= 0}


def eagle3_json(draft: Eagle3Draft) -> dict[str, JSON]:
    """The config of a draft."""
    config = draft.config
    layer = "qwen3" if config.qk_norm else "llama"
    return {
        "architectures": ["Eagle3Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"],
        "model_type": layer,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "num_aux_hidden_states": len(config.aux_layers),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        **config.block.to_json(),
    }
