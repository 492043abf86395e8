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
        verifications=9, difference=None, difference_interval=interval,
    )  # fmt: skip
    assert row.verdict(0.05) == verdict
    assert row.to_json(0.05)["verdict"] == verdict


@pytest.mark.parametrize("drafters", [{}, {"none": DrafterConfig()}])
def test_a_study_without_drafts_is_refused(tmp_path, drafters):
    with pytest.raises(ValueError, match="drafte"):
        DraftStudyConfig(dataset=tmp_path, output=tmp_path, target=TargetConfig(model="m"), drafters=drafters)
