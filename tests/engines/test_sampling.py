"""Temperature, top-k and top-p."""

import pytest
import torch

from ace_learn.engines.sampling import Sampling

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def test_greedy_is_one_hot_on_the_first_maximum():
    assert Sampling(temperature=0.0).probabilities(torch.tensor([[1.0, 3.0, 3.0]])).tolist() == [[0, 1, 0]]


def test_temperature_and_truncation_by_hand():
    plain = LOGITS.softmax(-1)
    assert torch.allclose(Sampling().probabilities(LOGITS), plain)
    assert torch.allclose(Sampling(temperature=2.0).probabilities(LOGITS), (LOGITS / 2).softmax(-1))
    kept = Sampling(top_k=2).probabilities(LOGITS)
    assert torch.allclose(kept, torch.tensor([[0.7310586, 0.2689414, 0.0, 0.0]]))
    # probabilities are .644, .237, .087, .032: .7 needs two tokens, .6 one, .89 three
    assert (Sampling(top_p=0.7).probabilities(LOGITS) > 0).sum() == 2
    assert (Sampling(top_p=0.6).probabilities(LOGITS) > 0).sum() == 1
    assert (Sampling(top_p=0.89).probabilities(LOGITS) > 0).sum() == 3


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": 1e-38}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}]
)
def test_ranges(wrong):
    with pytest.raises(ValueError, match="temperature"):
        Sampling(**wrong)
