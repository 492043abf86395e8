"""Draft modules on disk: published checkpoints by their layout, and folders that vLLM loads.

- EAGLE-3: the original layout (`fc`, `midlayer.*`, `norm`, `lm_head`, `d2t`, `t2d`), and that of `speculators`
  (`layers.0.*`, its settings under `transformer_layer_config`). Saved in the original one (`method: eagle3`).
- MTP: MiMo's (`model.mtp_layers.0.*` of a whole model, or of a folder with nothing else). vLLM loads it as part of a
  whole MiMo checkpoint alone.

Signal rows lie in a folder beside the weights, since vLLM refuses weights that it does not know.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import AutoTokenizer

from ace_learn.artifacts import JSON, JsonFields, read_fields, sha256_file, write_bytes, write_json
from ace_learn.models.draft_layers import BlockConfig
from ace_learn.models.eagle3 import Eagle3Config, Eagle3Draft
from ace_learn.models.identity import TargetIdentity
from ace_learn.models.mtp import MtpConfig, MtpDraft
from ace_learn.models.target import Target, check_same_tokens
from ace_learn.reasoner import drafter_path

FORMAT = "ace_learn.draft/1"
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
SIGNAL_FOLDER = "ace_head"
SIGNAL_ROWS = "ace_head.weight"
"""Name of the extra rows of the output projection that give signals."""

EMBEDDED_DRAFT = "ace_learn/reasoner-eagle3"
"""Name of the EAGLE-3 draft of the embedded reasoner, which comes with this package."""

DraftModule: TypeAlias = Eagle3Draft | MtpDraft
"""What drafts from the target's hidden states."""

_MTP_PREFIX = "model.mtp_layers.0."
_OWN = "ace_learn"
"""Where our own fields stand in `config.json`."""

_OF_SPECULATOR = (
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    _OWN,
)
"""What `speculators` says beside its `transformer_layer_config`."""


def draft_folder(name: str | Path) -> Path:
    """The folder of a draft that a recipe names: that of the embedded draft, or the name itself."""
    return drafter_path() if str(name) == EMBEDDED_DRAFT else Path(name)


def load_draft(folder: Path, target: Target) -> DraftModule:
    """Loads a draft module for a target, onto its device and in its dtype.

    Raises:
        ValueError: The folder holds no draft, one of a kind that is not supported, damaged weights, or a draft of
            another target (hidden size, vocabulary, tokenizer, layers); the message names both sides.
        OSError: A file cannot be read.
    """
    fields = _config_of(folder)
    _check_identity(folder, fields, target)
    weights = _read_weights(folder)
    try:
        mtp = any(name.startswith(_MTP_PREFIX) for name in weights)
        draft = _load_mtp(fields, weights, target) if mtp else _load_eagle3(fields, weights, target)
    except RuntimeError as error:  # what load_state_dict says of missing, unknown and misshapen weights
        raise ValueError(f"the weights in {folder} are not those that its {CONFIG_NAME} describes: {error}") from error
    return draft.to(target.device, target.output_layer.weight.dtype).eval()


def save_draft(folder: Path, draft: DraftModule, identity: TargetIdentity) -> None:
    """Writes a draft so that `load_draft` reads it, and vLLM, if it is EAGLE-3; `config.json` comes last.

    Args:
        folder: An existing folder; give the folder of `atomic_folder` where a reader may look on.
        draft: The draft.
        identity: The target that it drafts for.

    Raises:
        OSError: The disk is full or a path cannot be written.
    """
    weights = dict(draft.state_dict())
    rows = weights.pop(SIGNAL_ROWS, None)
    weights = _mtp_weights(draft, weights) if isinstance(draft, MtpDraft) else _eagle3_weights(draft, weights)
    _write(folder / WEIGHTS_NAME, weights)
    if rows is not None:
        _write(folder / SIGNAL_FOLDER / WEIGHTS_NAME, {SIGNAL_ROWS: rows})
    own: dict[str, JSON] = {
        "format": FORMAT,
        "target": identity.to_json(),
        "signals": list(draft.config.signals),
    }
    if isinstance(draft, MtpDraft):
        config, own["tap"] = _mtp_json(draft, identity.num_layers), draft.config.tap
    else:
        config = _eagle3_json(draft)
    dtype = str(next(draft.parameters()).dtype).removeprefix("torch.")
    write_json(folder / CONFIG_NAME, {**config, "dtype": dtype, _OWN: own})


def weights_sha256(folder: Path) -> str:
    """Hash of the weights of a draft that `save_draft` wrote or that has one file of weights; names it in artifacts.

    Raises:
        ValueError: There is no such file.
    """
    if not (folder / WEIGHTS_NAME).is_file():
        raise ValueError(f"{folder} has no {WEIGHTS_NAME}; save its weights as one file")
    return sha256_file(folder / WEIGHTS_NAME)


def new_eagle3(target: Target, config: Eagle3Config, vocabulary: Tensor | None = None) -> Eagle3Draft:
    """A draft with fresh weights for a target, whose embeddings it shares."""
    embeddings = None if config.own_embeddings else _embeddings(target)
    return Eagle3Draft(config, vocabulary, embeddings).to(target.device)


def new_mtp(target: Target, config: MtpConfig) -> MtpDraft:
    """An MTP draft with fresh weights for a target, whose embeddings and output layer it shares."""
    return MtpDraft(config, _embeddings(target), target.output_layer.weight.detach()).to(target.device)


def _embeddings(target: Target) -> Tensor:
    embedding = target.model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding), "the target has no embeddings"
    return embedding.weight.detach()


def _config_of(folder: Path) -> JsonFields:
    if not (folder / CONFIG_NAME).is_file():
        raise ValueError(f"{folder} holds no draft (no {CONFIG_NAME}); name the folder of a published or trained draft")
    fields = read_fields(folder / CONFIG_NAME)
    if "speculators_model_type" not in fields.data:
        return fields
    kind = fields.text("speculators_model_type")
    if kind != "eagle3":
        raise ValueError(f"{fields.where}: a speculator of kind {kind!r}; supported: eagle3")
    layer = fields.fields("transformer_layer_config").data
    outer = {name: fields.data[name] for name in _OF_SPECULATOR if fields.data.get(name) is not None}
    return JsonFields(data={**layer, "norm_before_residual": True, **outer}, where=fields.where)


def _check_identity(folder: Path, fields: JsonFields, target: Target) -> None:
    """Refuses another target; a fine-tuned sibling is welcome, since whatever is drafted is verified."""
    if _OWN in fields.data:
        trained_for = TargetIdentity.from_json(fields.fields(_OWN).fields("target").data)
        differences = [line for line in trained_for.mismatches(target.identity) if not line.startswith("fingerprint")]
        if differences:
            raise ValueError(
                f"the draft in {folder} was trained for the target {trained_for.name}, not for {target.identity.name} "
                f"('here' is the draft's side): {'; '.join(differences)}. Load the draft's own target, or train a "
                "draft for this one"
            )
    if (folder / "tokenizer.json").is_file():
        check_same_tokens(AutoTokenizer.from_pretrained(folder), str(folder), target)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """The draft's weights; of a whole model, those of its MTP layers alone."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = next(iter(sorted(folder.glob("*.bin"))), None)
        if pickled is None:
            raise ValueError(f"{folder} holds no weights (*.safetensors); copy the folder again")
        raise ValueError(
            f"{pickled} is a pickle, which is never loaded, since it can run code. Convert it where you trust it: "
            f"torch.load({pickled.name!r}, weights_only=True), then safetensors.torch.save_file(..., {WEIGHTS_NAME!r})"
        )
    weights: dict[str, Tensor] = {}
    try:
        names = {path: _names(path) for path in files}
        whole_model = any(name.startswith(_MTP_PREFIX) for held in names.values() for name in held)
        for path in files:
            with safe_open(path, framework="pt") as file:
                wanted = [name for name in names[path] if name.startswith(_MTP_PREFIX) or not whole_model]
                weights |= {name: file.get_tensor(name) for name in wanted}
        if (folder / SIGNAL_FOLDER / WEIGHTS_NAME).is_file():
            weights |= load_file(folder / SIGNAL_FOLDER / WEIGHTS_NAME)
    except SafetensorError as error:
        raise ValueError(f"the weights in {folder} are damaged: {error}; copy the folder again") from error
    return weights


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _write(path: Path, weights: dict[str, Tensor]) -> None:
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    write_bytes(path, save(whole, metadata={"format": "pt"}))


def _signals_of(fields: JsonFields) -> tuple[str, ...]:
    return fields.fields(_OWN).texts("signals") if _OWN in fields.data else ()


def _refuse(fields: JsonFields, plain: dict[str, JSON]) -> None:
    """Refuses settings that change the arithmetic in a way that is not supported."""
    for name, value in plain.items():
        found = fields.data.get(name)
        if found is not None and found != value:
            raise ValueError(f"{fields.where}: {name} is {found!r}; a draft is supported with {value!r} alone")


# EAGLE-3.


def _load_eagle3(fields: JsonFields, weights: dict[str, Tensor], target: Target) -> Eagle3Draft:
    weights = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
    offsets, kept = weights.pop("d2t", None), weights.pop("t2d", None)
    config = _eagle3_config(fields, target, own_embeddings="embed_tokens.weight" in weights)
    if config.draft_vocab_size == config.vocab_size and "lm_head.weight" not in weights:
        weights["lm_head.weight"] = target.output_layer.weight.detach()  # shared, as in vLLM
    vocabulary = _vocabulary(config, offsets, kept, fields.where)
    draft = Eagle3Draft(config, vocabulary, None if config.own_embeddings else _embeddings(target))
    draft.load_state_dict(weights)
    return draft


def _eagle3_config(fields: JsonFields, target: Target, *, own_embeddings: bool) -> Eagle3Config:
    block = BlockConfig.from_json(fields)
    _refuse(
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
        signals=_signals_of(fields),
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


def _eagle3_weights(draft: Eagle3Draft, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    if draft.config.draft_vocab_size == draft.config.vocab_size:
        return weights
    return weights | {"d2t": draft.d2t, "t2d": draft.to_draft >= 0}


def _eagle3_json(draft: Eagle3Draft) -> dict[str, JSON]:
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


# MTP.


def _load_mtp(fields: JsonFields, weights: dict[str, Tensor], target: Target) -> MtpDraft:
    block = BlockConfig.from_json(fields)
    _refuse(fields, {"quantization_config": None, "use_sliding_window": False})
    ours = target.identity
    if (block.hidden_size, fields.integer("vocab_size")) != (ours.hidden_size, ours.vocab_size):
        raise ValueError(
            f"{fields.where} describes a draft of another target than {ours.name}: hidden size {block.hidden_size} and "
            f"{fields.integer('vocab_size')} tokens in the draft, {ours.hidden_size} and {ours.vocab_size} here"
        )
    own = fields.fields(_OWN).text("tap") if _OWN in fields.data else "stream"
    config = MtpConfig(
        block=block,
        vocab_size=ours.vocab_size,
        tap="stream" if own == "stream" else "output",
        signals=_signals_of(fields),
    )
    draft = MtpDraft(config, _embeddings(target), target.output_layer.weight.detach())
    wanted = (name for name in weights if name.startswith(_MTP_PREFIX) or name == SIGNAL_ROWS)
    draft.load_state_dict({name.removeprefix(_MTP_PREFIX): weights[name] for name in wanted})
    return draft


def _mtp_weights(draft: MtpDraft, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """MiMo's names, and the shared weights, which vLLM wants to find."""
    named = {f"{_MTP_PREFIX}{name}": weight for name, weight in weights.items()}
    shared = {"model.embed_tokens.weight": draft.shared_embeddings, "lm_head.weight": draft.shared_output}
    return named | {name: weight.clone() for name, weight in _tensors(shared.items())}


def _tensors(items: Iterable[tuple[str, Tensor | nn.Module]]) -> Iterable[tuple[str, Tensor]]:
    return ((name, value) for name, value in items if isinstance(value, Tensor))


def _mtp_json(draft: MtpDraft, num_layers: int) -> dict[str, JSON]:
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_hidden_layers": num_layers,  # of the target: vLLM counts the MTP layer on from them
        "num_nextn_predict_layers": 1,
        "vocab_size": draft.config.vocab_size,
        "tie_word_embeddings": False,
        **draft.config.block.to_json(),
    }
