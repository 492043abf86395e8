import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from ace_learn.evaluate.calibration import Certificate, binomial_p_values, calibrate, upper_bound

ALPHA, DELTA = 0.02, 0.05


def losses_of(*counts, n):
    """Loss matrix [G, n] whose rows hold that many losses each, nested."""
    return np.arange(n) < np.array(counts)[:, None]


@pytest.mark.parametrize(("n", "allowed"), [(149, 0), (500, 4), (1000, 12)])
def test_allowed_losses_at_two_percent_and_95(n, allowed):
    certified = calibrate(losses_of(allowed, n=n), alpha=ALPHA, delta=DELTA)
    refused = calibrate(losses_of(allowed + 1, n=n), alpha=ALPHA, delta=DELTA)
    assert certified.chosen == 0
    assert refused.chosen is None


def test_148_problems_are_too_few():
    result = calibrate(losses_of(0, n=148), alpha=ALPHA, delta=DELTA)
    assert result.chosen is None
    assert "about 149 calibration problems" in result.message


def test_p_values_by_hand():
    # P(Bin(2, 0.5) <= 0, 1, 2) = 1/4, 3/4, 1
    np.testing.assert_allclose(binomial_p_values(np.array([0, 1, 2]), 2, 0.5), [0.25, 0.75, 1.0])
    np.testing.assert_allclose(binomial_p_values(np.array([0]), 149, 0.02), [0.98**149])


def test_fixed_sequence_stops_at_the_first_failure_and_bonferroni_does_not():
    losses = losses_of(0, 4, 9, 0, n=500)
    fixed = calibrate(losses, alpha=ALPHA, delta=DELTA)
    assert fixed.certified.tolist() == [0, 1]
    assert fixed.chosen == 1
    split = calibrate(losses, alpha=ALPHA, delta=DELTA, method="bonferroni")
    assert split.certified.tolist() == [0, 3]  # 4 losses have p = 0.028 > 0.05 / 4
    assert split.chosen == 3


def test_the_certified_candidate_that_saves_most_is_chosen():
    losses = losses_of(0, 1, 2, 30, n=500)
    savings = np.array([0.1, 0.5, 0.4, 0.9])
    assert calibrate(losses, alpha=ALPHA, delta=DELTA, savings=savings).chosen == 1
    result = calibrate(losses, alpha=ALPHA, delta=DELTA, savings=np.array([0.0, 0.0, 0.0, 0.9]))
    assert result.chosen is None  # what is certified saves nothing
    assert result.certified.tolist() == [0, 1, 2]
    assert "30 losses" in result.message


def test_crc_monotonises_and_bounds_the_expectation():
    losses = np.zeros((3, 99), dtype=bool)
    losses[0, 0] = losses[1, 1] = losses[2, 2] = True  # one loss each, on different problems
    result = calibrate(losses, alpha=0.03, delta=DELTA, method="crc")
    assert result.losses.tolist() == [1, 2, 3]
    assert result.certified.tolist() == [0, 1]  # (2 + 1) / 100 <= 0.03 < (3 + 1) / 100
    assert result.chosen == 1


@pytest.mark.parametrize("method", ["fixed_sequence", "bonferroni", "crc"])
@pytest.mark.parametrize(("losses", "n"), [(0, 40), (2, 120), (3, 160)])
def test_the_advice_is_what_it_says(method, losses, n):
    table = losses_of(losses, losses, n=n)
    result = calibrate(table, alpha=ALPHA, delta=DELTA, method=method)
    assert result.chosen is None
    alpha = float(result.message.split("alpha >= ")[1].split()[0])
    assert calibrate(table, alpha=alpha, delta=DELTA, method=method).chosen is not None
    assert calibrate(table, alpha=alpha - 2e-4, delta=DELTA, method=method).chosen is None
    enough = int(result.message.split("about ")[1].split()[0])
    scaled = int(np.ceil(losses * enough / n - 1e-9))
    level = DELTA / 2 if method == "bonferroni" else DELTA
    if method == "crc":
        assert (losses / n * enough + 1) / (enough + 1) <= ALPHA + 1e-9
    else:
        assert binom.cdf(scaled, enough, ALPHA) <= level
        assert binom.cdf(int(np.ceil(losses * (enough - 1) / n - 1e-9)), enough - 1, ALPHA) > level


def test_no_n_helps_where_the_rate_itself_is_too_high():
    result = calibrate(losses_of(30, n=1000), alpha=ALPHA, delta=DELTA)
    assert "no number of problems" in result.message


@pytest.mark.parametrize(("alpha", "delta"), [(0.0, 0.05), (1.0, 0.05), (0.02, 0.0), (0.02, 1.5)])
def test_levels_outside_the_unit_interval_are_refused(alpha, delta):
    with pytest.raises(ValueError, match="between 0 and 1"):
        calibrate(losses_of(0, n=10), alpha=alpha, delta=delta)


def test_no_candidate_and_no_problem():
    assert calibrate(np.zeros((0, 50), dtype=bool), alpha=ALPHA, delta=DELTA).chosen is None
    with pytest.raises(ValueError, match="no problem"):
        calibrate(np.zeros((1, 0), dtype=bool), alpha=ALPHA, delta=DELTA)


@settings(max_examples=50, deadline=None)
@given(losses=st.integers(0, 40), n=st.integers(41, 400), confidence=st.sampled_from([0.9, 0.95, 0.99]))
def test_upper_bound_inverts_the_p_value(losses, n, confidence):
    bound = upper_bound(losses, n, confidence)
    assert bound > losses / n
    np.testing.assert_allclose(binom.cdf(losses, n, bound), 1 - confidence, rtol=1e-6)


def test_upper_bound_of_all_losses_is_one():
    assert upper_bound(5, 5) == 1.0


class Simulation:
    """Calibration sets drawn with replacement from a pool whose risks are known exactly."""

    def __init__(self, *, draws=1500, n=500, pool=4000, grid=40):
        rng = np.random.default_rng(7)
        # Risk rises from 0 to 6% along the grid; every candidate loses mostly, but not only, what safer ones lose.
        hardness = rng.random(pool)
        jitter = 0.004 * rng.normal(size=(grid, pool))
        self.losses = hardness + jitter < np.linspace(0.0, 0.06, grid)[:, None]
        self.risk = self.losses.mean(axis=1)
        self.savings = np.linspace(0.05, 1.0, grid)
        self.draws = [rng.integers(0, pool, n) for _ in range(draws)]

    def true_risks(self, choose):
        """True risk of what `choose` picks on each draw; 0 where it picks nothing."""
        chosen = [choose(self.losses[:, drawn]) for drawn in self.draws]
        return np.array([0.0 if index is None else self.risk[index] for index in chosen])


@pytest.fixture(scope="module")
def simulation():
    return Simulation()


def violation_limit(draws):
    """A procedure with violation probability delta exceeds this share of violations once in 10,000 such tests."""
    return binom.ppf(0.9999, draws, DELTA) / draws


@pytest.mark.parametrize("method", ["fixed_sequence", "bonferroni"])
def test_certified_choices_violate_at_most_delta(simulation, method):
    def choose(losses):
        return calibrate(losses, alpha=ALPHA, delta=DELTA, method=method, savings=simulation.savings).chosen

    risks = simulation.true_risks(choose)
    assert np.mean(risks > ALPHA) <= violation_limit(len(risks))
    assert np.mean(risks > 0) > 0.5  # and it is not safe by never choosing anything


def test_naive_selection_fails_the_same_check(simulation):
    def choose(losses):
        return int(np.flatnonzero(losses.mean(axis=1) <= ALPHA)[-1])  # greediest with an empirical risk <= alpha

    risks = simulation.true_risks(choose)
    assert np.mean(risks > ALPHA) > 5 * violation_limit(len(risks))


def test_crc_keeps_the_expectation_but_not_the_probability(simulation):
    def choose(losses):
        return calibrate(losses, alpha=ALPHA, delta=DELTA, method="crc", savings=simulation.savings).chosen

    risks = simulation.true_risks(choose)
    assert risks.mean() <= ALPHA
    assert np.mean(risks > ALPHA) > violation_limit(len(risks))


def make_certificate():
    return Certificate(
        method="fixed_sequence",
        guarantee="words",
        loss="lost_correct",
        n=1000,
        losses=12,
        alpha=ALPHA,
        delta=DELTA,
        p_value=0.0394,
        chosen=1,
        certified=(0, 1),
        grid=({"score": 0.99}, {"score": 0.5}),
        grid_order="validation savings",
        data_sha256="d" * 64,
        head_sha256="a" * 64,
        model_fingerprint="f" * 64,
        sampling={"temperature": 1.0, "seed": 3},
    )


def test_certificate_survives_json():
    certificate = make_certificate()
    assert Certificate.from_json(json.loads(json.dumps(certificate.to_json()))) == certificate


@pytest.mark.parametrize("change", [{"n": "many"}, {"grid": [{"score": "high"}]}, {"certified": 3}, {"sampling": []}])
def test_a_damaged_certificate_is_refused(change):
    with pytest.raises(ValueError, match="certificate"):
        Certificate.from_json({**make_certificate().to_json(), **change})
