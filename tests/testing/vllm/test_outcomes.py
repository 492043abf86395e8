"""How outcomes are counted, by hand; no engine."""

import numpy as np
import pytest

from ace_learn.testing.vllm.cells import CellResult
from ace_learn.testing.vllm.law import compare_samples, outcome
from ace_learn.testing.vllm.models import END_THINK
from ace_learn.testing.vllm.watch import Watched


def sample(*counted):
    """Requests: (ids, how often)."""
    return CellResult([list(ids) for ids, count in counted for _ in range(count)], [], Watched())


def test_an_outcome_is_where_thinking_ends_and_two_tokens_of_answer():
    assert outcome([7, 8, END_THINK, 9, 5, 5]) == (2, 9, 5)
    assert outcome([END_THINK, 9]) == (0, 9)
    assert outcome([7, 8, 9]) == (-1,)


def test_equal_samples_are_equal_and_others_are_not():
    short, long = (5, END_THINK, 6, 6), (5, 5, END_THINK, 6, 6)
    same = compare_samples("V1", sample((short, 60), (long, 40)), sample((short, 60), (long, 40)))
    assert (same.statistic, same.p_value, same.outcomes) == (0.0, 1.0, 2)
    other = compare_samples("V1", sample((short, 60), (long, 40)), sample((short, 40), (long, 60)))
    # 2 x 2 table of 60/40 against 40/60: each cell is 10 off its expected 50, 4 x 100 / 50 = 8
    assert other.statistic == pytest.approx(8.0)
    assert other.p_value == pytest.approx(0.004678, rel=1e-3)


def test_rare_outcomes_are_counted_together():
    common = ((5, END_THINK, 6, 6), 50)
    rare = [((5, 5, END_THINK, 6, token), 1) for token in range(5, 15)]
    result = compare_samples("V1", sample(common, *rare), sample(common, *rare))
    assert result.outcomes == 2
    assert np.isfinite(result.statistic)
