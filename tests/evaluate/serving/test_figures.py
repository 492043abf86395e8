import numpy as np
import pytest

from ace_learn.engines.answer_reader import ServedOutput
from ace_learn.evaluate.serving.arms import ArmRun
from ace_learn.evaluate.serving.figures import figures_of, ratios_of, table


def output(key, tokens, seconds, answer):
    return ServedOutput(
        key=key, text="", thinking="", answer=answer, finish_reason="stop", tokens=tokens, kept_tokens=tokens,
        think_tokens=0, counted_by="usage", seconds=seconds, first_token_s=None, calls=1, attempts=1, lost_tokens=0,
        error=None,
    )  # fmt: skip


def arm(name, tokens, seconds, answers, correct, *, elapsed_s, exits=0):
    columns = zip(tokens, seconds, answers, strict=True)
    outputs = {key: output(key, *values) for key, values in enumerate(columns)}
    return ArmRun(
        arm=name, concurrency=2, outputs=outputs, correct=dict(enumerate(correct)), elapsed_s=elapsed_s, exits=exits
    )


@pytest.fixture
def full():
    return arm("full", [100, 200, 300, 200], [1.0, 2.0, 3.0, 2.0], [1, 2, 3, None], [True] * 3 + [False], elapsed_s=4.0)


@pytest.fixture
def early():
    return arm(
        "exits", [50, 100, 150, 100], [0.6, 1.2, 1.8, 1.2], [1, 2, 3, 4], [True, True, False, False], elapsed_s=2.4,
        exits=3,
    )  # fmt: skip


def test_figures_of_an_arm(full):
    found = figures_of(full)
    assert (found.n, found.exits) == (4, 0)
    assert found.accuracy.value == 0.75
    assert found.tokens.value == 200
    assert found.latency_mean_s.value == found.latency_median_s.value == 2.0
    assert found.latency_p95_s.value == pytest.approx(np.quantile([1, 2, 3, 2], 0.95))
    assert found.valid_per_s.value == pytest.approx(3 / 4)  # three answers while the server was busy for 4 s
    for estimate in (found.accuracy, found.tokens, found.latency_median_s, found.valid_per_s):
        assert estimate.interval.low <= estimate.value <= estimate.interval.high


def test_ratios_are_of_sums_over_the_same_problems(full, early):
    found = ratios_of(full, early)
    assert found.tokens.value == 2.0
    assert found.tokens.interval == (2.0, 2.0)  # it is 2 for each problem
    assert found.latency.value == pytest.approx(8 / 4.8)
    assert found.share == pytest.approx(8 / 4.8 / 2)
    assert found.lost.value == 0.25


def test_the_table_has_a_line_per_arm_and_ratio(full, early):
    shown = table([figures_of(full), figures_of(early)], [ratios_of(full, early)]).splitlines()
    assert [line.split("|")[2].strip() for line in shown[2:4]] == ["full", "exits"]
    assert "| 0.83 |" in shown[-1]
