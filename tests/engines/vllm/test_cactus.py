import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ace_learn.engines.vllm.cactus import CactusSampling, cactus_logits, drafted_tokens, spent
from ace_learn.engines.vllm.settings import Acceptance

HOST = np.zeros(0)
EXACT = Acceptance(rule="cactus_exact", delta=0.2)


def test_a_row_verifies_the_input_of_the_next_row_of_its_request():
    input_ids = torch.tensor([10, 11, 12, 20, 30, -1, 40])
    slots = torch.tensor([4, 4, 4, 1, 2, 2, 2])
    local = torch.tensor([0, 1, 2, 0, 0, 1, 2])
    assert drafted_tokens(input_ids, slots, local).tolist() == [11, 12, -1, -1, -1, 40, -1]


def test_active_rows_spend_the_budget_and_the_others_nothing():
    torch.manual_seed(0)
    logits = torch.randn(3, 6)
    drafted, active = torch.tensor([2, 2, -1]), torch.tensor([True, False, False])
    raised, divergence = cactus_logits(logits, drafted, active, EXACT)
    assert torch.equal(raised[1:], logits[1:])
    h, q = raised[0].double().exp(), logits[0].double().softmax(-1)
    assert h.sum() == pytest.approx(1, abs=1e-6)
    assert float((h * (h / q).log()).sum()) == pytest.approx(0.2, abs=1e-4)
    assert h[2] > q[2]
    assert divergence.tolist() == [pytest.approx(0.2, abs=1e-4), 0, 0]


def test_a_row_that_is_certain_spends_nothing():
    logits = torch.tensor([[0.0, 1e30, 0.0], [0.0, -1e30, 1.0]])
    raised, divergence = cactus_logits(logits, torch.tensor([1, 1]), torch.ones(2, dtype=torch.bool), EXACT)
    assert torch.allclose(raised.softmax(-1), logits.softmax(-1))
    assert divergence.tolist() == [0, 0]


def test_nats_are_counted_for_the_rows_that_were_reached():
    divergence = np.array([0.1, 0.2, 0.0, 0.4, 0.0], dtype=np.float32)
    found = spent(["a", "b"], np.array([0, 3, 5]), divergence, [[5, 6], []])
    assert found == {"a": pytest.approx(0.3), "b": 0.0}


class Sampler:
    """Stands in for the sampler of Model Runner V2: temperature alone."""

    def __init__(self, temperature):
        self.sampling_states = SimpleNamespace(temperature=SimpleNamespace(gpu=temperature))
        self.seen = []

    def apply_sampling_params(self, logits, *args):
        self.seen.append(args)
        return logits


def stepping(acceptance=EXACT, *, thinking=None, forced=None, temperature=(1.0, 1.0, 0.0)):
    runner = SimpleNamespace(sampler=Sampler(torch.tensor(temperature)), sample=lambda *args: None)
    cactus = CactusSampling(
        acceptance,
        runner,
        thinking=lambda first, count: None if thinking is None else thinking[first : first + count],
        forced=lambda first, count: None if forced is None else forced[first : first + count],
    )
    slots = torch.tensor([0, 0, 1, 1, 2, 2])
    batch = SimpleNamespace(
        expanded_idx_mapping=slots, req_ids=["a", "b", "c"], cu_num_logits_np=np.array([0, 2, 4, 6])
    )
    runner.sample(torch.empty(0), batch, None)
    return cactus, runner.sampler, slots


def applied(sampler, slots, logits, rows, *, skip=False):
    local, ids = torch.tensor([0, 1] * 3), torch.tensor([9, 1, 9, 2, 9, 0])
    return sampler.apply_sampling_params(
        logits[rows], slots[rows], slots[rows].unique(), HOST, local[rows], ids[rows], local[rows], HOST, skip
    )


def changed(before, after):
    return [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]


def test_only_sampled_verified_rows_change_whole_or_in_pieces():
    torch.manual_seed(2)
    logits = torch.randn(6, 5)
    cactus, sampler, slots = stepping()
    whole = applied(sampler, slots, logits, slice(0, 6))
    assert changed(logits, whole) == [True, False, True, False, False, False]  # bonus rows, and a greedy request
    told = cactus.done()([[1, 2], [1], [1]])
    assert told == {"a": pytest.approx(0.2, abs=1e-3), "b": pytest.approx(0.2, abs=1e-3), "c": 0}
    cactus, sampler, slots = stepping()
    pieces = [applied(sampler, slots, logits, slice(0, 2)), applied(sampler, slots, logits, slice(2, 6))]
    assert torch.equal(torch.cat(pieces), whole)
    assert cactus.done()([[1, 2], [1], [1]]) == told


def test_forced_rows_and_answers_are_left_alone():
    torch.manual_seed(3)
    logits = torch.randn(6, 5)
    forced = torch.tensor([True, False, False, False, False, False])
    _, sampler, slots = stepping(forced=forced)
    assert changed(logits, applied(sampler, slots, logits, slice(0, 6)))[:3] == [False, False, True]
    only = Acceptance(rule="cactus", delta=0.2, only_in_think=True)
    thinking = torch.tensor([True, True, False, False, False, False])
    _, sampler, slots = stepping(only, thinking=thinking)
    assert changed(logits[2:], applied(sampler, slots, logits, slice(2, 6))) == [False] * 4
    assert changed(logits[:2], applied(sampler, slots, logits, slice(0, 2))) == [True, False]
    _, sampler, slots = stepping(only)
    assert not any(changed(logits, applied(sampler, slots, logits, slice(0, 6))))


def test_steps_without_drafts_and_dummy_runs_pass():
    logits = torch.randn(6, 5)
    cactus, sampler, slots = stepping()
    assert not any(changed(logits, applied(sampler, slots, logits, slice(0, 6), skip=True)))
    assert cactus.done() is None
    assert not any(changed(logits, applied(sampler, slots, logits, slice(0, 6))))  # no step is on


def test_cactus_exact_bounds_what_closed_form_may_overspend():
    logits = torch.tensor([[math.log(0.6), math.log(0.4)]])
    rows = torch.tensor([0]), torch.tensor([True])
    closed = cactus_logits(logits, *rows, Acceptance(rule="cactus", delta=0.3))[1]
    exact = cactus_logits(logits, *rows, Acceptance(rule="cactus_exact", delta=0.3))[1]
    assert float(exact) <= 0.3 + 1e-5 < float(closed)
