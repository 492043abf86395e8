"""The head in NumPy against the head in torch."""

import numpy as np
import pytest
import torch

from ace_learn.heads.head import HeadConfig, SignalHead
from ace_learn.heads.host import HostHead


def trained(config, size):
    torch.manual_seed(3)
    head = SignalHead(config, size)
    head.set_normalisation(100 * torch.randn(size), torch.rand(size).round())  # features that are constant as well
    with torch.no_grad():
        head.layers[-1].weight *= 6
    return head.eval()


@pytest.mark.parametrize(
    "config", [HeadConfig(arch="linear"), HeadConfig(arch="mlp", width=7), HeadConfig(arch="ensemble", members=4)]
)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_every_architecture_gives_what_it_gives_in_torch(config, rows):
    head = trained(config, 9)
    features = head.mean + 3 * torch.randn(rows, 9)
    found = np.array(HostHead(head)(features.numpy()), dtype=np.float32).reshape(rows, 4)
    torch.testing.assert_close(torch.from_numpy(found), head(features).detach(), rtol=2e-4, atol=1e-5)


def test_the_number_of_remaining_tokens_is_bounded_as_in_torch():
    head = trained(HeadConfig(arch="linear"), 2)
    features = head.mean + torch.tensor([[1e6, 1e6], [-1e6, -1e6]])
    expected = head(features).detach()
    assert expected[:, 2].tolist() in ([0.0, pytest.approx(4.85e8, rel=0.01)], [pytest.approx(4.85e8, rel=0.01), 0.0])
    torch.testing.assert_close(torch.tensor(HostHead(head)(features.numpy())), expected, rtol=1e-4, atol=1e-5)


def test_features_that_are_nan_give_nan():
    head = trained(HeadConfig(), 3)
    assert np.isnan(HostHead(head)(np.full((1, 3), np.nan, dtype=np.float32))).all()
