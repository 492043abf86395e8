"""The laws of a contract, on texts that look like model output, for every kind."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_learn.contracts import Contract
from tests.contracts.strategies import CONTRACTS, contracts, cut, texts

many = settings(max_examples=200, deadline=None)


@many
@given(contracts, texts, st.lists(st.integers(0, 200), max_size=8), st.booleans(), st.booleans())
def test_the_result_does_not_depend_on_the_chunks(contract, text, places, truncated, starts_in_think):
    expected = contract.project(text, truncated=truncated, starts_in_think=starts_in_think)
    for pieces in (list(text), cut(text, places)):
        committer = contract.committer(starts_in_think=starts_in_think)
        for piece in pieces:
            committer.feed(piece)
        assert committer.close(truncated=truncated) == expected


@many
@given(contracts, texts, texts)
def test_nothing_that_follows_a_commit_changes_it(contract, text, more):
    committer = contract.committer()
    for at, char in enumerate(text, 1):
        commit = committer.feed(char)
        if commit is not None:
            assert committer.feed(more) == commit
            assert contract.project(text[:at] + more) == commit
            assert contract.project(text[:at], truncated=True) == commit
            return
    assert contract.project(text, truncated=True) is None


@many
@given(contracts, texts)
def test_a_committed_answer_is_valid_equals_itself_and_stands_before_its_end(contract, text):
    commit = contract.project(text)
    if commit is not None:
        assert contract.valid(commit.answer)
        assert contract.equal(commit.answer, commit.answer)
        assert 0 < commit.end <= len(text)


@many
@given(contracts, texts)
def test_text_behind_the_end_only_serves_to_decide(contract, text):
    commit = contract.project(text)
    if commit is not None:
        assert contract.project(text[: commit.end]) == commit


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.kind)
@pytest.mark.parametrize(
    "text",
    [
        "[" * 1_000,
        "{" * 1_000,
        '{"a":' * 500,
        "\\boxed{" * 300,
        "\\boxed{" + "1" * 20_000 + "}",
        "Answer: " + "9" * 20_000,
        "Answer: " + "1,000" * 1_000,
        "Answer: " + "(" * 5_000 + "B",
        "Answer: " + " " * 5_000 + "B",
        "Answer: B" + "*" * 5_000,
        "answer is " * 300,
        "<think>" * 500,
        "<" * 10_000,
        '["' + "\\" * 10_000,
        "Answer: A " + "x" * 10_000,
        "\ud800" * 100 + "\x00" * 100,
    ],
    ids=lambda text: text[:10].encode("unicode_escape").decode(),
)
def test_hostile_texts_raise_nothing_in_any_chunks(contract, text):
    expected = contract.project(text)
    rng = random.Random(0)
    committer = contract.committer()
    at = 0
    while at < len(text):
        size = rng.randrange(1, 40)
        committer.feed(text[at : at + size])
        at += size
    assert committer.close() == expected


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.kind)
def test_the_spec_builds_an_equal_contract(contract):
    again = Contract.from_spec(contract.to_spec())
    assert again == contract
    assert hash(again) == hash(contract)
    assert contract.instruction()


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.kind)
def test_an_absent_answer_equals_nothing(contract):
    assert not contract.equal(None, None)
    assert not contract.equal(None, "A")
    assert not contract.equal("A", None)


def test_a_committer_that_is_closed_stays_as_it_is():
    committer = Contract.from_spec({"kind": "integer"}).committer()
    committer.feed("Answer: 2")
    assert committer.close(truncated=True) is None
    assert committer.feed("0\n") is None
    assert committer.close() is None
