"""The head that a server runs, checked against the server's model before and after its weights are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ace_learn.engines.vllm.settings import Settings
from ace_learn.exit.policy import ExitPolicy
from ace_learn.heads.export import LoadedHead, load_head, load_own_policy
from ace_learn.models.draft_files import weights_sha256
from ace_learn.models.fingerprint import checkpoint_fingerprint
from ace_learn.models.identity import TargetIdentity
from ace_learn.thinking import BoundaryTables

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig


class ServedHead(NamedTuple):
    """What the exit rule of a server consists of."""

    head: LoadedHead
    policy: ExitPolicy
    tables: BoundaryTables
    stop_ids: tuple[int, ...]
    """End-of-sequence tokens of the generation config and the tokenizer."""


def load_served_head(settings: Settings, model: ModelConfig) -> ServedHead:
    """Reads the head folder of a server and checks it against the model, of which no weight need be loaded.

    Where the model's files are not on this machine yet, its weights are not compared; the workers do so later.

    Raises:
        ValueError: The head was trained for another target, or its policy was calibrated with another head.
        OSError: A file cannot be read.
    """
    from transformers import AutoTokenizer

    assert settings.head is not None, "only called where there is a head"
    folder = Path(settings.head)
    card = load_head(folder).card
    tokenizer = AutoTokenizer.from_pretrained(
        model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
    )
    vocab_size = int(model.get_vocab_size())
    tables = BoundaryTables.from_tokenizer(tokenizer, vocab_size)
    checkpoint = find_checkpoint(model)
    tied = bool(getattr(model.hf_text_config, "tie_word_embeddings", False))
    found = None if checkpoint is None else checkpoint_fingerprint(checkpoint, tied=tied)
    identity = TargetIdentity(
        name=model.model,
        fingerprint=found or card.identity.fingerprint,
        hidden_size=int(model.get_hidden_size()),
        num_layers=int(model.hf_text_config.num_hidden_layers),
        vocab_size=vocab_size,
        markers=card.identity.markers,
        tables_sha256=tables.sha256,
    )
    head = load_head(folder, expect=identity)
    stop_ids = _stop_ids(model.try_get_generation_config().get("eos_token_id"), tokenizer.eos_token_id)
    return ServedHead(head=head, policy=load_own_policy(head), tables=tables, stop_ids=stop_ids)


def check_drafter(head: LoadedHead, speculation: SpeculativeConfig | None) -> None:
    """Checks that the server drafts with what a head was trained with, if it reads a drafter's hidden states.

    Where the drafter's files are not on this machine yet, its weights are not compared; the workers do so later.

    Raises:
        ValueError: There is no such drafter, it has other weights, or it drafts so far that its states come too late.
    """
    states = head.spec.draft
    if states is None:
        return
    if speculation is None or speculation.method not in ("eagle3", "mtp") or speculation.parallel_drafting:
        found = "there is no speculation"
        if speculation is not None:
            found = f"drafts come from {speculation.method!r}{' in parallel' * speculation.parallel_drafting}"
        raise ValueError(
            f"the head reads the hidden states of a drafter (draft), but {found}; name the EAGLE-3 or MTP drafter that "
            "it was trained with in --speculative-config, or train a head on other sources"
        )
    if speculation.num_speculative_tokens >= states.delay:
        raise ValueError(
            f"the head reads the drafter's states {states.delay} positions late, so at most {states.delay - 1} tokens "
            f"can be drafted, not {speculation.num_speculative_tokens}; set num_speculative_tokens"
        )
    model = speculation.draft_model_config
    folder = find_checkpoint(model)
    drafter = None if folder is None else weights_sha256(folder)
    if drafter not in (None, states.drafter):
        raise ValueError(
            f"the head was trained with another drafter than {model.model}: the SHA-256 of its weights is {drafter} "
            f"here, {states.drafter} there; serve that one, or train a head with this one"
        )


def _stop_ids(configured: int | list[int] | None, own: int | None) -> tuple[int, ...]:
    ids = [*(configured if isinstance(configured, list) else [configured]), own]
    return tuple(sorted({int(token) for token in ids if token is not None}))


def find_checkpoint(model: ModelConfig) -> Path | None:
    """The folder that the model's weights are read from; None where it is not on this machine (yet)."""
    from huggingface_hub import try_to_load_from_cache

    if Path(model.model).is_dir():
        return Path(model.model)
    cached = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    return Path(cached).parent if isinstance(cached, str) else None
