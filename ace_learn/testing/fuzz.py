"""Tries the laws of output contracts on made-up texts for as long as one likes."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import NamedTuple

from ace_learn.contracts import JSON, Contract
from ace_learn.testing.contract import (
    a_commit_is_final,
    a_committed_answer_is_legal,
    the_cut_does_not_matter,
    the_rest_only_serves_to_decide,
)
from ace_learn.testing.law import RaisesNothing
from ace_learn.testing.texts import sample_texts

SPECS: tuple[dict[str, JSON], ...] = (
    {"kind": "boxed"},
    {"kind": "boxed", "scope": "anywhere"},
    {"kind": "boxed", "equality": "math"},
    {"kind": "integer"},
    {"kind": "integer", "minimum": -5, "maximum": 999},
    {"kind": "choice", "options": ["A", "B", "C", "D", "I"]},
    {"kind": "choice", "options": ["yes", "no", "not sure", "1", "12"], "cues": ["answer is", "is", "so"]},
    {"kind": "label", "labels": ["spam", "not spam", "A"]},
    {"kind": "json", "schema": {"type": "object", "properties": {"answer": {"type": "integer"}}}},
    {"kind": "json", "schema": True},
    {"kind": "tag", "tag": "t"},
    {"kind": "patch"},
    {"kind": "regex", "pattern": "[0-9]+"},
    {"kind": "regex", "pattern": r"(?i)answer(?: is|:) *(.+?)(?:\.|$)", "group": 1},
    {"kind": "regex", "pattern": r"\bA\b|a$|1(?:,204)?", "scope": "anywhere"},
)
"""Contracts of every kind that ships."""


@dataclass(frozen=True, kw_only=True)
class ContractFuzz:
    """How long to try."""

    seconds: float = 60.0
    """Time to spend."""
    seed: int = 0
    """Which texts are made up."""


class Fuzzed(NamedTuple):
    """What was tried."""

    texts: int
    committed: int


def fuzz_contracts(config: ContractFuzz) -> Fuzzed:
    """Tries every kind on made-up texts until the time is over, and prints how many there were.

    Raises:
        LawError: A law is broken; names it, the contract and the text.
    """
    rng = random.Random(config.seed)
    contracts = [Contract.from_spec(spec) for spec in SPECS]
    end = time.monotonic() + config.seconds
    texts = committed = 0
    while time.monotonic() < end:
        contract = rng.choice(contracts)
        *_, text, more = sample_texts(contract, (), count=2, rng=rng)
        with RaisesNothing("no text raises an error", given=(contract, text)):
            places = [rng.randrange(200) for _ in range(rng.randrange(8))]
            truncated, starts_in_think = rng.random() < 0.5, rng.random() < 0.2
            the_cut_does_not_matter(contract, text, places, truncated=truncated, starts_in_think=starts_in_think)
            a_commit_is_final(contract, text, more)
            a_committed_answer_is_legal(contract, text)
            the_rest_only_serves_to_decide(contract, text)
            committed += contract.project(text) is not None
        texts += 1
    print(f"{texts:,} texts, in {committed:,} of which a contract committed; no law broken, nothing raised")
    return Fuzzed(texts, committed)
