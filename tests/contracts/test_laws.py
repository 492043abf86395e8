"""The laws of `ace_learn.testing.contract`, on texts that hypothesis finds, for every kind."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_learn.contracts import Contract
from ace_learn.testing import contract as laws
from ace_learn.testing.texts import HOSTILE, cut
from tests.contracts.strategies import CONTRACTS, contracts, texts

many = settings(max_examples=200, deadline=None)
every_contract = pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.kind)


@many
@given(contracts, texts, st.lists(st.integers(0, 200), max_size=8), st.booleans(), st.booleans())
def test_the_result_does_not_depend_on_the_chunks(contract, text, places, truncated, starts_in_think):
    laws.the_cut_does_not_matter(contract, text, places, truncated=truncated, starts_in_think=starts_in_think)


@many
@given(contracts, texts, texts)
def test_nothing_that_follows_a_commit_changes_it(contract, text, more):
    laws.a_commit_is_final(contract, text, more)


@many
@given(contracts, texts)
def test_a_committed_answer_is_valid_equals_itself_and_stands_before_its_end(contract, text):
    laws.a_committed_answer_is_legal(contract, text)


@many
@given(contracts, texts)
def test_text_behind_the_end_only_serves_to_decide(contract, text):
    laws.the_rest_only_serves_to_decide(contract, text)


@every_contract
@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:10].encode("unicode_escape").decode())
def test_hostile_texts_raise_nothing_in_any_chunks(contract, text):
    rng = random.Random(0)
    laws.pieces_give_the_same(contract, cut(text, [rng.randrange(len(text)) for _ in range(len(text) // 20)]))


@every_contract
def test_the_spec_builds_an_equal_contract(contract):
    laws.the_spec_makes_an_equal_contract(contract)
    laws.the_prompt_gets_an_instruction(contract)


@every_contract
def test_an_absent_answer_equals_nothing(contract):
    laws.equality_is_symmetric(contract, ["A"])


@every_contract
@pytest.mark.parametrize("prefix", ["", '{"answer": "', "\\boxed{"])
def test_a_character_costs_the_same_wherever_it_is_in_the_text(contract, prefix):
    laws.cost_is_linear(contract, prefix)


def test_a_committer_that_is_closed_stays_as_it_is():
    committer = Contract.from_spec({"kind": "integer"}).committer()
    committer.feed("Answer: 2")
    assert committer.close(truncated=True) is None
    assert committer.feed("0\n") is None
    assert committer.close() is None
