"""Signals of single rows in NumPy against those in torch."""

import numpy as np
import torch

from ace_learn.engines.signaller import HeadSignaller, HostSignals, _from_scalars
from ace_learn.exit.tracker import Hidden
from ace_learn.features.spec import FeatureSpec
from ace_learn.heads.head import HeadConfig, SignalHead
from ace_learn.signals import SCALARS, SIGNALS, DerivedSignal, with_derived

SPEC = FeatureSpec(sources=("scalars", "target_aux", "target_last"), hidden_size=3, aux_layers=(1, 2))


def test_a_head_and_its_derived_signals_are_those_of_the_engines():
    torch.manual_seed(0)
    signaller = HeadSignaller(SignalHead(HeadConfig(width=5), SPEC.size), SPEC, torch.device("cpu"))
    scalars, hidden, aux = torch.rand(4, len(SCALARS)), torch.randn(4, 3), torch.randn(4, 6)
    learned = signaller(scalars[None], scalars[None, :, :0], Hidden(hidden[None], aux[None]))[0]
    expected = with_derived(learned.detach(), {"scalars": scalars})
    found = HostSignals(signaller)(scalars.numpy(), hidden.numpy(), aux.numpy())
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_without_a_head_there_is_what_the_scalars_give():
    scalars = np.arange(2 * len(SCALARS), dtype=np.float32).reshape(2, -1)
    found = np.array(HostSignals(None)(scalars, np.zeros((2, 3), dtype=np.float32), None))
    known = ~np.isnan(found).any(0)
    assert [name for name, there in zip(SIGNALS, known, strict=True) if there] == ["entropy"]
    assert found[:, SIGNALS.index("entropy")].tolist() == scalars[:, SCALARS.index("entropy")].tolist()


def test_a_signal_of_its_own_is_computed():
    reads = ("log_tokens", "entropy")
    signal = DerivedSignal(name="mood", description="d", reads=reads, compute=lambda columns: columns.prod(-1))
    scalars = np.full((2, len(SCALARS)), 2.0, dtype=np.float32)
    scalars[1, -1] = 5.0
    assert _from_scalars(signal)(scalars) == [4.0, 10.0]
