"""Finds the derived signals: every public module of this package holds one."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from importlib import import_module

from ace_learn.signals._base import DerivedSignal, Signal

LEARNED_SIGNALS = (
    Signal(name="confidence", description="probability of the paragraph's tokens, geometric mean"),
    Signal(name="progress", description="share of the minimal reasoning that is done, 0 to 1"),
    Signal(
        name="remaining",
        description="tokens of minimal reasoning still to come",
        falls=True,
        score_transform="log1p",
    ),
    Signal(name="consistency", description="probability that an exit here keeps the full answer"),
)


def discover(package: str, paths: Iterable[str]) -> tuple[DerivedSignal, ...]:
    """The signals of a package's public modules, ordered by their names.

    Args:
        package: Name of the package.
        paths: Its `__path__`.

    Raises:
        ValueError: A module defines no `SIGNAL`, or two signals have one name.
    """
    found = {signal.name: f"the learned signal {signal.name}" for signal in LEARNED_SIGNALS}
    signals = []
    for module in sorted(info.name for info in pkgutil.iter_modules(paths) if not info.name.startswith("_")):
        signal = getattr(import_module(f"{package}.{module}"), "SIGNAL", None)
        if not isinstance(signal, DerivedSignal):
            raise ValueError(
                f"{package}.{module} defines no signal: give it a constant `SIGNAL = DerivedSignal(...)`, or begin the "
                "module's name with an underscore if it is a helper"
            )
        if signal.name in found:
            raise ValueError(
                f"{package}.{module} names its signal {signal.name!r}, as does {found[signal.name]}; rename one"
            )
        found[signal.name] = f"{package}.{module}"
        signals.append(signal)
    return tuple(sorted(signals, key=lambda signal: signal.name))
