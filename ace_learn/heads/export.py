"""The head folder: a head that says itself which target it was trained for and what it reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from ace_learn.artifacts import JSON, JsonFields, read_fields, sha256_file, write_bytes, write_json
from ace_learn.exit.policy import ExitPolicy, load_policy
from ace_learn.features import FeatureSpec
from ace_learn.heads.head import HeadConfig, SignalHead
from ace_learn.models.identity import TargetIdentity

FORMAT = "ace_learn.head/1"
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class HeadCard:
    """What a head is and where it comes from; `config.json` of the head folder.

    Attributes:
        config: The architecture.
        spec: The features that it reads.
        identity: The target that it was trained for.
        data_sha256: Hash of the training data.
        rows: Which rows it was trained on: boundaries or all.
        metrics: What it reached on the validation split.
    """

    config: HeadConfig
    spec: FeatureSpec
    identity: TargetIdentity
    data_sha256: str
    rows: str
    metrics: JSON

    def to_json(self) -> dict[str, JSON]:
        """The card as a JSON object."""
        return {
            "format": FORMAT,
            "head": self.config.to_json(),
            "features": self.spec.to_json(),
            "target": self.identity.to_json(),
            "data_sha256": self.data_sha256,
            "rows": self.rows,
            "metrics": self.metrics,
        }

    @classmethod
    def from_json(cls, fields: JsonFields) -> HeadCard:
        """Reads a card.

        Raises:
            ValueError: A field is missing or wrong, or target and features do not fit each other.
        """
        if fields.text("format") != FORMAT:
            raise ValueError(f"{fields.where} has format {fields.text('format')}, not {FORMAT}; train the head again")
        card = cls(
            config=HeadConfig.from_json(fields.get("head"), where=f"{fields.where}: head"),
            spec=FeatureSpec.from_json(fields.get("features"), where=f"{fields.where}: features"),
            identity=TargetIdentity.from_json(fields.fields("target").data),
            data_sha256=fields.text("data_sha256"),
            rows=fields.text("rows"),
            metrics=fields.get("metrics"),
        )
        if card.spec.hidden_size != card.identity.hidden_size:
            raise ValueError(
                f"{fields.where}: the features have hidden size {card.spec.hidden_size}, "
                f"the target {card.identity.hidden_size}"
            )
        return card


@dataclass(frozen=True, kw_only=True)
class LoadedHead:
    """A head that is ready to use.

    Attributes:
        head: The module, in evaluation mode, on the CPU.
        card: What it is and where it comes from.
        weights_sha256: Hash of its weights; a certificate names it.
        folder: Where it was read; a policy may lie there too.
    """

    head: SignalHead
    card: HeadCard
    weights_sha256: str
    folder: Path

    @property
    def spec(self) -> FeatureSpec:
        """The features that it reads."""
        return self.card.spec

    @property
    def identity(self) -> TargetIdentity:
        """The target that it was trained for."""
        return self.card.identity


def save_head(folder: Path, head: SignalHead, card: HeadCard) -> None:
    """Writes `model.safetensors` and, last, `config.json`.

    Args:
        folder: An existing folder; give the folder of `atomic_folder` where a reader may look on.
        head: The head.
        card: What it is; it must describe this very head.

    Raises:
        OSError: The disk is full or a path cannot be written.
    """
    assert head.config == card.config, "the card describes another head"
    assert head.feature_size == card.spec.size, "the card describes other features"
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    write_bytes(folder / WEIGHTS_NAME, save(weights, metadata={"format": FORMAT}))
    write_json(folder / CONFIG_NAME, {**card.to_json(), "weights_sha256": sha256_file(folder / WEIGHTS_NAME)})


def load_head(folder: Path, expect: TargetIdentity | None = None) -> LoadedHead:
    """Reads a head folder; only JSON and safetensors are read.

    Args:
        folder: The head folder.
        expect: The target that the head will be used with; None: any.

    Raises:
        ValueError: The folder holds no finished head, its weights are damaged, or it was trained for another target;
            the message names both sides.
        OSError: A file cannot be read.
    """
    if not (folder / CONFIG_NAME).is_file():
        raise ValueError(f"{folder} holds no finished head (no {CONFIG_NAME}); run train, or run it again to resume it")
    fields = read_fields(folder / CONFIG_NAME)
    card = HeadCard.from_json(fields)
    if expect is not None:
        _refuse_other_target(folder, card.identity, expect)
    sha256 = fields.text("weights_sha256")
    head = _load_weights(card, folder / WEIGHTS_NAME, sha256)
    return LoadedHead(head=head.eval(), card=card, weights_sha256=sha256, folder=folder)


def load_own_policy(head: LoadedHead) -> ExitPolicy:
    """Reads the policy that lies beside a head; its certificate must have been made with this very head.

    Raises:
        ValueError: The folder holds no policy, a damaged one, or one that was calibrated with another head.
    """
    policy = load_policy(head.folder)
    if policy.certificate is None:
        return policy
    certified = JsonFields.of(policy.certificate, where=f"{head.folder / 'policy.json'}: certificate")
    if certified.text("head_sha256") != head.weights_sha256:
        raise ValueError(
            f"the policy in {head.folder} was certified with another head (weights {certified.text('head_sha256')}) "
            f"than the one beside it (weights {head.weights_sha256}), so its certificate proves nothing here; run "
            "calibrate with this head, or copy the whole folder that calibrate wrote"
        )
    return policy


def _refuse_other_target(folder: Path, found: TargetIdentity, expect: TargetIdentity) -> None:
    differences = found.mismatches(expect)
    if differences:
        raise ValueError(
            f"the head in {folder} was trained for the target {found.name}, not for {expect.name}, which it is to be "
            f"used with ('here' is the head's side): {'; '.join(differences)}. "
            "Load the target that the head names, or build and train for this one"
        )


def _load_weights(card: HeadCard, path: Path, sha256: str) -> SignalHead:
    if not path.is_file() or sha256_file(path) != sha256:
        state = "damaged: its SHA-256 is not the one in config.json" if path.is_file() else "missing"
        raise ValueError(f"{path} is {state}; copy the head folder again, or train it again")
    # Before the head is made: a config may announce more than fits into the memory.
    values, size = card.config.num_values(card.spec.size), path.stat().st_size
    if 4 * values > size:
        raise ValueError(
            f"{path} does not hold the weights that config.json describes: {values:,} numbers in {size:,} bytes"
        )
    head = SignalHead(card.config, card.spec.size)
    try:
        head.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{path} does not hold the weights that config.json describes: {error}") from error
    return head
