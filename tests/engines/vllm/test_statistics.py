import pytest
import torch

from ace_learn.engines.vllm.statistics import fused, logit_statistics, on_device
from ace_learn.exit.state import entropy_of


def cases():
    draw = torch.Generator().manual_seed(0)
    plain = torch.randn(5, 3000, generator=draw) * 4
    masked = plain.clone()
    masked[1, 5:2500] = -torch.inf
    peaked = plain.clone()
    peaked[:, 2900] = 300.0  # every probability among the first columns is 0
    return {"plain": plain, "masked": masked, "peaked": peaked, "half": plain.half()}


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("chosen", [None, [3, 1]])
@pytest.mark.parametrize("function", [logit_statistics, on_device, fused])
def test_statistics_are_those_of_the_log_softmax(name, chosen, function):
    logits = cases()[name]
    rows = logits if chosen is None else logits[chosen]
    exact = rows.double().log_softmax(-1)
    if function is logit_statistics:
        totals, entropies = logit_statistics(logits, None if chosen is None else torch.tensor(chosen))
    else:
        totals, entropies = function(rows.float())
    torch.testing.assert_close(totals.double(), rows.double().logsumexp(-1), atol=1e-4, rtol=0)
    torch.testing.assert_close(entropies.double(), entropy_of(exact), atol=2e-4, rtol=0)
    assert totals.dtype == entropies.dtype == torch.float32


def test_many_rows_are_cut_into_parts_that_change_nothing():
    logits = torch.randn(30, 2**16, generator=torch.Generator().manual_seed(1))
    whole, entropies = logit_statistics(logits)
    for row in (0, 7, 8, 29):
        one, entropy = logit_statistics(logits[row : row + 1])
        assert torch.equal(one[0], whole[row])
        assert torch.equal(entropy[0], entropies[row])
