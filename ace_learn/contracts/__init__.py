"""Output contracts: what counts as an answer, and the character at which it is complete.

A contract is built from a spec and reads text as it is generated:

    contract = Contract.from_spec({"kind": "integer", "minimum": 0, "maximum": 999})
    committer = contract.committer()
    for piece in pieces:
        if (commit := committer.feed(piece)) is not None:
            ...  # commit.answer, commit.end

`contract.project(text)` is the same on a whole text, so the same object scores answers.
`python -m ace_learn.contracts check FILE` runs a file of cases.
"""

from ace_learn.contracts.base import Contract, Scope
from ace_learn.contracts.boxed import Boxed
from ace_learn.contracts.choice import Choice
from ace_learn.contracts.committer import Commit, Committer
from ace_learn.contracts.integer import Integer
from ace_learn.contracts.json_schema import JsonSchema
from ace_learn.contracts.kinds import KINDS
from ace_learn.contracts.label import Label
from ace_learn.contracts.stream import TokenCommit, TokenStream
from ace_learn.contracts.tag import Tag
from ace_learn.json_type import JSON

__all__ = [
    "JSON",
    "KINDS",
    "Boxed",
    "Choice",
    "Commit",
    "Committer",
    "Contract",
    "Integer",
    "JsonSchema",
    "Label",
    "Scope",
    "Tag",
    "TokenCommit",
    "TokenStream",
]
