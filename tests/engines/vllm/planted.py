"""Faults that the proofs must find."""

import torch

from ace_learn.engines.vllm.hook import ExitHook


def plant_late_rows(monkeypatch):
    """Within a verify step an exit is forced one row too late; steps of one row are right."""
    right = ExitHook.observe

    def observe(self, rows):
        forced = right(self, rows)
        if forced is None:
            return None
        parts = forced.split([int(count) for count in rows.counts])
        return torch.cat([part if len(part) == 1 else _late(part) for part in parts])

    monkeypatch.setattr(ExitHook, "observe", observe)


def _late(forced):
    moved = forced.roll(1)
    moved[0] = -1
    return torch.where(torch.arange(len(forced)) == len(forced) - 1, torch.maximum(moved, forced), moved)
