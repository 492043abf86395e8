import pytest
import torch

from ace_learn.drafts.data import Trace
from ace_learn.drafts.vocabulary import choose_vocabulary, restrict, token_counts


def test_only_outputs_are_counted():
    trace = Trace(torch.tensor([5, 5, 1, 2, 2]), 2, torch.full((5, 4), torch.nan))
    assert token_counts([trace, trace], 7).tolist() == [0, 2, 4, 0, 0, 0, 0]


def test_the_most_frequent_and_of_equals_the_smaller_ids():
    chosen = choose_vocabulary(torch.tensor([3, 9, 3, 3, 0, 2]), 3)
    assert chosen.target_ids.tolist() == [0, 1, 2]
    assert chosen.coverage == pytest.approx(15 / 20)
    chosen = choose_vocabulary(torch.tensor([3, 9, 3, 3, 0, 2]), 3, always=[4, 4])
    assert chosen.target_ids.tolist() == [0, 1, 4]
    assert chosen.offsets.tolist() == [0, 0, 2]


@pytest.mark.parametrize(("size", "always"), [(7, []), (0, []), (1, [2, 3])])
def test_an_impossible_size_is_refused(size, always):
    with pytest.raises(ValueError, match="choose another shape"):
        choose_vocabulary(torch.ones(6, dtype=torch.int64), size, always=always)


def test_restricted_log_probabilities_keep_what_the_vocabulary_lacks():
    log_probs = restrict(torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([0, 2]))
    torch.testing.assert_close(log_probs.exp(), torch.tensor([[0.5, 0.25]]))
