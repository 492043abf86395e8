"""The candidates of the thinking, by hand and against a slow reading of every prefix."""

import math
import random

import pytest
import torch

from ace_learn.contracts import Contract
from ace_learn.exit.candidates import Candidate, CandidateReader
from ace_learn.exit.policy import ExitPolicy
from ace_learn.exit.tracker import ExitTracker, Hidden, Rows
from ace_learn.thinking import BoundaryTables, ThinkMarkers

TEXTS = ["a", "\n\n", " answer: 4.", " answer: 5.", "<t>", "</t>", " answer: 04.", "?\n\n"]
INTEGER = Contract.from_spec({"kind": "integer"})
BREAK, FOUR, FIVE, START, END, PADDED = 1, 2, 3, 4, 5, 6


def decode(ids):
    return "".join(TEXTS[i] for i in ids)


def slow(tokens):
    """Columns after every token: the text of the span is read anew for each prefix."""
    out, closed, text, thinking = [], [], "", False
    for token in tokens:
        if token == START and not thinking:
            closed, text, thinking = [], "", True
        elif token == END:
            thinking = False
        elif thinking:
            blank = not text.strip()
            text += TEXTS[token]
            if text.endswith("\n\n") and not (blank and TEXTS[token].isspace()):
                closed.append(text)
                text = ""
        out.append(columns(closed))
    return out


def columns(paragraphs):
    commits = [INTEGER.project(paragraph) for paragraph in paragraphs]
    history = [None if commit is None else commit.answer for commit in commits]
    known = [(i, answer) for i, answer in enumerate(history) if answer is not None]
    if not known:
        return [0.0] * 4
    runs = [known[0]]
    for place, answer in known[1:]:
        if answer != runs[-1][1]:
            runs.append((place, answer))
    since = runs[-1][0]
    repeats = sum(place > since for place, _ in known)
    return [1.0, math.log1p(repeats), math.log1p(len(history) - 1 - since), math.log1p(len(runs) - 1)]


def tracker_for(contract=INTEGER, reader=None):
    tracker = ExitTracker(
        markers=ThinkMarkers((START,), (END,)),
        tables=BoundaryTables.from_texts(TEXTS),
        policy=ExitPolicy.never(),
        signaller=None,
        num_slots=2,
        window=24,
        device=torch.device("cpu"),
        candidates=reader or CandidateReader(decode, 2),
    )
    flags = {"in_think": torch.tensor([False]), "armed": torch.tensor([True])}
    tracker.admit(torch.tensor([1]), torch.tensor([1]), **flags, contracts=[contract])
    return tracker


def observe(tracker, tokens, first, drafts=()):
    """Candidate columns after the last committed token and after each draft."""
    ids = [*tokens[first - 1 :], *drafts]
    verdict = tracker.observe(
        torch.tensor([1]),
        Rows(
            tokens=torch.tensor([ids]),
            positions=torch.arange(first, first + len(ids))[None],
            logprobs=torch.zeros(1, len(ids)),
            entropy=torch.zeros(1, len(ids)),
            hidden=Hidden(torch.zeros(1, len(ids), 2), torch.zeros(1, len(ids), 0)),
        ),
    )
    return verdict.candidates[0]


def test_hand_worked_states():
    tokens = [START, 0, BREAK, FOUR, BREAK, 0, BREAK, PADDED, BREAK, FIVE, BREAK, FOUR, FOUR, BREAK]
    found = observe(tracker_for(), tokens, 1)
    wanted = {2: (0, 0, 0, 0), 4: (1, 0, 0, 0), 6: (1, 0, 1, 0), 8: (1, 1, 2, 0), 10: (1, 0, 0, 1), 13: (1, 0, 0, 2)}
    for place, (present, *counts) in wanted.items():
        expected = torch.tensor([present, *map(math.log1p, counts)])
        torch.testing.assert_close(found[place], expected, msg=str(place))
    assert torch.equal(found[3], found[2]), "a candidate counts where its paragraph closes"


def run_windows(tracker, tokens, draw):
    """Columns of every committed token, under random windows with rejected drafts behind them."""
    committed, position = [], 1
    while position <= len(tokens):
        kept = min(draw.randint(1, 5), len(tokens) - position + 1)
        wrong = draw.choices(range(len(TEXTS)), k=draw.randint(0, 4))
        committed.extend(observe(tracker, tokens[: position + kept - 1], position, wrong)[:kept].tolist())
        position += kept
    return committed


def random_tokens(draw):
    return [START, *draw.choices([0, 1, 2, 3, 6, 7, 1], k=40), END, 0, BREAK, FOUR, BREAK, START, *[3, 1, 0, 7, 3, 1]]


def test_any_verification_pattern_gives_the_slow_columns():
    draw = random.Random(3)
    for _ in range(40):
        tokens = random_tokens(draw)
        torch.testing.assert_close(torch.tensor(run_windows(tracker_for(), tokens, draw)), torch.tensor(slow(tokens)))


def test_a_reader_that_keeps_rejected_drafts_fails_the_same_check(monkeypatch):
    def append_only(self, number, first, rows):
        slot = self._slots[number]
        states = []
        for token, opens, closes in rows:
            slot.tokens.append(token)
            slot.states.append(self._after(slot, opens=bool(opens), closes=bool(closes)))
            states.append(slot.states[-1])
        return states

    monkeypatch.setattr(CandidateReader, "_follow", append_only)
    draw = random.Random(3)
    tokens = random_tokens(draw)
    assert not torch.allclose(torch.tensor(run_windows(tracker_for(), tokens, draw)), torch.tensor(slow(tokens)))


def test_each_paragraph_is_read_once():
    read = []

    def counted(ids):
        read.append(len(ids))
        return decode(ids)

    tracker, tokens = tracker_for(reader=CandidateReader(counted, 2)), [START, *[0, FOUR, BREAK] * 50]
    for position in range(1, len(tokens) + 1):
        observe(tracker, tokens[:position], position)
        if position < len(tokens):
            observe(tracker, tokens[:position], position, tokens[position : position + 1])  # drafted, then verified
    assert read == [3] * 50


def test_without_a_contract_there_is_no_candidate():
    assert not observe(tracker_for(contract=None), [START, FOUR, BREAK], 1).any()


def test_where_nothing_reads_candidates_none_are_computed(monkeypatch):
    tracker = tracker_for()
    tracker.candidates = None
    monkeypatch.setattr(CandidateReader, "observe", None)
    assert observe(tracker, [START, FOUR, BREAK], 1).shape == (3, 0)


@pytest.mark.parametrize(("spec", "text"), [({"kind": "json", "schema": {"type": "object"}}, "So it is 42.\n\n")])
def test_kinds_that_prose_cannot_state_have_no_candidate(spec, text):
    assert Contract.from_spec(spec).project(text) is None


def test_an_absent_answer_is_no_statement():
    before = Candidate(start=0, answer="4", repeats=1, age=2)
    assert before.closed(None, INTEGER, start=9) == Candidate(start=9, answer="4", repeats=1, age=3)
