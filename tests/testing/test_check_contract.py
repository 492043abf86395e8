"""`check_contract` passes for what is shipped, and names the law that a broken contract breaks."""

import re
from dataclasses import dataclass

import pytest

from ace_learn.contracts import KINDS, Commit, Contract
from ace_learn.contracts.base import common_fields
from ace_learn.contracts.committer import Committer
from ace_learn.testing import LawError, check_contract
from tests.contracts.strategies import CONTRACTS

TEXTS = ["So, word: tree.", "word: a b", "no word here"]


@dataclass(frozen=True, kw_only=True)
class Word(Contract):
    """Somebody's contract: the word behind "word: ", up to a space or a full stop."""

    kind = "word"
    lookback = 6

    longest: int = 40

    @classmethod
    def from_fields(cls, fields):
        return cls(longest=fields.integer("longest") or 40, **common_fields(fields)._asdict())

    def own_fields(self):
        return {"longest": self.longest}

    def scan(self, source):
        while (yield from source.find(re.compile("(?<=word:) "))):
            word = ""
            while (char := (yield from source.peek())) not in ("", " ", "."):
                word += char
                source.pos += 1
            if 0 < len(word) <= self.longest:
                return Commit(word, source.offset)
        return None

    def valid(self, answer):
        return isinstance(answer, str) and 0 < len(answer) <= self.longest and not {" ", "."} & set(answer)

    def same(self, a, b):
        return a == b

    def instruction(self):
        return 'End with "word: X".'


class Restless(Committer):
    """Goes on looking behind a commit."""

    def feed(self, text):
        commit = super().feed(text)
        return commit and commit._replace(end=commit.end + len(text) - 1)


def never_moves(self, source):
    """Finds the same, but reads all of the text again whenever some more has come."""
    while True:
        found = re.search(r"word: ([^ .]+)" + ("" if source.closed else "[ .]"), source.buf)
        if found is not None or source.closed:
            return None if found is None else Commit(found.group(1), source.offset + found.end(1))
        yield


def never_commits(self, source):
    yield from source.find(re.compile("(?!)"))


def depends_on_chunks(self, source):
    yield from source.find(re.compile("(?<=word:) "))
    yield from source.peek()
    return Commit(source.buf[source.pos :].split(" ")[0] or "x", source.offset + 1) if source.buf else None


def chokes(self, source):
    if (yield from source.find(re.compile("[\ud800é]"))):
        raise RuntimeError("cannot read this")
    return None


def cuts_too_early(self, source):
    commit = yield from Word.scan(self, source)
    return commit and commit._replace(end=commit.end - 1)


def ends_outside(self, source):
    commit = yield from Word.scan(self, source)
    return commit and commit._replace(end=source.offset + 1_000)


def restless_committer(self, *, starts_in_think=False):
    return Restless(self.scan, markers=None, in_think=False, lookback=self.lookback)


def takes_the_last(self, text, **kwargs):
    return Word.project(self, text[max(0, text.rfind("word:")) :], **kwargs)


BREAKS = {
    "the result does not depend on the cut": [{"scan": depends_on_chunks}, {"project": takes_the_last}],
    "nothing that follows a commit changes it": [{"committer": restless_committer}],
    "a committed answer is valid": [{"valid": lambda self, answer: answer == "tree"}],
    "a committed answer equals itself": [{"same": lambda self, a, b: False}],
    "the end stands in the text": [{"scan": ends_outside}],
    "text behind the end only serves to decide": [{"scan": cuts_too_early}],
    "equality is symmetric": [{"same": lambda self, a, b: str(a) <= str(b)}],
    "equality raises no error": [{"same": lambda self, a, b: len(a) == len(b)}],
    "an absent answer equals nothing": [{"equal": lambda self, a, b: a == b}],
    "the spec makes an equal contract": [{"own_fields": lambda self: {}}, {"kind": "unregistered"}],
    "no text raises an error": [{"scan": chokes}],
    "cost is linear in the text": [{"scan": never_moves}],
    "the prompt gets an instruction": [{"instruction": lambda self: " "}],
}


def build(monkeypatch, **methods):
    broken = dataclass(frozen=True, kw_only=True)(type("Broken", (Word,), methods))
    monkeypatch.setitem(KINDS, "word", broken)
    return broken(longest=30)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.kind)
def test_every_shipped_kind_passes(contract):
    check_contract(contract.to_spec(), seed=1)


def test_a_contract_of_ones_own_passes(monkeypatch):
    check_contract(build(monkeypatch), TEXTS)


def broken_law(contract, law):
    """The error by which the suite names a law; which law it meets first depends on the texts that are made up."""
    for seed in range(10):
        try:
            check_contract(contract, TEXTS, seed=seed)
        except LawError as error:
            if error.law == law:
                return error
        except ValueError as error:
            if "committed in none" not in str(error):  # that one is a matter of the seed
                raise
    return None


@pytest.mark.parametrize(("law", "methods"), [(law, methods) for law, several in BREAKS.items() for methods in several])
def test_a_broken_contract_fails_by_the_name_of_its_law(monkeypatch, law, methods):
    error = broken_law(build(monkeypatch, **methods), law)
    assert error is not None
    assert re.match(f"{law}: given .*: expected .*, got ", str(error))
    assert isinstance(error, AssertionError)


def test_a_check_that_would_check_nothing_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"committed in none of 42 texts.*pass `texts` with an answer"):
        check_contract(build(monkeypatch, scan=never_commits), ["nothing"])


def test_long_values_are_cut_in_messages():
    error = LawError("a law", given="x" * 1_000, expected=1, got=2)
    assert len(str(error)) < 500
    assert "(1002 characters)" in str(error)
