"""Names of what the decoding loop knows of a prefix; derived signals are made of them, so they are defined there."""

from ace_learn.signals import CANDIDATES, SCALARS

__all__ = ["CANDIDATES", "SCALARS"]
