"""Texts that look like model output, for any contract."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from ace_learn.contracts import JSON, Contract

_PATCH = "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-a\n+b\n c\n"

FRAGMENTS = (
    "\\boxed{", "\\fbox{", "\\boxed", "{", "}", "\\{", "\\}", "\\\\", "\\", "$", "\\(", "\\)", "\\text{",
    "\\frac{1}{2}", "The answer is ", "Answer: ", "answer", "**", "*", "is ", "isn't ", "not ", "I do not think ",
    "if ", "the correct option is ", "A", "B", "(B)", "I", "C", " or ", " and ", ", ", "; ", "yes", "no",
    "not sure", "spam", "not spam", "Label: ", "class is ", "0", "1", "204", "042", "1,204", "-", "\u2212", "+",
    "/", "^", ".", ". ", "?", "!", ":", " ", "\n", "\n\n", "\t", "\r\n", '{"answer": 4', '{"answer": 4}', '"', "[",
    "]", "[1]", "true", "null", "NaN", "1e5", "\\u00e9", "\\ud800", ",", '"a"', "<think>", "</think>", "<thi", "</",
    "<", ">", "#### ", "million", "<t>", "</t>", "t>", "because ", "\ud800", "\u0000", "é", "日", "答案", "\uff1a",
    "²", "\u2019", "…", "```", "```diff\n", "\n```\n", "--- a/x\n", "+++ b/x\n", "@@ -1 +1 @@\n", "@@ -1,2 +1 @@ f\n",
    "-a\n", "+b\n", " c\n", "diff --git a/x b/x\n", "\\ No newline at end of file\n", _PATCH, _PATCH[:-1],
)  # fmt: skip
"""What the shipped contracts read, and what lies close to it."""

ANSWERS = (
    "The answer is (B).", "Answer: 204\n", "Final Answer: 7", "#### 42\n", "\\boxed{17}", "\\boxed{A}", "Label: spam\n",
    'It is {"answer": 4}.', '{"answer": 204, "why": ["a", {"b": null}]}', "<think>\\boxed{3}</think>\\boxed{4} so",
)  # fmt: skip
"""Whole answers, for contracts that such texts suit."""

_SHAPES = ("{0}", "<{0}>", "</{0}>", "<{0}>4</{0}>", '"{0}": ', "({0})", "{0}: ", "Answer: {0}\n", "\\boxed{{{0}}}")
"""Where a word of the spec may stand."""

HOSTILE = (
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
)
"""Texts that are long, deep or malformed."""

FILLERS = ("and so on, ", "(1) it is 2\n\n")
"""What a text may go on with for long."""


def sample_texts(contract: Contract, texts: Sequence[str], *, count: int, rng: random.Random) -> Iterator[str]:
    """The given texts, then `count` made-up ones of fragments, the contract's own words and parts of the given ones."""
    yield from texts
    words = _own_words(contract)
    yield from (f"So <{word}>4</{word}>, {word}: 4\nAnswer: {word}\n" for word in words)
    own = [shape.format(word) for word in words for shape in _SHAPES]
    own += [word for text in texts for word in text.split()]
    pools = [FRAGMENTS, ANSWERS, own or FRAGMENTS]
    for _ in range(count):
        parts = [rng.choice(pool) for pool in rng.choices(pools, weights=(5, 1, 3), k=rng.randrange(8))]
        if texts and rng.random() < 0.5:
            text = rng.choice(texts)
            parts.insert(rng.randrange(len(parts) + 1), text[: rng.randint(0, len(text))])
            parts.append(rng.choice(texts))
        yield "".join(parts)


def cut(text: str, places: Sequence[int]) -> list[str]:
    """`text` cut at `places` (taken modulo its length, so that any integers will do)."""
    at = sorted({place % (len(text) + 1) for place in places})
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


def encodable(text: str) -> str:
    """The text with a question mark in place of what UTF-8 has not (half a surrogate pair)."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _own_words(contract: Contract) -> list[str]:
    """The first few strings of the spec, those of a kind's own keys and the keys themselves."""
    return [word for word in dict.fromkeys(_strings(contract.own_fields())) if 0 < len(word) <= 64][:8]


def _strings(value: JSON) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in (key, *_strings(item))]
    return [text for item in value for text in _strings(item)] if isinstance(value, list) else []
