"""The result page on made-up results, and the choice of its examples."""

import json
from dataclasses import replace

import numpy as np
import pytest

from ace_learn.evaluate.bootstrap import Bootstrap
from ace_learn.evaluate.compare import Splits, compare_methods
from ace_learn.evaluate.examples import SCORE, Example, bounds, choose, signal_values, trace_view
from ace_learn.evaluate.learned import PolicyFamily, Risk, Scope, build_candidates, calibrate_policy
from ace_learn.evaluate.metrics import LatencyModel
from ace_learn.evaluate.page import Facts, Figure, Table, TraceView, render_page
from ace_learn.evaluate.report import findings
from ace_learn.evaluate.result_page import PageData, example_views, result_page, training_figure
from ace_learn.exit.policy import ExitPolicy, ScoreModel
from ace_learn.heads.metrics import ClassificationMetrics, HeadMetrics, RegressionMetrics
from ace_learn.heads.report import TrainReport
from ace_learn.labels.records import TraceRecord
from ace_learn.signals import LEARNED, SIGNALS
from tests.evaluate.synthetic import World, make_rows, make_signals, make_traces

WORLD = World(noise=0.7)
SCOPE = Scope(data_sha256="d" * 64, head_sha256="a" * 64, model_fingerprint="f" * 64, sampling={})
LATENCY = LatencyModel(prefill_s=0.05, per_token_s=0.004)
NO_REGRESSION = RegressionMetrics(None, None, 0)
METRICS = HeadMetrics(*[NO_REGRESSION] * 4, ClassificationMetrics(None, None, None, 0))
TRAINING = TrainReport(
    head=METRICS,
    baseline=METRICS,
    history=({"train": 1.0, "validation": 0.9}, {"train": 0.5, "validation": 0.4}, {"train": 0.3, "validation": 0.6}),
    best_epoch=1,
    rows=(100, 50),
)


def decode(ids):
    return "".join(f" t{i}" for i in ids) + "\n\n"


def record(row) -> TraceRecord:
    ends = [row["think_start"] + end + 1 for end in row["boundary"]]
    return TraceRecord(
        **row,
        prompt=f"problem {row['problem']} <b>",
        contract="{}",
        prompt_ids=[1],
        token_ids=list(range(row["full_tokens"])),
        no_think_token_ids=[],
        probe_token_ids=[[0]] * len(ends),
        probe_asked=[True] * len(ends),
        probe_match_rate=[float(match) for match in row["probe_matches"]],
    )


@pytest.fixture(scope="module")
def splits():
    sizes = {"validation": 200, "calibration": 400, "test": 60}
    return Splits(*(make_traces(n, seed=i, split=name, world=WORLD) for i, (name, n) in enumerate(sizes.items())))


@pytest.fixture(scope="module")
def signals(splits):
    return [make_signals(traces, seed=i, world=WORLD) for i, traces in enumerate(splits)]


def evaluate(splits, policy, signals):
    return compare_methods(
        splits, policy, signals[2], risk=Risk(alpha=0.1), latency=LATENCY, bootstrap=Bootstrap(replicates=100, seed=1)
    )


@pytest.fixture(scope="module")
def evaluation(splits, signals):
    risk = Risk(alpha=0.1)
    candidates = build_candidates(PolicyFamily(), signals[0], splits.validation, risk)
    policy = calibrate_policy(candidates, signals[1], splits.calibration, risk=risk, scope=SCOPE).policy
    assert policy.predicate == "score"
    return evaluate(splits, policy, signals)


@pytest.fixture(scope="module")
def data(splits, signals):
    records = tuple(record(row) for row in make_rows(60, seed=2, split="test", world=WORLD))
    return PageData(traces=splits.test, records=records, signals=signals[2], smoothed=signals[2], training=TRAINING)


def page_of(evaluation, data):
    stages = {"build": {"sha256": "ab" * 32, "seconds": 3.0, "artifact": "dataset"}}
    live = {"n": 20, "equals_replay": True, "ratio": 1.23456, "methods": {}, "first_differing": []}
    return result_page(evaluation, data, live=live, stages=stages, latency=LATENCY, decode=decode)


def test_the_page_shows_the_results(evaluation, data):
    page = page_of(evaluation, data)
    kinds = [type(section) for section in page.sections]
    assert kinds.count(Figure) == 3
    facts, table = page.sections[:2]
    assert isinstance(facts, Facts)
    assert isinstance(table, Table)
    learned = next(row for row in evaluation.rows if row.method == "learned")
    assert facts.items[0].value == f"{learned.accuracy:.1%}"
    assert len(table.rows) == len(evaluation.rows)
    assert len({row[0] for row in table.rows}) == len(table.rows)
    html = render_page(page)
    assert "alpha = 10.00%, delta = 5.00%" in html
    assert "weights kept: epoch 2" in html
    assert "equals replay" in html
    assert ">1.23<" in html
    assert "lowest validation loss is 0.400, after epoch 2" in html
    assert render_page(page_of(evaluation, data)) == html
    assert all(sentence.text.replace("`", "'")[:40] in html for sentence in findings(evaluation))


def test_a_policy_that_never_exits_has_no_examples_and_says_so(splits, signals, data):
    never = evaluate(splits, ExitPolicy.never(), signals)
    page = page_of(never, data)
    assert example_views(never, data, decode) == ()
    assert any("Nothing was certified" in text for text in page.intro)
    html = render_page(page)
    assert "On no test problem does the exit save tokens." in html
    assert "exit here" not in html


def test_examples_are_the_first_of_each_family_that_save_tokens(splits):
    traces = splits.test
    natural = traces.num_boundaries.copy()
    assert choose(traces, natural) == ()
    exits = natural.copy()
    exits[[4, 6, 9]] = 0  # problems 4 and 6 are of the family even, 9 of odd
    chosen = choose(traces, exits)
    assert [example.place for example in chosen][:2] == [4, 9]
    assert "'even'" in chosen[0].reason
    kept = replace(traces, correct_at=np.ones_like(traces.correct_at))
    assert [example.place for example in choose(kept, exits)] == [4, 9]
    wrong = kept.correct_at.copy()
    wrong[6, 0] = False
    lost = choose(replace(kept, correct_at=wrong), exits)
    assert [example.place for example in lost] == [4, 9, 6]
    assert "loses" in lost[2].reason
    shuffled = kept.select(np.arange(59, -1, -1))
    assert [int(shuffled.problem[e.place]) for e in choose(shuffled, exits[::-1].copy())] == [4, 9]


def test_an_exit_that_saves_nothing_is_no_example(splits):
    traces, exits = splits.test, splits.test.num_boundaries.copy()
    exits[4] = 0
    tokens = traces.tokens_at.copy()
    tokens[4, 0] = traces.full_tokens[4]
    assert choose(replace(traces, tokens_at=tokens), exits) == ()


def view(data, policy, exit_index, place=4) -> TraceView:
    return trace_view(
        Example(place, "a reason"),
        data.records[place],
        data.smoothed[place],
        policy=policy,
        exit_index=exit_index,
        decode=decode,
    )


def test_a_trace_is_cut_at_its_boundaries(data):
    shown, source = view(data, ExitPolicy.specexit(), 0), data.records[4]
    words = "".join(paragraph.text for paragraph in shown.paragraphs).split()
    assert words == [f"t{i}" for i in range(source.think_start, source.think_end)]
    assert [p.closed for p in shown.paragraphs[:-1]] == [True] * (len(shown.paragraphs) - 1)
    for place, end in enumerate(source.boundary):
        assert shown.paragraphs[place].text.split()[-1] == f"t{source.think_start + end}"
        assert shown.paragraphs[place].signals["remaining"] == data.smoothed[4, place, SIGNALS.index("remaining")]
        assert shown.paragraphs[place].matches == source.probe_matches[place]
    assert shown.early_answer == source.probe_answer[0]
    assert shown.bounds == {"confidence": 0.8, "progress": 0.3, "remaining": 200.0}
    assert f"{source.probe_tokens[0]} output tokens instead of {source.full_tokens}" in shown.note
    natural = view(data, ExitPolicy.specexit(), len(source.boundary))
    assert not natural.exits_early
    assert natural.early_answer == source.full_answer


def test_the_score_of_a_score_rule_comes_first(data):
    model = ScoreModel(signals=("consistency",), weights=(2.0,), bias=-1.0, threshold=0.6)
    policy = ExitPolicy(predicate="score", score=model)
    values = signal_values(policy, data.smoothed[4])
    assert list(values) == [SCORE, *LEARNED]
    consistency = data.smoothed[4, 0, SIGNALS.index("consistency")]
    assert values[SCORE][0] == pytest.approx(1 / (1 + np.exp(1 - 2 * consistency)), rel=1e-6)
    assert bounds(policy) == {SCORE: 0.6}
    assert list(signal_values(ExitPolicy.never(), data.smoothed[4])) == list(LEARNED)


def test_answers_are_shown_without_the_quotes_of_json(data):
    source = replace(data.records[4], full_answer=json.dumps("x"), gold=None)
    quoted = (*data.records[:4], source, *data.records[5:])
    shown = view(replace(data, records=quoted), ExitPolicy.never(), len(source.boundary))
    assert shown.full_answer == "x"
    assert shown.gold is None


def test_training_figure_says_which_epoch_was_kept():
    figure = training_figure(TRAINING)
    assert "epoch 2" in figure.alt
    assert "100 training rows" in figure.caption
