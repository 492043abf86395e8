import numpy as np
import pytest

from ace_learn.engines.requests import Output, SpeculationStats
from ace_learn.evaluate.bootstrap import Bootstrap, Interval
from ace_learn.evaluate.drafting import (
    Accepted,
    DrafterRow,
    DraftStudyConfig,
    accepted_of,
    length_difference,
    length_interval,
    pairs_row,
)
from ace_learn.models.target import TargetConfig
from ace_learn.speculation.drafters import DrafterConfig


def output(tokens, steps, drafted, accepted):
    stats = SpeculationStats(verify_steps=steps, drafted=drafted, accepted=accepted)
    return Output(
        key=0, token_ids=(1,) * tokens, logprobs=(0.0,) * tokens, finish_reason="stop", think_start=None,
        think_end=None, answer=None, answer_text="", exit=None, stats=stats, seconds=0.0,
    )  # fmt: skip


def test_lengths_by_hand():
    accepted = accepted_of([output(11, 6, 20, 5), output(5, 2, 4, 3)])
    assert accepted.length == pytest.approx((10 + 4) / (5 + 1))  # the prefill gives a token and verifies nothing
    assert accepted.rate == pytest.approx(8 / 24)


def test_requests_that_end_at_once_are_refused():
    with pytest.raises(ValueError, match="max_new_tokens"):
        accepted_of([output(1, 1, 0, 0)])


def made(seed, factor=1.0, n=300):
    steps = np.random.default_rng(seed).integers(20, 60, n).astype(float)
    tokens = np.round(steps * factor * np.random.default_rng(9).uniform(3.0, 4.0, n))  # the problem, not the drafter
    return Accepted(tokens, steps, 4 * steps, tokens - steps)


def test_pairing_sees_a_difference_that_the_intervals_of_each_do_not():
    a, b = made(1), made(2, factor=0.99)
    settings = Bootstrap(replicates=500)
    apart = [length_interval(side, settings) for side in (a, b)]
    assert apart[0].low < apart[1].high  # they overlap
    assert length_difference(a, b, settings).low > 0
    same = length_difference(a, a, settings)
    assert same == Interval(0.0, 0.0)


def test_pairs_are_averaged_and_their_spread_widens_the_interval():
    pairs = [(made(seed, factor=1 + gain), made(seed)) for seed, gain in ((1, 0.10), (2, 0.12), (3, 0.08))]
    row = pairs_row(1.0, pairs, Bootstrap(replicates=500))
    each = [a.length - b.length for a, b in pairs]
    assert row.differences == pytest.approx(each)
    reach = 4.302653 * np.std(each, ddof=1) / 3**0.5  # Student's t with two degrees of freedom
    assert row.over_pairs == pytest.approx((np.mean(each) - reach, np.mean(each) + reach), rel=1e-6)
    assert row.over_problems.low < row.mean < row.over_problems.high
    assert row.over_pairs.high - row.over_pairs.low > 2 * (row.over_problems.high - row.over_problems.low)
    assert row.to_json(0.05)["verdict"] == "does not drop"


@pytest.mark.parametrize("against", [{"b": "c"}, {"c": "a"}, {"b": "b"}])
def test_pairs_name_two_drafters(tmp_path, against):
    drafters = {name: DrafterConfig(kind="eagle3", model=name) for name in "ab"}
    common = {"dataset": tmp_path, "output": tmp_path, "target": TargetConfig(model="m"), "drafters": drafters}
    assert DraftStudyConfig(**common, against={"b": "a"}).reference("b") == "a"
    assert DraftStudyConfig(**common).reference("a") is None
    with pytest.raises(ValueError, match="against names two different drafters"):
        DraftStudyConfig(**common, against=against)


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        (Interval(-0.3, -0.1), "drops"),
        (Interval(-0.04, 0.1), "does not drop"),
        (Interval(-0.1, 0.1), "not decided"),
        (None, "-"),
    ],
)
def test_verdicts(interval, verdict):
    row = DrafterRow(
        drafter="a", temperature=0.0, draft_tokens=4, length=3.0, interval=Interval(2.9, 3.1), rate=0.5,
        verifications=9, against=None, difference=None, difference_interval=interval,
    )  # fmt: skip
    assert row.verdict(0.05) == verdict
    assert row.to_json(0.05)["verdict"] == verdict


@pytest.mark.parametrize("drafters", [{}, {"none": DrafterConfig()}])
def test_a_study_without_drafts_is_refused(tmp_path, drafters):
    with pytest.raises(ValueError, match="drafte"):
        DraftStudyConfig(dataset=tmp_path, output=tmp_path, target=TargetConfig(model="m"), drafters=drafters)
