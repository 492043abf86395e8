import pytest

from ace_learn.contracts import Boxed, Choice, Integer, JsonSchema, Label, Tag

ANY = JsonSchema.of(True)


@pytest.mark.parametrize(
    ("contract", "a", "b", "equal"),
    [
        (Boxed(), "\\dfrac{1}{2}", "\\frac{1}{2}", True),
        (Boxed(), "\\tfrac12", "\\frac12", True),
        (Boxed(), " x + 1", "x+1", True),
        (Boxed(), "1\\,204", "1204", True),
        (Boxed(), "007", "7", True),
        (Boxed(), "7.", "7", True),
        (Boxed(), "0.05", "0.5", False),
        (Boxed(), "1.007", "1.7", False),
        (Boxed(), "10", "1", False),
        (Boxed(), "0", "00", True),
        (Boxed(), "\\left(1, 2\\right)", "(1,2)", True),
        (Boxed(), 7, "7", False),
        (Integer(), "42", "042", True),
        (Integer(), 42, "42", True),
        (Integer(), "-0", "0", True),
        (Integer(), True, "1", False),
        (Integer(), "x", "x", False),
        (Choice(options=("A", "B")), "A", " a ", True),
        (Choice(options=("A", "a")), "A", "a", False),
        (Choice(options=("A", "B")), "C", "C", False),
        (Label(labels=("spam", "not spam")), "Spam", "spam", True),
        (Tag(tag="t"), "a  b", " a b", True),
        (Tag(tag="t"), "a b", "ab", False),
        (ANY, 1, 1.0, True),
        (ANY, True, 1, False),
        (ANY, [True], [1], False),
        (ANY, {"a": 1, "b": [2]}, {"b": [2.0], "a": 1}, True),
        (ANY, {"a": 1}, {"a": 1, "b": 1}, False),
        (ANY, [1, 2], [2, 1], False),
        (ANY, "1", 1, False),
        (ANY, 2**53 + 1, float(2**53), False),
    ],
)
def test_equal(contract, a, b, equal):
    assert contract.equal(a, b) is equal
    assert contract.equal(b, a) is equal


@pytest.mark.parametrize(
    ("contract", "answer", "valid"),
    [
        (Boxed(), "x", True),
        (Boxed(), "", False),
        (Boxed(), "{", False),
        (Boxed(), "\\{", True),
        (Boxed(), 3, False),
        (Integer(minimum=0, maximum=999), "999", True),
        (Integer(minimum=0, maximum=999), "1000", False),
        (Integer(), "042", False),
        (Integer(), 42, True),
        (Integer(), True, False),
        (Integer(), "9" * 5_000, False),
        (Choice(options=("A", "B")), "A", True),
        (Choice(options=("A", "B")), "a", False),
        (Tag(tag="t"), "x", True),
        (Tag(tag="t"), " ", False),
        (Tag(tag="t"), "x</t>", False),
        (ANY, {"a": 1}, True),
        (ANY, 1, False),
        (JsonSchema.of({"required": ["a"]}), {}, False),
    ],
)
def test_valid(contract, answer, valid):
    assert contract.valid(answer) is valid


def test_an_answer_nested_too_deep_is_not_valid():
    answer = [1]
    for _ in range(2_000):
        answer = [answer]
    assert not ANY.valid(answer)


def test_patterns_of_a_schema_run_in_linear_time():
    contract = JsonSchema.of({"properties": {"a": {"pattern": "^(a+)+$"}}})
    assert contract.project('{"a": "' + "a" * 50_000 + '!"}') is None
