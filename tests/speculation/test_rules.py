"""Acceptance rules: hand-worked laws, the budget of `cactus_exact`, and the exact law of what is emitted."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ace_learn.speculation.rules import (
    AcceptanceConfig,
    cactus_target,
    kl_divergence,
    output_law,
    raised,
    raised_kl,
    typical_threshold,
)

DELTAS = (1e-4, 0.01, 0.05, 0.1, 0.5, 0.75, 1.0, 1.256, 3.0)


def random_cases(count, seed=0):
    """Target laws of very different sharpness, and a drafted token of each."""
    draw = torch.Generator().manual_seed(seed)
    sharpness = 10.0 ** (torch.rand(count, 1, generator=draw, dtype=torch.double) * 2.5 - 1.0)
    q = (torch.randn(count, 8, generator=draw, dtype=torch.double) * sharpness).softmax(-1)
    return q, torch.randint(8, (count,), generator=draw)


def test_cactus_by_hand():
    q, first = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.double), torch.tensor([0])
    g = 0.2 + math.sqrt(2 * 0.1 * 0.2 * 0.8)
    by_hand = torch.tensor([[g, 0.5 * (1 - g) / 0.8, 0.3 * (1 - g) / 0.8]], dtype=torch.double)
    torch.testing.assert_close(cactus_target(q, first, 0.1, False), by_hand)
    torch.testing.assert_close(cactus_target(q, first, 0.0, False), q)
    torch.testing.assert_close(cactus_target(q, first, 0.0, True), q)
    certain = torch.tensor([[0.0, 1.0, 0.0]])
    for token in (0, 1):  # at temperature 0 the rule does nothing, whichever token was drafted
        for exact in (False, True):
            assert torch.equal(cactus_target(certain, torch.tensor([token]), 1.0, exact), certain)


def test_the_closed_form_overspends_where_it_accepts_surely():
    q_n = torch.tensor([1 / 3, 0.6], dtype=torch.double)
    assert raised(q_n[:1], 1.0, exact=False).item() == pytest.approx(1.0)
    kl = raised_kl(raised(q_n, 1.0, exact=False), q_n)
    assert kl[0].item() == pytest.approx(math.log(3.0))
    assert raised_kl(raised(q_n[1:], 0.05, exact=False), q_n[1:]).item() == pytest.approx(0.0533, abs=1e-4)


@pytest.mark.parametrize(("largest", "share"), [(0.4, 0.40), (1.0, 0.26)])
def test_how_often_the_closed_form_overspends(largest, share):
    """Of q_n uniform in (0, 1) and delta uniform in (0, largest)."""
    draw = torch.Generator().manual_seed(1)
    q_n = torch.rand(500, 200, generator=draw, dtype=torch.double)
    deltas = (torch.rand(500, generator=draw, dtype=torch.double) * largest).tolist()
    spent = torch.stack([raised_kl(raised(q, d, exact=False), q) - d for q, d in zip(q_n, deltas, strict=True)])
    assert float((spent > 1e-9).double().mean()) == pytest.approx(share, abs=0.015)


@pytest.mark.parametrize("delta", DELTAS)
def test_cactus_exact_keeps_its_budget_and_spends_it(delta):
    q, drafted = random_cases(12_000)  # times nine deltas: 108,000 rows
    h = cactus_target(q, drafted, delta, True)
    kl = kl_divergence(h, q)
    h_n, q_n = (law.gather(-1, drafted[:, None])[:, 0] for law in (h, q))
    assert float(kl.max()) <= delta + 1e-6
    assert float(kl[h_n < 1.0].sub(delta).abs().max()) < 1e-6
    assert bool((-q_n[h_n == 1.0].log() <= delta).all())
    torch.testing.assert_close(h.sum(-1), torch.ones(len(h), dtype=torch.double))
    torch.testing.assert_close(raised_kl(h_n, q_n), kl, atol=1e-9, rtol=1e-6)
    for exact in (False, True):  # acceptance min(1, h_n / p_n) is never below that of `standard`
        assert bool((raised(q_n, delta, exact=exact) >= q_n).all())


@given(
    q=st.one_of(
        st.floats(0.0, 1.0),
        st.floats(-40.0, -1e-6).map(math.exp),
        st.floats(-30.0, -1.0).map(math.exp).map(lambda x: 1.0 - x),
    ),
    delta=st.floats(0.0, 20.0),
)
def test_the_budget_holds_for_any_probability(q, delta):
    q_n = torch.tensor([q], dtype=torch.double)
    g = raised(q_n, delta, exact=True)
    assert q <= g.item() <= 1.0
    kl = raised_kl(g, q_n).item()
    assert kl <= delta + 1e-6
    assert g.item() in (q, 1.0) or kl > delta - 1e-6


def test_single_precision_loses_little():
    q, drafted = random_cases(20_000, seed=3)
    q_n = q.gather(-1, drafted[:, None])[:, 0]
    likely = (q_n > 1e-30) & (q_n < 0.9999)  # beyond, single precision does not tell q_n from 0 or 1
    h = cactus_target(q.float(), drafted, 0.5, True)
    assert h.dtype == torch.float32
    torch.testing.assert_close(h[likely].double(), cactus_target(q, drafted, 0.5, True)[likely], atol=1e-5, rtol=1e-4)


def test_typical_threshold_by_hand():
    uniform, certain = torch.full((4,), 0.25), torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert typical_threshold(uniform, 0.09, 0.3).item() == pytest.approx(0.3 * 0.25)
    assert typical_threshold(certain, 0.09, 0.3).item() == pytest.approx(0.09)
    assert AcceptanceConfig(rule="typical").thresholds == pytest.approx((0.09, 0.3))


def test_output_law_by_hand():
    q, p = torch.tensor([[0.2, 0.8]], dtype=torch.double), torch.tensor([[0.5, 0.5]], dtype=torch.double)
    torch.testing.assert_close(output_law(q, p, AcceptanceConfig()), q)
    # typical: both exceed min(.09, .3 exp(-.5)), so that whatever is drafted is emitted
    torch.testing.assert_close(output_law(q, p, AcceptanceConfig(rule="typical")), p)
    g = 0.2 + math.sqrt(2 * 0.02 * 0.16)  # token 0 drafted: kept with g / .5, else token 1; token 1 always kept
    law = torch.tensor([[g, 1 - g]], dtype=torch.double)
    torch.testing.assert_close(output_law(q, p, AcceptanceConfig(rule="cactus", delta=0.02)), law)


def test_the_law_of_the_output_is_closer_than_the_draft():
    """Theorem 3: it is bounded by KL(p||q), whatever the budget; and `standard` leaves nothing to bound."""
    (q, _), (p, _) = random_cases(2_000), random_cases(2_000, seed=9)
    torch.testing.assert_close(output_law(q, p, AcceptanceConfig()), q)
    drift = {
        (rule, delta): kl_divergence(output_law(q, p, AcceptanceConfig(rule=rule, delta=delta)), q)
        for rule in ("cactus", "cactus_exact")
        for delta in (0.0, 0.1, 1.0)
    }
    for rule in ("cactus", "cactus_exact"):
        assert float(drift[rule, 0.0].abs().max()) < 1e-9
        assert bool((drift[rule, 1.0] <= kl_divergence(p, q) + 1e-9).all())
        assert float(drift[rule, 0.1].mean()) < float(drift[rule, 1.0].mean())
        assert float(drift[rule, 1.0].max()) > 0.5


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"delta": 1.0}, "standard ignores delta"),
        ({"only_in_think": True}, "standard ignores only_in_think"),
        ({"rule": "typical", "delta": 1.0}, "typical ignores delta"),
        ({"rule": "cactus"}, "needs a delta"),
        ({"rule": "cactus_exact", "delta": -0.1}, "needs a delta"),
        ({"rule": "cactus", "delta": 1.0, "alpha": 0.3}, "cactus ignores alpha"),
        ({"rule": "typical", "epsilon": 0.0}, "epsilon is a probability"),
        ({"rule": "typical", "alpha": -1.0}, "alpha must be > 0"),
    ],
)
def test_what_would_be_ignored_or_means_nothing_is_refused(values, said):
    with pytest.raises(ValueError, match=said):
        AcceptanceConfig(**values)
