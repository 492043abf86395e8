from itertools import product
from pathlib import Path

import numpy as np
import pytest

from ace_learn.engines.answer_reader import ServedOutput
from ace_learn.evaluate.serving.arms import ARMS, ArmRun
from ace_learn.evaluate.serving.bench import ServeBenchmark, _order
from ace_learn.evaluate.serving.figures import figures_of, ratios_of, table


def output(key, tokens, seconds, answer):
    return ServedOutput(
        key=key, text="", thinking="", answer=answer, finish_reason="stop", tokens=tokens, kept_tokens=tokens,
        think_tokens=0, counted_by="usage", seconds=seconds, first_token_s=None, calls=1, attempts=1, lost_tokens=0,
        error=None,
    )  # fmt: skip


def arm(name, tokens, seconds, answers, correct, *, elapsed_s, exits=0):
    columns = zip(tokens, seconds, answers, strict=True)
    outputs = {key: [output(key, *values)] for key, values in enumerate(columns)}
    correct = {key: [right] for key, right in enumerate(correct)}
    return ArmRun(arm=name, concurrency=2, outputs=outputs, correct=correct, elapsed_s=elapsed_s, exits=exits)


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


def test_rounds_count_as_their_mean(early):
    before = figures_of(early)
    for key, seconds in enumerate([1.0, 2.0, 3.0, 2.0]):
        early.add(output(key, 50, seconds, None))
        early.correct[key].append(False)
    early.elapsed_s, early.exits = 6.4, 7
    found = figures_of(early)
    assert (found.n, found.exits) == (4, 7 / 8)
    assert found.accuracy.value == before.accuracy.value / 2
    assert found.tokens.value == 75
    assert found.latency_mean_s.value == pytest.approx((4.8 + 8) / 8)
    assert found.valid_per_s.value == pytest.approx(4 / 6.4)


def test_what_is_compared_follows_on_one_another_and_every_second_round_goes_back():
    config = ServeBenchmark(head=Path("head"), dataset=Path("dataset"), output=Path("out"))
    blocks = [_order(config, start, 0) for start in range(0, 240, 40)]
    for start, ways in zip(range(0, 240, 40), blocks, strict=True):
        assert sorted(ways) == sorted(product((1, 4, 16), ARMS))
        assert all(len({level for level, _ in ways[i : i + 3]}) == 1 for i in (0, 3, 6))
        assert _order(config, start, 1) == ways[::-1]
        assert _order(config, start, 2) == ways
    assert len({tuple(ways) for ways in blocks}) == 6


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"block": 0}, {"problems": 1}, {"concurrency": (0,)}])
def test_sizes_are_checked(wrong):
    with pytest.raises(ValueError, match="rounds >= 1"):
        ServeBenchmark(head=Path("head"), dataset=Path("dataset"), output=Path("out"), **wrong)


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
