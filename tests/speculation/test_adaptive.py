"""Adaptive verification: budgets and allocations worked by hand, and what may choose a budget."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ace_learn.speculation.adaptive import AdaptiveVerifier, CostTables, allocate, choose_budget, fresh_scores
from ace_learn.speculation.drafters import Drafts
from ace_learn.speculation.estimator import OnlineAcceptanceEstimator


def tables(verify, draft=0.0, padded=False):
    return CostTables(draft=np.full(9, draft), verify=np.array(verify, dtype=float), padded=padded)


def test_tables_from_curves_are_monotone_and_go_on():
    costs = CostTables.from_curves(
        [(1, 2.0), (4, 1.0)], [(1, 1.0), (3, 5.0), (4, 4.0), (6, 9.0)], most_requests=5, most_tokens=8
    )
    assert costs.draft.tolist() == [2.0] * 6
    assert costs.verify.tolist() == pytest.approx([1.0, 1.0, 3.0, 5.0, 5.0, 7.0, 9.0, 11.0, 13.0])


def test_budget_by_hand():
    scores = np.array([[0.9, 0.5], [0.6, 0.5]])  # survivals .9, .6, .45, .3
    both = np.array([2, 2])
    flat = tables([0, 1, 1, 1, 1, 1, 1])
    steep = tables([0, 1, 2, 3, 4, 5, 6])
    assert choose_budget(scores, both, flat) == 4
    assert choose_budget(scores, both, steep) == 0  # 2/2 beats 2.9/3
    some = tables([0, 1, 2, 2.5, 3.1, 4, 6])  # 2/2, 2.9/2.5, 3.5/3.1, 3.95/4
    assert choose_budget(scores, both, some) == 1
    assert choose_budget(scores, both, tables([0, 1, 2, 2.5, 3.1, 4, 6], draft=4.0)) == 3  # 3.95/8 beats 3.5/7.1
    assert choose_budget(scores, np.array([0, 0]), flat) == 0
    assert choose_budget(scores, np.array([1, 0]), flat) == 1


def test_a_padded_engine_fills_its_rectangle():
    """Two requests: the second column costs two tokens at once, and then is full."""
    scores, both = np.array([[0.9, 0.9], [0.3, 0.3]]), np.array([2, 2])
    costs = [0, 1, 2, 2.1, 3, 4, 4]
    assert choose_budget(scores, both, tables(costs)) == 1  # 2/2, 2.9/2.1, 3.71/3
    assert choose_budget(scores, both, tables(costs, padded=True)) == 4  # 2/2, 2.9/3, 3.71/4, 4.01/4, 4.1/4


def test_allocation_by_hand():
    predicted = torch.tensor([[0.9, 0.5, 0.9], [0.6, 0.5, 0.1]])  # .9 .45 .405 / .6 .3 .03
    full = torch.tensor([3, 3])
    assert [allocate(predicted, full, n).tolist() for n in range(7)] == [
        [0, 0], [1, 0], [1, 1], [2, 1], [3, 1], [3, 2], [3, 3],
    ]  # fmt: skip
    assert allocate(predicted, torch.tensor([1, 3]), 3).tolist() == [1, 2]
    assert allocate(predicted, torch.tensor([1, 0]), 6).tolist() == [1, 0]


@given(
    predicted=st.lists(st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4), min_size=1, max_size=5),
    budget=st.integers(0, 20),
    seed=st.integers(0, 100),
)
def test_an_allocation_is_a_prefix_of_each_request_and_within_budget(predicted, budget, seed):
    scores = torch.tensor(predicted)
    drafted = torch.randint(0, 5, (len(scores),), generator=torch.Generator().manual_seed(seed))
    counts = allocate(scores, drafted, budget)
    assert bool((counts <= drafted).all())
    assert int(counts.sum()) == min(budget, int(drafted.sum()))


@given(seed=st.integers(0, 10_000))
def test_what_stands_behind_a_draft_does_not_decide_whether_it_is_verified(seed):
    """Slot i is admitted or not whatever the scores of the slots behind it, which are the ones that know the draft."""
    draw = torch.Generator().manual_seed(seed)
    predicted, budget = torch.rand(3, 4, generator=draw), int(torch.randint(0, 13, (1,), generator=draw))
    slot = int(torch.randint(0, 4, (1,), generator=draw))
    other = predicted.clone()
    other[0, slot + 1 :] = torch.rand(3 - slot, generator=draw)
    full = torch.full((3,), 4)
    admitted = [int(allocate(scores, full, budget)[0]) > slot for scores in (predicted, other)]
    assert admitted[0] == admitted[1]


def test_scores_that_know_noise_to_be_drawn_again_are_not_kept():
    predicted = torch.tensor([[0.9, 0.8, 0.7, 0.6]]).expand(5, -1)
    kept = fresh_scores(predicted, torch.arange(1, 6))
    assert kept.tolist() == [pytest.approx(row) for row in (
        [0.9, 0.8, 0.8, 0.8], [0.9, 0.8, 0.7, 0.7], [0.9, 0.8, 0.7, 0.6], [0.9, 0.8, 0.7, 0.6], [0.9, 0.8, 0.7, 0.6],
    )]  # fmt: skip


def drafts_of(batch, width, seed=0):
    draw = torch.Generator().manual_seed(seed)
    law = (torch.randn(batch, width, 10, generator=draw) * 3).softmax(-1)
    return Drafts(law.argmax(-1), torch.full((batch,), width), law)


def test_a_session_admits_all_at_first_and_trims_by_what_it_has_seen():
    estimator = OnlineAcceptanceEstimator(num_positions=4)
    session = AdaptiveVerifier(estimator=estimator, costs=tables(np.arange(30) + 1.0)).start(3)
    thinking = torch.tensor([True, True])
    first = session.admit(drafts_of(2, 3), [0, 2], thinking)
    assert first.num_drafted.tolist() == [3, 3]
    session.observe(torch.tensor([0, 1]), first.num_drafted, torch.ones(2, 3, dtype=torch.bool))
    session.keep([0, 2], [1, 2])
    second = session.admit(drafts_of(2, 3, seed=1), [0, 2], thinking)
    assert second.num_drafted.tolist() == [0, 0]  # a step costs as much as it has tokens: no draft is worth it
    assert second.tokens.shape == (2, 0)
    assert second.probabilities.shape == (2, 0, 10)
    assert session.admit(drafts_of(1, 2), [1], thinking[:1]).num_drafted.tolist() == [2]  # nothing known of it


def test_without_costs_it_only_watches():
    estimator = OnlineAcceptanceEstimator(num_positions=2, refit_interval=1)
    session = AdaptiveVerifier(estimator=estimator, costs=None).start(2)
    drafts = drafts_of(2, 2)
    assert session.admit(drafts, [0, 1], torch.ones(2, dtype=torch.bool)) is drafts
    session.observe(torch.tensor([2, 2]), drafts.num_drafted, torch.zeros(2, 2, dtype=torch.bool))
    assert float(estimator.slope) == 0.5  # forced rows are no labels
    session.observe(torch.tensor([2, 2]), drafts.num_drafted, torch.ones(2, 2, dtype=torch.bool))
    assert estimator.intercepts.tolist() != pytest.approx([-0.2, -0.2])


def test_drafts_without_probabilities_and_broken_tables_are_refused():
    session = AdaptiveVerifier(estimator=OnlineAcceptanceEstimator(num_positions=2), costs=None).start(1)
    with pytest.raises(ValueError, match="draft probabilities"):
        session.admit(Drafts(torch.zeros(1, 2, dtype=torch.long), torch.tensor([2]), None), [0], torch.tensor([True]))
    with pytest.raises(ValueError, match="must cost something"):
        tables([0.0, 0.0])
    with pytest.raises(ValueError, match="finite"):
        tables([0.0, np.nan])
