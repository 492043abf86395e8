"""Draft modules on disk: published checkpoints by their layout, and folders that vLLM loads.

- EAGLE-3: the original layout (`fc`, `midlayer.*`, `norm`, `lm_head`, `d2t`, `t2d`), and that of `speculators`
  (`layers.0.*`, its settings under `transformer_layer_config`). Saved in the original one (`method: eagle3`).
- MTP: MiMo's (`model.mtp_layers.0.*`) and Qwen3-Next's (`mtp.*`), of a whole model, or of a folder with nothing else.
  vLLM loads it as part of a whole checkpoint alone.

Signal rows lie in a folder beside the weights, since vLLM refuses weights that it does not know.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import AutoTokenizer

from ace_learn.artifacts import JSON, JsonFields, read_fields, sha256_file, write_bytes, write_json
from ace_learn.models.draft_layout import OWN, SIGNAL_ROWS
from ace_learn.models.draft_module import Draft
from ace_learn.models.eagle3 import Eagle3Draft
from ace_learn.models.eagle3_files import eagle3_json, eagle3_weights, load_eagle3
from ace_learn.models.identity import TargetIdentity
from ace_learn.models.mtp import MimoDraft, MtpDraft
from ace_learn.models.mtp_files import PREFIXES, load_mtp, mtp_json, mtp_weights, style_of
from ace_learn.models.target import Target, check_same_tokens
from ace_learn.reasoner import drafter_path

FORMAT = "ace_learn.draft/1"
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
SIGNAL_FOLDER = "ace_head"
EMBEDDED_DRAFT = "ace_learn/reasoner-eagle3"
"""Name of the EAGLE-3 draft of the embedded reasoner, which comes with this package."""

_OF_SPECULATOR = (
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    OWN,
)
"""What `speculators` says beside its `transformer_layer_config`."""


def draft_folder(name: str | Path) -> Path:
    """The folder of a draft that a recipe names: that of the embedded draft, or the name itself."""
    return drafter_path() if str(name) == EMBEDDED_DRAFT else Path(name)


def load_draft(folder: Path, target: Target) -> Draft:
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
        style = style_of(weights)
        if style is None:
            draft: Draft = load_eagle3(fields, weights, target)
        else:
            draft = load_mtp(fields, weights, target, style)
    except RuntimeError as error:  # what load_state_dict says of missing, unknown and misshapen weights
        raise ValueError(f"the weights in {folder} are not those that its {CONFIG_NAME} describes: {error}") from error
    return draft.to(target.device, target.output_layer.weight.dtype).eval()


def save_draft(folder: Path, draft: Draft, identity: TargetIdentity) -> None:
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
    own: dict[str, JSON] = {
        "format": FORMAT,
        "target": identity.to_json(),
        "signals": list(draft.config.signals),
    }
    if isinstance(draft, MtpDraft):
        weights, config = mtp_weights(draft, weights), mtp_json(draft, identity.num_layers)
        own |= {"tap": draft.config.tap} if isinstance(draft, MimoDraft) else {}
    else:
        assert isinstance(draft, Eagle3Draft), "a draft without a layout"
        weights, config = eagle3_weights(draft, weights), eagle3_json(draft)
    _write(folder / WEIGHTS_NAME, weights)
    if rows is not None:
        _write(folder / SIGNAL_FOLDER / WEIGHTS_NAME, {SIGNAL_ROWS: rows})
    dtype = str(next(draft.parameters()).dtype).removeprefix("torch.")
    write_json(folder / CONFIG_NAME, {**config, "dtype": dtype, OWN: own})


def weights_sha256(folder: Path) -> str:
    """Hash of the weights of a draft that `save_draft` wrote or that has one file of weights; names it in artifacts.

    Raises:
        ValueError: There is no such file.
    """
    if not (folder / WEIGHTS_NAME).is_file():
        raise ValueError(f"{folder} has no {WEIGHTS_NAME}; save its weights as one file")
    return sha256_file(folder / WEIGHTS_NAME)


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
    if OWN in fields.data:
        trained_for = TargetIdentity.from_json(fields.fields(OWN).fields("target").data)
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
        style = style_of([name for held in names.values() for name in held])
        for path in files:
            with safe_open(path, framework="pt") as file:
                wanted = [name for name in names[path] if style is None or name.startswith(PREFIXES[style])]
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
