"""What the page promises of its example; `test_page.py` runs this where the example's file is part of the package."""

import torch

from ace_learn.engines.hf import HFEngine
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.evaluate.signals import SignalReader
from ace_learn.exit import SCALARS, ExitPolicy
from ace_learn.features import FeatureStore
from ace_learn.heads.head import natural
from ace_learn.signals import LEARNED, SIGNALS
from tests.features.synthetic import Synthetic, make_dataset
from tests.helpers.targets import WORDS, tiny_target


def test_it_is_a_signal():
    assert "weakest" in SIGNALS
    assert SIGNALS[:4] == LEARNED
    assert SIGNALS[4:] == tuple(sorted(SIGNALS[4:]))


def test_it_is_replayed(tmp_path):
    stored = make_dataset(tmp_path / "data", Synthetic(problems=8))
    reader = SignalReader(FeatureStore(tmp_path / "data"), lambda rows: natural(rows[:, :4]), ("target_last",))
    reader.require(["weakest"])
    signals = reader.signals(torch.arange(20))
    expected = stored["scalars"][:20, SCALARS.index("paragraph_min_logprob")].exp()
    assert torch.equal(signals[:, SIGNALS.index("weakest")], expected)


def test_it_fires_live():
    target, think = tiny_target(), WORDS.index("<think>")
    requests = [Request(key=key, prompt_ids=(25, 26, 27, think), max_new_tokens=60) for key in range(16)]
    exits = {}
    for bound in (-1.0, 2.0):  # a probability is above the one, and never above the other
        policy = ExitPolicy(predicate="all", thresholds={"weakest": bound})
        outputs = HFEngine(target, sampling=Sampling(), policy=policy).generate(requests)
        exits[bound] = [output.exit for output in outputs if output.exit is not None]
    assert exits[2.0] == []
    assert len(exits[-1.0]) >= 4
    assert all(0.0 <= fired.signals["weakest"] <= 1.0 for fired in exits[-1.0])
