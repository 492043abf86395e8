"""The draft modules that can be trained, as one thing: fresh ones for a target, and those of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from ace_learn.artifacts import JsonFields
from ace_learn.drafts.config import DraftShape
from ace_learn.drafts.vocabulary import DraftVocabulary
from ace_learn.models.draft_files import draft_folder, load_draft
from ace_learn.models.draft_layers import ROTATED_SHARE, BlockConfig
from ace_learn.models.draft_module import Draft, DraftKind
from ace_learn.models.eagle3 import Eagle3Config, Eagle3Draft
from ace_learn.models.eagle3_files import new_eagle3
from ace_learn.models.mtp import MimoConfig, MtpDraft, MtpTap
from ace_learn.models.mtp_files import new_mtp
from ace_learn.models.qwen3_next import ExpertsConfig, Qwen3NextMtpConfig, partly_rotated
from ace_learn.models.target import Target


def fresh_eagle3(
    shape: DraftShape, target: Target, vocabulary: DraftVocabulary, *, signals: Sequence[str]
) -> Eagle3Draft:
    """An EAGLE-3 draft with fresh weights from torch's global generator.

    Its output projection starts as the target's rows of the draft vocabulary, where the sizes allow.

    Args:
        shape: Its sizes.
        target: The model that it drafts for.
        vocabulary: The tokens that it can propose.
        signals: Names of its signal rows.

    Raises:
        ValueError: The sizes do not fit together.
    """
    block = _block(shape, target)
    own = block.hidden_size != target.identity.hidden_size
    config = Eagle3Config(
        block=block,
        vocab_size=target.vocab_size,
        draft_vocab_size=len(vocabulary.target_ids),
        target_hidden_size=target.identity.hidden_size,
        aux_layers=shape.aux_layers or target.default_aux_layers(),
        own_embeddings=own,
        signals=tuple(signals),
    )
    if max(config.aux_layers) > target.identity.num_layers:
        raise ValueError(
            f"shape.aux_layers {config.aux_layers} go beyond the {target.identity.num_layers} layers of the target"
        )
    draft = new_eagle3(target, config, vocabulary.target_ids)
    _initialise(draft)
    if not own:
        with torch.no_grad():
            draft.lm_head.weight.copy_(target.output_layer.weight[vocabulary.target_ids.to(target.device)])
    return draft


def fresh_mtp(shape: DraftShape, target: Target, *, signals: Sequence[str]) -> MtpDraft:
    """An MTP draft with fresh weights from torch's global generator; it shares the target's output layer.

    Args:
        shape: Its sizes.
        target: The model that it drafts for.
        signals: Names of its signal rows.

    Raises:
        ValueError: The sizes do not fit together.
    """
    block = _block(shape, target)
    if block.hidden_size != target.identity.hidden_size:
        raise ValueError("an mtp draft has the hidden size of its target; leave out shape.hidden_size")
    draft = new_mtp(target, _mtp_config(shape, target, block, tuple(signals)))
    _initialise(draft)
    return draft


def _mtp_config(
    shape: DraftShape, target: Target, block: BlockConfig, signals: tuple[str, ...]
) -> MimoConfig | Qwen3NextMtpConfig:
    theirs = target.model.config.get_text_config()
    if shape.style == "qwen3_next":
        return Qwen3NextMtpConfig(
            block=partly_rotated(block, theirs.rope_parameters),
            vocab_size=target.vocab_size,
            experts=_experts(shape, target),
            signals=signals,
        )
    tap: MtpTap = "stream" if theirs.model_type == "mimo" else "output"  # what vLLM hands on
    return MimoConfig(block=block, vocab_size=target.vocab_size, tap=tap, signals=signals)


def loaded_draft(folder: Path, target: Target, kind: DraftKind, *, signals: Sequence[str]) -> Draft:
    """A draft from a folder, ours or published, in float32, with fresh signal rows where it has none yet.

    Args:
        folder: The draft folder.
        target: The model that it drafts for.
        kind: What it must be.
        signals: The signal rows that it shall have; rows that it has are dropped where these are none.

    Raises:
        ValueError: The folder holds no draft of that kind for that target, or one with other signals.
    """
    draft = load_draft(draft_folder(folder), target).float().train()
    if draft.kind != kind:
        raise ValueError(
            f"start_from {folder} holds a draft of kind {draft.kind}, and kind is {kind}; choose one of them"
        )
    there, wanted = draft.config.signals, tuple(signals)
    if there and wanted and there != wanted:
        raise ValueError(f"start_from {folder} has signal rows for {', '.join(there)}, not for {', '.join(wanted)}")
    if there != wanted:
        draft.make_signal_rows(wanted)
    return draft.to(target.device)


def _initialise(draft: nn.Module) -> None:
    for module in draft.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _block(shape: DraftShape, target: Target) -> BlockConfig:
    """The sizes of the draft's decoder layer: those of the target's layers where the shape has none."""
    theirs = target.model.config.get_text_config()
    hidden = shape.hidden_size or int(theirs.hidden_size)
    heads = shape.heads or int(theirs.num_attention_heads)
    kv_heads = shape.kv_heads or int(getattr(theirs, "num_key_value_heads", None) or heads)
    same_heads = shape.hidden_size is None and shape.heads is None
    head_dim = shape.head_dim or (getattr(theirs, "head_dim", None) if same_heads else None) or hidden // heads
    return BlockConfig(
        hidden_size=hidden,
        intermediate_size=shape.intermediate_size or int(theirs.intermediate_size),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=int(head_dim),
        max_position_embeddings=target.context_length,
        rms_norm_eps=float(theirs.rms_norm_eps),
        rope_parameters={name: value for name, value in theirs.rope_parameters.items() if name != ROTATED_SHARE},
    )


def _experts(shape: DraftShape, target: Target) -> ExpertsConfig | None:
    """The experts of a block of Qwen3-Next: those of the target's first layer where the shape has none."""
    config, theirs = target.model.config.get_text_config(), None
    if config.model_type == "qwen3_next":
        theirs = ExpertsConfig.from_json(JsonFields(data=config.to_dict(), where=f"config of {target.identity.name}"))
    active, size = shape.active_experts, shape.expert_size
    if shape.experts == 0 or (theirs is None and not (shape.experts or active or size)):
        return None
    if theirs is not None:
        return ExpertsConfig(
            num_experts=shape.experts or theirs.num_experts,
            num_experts_per_tok=active or theirs.num_experts_per_tok,
            moe_intermediate_size=size or theirs.moe_intermediate_size,
            shared_expert_intermediate_size=size or theirs.shared_expert_intermediate_size,
            norm_topk_prob=theirs.norm_topk_prob,
        )
    if not (shape.experts and active and size):
        raise ValueError(
            f"the first layer of {target.identity.name} has no experts whose sizes could be taken; set shape.experts, "
            "shape.active_experts and shape.expert_size"
        )
    return ExpertsConfig(
        num_experts=shape.experts,
        num_experts_per_tok=active,
        moe_intermediate_size=size,
        shared_expert_intermediate_size=size,
    )
