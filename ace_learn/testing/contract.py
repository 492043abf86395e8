"""The laws of an output contract, one function each, and the suite that tries them on many texts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence

from ace_learn.contracts import JSON, Contract, TokenStream
from ace_learn.contracts.source import Source
from ace_learn.testing.law import RaisesNothing, holds, same
from ace_learn.testing.texts import FILLERS, HOSTILE, cut, encodable, sample_texts

SAMPLES = 40
"""Made-up texts."""

HOSTILE_LENGTH = 300
"""Characters of each hostile text that are tried."""

COST_LENGTH = 400
"""Characters of the shorter of the two texts whose costs are compared."""

_CUT = "the result does not depend on the cut"

_ODD_ANSWERS: tuple[JSON, ...] = (True, 0, 1, 1.0, 42, "42", "042", "", "A", "a", " A ", [], [1], {}, {"a": 1.0})
"""Answers of every type, also illegal ones: an evaluator compares what a data set holds."""


def check_contract(
    contract: Contract | Mapping[str, JSON] | str, texts: Sequence[str] | None = None, *, seed: int = 0
) -> None:
    """Checks that a contract keeps the laws of output contracts (DESIGN, section 9).

    The laws: the result does not depend on how the text was cut, be it between characters or inside one; nothing that
    follows a commit changes it; a committed answer is legal and equals itself; equality is symmetric, and an absent
    answer equals nothing; text behind the end only served to decide; the spec makes an equal contract; no text raises
    an error; reading costs the same per character however long the text is; the prompt gets an instruction.

    The cost is counted in characters that `scan` gets to see of its source, not timed, so work on copies of the text
    is not seen.

    Args:
        contract: The contract, or its spec.
        texts: Texts to try besides the made-up ones; give some in which the contract commits.
        seed: Which texts are made up.

    Raises:
        LawError: A law does not hold; names the law, the text and both values.
        ValueError: The spec is none, or no text made the contract commit, so that next to nothing was checked.
    """
    if not isinstance(contract, Contract):
        contract = Contract.from_spec(contract)
    the_spec_makes_an_equal_contract(contract)
    the_prompt_gets_an_instruction(contract)
    rng = random.Random(seed)
    tried = list(sample_texts(contract, texts or (), count=SAMPLES, rng=rng))
    answers: list[JSON] = []
    begun: list[str] = []
    for text in tried:
        with RaisesNothing("no text raises an error", given=(contract, text)):
            places = [rng.randrange(200) for _ in range(rng.randrange(8))]
            the_cut_does_not_matter(
                contract, text, places, truncated=rng.random() < 0.5, starts_in_think=rng.random() < 0.2
            )
            a_commit_is_final(contract, text, rng.choice(tried))
            a_committed_answer_is_legal(contract, text)
            the_rest_only_serves_to_decide(contract, text)
            commit = contract.project(text)
        if commit is not None:
            answers.append(commit.answer)
            begun.append(text[: commit.end - 1])
    if not answers:
        raise ValueError(
            f"{contract} committed in none of {len(tried)} texts, so nothing was checked; pass `texts` with an answer"
        )
    equality_is_symmetric(contract, [*answers[:20], *_ODD_ANSWERS])
    for text in (text[:HOSTILE_LENGTH] for text in HOSTILE):
        with RaisesNothing("no text raises an error", given=(contract, text)):
            pieces = cut(text, [rng.randrange(len(text)) for _ in range(len(text) // 20)])
            pieces_give_the_same(contract, pieces)
    for prefix in ("", *begun[:2]):
        cost_is_linear(contract, prefix)


def the_cut_does_not_matter(
    contract: Contract,
    text: str,
    places: Sequence[int],
    *,
    truncated: bool = False,
    starts_in_think: bool = False,
) -> None:
    """A committer finds what `project` finds, in characters, in pieces, and in the bytes of characters.

    Args:
        contract: The contract.
        text: Any text.
        places: Where to cut it, modulo its length.
        truncated: See `Contract.project`.
        starts_in_think: See `Contract.project`.

    Raises:
        LawError: It does not.
    """
    for pieces in (list(text), cut(text, places)):
        pieces_give_the_same(contract, pieces, truncated=truncated, starts_in_think=starts_in_think)
    text = encodable(text)
    stream = TokenStream(contract.committer(starts_in_think=starts_in_think), _decode_bytes)
    for token in text.encode():
        stream.push([token])
    found = stream.close(truncated=truncated)
    expected = contract.project(text, truncated=truncated, starts_in_think=starts_in_think)
    same(_CUT, None if found is None else found.commit, expected, given=(contract, text.encode()))


def pieces_give_the_same(
    contract: Contract, pieces: Sequence[str], *, truncated: bool = False, starts_in_think: bool = False
) -> None:
    """A committer that is fed piece by piece finds what `project` finds in the whole text.

    Raises:
        LawError: It does not.
    """
    expected = contract.project("".join(pieces), truncated=truncated, starts_in_think=starts_in_think)
    committer = contract.committer(starts_in_think=starts_in_think)
    for piece in pieces:
        committer.feed(piece)
    same(_CUT, committer.close(truncated=truncated), expected, given=(contract, pieces))


def a_commit_is_final(contract: Contract, text: str, more: str) -> None:
    """Once a prefix of the text has committed, no continuation and no cut by length changes that.

    Raises:
        LawError: It does.
    """
    law = "nothing that follows a commit changes it"
    committer = contract.committer()
    for at, char in enumerate(text, 1):
        commit = committer.feed(char)
        if commit is not None:
            given = (contract, text[:at], more)
            same(law, committer.feed(more), commit, given=given)
            same(law, committer.close(), commit, given=given)
            same(law, contract.project(text[:at] + more), commit, given=given)
            same(law, contract.project(text[:at], truncated=True), commit, given=given)
            return
    same("a cut by length settles nothing", contract.project(text, truncated=True), None, given=(contract, text))


def a_committed_answer_is_legal(contract: Contract, text: str) -> None:
    """A committed answer is valid, equals itself, and stands before its end, which stands in the text.

    Raises:
        LawError: It does not.
    """
    commit = contract.project(text)
    if commit is None:
        return
    given = (contract, text)
    holds("a committed answer is valid", contract.valid(commit.answer), given=given, expected="valid", got=commit)
    equal = contract.equal(commit.answer, commit.answer)
    holds("a committed answer equals itself", equal, given=given, expected="equal", got=commit)
    inside = 0 < commit.end <= len(text)
    holds("the end stands in the text", inside, given=given, expected=f"an end in 1..{len(text)}", got=commit)


def the_rest_only_serves_to_decide(contract: Contract, text: str) -> None:
    """The text up to the end of the answer has the same answer.

    Raises:
        LawError: It has not.
    """
    commit = contract.project(text)
    if commit is not None:
        kept = text[: commit.end]
        same("text behind the end only serves to decide", contract.project(kept), commit, given=(contract, kept))


def equality_is_symmetric(contract: Contract, answers: Iterable[JSON]) -> None:
    """Equality is symmetric on any answers, legal or not, and an absent answer equals nothing.

    Raises:
        LawError: It is not.
    """
    listed = list(answers)
    for index, a in enumerate(listed):
        for b in listed[index:]:
            with RaisesNothing("equality raises no error", given=(contract, a, b)):
                same("equality is symmetric", contract.equal(b, a), contract.equal(a, b), given=(contract, a, b))
    for pair in [(None, None), *((None, a) for a in listed), *((a, None) for a in listed)]:
        same("an absent answer equals nothing", contract.equal(*pair), False, given=(contract, *pair))


def the_spec_makes_an_equal_contract(contract: Contract) -> None:
    """`Contract.from_spec(contract.to_spec())`, also by way of JSON text, is the contract, with the same hash.

    Raises:
        LawError: It is not.
    """
    law = "the spec makes an equal contract"
    with RaisesNothing(law, given=contract):
        spec = contract.to_spec()
        for again in (Contract.from_spec(spec), Contract.from_spec(json.dumps(spec))):
            same(law, again, contract, given=spec)
            same(law, hash(again), hash(contract), given=spec)
            same(law, again.to_spec(), spec, given=contract)


def the_prompt_gets_an_instruction(contract: Contract) -> None:
    """`instruction()` is not blank.

    Raises:
        LawError: It is.
    """
    text = contract.instruction()
    holds("the prompt gets an instruction", bool(text.strip()), given=contract, expected="a sentence", got=text)


def cost_is_linear(contract: Contract, prefix: str) -> None:
    """Twice as long a text shows `scan` at most three times as many characters.

    Args:
        contract: The contract.
        prefix: How the text begins; it goes on with prose, one character at a time.

    Raises:
        LawError: It shows more.
    """
    for filler in FILLERS:
        text = prefix + filler * (2 * COST_LENGTH // len(filler) + 1)
        with RaisesNothing("no text raises an error", given=(contract, text)):
            short, long = (_characters_seen(contract, text[:size]) for size in (COST_LENGTH, 2 * COST_LENGTH))
        holds(
            "cost is linear in the text",
            long <= 3 * short,
            given=(contract, f"{prefix!r} and {filler!r} over and over"),
            expected=f"at most {3 * short} characters seen of {2 * COST_LENGTH}, three times those of half the text",
            got=long,
        )


class _Meter(Source):
    """A source that counts the characters it shows, those that are shown again included."""

    def __init__(self, *, lookback: int) -> None:
        self.seen = 0
        self._text = ""
        super().__init__(lookback=lookback)

    @property
    def buf(self) -> str:
        self.seen += len(self._text)
        return self._text

    @buf.setter
    def buf(self, text: str) -> None:
        self._text = text

    def marked(self) -> str:
        text = super().marked()
        self.seen += len(text)
        return text


def _characters_seen(contract: Contract, text: str) -> int:
    """What `scan` is shown of a text that arrives character by character and has no end yet."""
    meter = _Meter(lookback=contract.lookback)
    steps = contract.scan(meter)
    for char in text:
        meter.push(char)
        if next(steps, steps) is steps:
            break
    return max(1, meter.seen)


def _decode_bytes(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode("utf-8", errors="replace")
