"""SignalHead against a slow reading of what it is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ace_learn.heads import HeadConfig, SignalHead
from ace_learn.heads.head import natural
from ace_learn.signals import LEARNED

ARCHITECTURES = ("linear", "mlp", "ensemble")
F = 9


def head_config(arch: str, **values: float) -> HeadConfig:
    """A config with those of the values that the architecture reads."""
    read = {"linear": (), "mlp": ("width", "dropout"), "ensemble": ("width", "members", "dropout")}[arch]
    return HeadConfig.from_json(
        {**HeadConfig().to_json(), "arch": arch, **{name: values[name] for name in read if name in values}}
    )


def _head(arch: str, *, dropout: float = 0.0) -> SignalHead:
    torch.manual_seed(3)
    head = SignalHead(head_config(arch, width=5, members=4, dropout=dropout), F)
    head.set_normalisation(torch.randn(F), torch.rand(F) + 0.5)
    return head.eval()


def _by_hand(head: SignalHead, member: int, features: Tensor) -> Tensor:
    """One member, one row at a time, with torch's own linear layer."""
    rows = []
    for row in (features - head.mean) / head.std:
        hidden = row
        for index, layer in enumerate(head.layers):
            if index:
                hidden = nn.functional.gelu(hidden)
            hidden = nn.functional.linear(hidden, layer.weight[member].T, layer.bias[member])
        rows.append(hidden)
    return torch.stack(rows)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_head_is_the_average_of_its_members(arch: str) -> None:
    head = _head(arch)
    features = torch.randn(6, F)
    assert head.num_members == (4 if arch == "ensemble" else 1)
    members = torch.stack([_by_hand(head, member, features) for member in range(head.num_members)])
    torch.testing.assert_close(head.members_raw(features), members)
    torch.testing.assert_close(head.raw(features), members.mean(0))
    if arch == "ensemble":
        assert members.std(0).min() > 0, "members must differ"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_any_leading_axes_and_dtypes(arch: str) -> None:
    head = _head(arch)
    features = torch.randn(2, 3, F)
    signals = head(features)
    assert signals.shape == (2, 3, len(LEARNED))
    assert signals.dtype == torch.float32
    torch.testing.assert_close(head(features.flatten(0, 1)).unflatten(0, (2, 3)), signals)
    torch.testing.assert_close(head(features[0, 0]), signals[0, 0])
    torch.testing.assert_close(head(features.bfloat16()), head(features.bfloat16().float()))
    assert head(features[:0]).shape == (0, 3, 4)


def test_natural_units_by_hand() -> None:
    raw = torch.tensor([0.0, torch.log(torch.tensor(3.0)), torch.log(torch.tensor(8.0)), -torch.log(torch.tensor(3.0))])
    torch.testing.assert_close(natural(raw), torch.tensor([0.5, 0.75, 7.0, 0.25]))


@settings(max_examples=50, deadline=None)
@given(raw=st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=4))
def test_natural_units_stay_in_their_ranges(raw: list[float]) -> None:
    signals = natural(torch.tensor(raw))
    assert signals.isfinite().all()
    assert 0 <= signals[[0, 1, 3]].min() <= signals[[0, 1, 3]].max() <= 1
    assert signals[2] >= 0


def test_a_constant_feature_does_no_harm() -> None:
    head = _head("linear")
    std = torch.rand(F) + 0.5
    std[4] = 0
    head.set_normalisation(torch.zeros(F), std)
    assert head(torch.ones(2, F)).isfinite().all()
    assert head.std[4] == 1


def test_dropout_only_while_training() -> None:
    head = _head("mlp", dropout=0.5)
    features = torch.randn(3, F)
    assert torch.equal(head(features), head(features))
    head.train()
    assert not torch.equal(head(features), head(features))


def test_config_round_trip_and_refusals() -> None:
    config = HeadConfig(arch="mlp", width=7, dropout=0.25)
    assert HeadConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match="arch is 'rnn', not one of linear, mlp, ensemble"):
        HeadConfig.from_json({**config.to_json(), "arch": "rnn"})
    with pytest.raises(ValueError, match="width >= 1"):
        HeadConfig(width=0)
    with pytest.raises(ValueError, match="linear does not read width, dropout; leave them out"):
        HeadConfig(arch="linear", width=512, dropout=0.5)
    with pytest.raises(ValueError, match="mlp does not read members"):
        HeadConfig(arch="mlp", members=9)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_number_of_values(arch: str) -> None:
    head = _head(arch)
    assert head.config.num_values(F) == sum(tensor.numel() for tensor in head.state_dict().values())
