import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from ace_learn.evaluate.ablation.config import FixedPolicy, GroupConfig, Smoothing
from ace_learn.evaluate.ablation.outcomes import SmoothedSplits, decide
from ace_learn.evaluate.ablation.table import adjusted_p_values, measure
from ace_learn.evaluate.ablation.variants import REFERENCE, Variant, plan_variants, subsets
from ace_learn.evaluate.bootstrap import Bootstrap
from ace_learn.evaluate.calibration import Certificate
from ace_learn.evaluate.compare import Splits
from ace_learn.evaluate.learned import PolicyFamily, Risk, Scope, policy_exits
from ace_learn.evaluate.metrics import accuracy_difference, row_intervals, savings_difference
from ace_learn.evaluate.replay import replay
from ace_learn.evaluate.traces import Traces
from ace_learn.exit.policy import ExitPolicy, smooth
from tests.evaluate.ablating import recipe
from tests.evaluate.synthetic import make_signals, make_traces

FOUR = ("confidence", "progress", "remaining", "consistency")
SCOPE = Scope(data_sha256="d" * 64, head_sha256="a" * 64, model_fingerprint="f" * 64, sampling={"temperature": 1.0})
RISK = Risk(alpha=0.05)


def trace(problem, boundary, tokens, full_tokens, matches, first):
    """A trace whose full answer is right; an answer that does not match is wrong."""
    return {
        "problem": problem, "family": "hand", "split": "test", "excluded": False, "gold": "7", "think_start": 0,
        "think_end": boundary[-1] + 1, "full_answer": "7", "full_correct": True, "full_tokens": full_tokens,
        "no_think_answer": "1", "no_think_correct": False, "no_think_tokens": 1, "boundary": boundary,
        "probe_answer": ["7" if match else "8" for match in matches], "probe_matches": matches,
        "probe_correct": matches, "probe_tokens": tokens, "boundary_confidence": [0.5] * len(boundary),
        "first": first, "stable": first,
    }  # fmt: skip


def by_hand():
    """Two traces, of which the second has a boundary less, and their consistency."""
    rows = [
        trace(0, [9, 19, 29], [16, 26, 36], 40, [False, True, True], 1),
        trace(1, [4, 14], [11, 21], 30, [False, False], 2),
    ]
    signals = np.zeros((2, 3, 4), dtype=np.float32)
    signals[..., 3] = [[0.2, 0.9, 0.9], [0.1, 0.8, np.nan]]
    return Traces.from_rows(rows), signals


@pytest.mark.parametrize(
    ("options", "exits", "tokens", "savings"),
    [
        # full 40 + 30, oracle 26 + 30: 14 tokens can be saved
        ({}, [1, 1], [26, 21], 23 / 14),  # the second exits too early, and saves more than it may
        ({"patience": 2}, [2, 2], [36, 30], 4 / 14),
        ({"smoothing": Smoothing(ewma=0.5)}, [1, 2], [26, 30], 1.0),  # 0.2, 0.55, 0.725 and 0.1, 0.45
        ({"min_thinking_tokens": 21}, [2, 2], [36, 30], 4 / 14),
        ({"thresholds": {"consistency": 0.9}}, [3, 2], [40, 30], 0.0),  # above, not at, the bound
    ],
)
def test_two_traces_by_hand(options, exits, tokens, savings):
    traces, signals = by_hand()
    policy = FixedPolicy(**{"thresholds": {"consistency": 0.5}} | options)
    variant = Variant(name="hand", head="reference", policy=policy)
    smoothed = smooth(torch.from_numpy(signals), variant.smoothing[0]).numpy()
    outcome = decide(variant, SmoothedSplits(smoothed, smoothed, smoothed), Splits(traces, traces, traces),
                     risk=RISK, scope=SCOPE)  # fmt: skip
    assert outcome.exit_index.tolist() == exits
    results = {"full": replay(traces, traces.num_boundaries), "hand": replay(traces, outcome.exit_index)}
    assert results["hand"].tokens.tolist() == tokens
    figures = measure(results, traces, reference="full", compared=["hand"], bootstrap=Bootstrap(replicates=100))
    assert figures.overall["hand"].captured_savings == pytest.approx(savings)
    assert figures.overall["hand"].savings_difference.estimate == pytest.approx(savings)
    assert outcome.policy.certificate is None


def test_every_subset_of_the_signals_comes_once():
    config = recipe(groups={"signals": GroupConfig(title="Which?", subsets_of=FOUR)})
    plan = plan_variants(config)
    asked = [plan.variants[name].policy.signals for name in plan.groups["signals"]]
    assert len(asked) == 15
    assert {frozenset(subset) for subset in asked} == {
        frozenset(name for name, bit in zip(FOUR, bits, strict=True) if bit)
        for bits in itertools.product((False, True), repeat=4)
        if any(bits)
    }
    assert asked[0] == ("confidence",)
    assert asked[-1] == FOUR
    assert plan.groups["signals"][-1] == REFERENCE  # the whole set is the reference itself
    assert len(plan.variants) == 15


def test_subsets_keep_the_order_and_grow():
    assert subsets(("b", "a")) == [("b",), ("a",), ("b", "a")]


def test_a_group_is_the_product_of_its_lists_and_nothing_else():
    group = GroupConfig(title="?", heads=("reference", "other"), smoothing=(Smoothing(), Smoothing(ewma=0.3)))
    family = PolicyFamily(signals=("progress",), patience=2, label="safe")
    config = recipe(heads=("reference", "other"), groups={"g": group}, policy=family)
    plan = plan_variants(config)
    assert plan.groups["g"] == (
        "reference",
        "ewma 0.3 over boundaries",
        "head other",
        "head other, ewma 0.3 over boundaries",
    )
    for name in plan.groups["g"]:
        policy = plan.variants[name].policy
        assert replace(policy, ewma=1.0) == family


def test_a_variant_of_two_groups_is_one_variant():
    groups = {
        "a": GroupConfig(title="?", patience=(1, 2)),
        "b": GroupConfig(title="?", patience=(2, 3), predicates=("score", "all")),
    }
    plan = plan_variants(recipe(groups=groups))
    assert list(plan.variants) == [
        "reference", "patience 2", "patience 3", "predicate all, patience 2", "predicate all, patience 3",
    ]  # fmt: skip


def test_the_reference_label_is_left_behind_where_no_score_reads_it():
    group = GroupConfig(title="?", predicates=("score", "all", "any"))
    plan = plan_variants(recipe(groups={"g": group}, policy=PolicyFamily(label="safe")))
    assert plan.groups["g"] == ("reference", "predicate all", "predicate any")
    with pytest.raises(ValueError, match="label is read by the predicate 'score' alone"):
        plan_variants(recipe(groups={"g": replace(group, labels=("safe",))}))


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"signals": (("hope",),)}, "name one or more of the signals .* got hope"),
        ({"subsets_of": ("progress", "hope")}, "got hope"),
        ({"patience": (2, 2)}, "asks for the variant 'patience 2' more than once"),
        ({"patience": (0,)}, "patience"),
        ({"smoothing": (Smoothing(ewma=2.0),)}, "ewma"),
    ],
)
def test_impossible_variants_are_refused(group, message):
    with pytest.raises(ValueError, match=message):
        plan_variants(recipe(groups={"g": GroupConfig(title="?", **group)}))


def test_groups_and_smoothing_that_say_nothing_are_refused():
    with pytest.raises(ValueError, match="lists nothing to vary"):
        GroupConfig(title="?")
    with pytest.raises(ValueError, match="keep one of them"):
        GroupConfig(title="?", signals=(FOUR,), subsets_of=FOUR)
    with pytest.raises(ValueError, match="smooths nothing"):
        Smoothing(over="tokens")


def test_specexit_can_be_written_as_a_fixed_policy():
    thresholds = {"confidence": 0.8, "progress": 0.3, "remaining": 200.0}
    fixed = FixedPolicy(thresholds=thresholds, smoothing=Smoothing(ewma=0.1, over="tokens"))
    assert fixed.policy() == ExitPolicy.specexit()


def planted(seed, n):
    """Traces whose consistency tells all, and whose other signals tell nothing."""
    traces = make_traces(n, seed=seed)
    rng = np.random.default_rng([seed, 7])
    signals = np.where(traces.is_boundary[..., None], rng.uniform(size=(*traces.boundary.shape, 4)), np.nan)
    known = np.where(traces.matches_at[:, :-1], 0.9, 0.1) + 0.05 * rng.normal(size=traces.boundary.shape)
    signals[..., 3] = np.where(traces.is_boundary, known, np.nan)
    return traces, signals.astype(np.float32)


@pytest.fixture(scope="module")
def settled():
    """Outcomes of all subsets through a score, and of some through thresholds, on planted signals."""
    parts = [planted(seed, n) for seed, n in ((1, 150), (2, 400), (3, 300))]
    splits = Splits(*(traces for traces, _ in parts))
    smoothed = SmoothedSplits(*(signals for _, signals in parts))
    groups = {
        "score": GroupConfig(title="?", subsets_of=FOUR),
        "thresholds": GroupConfig(title="?", subsets_of=("progress", "consistency"), predicates=("all",)),
    }
    plan = plan_variants(recipe(groups=groups))
    outcomes = {
        name: decide(variant, smoothed, splits, risk=RISK, scope=SCOPE) for name, variant in plan.variants.items()
    }
    return splits, smoothed, plan, outcomes


def test_a_planted_signal_wins_and_noise_does_not(settled):
    splits, _, plan, outcomes = settled
    results = {name: replay(splits.test, outcome.exit_index) for name, outcome in outcomes.items()}
    compared = [name for name in results if name != REFERENCE]
    measured = measure(results, splits.test, reference=REFERENCE, compared=compared, bootstrap=Bootstrap(500))
    assert measured.comparisons == 17
    for name, variant in plan.variants.items():
        figures = measured.overall[name]
        if "consistency" in variant.policy.signals:
            assert figures.captured_savings > 0.8, name
            assert figures.savings_difference.interval.high > -0.15, name
        else:
            assert figures.captured_savings < 0.4, name
            assert figures.savings_differ, name
            assert figures.adjusted_p < 0.05, name


def test_certificates_hold_what_they_say(settled):
    splits, smoothed, _, outcomes = settled
    certified = 0
    for name, outcome in outcomes.items():
        if outcome.policy.certificate is None:
            assert outcome.policy == ExitPolicy.never()
            assert (outcome.exit_index == splits.test.num_boundaries).all()
            continue
        certified += 1
        certificate = Certificate.from_json(outcome.policy.certificate)
        exits = policy_exits([outcome.policy], smoothed.calibration, splits.calibration)[0]
        assert replay(splits.calibration, exits).lost_correct.sum() == certificate.losses, name
        assert certificate.n == 400
        assert certificate.p_value <= RISK.delta
        assert len(outcome.curve.tokens_mean) == len(certificate.grid)
    assert certified >= 10


def test_labels_of_the_test_split_decide_nothing(settled):
    splits, smoothed, plan, outcomes = settled
    test = splits.test
    values = {name: getattr(test, name) for name in test.__dataclass_fields__}
    upside_down = Traces(
        **values
        | {name: ~values[name] for name in ("correct_at", "matches_at", "valid_at")}
        | {"first": test.num_boundaries, "stable": test.num_boundaries, "tokens_at": values["tokens_at"][::-1]}
    )
    for name, variant in plan.variants.items():
        other = decide(variant, smoothed, splits._replace(test=upside_down), risk=RISK, scope=SCOPE)
        assert other.policy == outcomes[name].policy, name
        np.testing.assert_array_equal(other.exit_index, outcomes[name].exit_index)


def test_figures_equal_those_of_the_demo():
    traces = make_traces(120)
    signals = make_signals(traces)
    policies = [ExitPolicy(predicate="all", thresholds={"consistency": bound}) for bound in (0.5, 0.9)]
    first, second = (replay(traces, exits) for exits in policy_exits(policies, signals, traces))
    bootstrap = Bootstrap(replicates=300, seed=5)
    measured = measure({"a": first, "b": second}, traces, reference="a", compared=["b"], bootstrap=bootstrap)
    figures = measured.overall["b"]
    savings, accuracy = (
        savings_difference(second, first, traces, bootstrap),
        accuracy_difference(second, first, bootstrap),
    )
    assert figures.savings_difference.estimate == pytest.approx(savings.estimate)
    assert figures.savings_difference.interval == pytest.approx(savings.interval)
    assert figures.accuracy_difference.estimate == pytest.approx(accuracy.estimate)
    assert figures.accuracy_difference.interval == pytest.approx(accuracy.interval)
    intervals = row_intervals(second, traces, bootstrap)
    assert figures.accuracy_interval == pytest.approx(intervals.accuracy)
    assert figures.captured_savings_interval == pytest.approx(intervals.captured_savings)
    assert measured.overall["a"].savings_difference.interval == (0.0, 0.0)
    even = np.flatnonzero(np.array(traces.family) == "even")
    own = savings_difference(second.at(even), first.at(even), traces.select(even), bootstrap)
    assert measured.families["even"]["b"].savings_difference.interval == pytest.approx(own.interval)
    assert [f["b"].n for f in measured.families.values()] == [60, 60]


def test_adjusted_p_values_equal_the_slow_loop():
    rng = np.random.default_rng(0)
    estimate = np.array([0.5, 0.05, -0.3, 0.0])
    resampled = estimate + rng.normal(size=(199, 4)) * np.array([0.1, 0.1, 0.2, 0.0])
    got = adjusted_p_values(estimate, resampled)
    error = [np.std(resampled[:, k]) for k in range(3)]
    for k in range(3):
        reached = 1
        for row in resampled:
            largest = max(abs(row[j] - estimate[j]) / error[j] for j in range(3))
            reached += largest >= abs(estimate[k]) / error[k]
        assert got[k] == pytest.approx(reached / 200)
    assert got[3] == 1.0  # two policies with the same exits
    assert got[0] < 0.05 < got[1]


def test_adjusting_for_more_comparisons_never_makes_a_p_value_smaller():
    rng = np.random.default_rng(1)
    estimate = rng.normal(size=6) * 0.2
    resampled = estimate + 0.1 * rng.normal(size=(400, 6))
    alone = [adjusted_p_values(estimate[[k]], resampled[:, [k]])[0] for k in range(6)]
    together = adjusted_p_values(estimate, resampled)
    assert (together >= np.array(alone)).all()


def test_adjusted_p_values_keep_their_promise_where_nothing_differs():
    rng = np.random.default_rng(2)
    false_alarms = 0
    for _ in range(200):
        sample = rng.normal(size=(60, 8))
        drawn = rng.integers(0, 60, (300, 60))
        p_values = adjusted_p_values(sample.mean(axis=0), sample[drawn].mean(axis=1))
        false_alarms += bool((p_values < 0.05).any())
    assert false_alarms <= 24  # 10 expected; a fair one exceeds this with probability 3e-5. Unadjusted: about 67
