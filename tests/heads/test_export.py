"""The head folder: the same numbers back, and nothing wrong accepted."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ace_learn.artifacts import read_json, write_json
from ace_learn.exit.policy import ExitPolicy
from ace_learn.features import FeatureSpec
from ace_learn.heads import HeadCard, SignalHead, load_head, load_own_policy, save_head
from ace_learn.models.identity import TargetIdentity
from ace_learn.thinking import ThinkMarkers
from tests.features.synthetic import target_json
from tests.heads.test_head import head_config

_SPEC = FeatureSpec(sources=("target_last", "scalars"), hidden_size=6, aux_layers=(1,))
_IDENTITY = TargetIdentity.from_json(target_json())


def _saved(folder: Path, arch: str = "ensemble") -> SignalHead:
    torch.manual_seed(1)
    config = head_config(arch, width=5, members=3, dropout=0.1)
    head = SignalHead(config, _SPEC.size)
    head.set_normalisation(torch.randn(_SPEC.size), torch.rand(_SPEC.size) + 0.1)
    card = HeadCard(
        config=config, spec=_SPEC, identity=_IDENTITY, data_sha256="d" * 64, rows="boundaries", metrics={"x": 1}
    )
    folder.mkdir(exist_ok=True)
    save_head(folder, head, card)
    return head.eval()


@pytest.mark.parametrize("arch", ["linear", "mlp", "ensemble"])
def test_export_and_load_give_the_same_numbers_bit_for_bit(tmp_path: Path, arch: str) -> None:
    head = _saved(tmp_path, arch)
    loaded = load_head(tmp_path, _IDENTITY)
    features = torch.randn(50, _SPEC.size)
    assert torch.equal(loaded.head(features), head(features))
    assert not loaded.head.training
    assert (loaded.spec, loaded.identity, loaded.folder) == (_SPEC, _IDENTITY, tmp_path)
    assert loaded.card.metrics == {"x": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(_IDENTITY, hidden_size=8, name="big"), "target synthetic, not for big.*hidden_size: 6 here, 8 there"),
        (replace(_IDENTITY, fingerprint="a" * 64), f"fingerprint: '{'f' * 64}' here, '{'a' * 64}' there"),
        (replace(_IDENTITY, markers=ThinkMarkers((1,), (3, 4))), r"markers: .*\(2,\).* here, .*\(3, 4\).* there"),
        (replace(_IDENTITY, tables_sha256="1" * 64), "tables_sha256: '000"),
    ],
)
def test_another_target_is_refused_naming_both_sides(tmp_path: Path, other: TargetIdentity, message: str) -> None:
    _saved(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path, other)


def test_another_name_alone_is_no_other_target(tmp_path: Path) -> None:
    _saved(tmp_path)
    assert load_head(tmp_path, replace(_IDENTITY, name="moved")).identity.name == "synthetic"


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    _saved(tmp_path)
    weights = tmp_path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged.*copy the head folder again, or train it"):
        load_head(tmp_path)
    weights.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        load_head(tmp_path)


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    _saved(tmp_path)
    config = read_json(tmp_path / "config.json")
    assert isinstance(config, dict)
    head = config["head"]
    assert isinstance(head, dict)
    write_json(tmp_path / "config.json", {**config, "head": {**head, "width": 6}})
    with pytest.raises(ValueError, match=r"does not hold the weights that config\.json describes"):
        load_head(tmp_path)


def test_a_config_that_announces_more_than_there_is_allocates_nothing(tmp_path: Path) -> None:
    _saved(tmp_path)
    config = read_json(tmp_path / "config.json")
    assert isinstance(config, dict)
    head = config["head"]
    assert isinstance(head, dict)
    for width in (10**12, 10**30):
        write_json(tmp_path / "config.json", {**config, "head": {**head, "width": width}})
        with pytest.raises(ValueError, match=r"does not hold the weights that config\.json describes: .* numbers in"):
            load_head(tmp_path)


def test_a_policy_certified_with_another_head_is_refused_naming_both(tmp_path: Path) -> None:
    _saved(tmp_path)
    head = load_head(tmp_path)
    policy = ExitPolicy(predicate="any", thresholds={"consistency": 0.5})
    for certificate in (None, {"head_sha256": head.weights_sha256}):
        write_json(tmp_path / "policy.json", replace(policy, certificate=certificate).to_json())
        assert load_own_policy(head).certificate == certificate
    write_json(tmp_path / "policy.json", policy.with_certificate({"head_sha256": "b" * 64}).to_json())
    with pytest.raises(ValueError, match=f"weights {'b' * 64}.*weights {head.weights_sha256}.*run calibrate"):
        load_own_policy(head)
    write_json(tmp_path / "policy.json", policy.with_certificate({}).to_json())
    with pytest.raises(ValueError, match="no field 'head_sha256'; it may come from another version"):
        load_own_policy(head)


def test_unfinished_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no finished head"):
        load_head(tmp_path)
    _saved(tmp_path)
    config = read_json(tmp_path / "config.json")
    assert isinstance(config, dict)
    write_json(tmp_path / "config.json", {**config, "format": "ace_learn.head/9"})
    with pytest.raises(ValueError, match=r"has format ace_learn\.head/9"):
        load_head(tmp_path)
    features = config["features"]
    assert isinstance(features, dict)
    write_json(tmp_path / "config.json", {**config, "features": {**features, "hidden_size": 7}})
    with pytest.raises(ValueError, match="features have hidden size 7, the target 6"):
        load_head(tmp_path)


def test_serving_imports_no_training_library() -> None:
    program = (
        "import sys, ace_learn.heads\n"
        "heavy = {'lightning', 'sklearn', 'matplotlib', 'transformers', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
