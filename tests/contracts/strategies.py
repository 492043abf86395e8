"""Texts that look like model output, and every contract kind that is implemented."""

from hypothesis import strategies as st

from ace_learn.contracts import KINDS, Contract

CONTRACTS = [
    Contract.from_spec(spec)
    for spec in (
        {"kind": "boxed"},
        {"kind": "boxed", "scope": "anywhere"},
        {"kind": "integer"},
        {"kind": "integer", "minimum": -5, "maximum": 999},
        {"kind": "choice", "options": ["A", "B", "C", "D", "I"]},
        {"kind": "choice", "options": ["yes", "no", "not sure", "1", "12"], "cues": ["answer is", "is", "so"]},
        {"kind": "label", "labels": ["spam", "not spam", "A"]},
        {"kind": "json", "schema": {"type": "object", "properties": {"answer": {"type": "integer"}}}},
        {"kind": "json", "schema": True},
        {"kind": "tag", "tag": "t"},
    )
]
assert {contract.kind for contract in CONTRACTS} == set(KINDS), "list every kind"

FRAGMENTS = [
    "\\boxed{", "\\fbox{", "\\boxed", "{", "}", "\\{", "\\}", "\\\\", "\\", "$", "\\(", "\\)", "\\text{",
    "\\frac{1}{2}", "The answer is ", "Answer: ", "answer", "**", "*", "is ", "isn't ", "not ", "I do not think ",
    "if ", "the correct option is ", "A", "B", "(B)", "I", "C", " or ", " and ", ", ", "; ", "yes", "no",
    "not sure", "spam", "not spam", "Label: ", "class is ", "0", "1", "204", "042", "1,204", "-", "\u2212", "+",
    "/", "^", ".", ". ", "?", "!", ":", " ", "\n", "\n\n", "\t", "\r\n", '{"answer": 4', '{"answer": 4}', '"', "[",
    "]", "[1]", "true", "null", "NaN", "1e5", "\\u00e9", "\\ud800", ",", '"a"', "<think>", "</think>", "<thi", "</",
    "<", ">", "#### ", "million", "<t>", "</t>", "t>", "because ", "\ud800", "\u0000", "é", "日", "答案", "\uff1a",
    "²", "\u2019", "…",
]  # fmt: skip

texts = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=10).map("".join),
    st.text(st.characters(codec=None), max_size=30),
)
contracts = st.sampled_from(CONTRACTS)


def cut(text: str, places: list[int]) -> list[str]:
    """`text` cut at `places` (taken modulo its length, so that any list of integers will do)."""
    at = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
