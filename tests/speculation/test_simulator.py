"""The simulator of adaptive verification, on cases whose best choice is known."""

import numpy as np
import pytest

from ace_learn.speculation.simulator import Machine, Pool, simulate

FREE = Machine(compute=0.0, draft_step=0.0)
BOUND = Machine(memory=0.0, overhead=0.0, compute=1.0, draft_step=0.0)
SURE, HOPELESS = 30.0, -30.0


def pool(*log_odds):
    return Pool(features=np.array(log_odds, dtype=float), slope=1.0, intercepts=np.zeros(len(log_odds[0])))


def test_speed_by_hand():
    always = pool([SURE, SURE])
    assert simulate(always, FREE, requests=2, draft_tokens=0, adaptive=False, steps=10) == pytest.approx(2000 / 2.5)
    assert simulate(always, FREE, requests=2, draft_tokens=2, adaptive=False, steps=10) == pytest.approx(6000 / 2.5)
    assert simulate(always, BOUND, requests=2, draft_tokens=2, adaptive=False, steps=10) == pytest.approx(1000)
    assert simulate(pool([HOPELESS]), BOUND, requests=2, draft_tokens=1, adaptive=False, steps=10) == pytest.approx(500)


def test_adaptive_verification_drafts_where_it_pays_and_nowhere_else():
    mixed = pool([SURE, HOPELESS, HOPELESS], [SURE, SURE, SURE])
    assert simulate(mixed, FREE, requests=4, draft_tokens=3, adaptive=True, steps=200) == pytest.approx(
        simulate(mixed, FREE, requests=4, draft_tokens=3, adaptive=False, steps=200), rel=0.1
    )
    dear = Machine(memory=0.5, overhead=2.0, compute=0.5, draft_step=0.01)
    mixed = pool([HOPELESS] * 3, [SURE] * 3)  # at best 20 tokens for 12 ms; without drafts 8 for 6 ms
    fixed = [simulate(mixed, dear, requests=8, draft_tokens=k, adaptive=False, steps=200) for k in (0, 1, 2, 3)]
    assert simulate(mixed, dear, requests=8, draft_tokens=3, adaptive=True, steps=200) > max(fixed)


def test_a_step_must_cost_something():
    with pytest.raises(ValueError, match="must cost something"):
        Machine(memory=0.0, compute=0.0)
