"""The follower of vLLM's engine core: ends as the reference engine does, and nothing leaves that is taken back."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_learn.contracts import Contract
from ace_learn.contracts.check import load_cases
from ace_learn.engines.follower import FollowRules
from ace_learn.engines.live import LiveRequest
from ace_learn.engines.requests import Request
from ace_learn.engines.vllm.answer import RequestFollower, TokenEffects, advance
from ace_learn.exit.state import Span, SpanMachine
from ace_learn.speculation.window import FinishLimits
from ace_learn.thinking import AFTER_NEWLINE, IN_BREAK, TEXT, BoundaryTables, ThinkMarkers
from tests.contracts.strategies import contracts, texts
from tests.engines.test_live import DOUBLE, EOS, PIECES, SINGLE, SPECS, TARGETS

NO_MARKERS = ThinkMarkers((-1,), (-2,))


class Pieces:
    """A tokenizer whose tokens are the pieces of one text; the last id ends the output."""

    def __init__(self, pieces):
        self.pieces = [*pieces, ""]
        self.stop = len(pieces)

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids)


def follower(pieces, contract=None, *, markers=NO_MARKERS, prompt=(), cap=10_000, minimum=0, **rules):
    limits = FinishLimits(
        stop_ids=frozenset([pieces.stop]), max_new_tokens=cap, context_room=10_000, min_tokens=minimum
    )
    rules = FollowRules(markers=markers, decode=pieces.decode, limits=limits, contract=contract, **rules)
    return RequestFollower(prompt, rules, TokenEffects(pieces.decode))


def cut(text, places):
    at = sorted({0, len(text), *(place for place in places if place < len(text))})
    return [text[a:b] for a, b in pairwise(at)]


def windows(tokens, sizes):
    at, turn = 0, 0
    while at < len(tokens):
        yield tokens[at : at + sizes[turn % len(sizes)]]
        at += sizes[turn % len(sizes)]
        turn += 1


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    texts, contracts, st.lists(st.integers(1, 200), max_size=60), st.lists(st.integers(1, 6), min_size=1), st.booleans()
)
def test_nothing_leaves_that_a_commit_takes_back(text, contract, places, sizes, natural):
    """Whatever the contract, the text and the cuts: what has left is what the request ends with."""
    pieces = Pieces(cut(text, places))
    live = follower(pieces, contract, cap=len(pieces.pieces) + natural)
    left = []
    tokens = [*range(len(pieces.pieces) - 1), *([pieces.stop] if natural else [])]
    for window in windows(tokens, sizes):
        live.push(window)
        before = live.sent
        count = live.take()
        left += live.output_ids[before : before + count]
        if live.finish is not None:
            break
    assert live.surplus == 0
    if live.finish is not None:
        assert left == live.output_ids
    if live.commit is not None:
        text = pieces.decode(live.output_ids)
        assert live.cut == len(text) - live.commit.commit.end


CASES = Path(__file__).parents[2] / "cases"


@pytest.mark.slow
def test_nothing_leaves_too_early_where_every_character_is_a_token():
    """The longest look-ahead there is, for every case that contracts are tested with; most of them decide late."""
    late = 0
    for case in [*load_cases(CASES / "contracts.jsonl"), *load_cases(CASES / "contracts_more.jsonl")]:
        if case.starts_in_think or "think>" in case.text:
            continue
        pieces = Pieces(list(case.text))
        live = follower(pieces, Contract.from_spec(case.contract), cap=len(case.text) + (not case.truncated))
        read = 0
        for token in range(len(case.text) + (not case.truncated)):
            read += 1
            if live.push([token]) is not None:
                break
            live.take()
        live.take()
        assert live.surplus == 0, case.id
        assert (live.sent if case.expected else None) == (case.expected and case.expected.end), case.id
        late += read > live.sent + 1
    assert late > 50


@settings(max_examples=150, deadline=None)
@given(
    st.lists(PIECES, min_size=4, max_size=30),
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.sampled_from(SPECS),
    st.sampled_from([SINGLE, DOUBLE]),
    st.booleans(),
    st.integers(0, 5),
)
def test_it_ends_as_the_reference_engine_does(tokens, sizes, spec, markers, opened, minimum):
    target, contract = TARGETS[markers], Contract.from_spec(spec)
    prompt = (9, 9, *markers.start) if opened else (9,)
    request = Request(
        key=0,
        prompt_ids=prompt,
        contract=contract,
        max_new_tokens=24,
        min_tokens=minimum,
        eos_in_think="stop",
    )
    reference = LiveRequest(request, target)
    rules = FollowRules(markers=markers, decode=target.decode, limits=reference.limits, contract=contract)
    live = RequestFollower(prompt, rules, TokenEffects(target.decode))
    for window in windows(tokens, sizes):
        reference.push(window, [0.0] * len(window), num_accepted=len(window) - 1)
        live.push(window, num_drafted=5)
        if reference.finish is not None:
            break
    assert live.finish == reference.finish
    assert live.output_ids == reference.output_ids
    assert (live.answer, live.think_start, live.think_end) == (
        reference.answer,
        reference.think_start,
        reference.think_end,
    )
    if live.finish is not None:
        assert live.accepted == reference.stats.accepted
        assert live.answer_text() == reference.answer_text()


@given(st.lists(st.sampled_from(["a", " ", "\n", "\n\n", "a\n", ".\n\n", " \n", "\n a", ""]), max_size=20))
def test_boundaries_are_those_of_the_tables(pieces):
    effects = TokenEffects(lambda ids: "".join(pieces[i] for i in ids))
    tables = BoundaryTables.from_texts(pieces or [""])
    standing = IN_BREAK
    for token in range(len(pieces)):
        moved, closes = tables.advance(torch.tensor([standing]), torch.tensor([token]))
        standing, closed = advance(effects[token], standing)
        assert (standing, closed) == (moved.item(), closes.item())
        assert standing in (TEXT, AFTER_NEWLINE, IN_BREAK)


@given(st.lists(PIECES, max_size=30), st.sampled_from([SINGLE, DOUBLE]), st.booleans())
def test_it_counts_the_first_span_as_the_exit_rule_does(tokens, markers, opened):
    target = TARGETS[markers]
    tokens = [token for token in tokens if token != EOS]
    prompt = (9, 9, *markers.start) if opened else (9,)
    limits = FinishLimits(stop_ids=frozenset(), max_new_tokens=99, context_room=99)
    live = RequestFollower(
        prompt, FollowRules(markers=markers, decode=target.decode, limits=limits), TokenEffects(target.decode)
    )
    machine = SpanMachine(markers, target.tables, torch.device("cpu"))
    span = Span.initial(torch.tensor([float(opened)]))
    for token in tokens:
        live.push([token])
        span = Span(*(field[:, -1] for field in machine.advance(span, torch.tensor([[token]]), torch.zeros(1, 1))))
        if live.think_end is not None:
            break
        assert (live.tokens_thought, live.paragraphs) == (span.tokens.item(), span.paragraphs.item())
    if live.think_end is not None:
        assert live.tokens_thought == live.think_end - live.think_start


LETTER = Contract.from_spec({"kind": "choice", "options": ["A", "B"]})


def test_tokens_that_may_only_serve_to_decide_wait():
    """After "answer" everything may be a part of the decision; the blank behind "B" only decides, and is dropped."""
    pieces = Pieces(["So", " the", " answer", " is", " B", " because", " it", " is"])
    live = follower(pieces, LETTER)
    left = []
    for token in range(8):
        live.push([token])
        left.append(live.take())
        if live.finish is not None:
            break
    assert live.finish == (5, "contract")
    assert live.answer == "B"
    assert left == [1, 1, 1, 0, 0, 0, 2]
    assert live.surplus == 0


def test_what_decides_nothing_leaves_as_soon_as_that_is_known():
    pieces = Pieces(["the", " answer", " is", " B", " or", " A", ".", " So"])
    live = follower(pieces, LETTER)
    left = []
    for token in range(8):
        live.push([token])
        left.append(live.take())
    assert live.finish is None
    assert left[:4] == [1, 1, 0, 0]
    assert sum(left) == 8


@pytest.mark.parametrize("kind", ["json", "tag"])
def test_kinds_that_settle_at_once_hold_nothing_back(kind):
    spec = {"kind": "json", "schema": {"type": "object"}} if kind == "json" else {"kind": "tag", "tag": "a"}
    pieces = Pieces(["{", '"a"', ":", " 1", "}"] if kind == "json" else ["<a>", "x", "y", "</", "a>"])
    live = follower(pieces, Contract.from_spec(spec))
    left = []
    for token in range(5):
        live.push([token])
        left.append(live.take())
    assert live.finish == (5, "contract")
    assert left == [1] * 5


def test_a_stop_string_counts_in_the_thinking_too():
    """As everywhere in vLLM; the reference engine looks for it in the answer alone."""
    pieces = Pieces(["a", "\n", "\nb", "c"])
    markers = ThinkMarkers((90,), (91,))
    live = follower(pieces, markers=markers, prompt=(90,), stop=("\n\n",), decode_stop=pieces.decode)
    assert live.push([0, 1, 2, 3]) == (3, "stop")
    assert live.stop.commit.answer == "\n\n"


@pytest.mark.parametrize(
    ("pieces", "finish"),
    [
        (["answer: ", "B", ". ", "x", "END"], (2, "contract")),
        (["answer: ", "END", "B", ". ", "x"], (2, "stop")),
        (["answer: ", "B. END", " x"], (2, "contract")),
    ],
)
def test_the_earlier_of_commit_and_stop_string_wins(pieces, finish):
    for size in (1, 5):
        live = follower(Pieces(pieces), LETTER, stop=("END",), decode_stop=Pieces(pieces).decode)
        for window in windows(list(range(len(pieces))), [size]):
            if live.push(window) is not None:
                break
        assert live.finish == finish


def test_min_tokens_hides_stop_strings_and_no_commit():
    pieces = ["END", " answer: ", "B", ". ", "END"]
    live = follower(Pieces(pieces), LETTER, stop=("END",), decode_stop=Pieces(pieces).decode, minimum=4)
    assert live.push(range(5)) == (3, "contract")
    live = follower(Pieces(pieces), stop=("END",), decode_stop=Pieces(pieces).decode, minimum=4)
    assert live.push(range(5)) == (5, "stop")


def test_accepted_drafts_count_where_they_are_kept():
    """Windows of 3 and 4 tokens: two and three drafts accepted, of which the commit at token 5 keeps two and two."""
    pieces = ["a", "b", " answer:", " ", "B", ".", "\n"]
    live = follower(Pieces(pieces), LETTER)
    live.push([0, 1, 2], num_drafted=4)
    live.push([3, 4, 5, 6], num_drafted=4)
    assert live.finish == (5, "contract")
    assert (live.verify_steps, live.drafted, live.accepted) == (2, 8, 4)


def test_a_commit_inside_a_token_keeps_the_token_and_says_what_to_cut():
    pieces = Pieces(["answer: ", "(B).\nNow", " x"])
    live = follower(pieces, LETTER)
    assert live.push([0, 1, 2]) == (2, "contract")
    assert live.cut == len(".\nNow")
    assert live.answer_text() == "answer: (B)"
