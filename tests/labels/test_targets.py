"""Minimal reasoning and targets, worked by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ace_learn.labels.targets import minimal_boundary, targets


@pytest.mark.parametrize(
    ("matches", "first", "stable"),
    [
        ([], 0, 0),
        ([False, False], 2, 2),
        ([True, False, True, True], 0, 2),
        ([False, True, True], 1, 1),
        ([True, True], 0, 0),
        ([True, False], 0, 2),
        ([False, True, None], 1, -1),  # probed up to the first match
    ],
)
def test_minimal_boundary(matches, first, stable):
    assert minimal_boundary(matches) == (first, stable)


@given(st.lists(st.booleans(), max_size=12))
def test_first_is_never_behind_stable(matches):
    best = minimal_boundary(matches)
    assert best.first <= best.stable <= len(matches)
    assert all(matches[best.stable :])
    assert not any(matches[: best.first])


def test_targets_by_hand():
    """b* is token 3: remaining counts down to it, progress reaches 1 there and stays."""
    out = targets(
        position=torch.tensor([0, 1, 3, 6]),
        confidence=torch.tensor([0.9, 0.8, 0.7, 0.6]),
        boundary=torch.tensor([-1, 0, 1, 2]),
        match_rate=[0.0, 0.5, None],
        minimal_position=3,
    )
    assert out[:, 0].tolist() == pytest.approx([0.9, 0.8, 0.7, 0.6])
    assert out[:, 1].tolist() == [0.25, 0.5, 1.0, 1.0]
    assert out[:, 2].tolist() == [3, 2, 0, 0]
    assert out[0, 3].isnan()
    assert out[1:3, 3].tolist() == [0, 0.5]
    assert out[3, 3].isnan()
