"""A step without a look at any of its results: fake tensors have none, and refuse whoever asks."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from ace_learn.engines.vllm import statistics
from ace_learn.engines.vllm.reports import DevicePart, Findings
from tests.engines.vllm.hook_world import POLICY, make_head, make_hook, rows_of, window
from tests.engines.vllm.test_hook import thinker


def two_steps(hook, *, allowed=False, starts=False):
    """What the second of two steps forces: a prompt's last tokens, then windows of several sizes."""
    lives, forced = [thinker("a"), thinker("b"), thinker("c", exits=False)], None
    for first, sizes in enumerate(([1, 1, 1], [3, 5, 1])):
        for live in lives:
            hook.admit(live.request_id, live.prompt, live.options)
            live.at = len(live.prompt) - 1 + first
        step = rows_of([window(live, 1, [0] * (size - 1)) for live, size in zip(lives, sizes, strict=True)])
        if allowed:
            step = step._replace(allowed=torch.ones(sum(sizes), 2, dtype=torch.bool))
        if starts:
            step = step._replace(starts=torch.tensor([0, *step.counts.cumsum()]))
        forced = hook.observe(step)
        assert hook.report().failures == []
    return forced


@pytest.mark.parametrize("options", [{}, {"allowed": True}, {"starts": True}], ids=["plain", "grammar", "starts"])
def test_no_step_waits_for_the_device(options, monkeypatch):
    monkeypatch.setattr(statistics, "_on_cpu", statistics.on_device)
    monkeypatch.setattr(DevicePart, "read", lambda part: Findings.none())  # that is for the host, later
    head = make_head()
    with FakeTensorMode(allow_non_fake_inputs=True):
        hook = make_hook(POLICY, signaller=head)
        assert two_steps(hook, **options).shape == (9,)
        assert hook.thinking.shape == hook.open.shape == (9,)


def test_a_look_at_a_result_would_be_found():
    class Looks:
        def __call__(self, scalars, candidates, hidden):
            if bool(scalars.isnan().any()):
                raise AssertionError
            return scalars.new_zeros(*scalars.shape[:2], 4)

    with FakeTensorMode(allow_non_fake_inputs=True):
        hook = make_hook(POLICY, signaller=Looks())
        lives = [thinker("a")]
        hook.admit("a", lives[0].prompt, lives[0].options)
        lives[0].at = 1
        hook.observe(rows_of([window(lives[0], 1)]))
        ((_, what),) = hook.report().failures
        assert what.startswith(DataDependentOutputException.__name__)
