"""`check_head` passes for heads of every architecture and their folders, and names the law that a broken one breaks."""

from dataclasses import replace

import pytest
import torch

from ace_learn.heads import SignalHead, load_head
from ace_learn.models.identity import TargetIdentity
from ace_learn.testing import LawError, check_head
from ace_learn.testing import head as suite
from tests.features.synthetic import target_json
from tests.heads.test_export import _saved as save_any
from tests.heads.test_head import ARCHITECTURES, head_config

IDENTITY = TargetIdentity.from_json(target_json())


def build(cls, arch="mlp"):
    torch.manual_seed(0)
    head = cls(head_config(arch, width=5, members=3, dropout=0.5), 9)
    head.set_normalisation(torch.randn(9), torch.rand(9) + 0.1)
    return head


class WrongShape(SignalHead):
    def forward(self, features):
        return super().forward(features).flatten(0, -2)


class HalfPrecision(SignalHead):
    def forward(self, features):
        return super().forward(features).bfloat16()


class LooksAround(SignalHead):
    def forward(self, features):
        signals = super().forward(features)
        return signals / (1 + signals.nan_to_num().mean()) if features.ndim == 2 and len(features) else signals


class OutOfRange(SignalHead):
    def forward(self, features):
        return self.raw(features).nan_to_num()


class Overflows(SignalHead):
    def forward(self, features):
        return super().forward(features) + 0 * features.float().square().sum(-1, keepdim=True)


class Retouched(SignalHead):
    def forward(self, features):
        return super().forward(features) * 0.5


BROKEN = {
    "signals have the shape of their rows, in float32": (WrongShape, HalfPrecision),
    "a row gets the signals that it gets alone": (LooksAround,),
    "signals are finite and in their ranges": (OutOfRange, Overflows),
    "export and load give the same numbers": (Retouched,),
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_passes_alone_and_as_a_folder(arch, tmp_path):
    head = build(SignalHead, arch).train()
    check_head(head)
    assert head.training  # as it was before
    save_any(tmp_path, arch)
    check_head(tmp_path)
    check_head(str(tmp_path), expect=IDENTITY, seed=1)


@pytest.mark.parametrize(("law", "cls"), [(law, cls) for law, several in BROKEN.items() for cls in several])
def test_a_broken_head_fails_by_the_name_of_its_law(law, cls):
    with pytest.raises(LawError, match=f"^{law}: given .*: expected .*, got "):
        check_head(build(cls))


@pytest.mark.parametrize(("name", "content"), [("head.pt", b"x"), ("weights", b"PK\x03\x04..."), ("w", b"\x80\x04..")])
def test_a_pickle_in_the_folder_is_found_by_name_and_by_content(tmp_path, name, content):
    save_any(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(b"PK\x03\x04")
    check_head(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LawError, match=f"a head folder holds no pickle: given .*{name}"):
        check_head(tmp_path)


@pytest.mark.parametrize("field", ["fingerprint", "hidden_size", "markers", "tables_sha256"])
def test_a_loader_that_takes_another_target_is_found(tmp_path, monkeypatch, field):
    def careless(folder, expect=None):
        found = load_head(folder).identity
        return load_head(folder, expect and replace(expect, **{field: getattr(found, field)}))

    save_any(tmp_path)
    monkeypatch.setattr(suite, "load_head", careless)
    with pytest.raises(LawError, match=f"another target is refused: given .*{field}.*expected a ValueError"):
        check_head(tmp_path)


def test_what_cannot_be_checked_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not know its target"):
        check_head(build(SignalHead), expect=IDENTITY)
    with pytest.raises(ValueError, match="holds no finished head"):
        check_head(tmp_path)
    save_any(tmp_path)
    with pytest.raises(ValueError, match="fingerprint"):
        check_head(tmp_path, expect=replace(IDENTITY, fingerprint="a" * 64))
