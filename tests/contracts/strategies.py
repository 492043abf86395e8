"""Texts that look like model output, and every contract kind that is implemented."""

from hypothesis import strategies as st

from ace_learn.contracts import KINDS, Contract
from ace_learn.testing.fuzz import SPECS
from ace_learn.testing.texts import FRAGMENTS

CONTRACTS = [Contract.from_spec(spec) for spec in SPECS]
assert {contract.kind for contract in CONTRACTS} == set(KINDS), "list every kind"

texts = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=10).map("".join),
    st.text(st.characters(codec=None), max_size=30),
)
contracts = st.sampled_from(CONTRACTS)
