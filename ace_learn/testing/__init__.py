"""Suites that any implementation can run on itself: does it keep the laws that the rest of the package relies on?

    from ace_learn.testing import check_contract, check_head, check_policy

    check_contract({"kind": "integer", "minimum": 0})
    check_policy(ExitPolicy.specexit())
    check_head(Path("runs/demo/policy"))

Each returns None, or raises a `LawError` (an AssertionError) that names the law, the input and both values. They draw
their inputs from a seed and need no test framework, so they run in any test suite, and at a prompt.
"""

from ace_learn.testing.contract import check_contract
from ace_learn.testing.head import check_head
from ace_learn.testing.law import LawError
from ace_learn.testing.policy import check_policy

__all__ = ["LawError", "check_contract", "check_head", "check_policy"]
