"""How sure the model is of its next token."""

from ace_learn.signals import DerivedSignal

SIGNAL = DerivedSignal(
    name="entropy",
    description="entropy of the next-token distribution, nats",
    reads=("entropy",),
    falls=True,
)
