"""Prompt lookup."""

import pytest
import torch

from ace_learn.speculation.drafters import NgramDrafter


def test_longest_suffix_and_latest_match_win():
    drafter = NgramDrafter(max_ngram=2)
    assert drafter.propose([1, 2, 3, 1, 2, 4, 1, 2], 2) == [4, 1]  # the later "1 2"
    assert drafter.propose([1, 2, 3, 9, 2, 4, 1, 2], 2) == [3, 9]  # "1 2" beats the later "2"
    assert drafter.propose([5, 6, 5], 4) == [6, 5]


def test_no_match_and_short_context():
    drafter = NgramDrafter(min_ngram=2, max_ngram=3)
    assert drafter.propose([1, 2, 3, 2], 4) == []
    assert drafter.propose([1], 4) == []
    assert drafter.propose([], 4) == []


def test_only_the_newest_tokens_are_searched():
    assert NgramDrafter(max_ngram=1, max_context=3).propose([7, 8, 1, 2, 7], 1) == []


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="min_ngram"):
        NgramDrafter(min_ngram=3, max_ngram=2)


def test_a_batch_is_drafted_row_by_row():
    session = NgramDrafter().start(torch.tensor([3, 1, 2]))
    drafts = session.draft([[5, 6, 5], [1, 2], [1, 2, 3, 1]], [4, 4, 1])
    assert drafts.num_drafted.tolist() == [2, 0, 1]
    assert drafts.tokens[0].tolist() == [6, 5]
    assert drafts.tokens[2, 0] == 2
    assert drafts.probabilities is None
    assert session.draft([[5, 6, 5]], [0]).num_drafted.tolist() == [0]
