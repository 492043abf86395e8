"""Answer candidates of the thinking in the engine: captured and replayed as they are live, with drafts or without."""

from collections import Counter

import pytest
import torch

from ace_learn.engines.hf import HFEngine
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.engines.signaller import HeadSignaller
from ace_learn.exit.candidates import CandidateReader
from ace_learn.exit.policy import ExitPolicy
from ace_learn.features import FeatureSpec
from ace_learn.heads import HeadConfig, SignalHead
from ace_learn.signals import CANDIDATES, SIGNALS, with_derived
from ace_learn.speculation.drafters import NgramDrafter
from ace_learn.tasks import TaskConfig, build_task, render_prompt

GREEDY = Sampling(temperature=0.0)
COUNT = 12


def asked(target):
    examples = list(build_task(TaskConfig(name="reasoner")).examples(COUNT, seed=11))
    rendered = [render_prompt(target.tokenizer, e.messages, thinking=True, markers=target.markers) for e in examples]
    return [
        Request(key=i, prompt_ids=tuple(ids), contract=e.contract, max_new_tokens=400, max_answer_tokens=40)
        for i, (ids, e) in enumerate(zip(rendered, examples, strict=True))
    ]


def candidate_head(target):
    """A head whose consistency rises with the paragraphs since the candidate was stated; it reads nothing else."""
    spec = FeatureSpec(sources=("candidates",), hidden_size=target.identity.hidden_size, aux_layers=())
    head = SignalHead(HeadConfig(arch="linear"), spec.size)
    with torch.no_grad():
        head.layers[0].weight.zero_()
        head.layers[0].bias.fill_(-3.0)
        head.layers[0].weight[0, CANDIDATES.index("candidate_log_age"), 3] = 2.5
    return HeadSignaller(head, spec, target.device)


BY_HEAD = ExitPolicy(predicate="all", thresholds={"consistency": 0.5}, ewma=0.7)
BY_SIGNAL = ExitPolicy(predicate="all", thresholds={"agreement": 0.5}, patience=3)


def engine(target, policy, *, draft_tokens=0, batch_size=COUNT):
    return HFEngine(
        target,
        sampling=GREEDY,
        policy=policy,
        signaller=candidate_head(target) if policy is BY_HEAD else None,
        drafter=NgramDrafter() if draft_tokens else None,
        num_draft_tokens=draft_tokens,
        batch_size=batch_size,
    )


@pytest.fixture(scope="module")
def rollouts(reasoner_target):
    recorder = HFEngine(reasoner_target, sampling=GREEDY, candidates=True, batch_size=COUNT)
    return recorder.rollout(asked(reasoner_target), "boundaries")


def replayed_exits(target, rollouts, policy):
    """Output index of the first boundary of every captured trace at which the policy fires; None where none does."""
    head, exits = candidate_head(target).head, []
    for request, output in enumerate(rollouts.outputs):
        rows = rollouts.rows.select(rollouts.rows.request == request)
        with torch.no_grad():
            learned = head(rows.candidates)
        average, held, found = None, 0, None
        for row, value in enumerate(with_derived(learned, {"scalars": rows.scalars, "candidates": rows.candidates})):
            average = value if average is None else policy.ewma * value + (1 - policy.ewma) * average
            held = held + 1 if bool(policy.holds(average)) else 0
            inside = output.think_end is None or int(rows.output_index[row]) < output.think_end
            if held >= policy.patience and inside:
                found = int(rows.output_index[row]) + 1
                break
        exits.append(found)
    return exits


def exits_of(outputs):
    return [output.exit and output.exit.output_index for output in outputs]


@pytest.mark.parametrize("policy", [BY_HEAD, BY_SIGNAL], ids=["head", "signal"])
def test_live_exits_equal_replay_with_speculation_and_without(reasoner_target, rollouts, policy):
    wanted = replayed_exits(reasoner_target, rollouts, policy)
    plain = engine(reasoner_target, policy).generate(asked(reasoner_target))
    speculated = engine(reasoner_target, policy, draft_tokens=4, batch_size=5).generate(asked(reasoner_target))
    assert exits_of(plain) == wanted
    assert [o.token_ids for o in plain] == [o.token_ids for o in speculated]
    assert exits_of(speculated) == wanted
    assert sum(index is not None for index in wanted) >= COUNT // 2
    assert sum(output.stats.accepted for output in speculated) > 0
    recorded = next(output.exit.signals for output in plain if output.exit is not None)
    assert set(recorded) >= {"agreement", "entropy"}
    assert (set(recorded) == set(SIGNALS) - {"acceptance"}) == (policy is BY_HEAD)  # no drafter gives that one


def test_a_candidate_state_that_counts_rejected_drafts_fails_the_same_check(reasoner_target, rollouts, monkeypatch):
    follow, rejected = CandidateReader._follow, Counter()

    def impure(self, number, first, rows):
        slot = self._slots[number]
        rejected[slot] += slot.states[-1].age > slot.states[first - slot.base].age  # a boundary that was but drafted
        states = follow(self, number, first, rows)
        return [state._replace(age=state.age + rejected[slot]) for state in states]

    monkeypatch.setattr(CandidateReader, "_follow", impure)
    wanted = replayed_exits(reasoner_target, rollouts, BY_HEAD)
    speculated = engine(reasoner_target, BY_HEAD, draft_tokens=4, batch_size=5).generate(asked(reasoner_target))
    assert exits_of(speculated) != wanted


def test_candidates_are_found_in_the_thoughts_of_the_reasoner(rollouts):
    """Every thought states its answer ("So the answer is 42."), which the contracts find; an object is never stated."""
    for request, (wanted, output) in enumerate(zip(rollouts.requests, rollouts.outputs, strict=True)):
        rows = rollouts.rows.select(rollouts.rows.request == request)
        present = bool(rows.candidates[:, 0].any())
        assert present == (wanted.contract.kind != "json"), output.answer


def test_nothing_is_read_where_nothing_asks(reasoner_target, monkeypatch):
    monkeypatch.setattr(CandidateReader, "observe", None)
    plain = HFEngine(reasoner_target, sampling=GREEDY, batch_size=2)
    rows = plain.rollout(asked(reasoner_target)[:2], "boundaries").rows
    assert len(rows.scalars) > 0
    assert rows.candidates.shape == (len(rows.scalars), 0)
