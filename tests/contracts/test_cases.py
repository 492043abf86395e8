"""The handed cases, and ours of the same nature: whole, and in every way of cutting tried."""

import random
from pathlib import Path

import pytest

from ace_learn.contracts import KINDS, Contract
from ace_learn.contracts.check import check_case, load_cases

CASES = Path(__file__).parent.parent / "cases"

HANDED = load_cases(CASES / "contracts.jsonl")
OURS = load_cases(CASES / "contracts_more.jsonl")


def test_every_handed_case_is_there():
    assert len(HANDED) == 44
    assert {case.contract["kind"] for case in HANDED} | {"regex"} == set(KINDS)


@pytest.mark.parametrize("case", [*HANDED, *OURS], ids=lambda case: case.id)
def test_case(case):
    assert list(check_case(case)) == []
    contract = Contract.from_spec(case.contract)
    rng = random.Random(0)
    for _ in range(5):
        committer = contract.committer(starts_in_think=case.starts_in_think)
        at = 0
        while at < len(case.text):
            size = rng.randrange(1, 12)
            committer.feed(case.text[at : at + size])
            at += size
        assert committer.close(truncated=case.truncated) == case.expected
