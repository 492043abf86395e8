import pytest

from ace_learn.contracts import Contract


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"pattern": "("}, "missing"),
        ({"pattern": r"(a)\1"}, "back-references"),
        ({"pattern": "(?<=a)b"}, "look-around"),
        ({"pattern": "a*"}, "empty text"),
        ({"pattern": "a", "group": 1}, "group 1"),
        ({"pattern": "a" * 5000}, "5000 characters"),
        ({}, "'pattern' is missing"),
    ],
    ids=["broken", "reference", "look-behind", "empty", "group", "long", "missing"],
)
def test_a_pattern_that_cannot_be_used_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        Contract.from_spec({"kind": "regex", **spec})


def test_a_pattern_bomb_costs_linear_time():
    contract = Contract.from_spec({"kind": "regex", "pattern": "(a+)+b"})
    assert contract.project("a" * 60_000 + "\n") is None  # a backtracking engine would not come back


def test_answers():
    number = Contract.from_spec({"kind": "regex", "pattern": "[0-9]+"})
    assert number.valid("42")
    assert not number.valid("42 ")
    assert not number.valid("")
    assert not number.valid(42)
    assert number.equal("42", "42")
    assert not number.equal("42", "042")


def test_a_cut_that_would_change_the_match_moves_to_the_end_of_the_line():
    contract = Contract.from_spec({"kind": "regex", "pattern": "(a)$|a(b)?c?", "group": 1})
    assert contract.project("ab\n") is None
    contract = Contract.from_spec({"kind": "regex", "pattern": "ab$|a"})
    commit = contract.project("abc\n")
    assert commit is not None
    assert (commit.answer, commit.end) == ("a", 1)
    contract = Contract.from_spec({"kind": "regex", "pattern": "x(ab)$|x(?:ab)c|ab", "group": 0})
    commit = contract.project("xabc\n")
    assert commit is not None
    assert (commit.answer, commit.end) == ("xabc", 4)
