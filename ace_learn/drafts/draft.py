"""The draft modules that can be trained, as one thing: fresh ones for a target, and those of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ace_learn.drafts.config import DraftKind, DraftShape
from ace_learn.drafts.vocabulary import DraftVocabulary
from ace_learn.models.draft_files import draft_folder, load_draft, new_eagle3, new_mtp
from ace_learn.models.draft_layers import BlockConfig
from ace_learn.models.eagle3 import Eagle3Config, Eagle3Draft
from ace_learn.models.mtp import MtpConfig, MtpDraft
from ace_learn.models.target import Target

Draft: TypeAlias = Eagle3Draft | MtpDraft
"""A draft module that unrolls itself over whole traces."""

SIGNAL_ROWS = "ace_head"
"""Name of the layer that holds the signal rows."""


def draft_vocabulary(draft: Draft) -> Int64[Tensor, " Vd"]:
    """The tokens that a draft can propose, ascending."""
    if isinstance(draft, Eagle3Draft):
        return draft.vocabulary
    return torch.arange(draft.config.vocab_size, device=draft.input_proj.weight.device)


def draft_logits(draft: Draft, read: Float[Tensor, "n H"]) -> Float[Tensor, "n Vd"]:
    """Logits over the tokens that the draft can propose."""
    rows = read.unsqueeze(0)
    return (draft.logits(rows) if isinstance(draft, Eagle3Draft) else draft.full_logits(rows))[0]


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
    config = MtpConfig(block=block, vocab_size=target.vocab_size, signals=tuple(signals))
    draft = new_mtp(target, config)
    _initialise(draft)
    return draft


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
    found = "eagle3" if isinstance(draft, Eagle3Draft) else "mtp"
    if found != kind:
        raise ValueError(f"start_from {folder} holds a draft of kind {found}, and kind is {kind}; choose one of them")
    there, wanted = draft.config.signals, tuple(signals)
    if there and wanted and there != wanted:
        raise ValueError(f"start_from {folder} has signal rows for {', '.join(there)}, not for {', '.join(wanted)}")
    if there == wanted:
        return draft
    if wanted:
        draft.ace_head = nn.Linear(draft.config.block.hidden_size, len(wanted), bias=False).to(target.device)
    else:
        del draft.ace_head
    if isinstance(draft, Eagle3Draft):
        draft.config = replace(draft.config, signals=wanted)
    else:
        draft.config = replace(draft.config, signals=wanted)
    return draft


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
        rope_parameters=dict(theirs.rope_parameters),
    )
