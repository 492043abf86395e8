"""The rule in Python against the rule in tensors, token by token."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_learn.exit.host import HostDecision, HostSpan, HostTables, holds
from ace_learn.exit.policy import ExitPolicy, ScoreModel
from ace_learn.exit.state import Decision, Span, SpanMachine, decide
from ace_learn.signals import SIGNALS
from ace_learn.thinking import BoundaryTables, ThinkMarkers

TEXTS = ["a", " ", "\n", "\n\n", ".\n", " \n ", "<t>", "<", "t>", "</", "b"]
TABLES = BoundaryTables.from_texts(TEXTS)
CPU = torch.device("cpu")
ONE = ThinkMarkers((6,), (10,))
SEVERAL = ThinkMarkers((7, 8), (9, 9, 8))

ANY = ExitPolicy(predicate="any", thresholds={"confidence": 0.6, "remaining": 0.4}, ewma=0.5, patience=2)
ALL = ExitPolicy(predicate="all", thresholds={"confidence": 0.3, "remaining": 0.8}, min_thinking_tokens=4)
SCORE = ExitPolicy(
    predicate="score",
    score=ScoreModel(signals=("remaining", "entropy"), weights=(-2.0, 1.0), bias=0.3, threshold=0.5),
    ewma=0.3,
)

tokens_ = st.lists(st.integers(0, len(TEXTS) - 1), min_size=1, max_size=40)


@settings(deadline=None)
@given(tokens=tokens_, seed=st.integers(0, 99), inside=st.booleans(), markers=st.sampled_from([ONE, SEVERAL]))
def test_a_span_goes_the_way_of_the_tensors(tokens, seed, inside, markers):
    logprobs = -torch.rand(1, len(tokens), generator=torch.Generator().manual_seed(seed)) * 5
    span = Span.initial(torch.tensor([float(inside)]))
    expected = SpanMachine(markers, TABLES, CPU).advance(span, torch.tensor([tokens]), logprobs)
    found, tables = HostSpan(inside), HostTables(markers, TABLES)
    for place, (token, logprob) in enumerate(zip(tokens, logprobs[0].tolist(), strict=True)):
        found.advance(token, logprob, tables)
        for name in Span._fields:
            assert getattr(found, name) == pytest.approx(float(getattr(expected, name)[0, place]), abs=1e-4), name
        scalars = expected.scalars(torch.full((1, len(tokens)), 0.5))[0, place]
        assert found.scalars(0.5) == pytest.approx(scalars.tolist(), abs=1e-4)


@settings(deadline=None)
@given(tokens=tokens_, seed=st.integers(0, 99), policy=st.sampled_from([ANY, ALL, SCORE]), grammar=st.booleans())
def test_a_decision_goes_the_way_of_the_tensors(tokens, seed, policy, grammar):
    draw = torch.Generator().manual_seed(seed)
    size, end_length = len(tokens), len(SEVERAL.end)
    signals = torch.rand(1, size, len(SIGNALS), generator=draw)
    allowed = torch.rand(1, size, end_length, generator=draw) < 0.7 if grammar else None
    span = Span.initial(torch.ones(1))
    after = SpanMachine(SEVERAL, TABLES, CPU).advance(span, torch.tensor([tokens]), torch.zeros(1, size))
    start = Decision.initial(torch.ones(1))
    expected = decide(start, after, signals, policy, end_length, allowed=allowed)
    found, one, tables = HostDecision(), HostSpan(True), HostTables(SEVERAL, TABLES)
    for place, token in enumerate(tokens):
        one.advance(token, 0.0, tables)
        may = None if allowed is None else allowed[0, place].tolist()
        verdict = found.advance(one, signals[0, place].tolist(), policy, end_length, allowed=may)
        blocked = expected.blocked is not None and bool(expected.blocked[0, place])
        assert verdict == (bool(expected.due[0, place]) and not blocked, blocked)
        assert found.smoothed == pytest.approx(expected.decision.smoothed[0, place].tolist(), abs=1e-5)
        for name in ("seen", "held", "forcing"):
            assert getattr(found, name) == float(getattr(expected.decision, name)[0, place]), name


@settings(deadline=None)
@given(
    values=st.lists(st.floats(-3, 1e9, width=32) | st.just(math.nan), min_size=len(SIGNALS), max_size=len(SIGNALS)),
    policy=st.sampled_from([ANY, ALL, SCORE, ExitPolicy.never()]),
)
def test_a_predicate_holds_where_it_holds_for_tensors(values, policy):
    assert holds(policy, values) == bool(policy.holds(torch.tensor(values)))


def test_a_log_probability_that_is_nan_stays():
    span, tables = HostSpan(True), HostTables(ONE, TABLES)
    for logprob in (-1.0, math.nan, -2.0):
        span.advance(0, logprob, tables)
    assert all(map(math.isnan, span.scalars(0.0)[2:6]))


def test_an_absurd_score_is_a_verdict_and_no_error():
    model = ScoreModel(signals=("remaining",), weights=(1e6,), bias=0.0, threshold=0.5)
    policy = ExitPolicy(predicate="score", score=model)
    assert holds(policy, [1e9] * len(SIGNALS))
    assert not holds(policy, [-0.5] * len(SIGNALS))
