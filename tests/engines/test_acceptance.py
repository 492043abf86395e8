"""Acceptance rules and adaptive verification inside the engine."""

import copy
from functools import cache

import pytest
import torch

from ace_learn.engines.costs import measure_costs
from ace_learn.engines.draft_model import ModelDrafter
from ace_learn.engines.hf import HFEngine
from ace_learn.engines.loading import build_engine
from ace_learn.engines.sampling import Sampling
from ace_learn.models.target import Target
from ace_learn.speculation.adaptive import AdaptiveConfig, AdaptiveVerifier, CostTables
from ace_learn.speculation.drafters import DrafterConfig, NgramDrafter
from ace_learn.speculation.estimator import OnlineAcceptanceEstimator
from ace_learn.speculation.rules import AcceptanceConfig
from tests.engines.test_hf import POLICY, RandomHead, requests
from tests.helpers.targets import save_tiny, tiny_target

SAMPLING = Sampling(temperature=1.0, seed=3)
EXACT = AcceptanceConfig(rule="cactus_exact", delta=0.5)


@cache
def pair():
    """A target, and itself with noise on its weights, which drafts something like it."""
    target = tiny_target("llama", spread=0.5, layers=2)
    model, draw = copy.deepcopy(target.model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.15 * weight.std() * torch.randn(weight.shape, generator=draw))
    return target, Target(model, target.tokenizer, target.markers, name="noised")


def decode(acceptance=None, *, sampling=SAMPLING, exits=False, verifier=None, count=8, k=4):
    target, draft = pair()
    engine = HFEngine(
        target,
        sampling=sampling,
        policy=POLICY if exits else None,
        signaller=RandomHead(target.identity.hidden_size) if exits else None,
        drafter=ModelDrafter(draft, sampling=sampling, vocab_size=target.vocab_size),
        num_draft_tokens=k,
        acceptance=acceptance,
        verifier=verifier,
        batch_size=count,
    )
    return engine.generate(requests(count, max_new_tokens=40))


@cache
def plain(*, exits=False):
    return decode(exits=exits)


def per_step(outputs):
    return sum(o.stats.accepted for o in outputs) / sum(o.stats.verify_steps for o in outputs)


def test_lossy_rules_accept_more_and_say_what_they_spend():
    assert all(o.stats.kl_spent == 0 for o in plain())
    for rule in ("cactus", "cactus_exact"):
        assert per_step(plain()) < per_step(decode(AcceptanceConfig(rule=rule, delta=1.0)))
    for output in decode(EXACT):
        assert 0 < output.stats.kl_spent <= 0.5 * output.stats.drafted + 1e-6
    assert sum(o.stats.kl_spent for o in decode(AcceptanceConfig(rule="typical"))) > 0


def test_a_budget_of_nothing_is_the_lossless_rule():
    assert [o.token_ids for o in decode(AcceptanceConfig(rule="cactus_exact", delta=0.0))] == [
        o.token_ids for o in plain()
    ]


@pytest.mark.parametrize("acceptance", [EXACT, AcceptanceConfig(rule="typical")])
def test_lossy_rules_do_nothing_at_temperature_0(acceptance):
    greedy = Sampling(temperature=0.0)
    outputs = decode(acceptance, sampling=greedy)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in decode(sampling=greedy)]
    assert all(o.stats.kl_spent == 0 for o in outputs)


@pytest.mark.parametrize("exits", [False, True])
def test_only_in_think_leaves_the_answer_to_the_lossless_rule(exits):
    """A budget so large that every draft is accepted: in the thinking all are, in the answer they are not."""
    everything = AcceptanceConfig(rule="cactus_exact", delta=1e6, only_in_think=True)
    thought = decode(everything, exits=exits)
    assert all(o.stats.kl_spent > 0 for o in thought if o.think_end is None or o.think_end > 5)
    everywhere = decode(AcceptanceConfig(rule="cactus_exact", delta=1e6), exits=exits)
    assert per_step(plain(exits=exits)) < per_step(thought) < per_step(everywhere)


def test_forced_rows_bypass_the_rule():
    """Exits happen where the policy says, whatever the rule accepts."""
    outputs = decode(AcceptanceConfig(rule="cactus_exact", delta=1e6), exits=True)
    exited = [o for o in outputs if o.exit is not None]
    assert exited
    for output in exited:
        assert output.think_end == output.exit.output_index


def verifier(costs, k=4):
    return AdaptiveVerifier(estimator=OnlineAcceptanceEstimator(k, refit_interval=5), costs=costs)


def tables(verify_slope, batch=8, k=4):
    verify = 1.0 + verify_slope * torch.arange(batch * (k + 1) + 1).double().numpy()
    return CostTables(draft=verify[: batch + 1] * 0 + 0.5, verify=verify)


def test_dear_tokens_are_not_drafted_into_the_target_and_cheap_ones_all_are():
    cheap, dear = (decode(verifier=verifier(tables(slope))) for slope in (0.0, 0.3))
    drafted, accepted = (
        [sum(getattr(o.stats, name) for o in outputs) for outputs in (plain(), cheap, dear)]
        for name in ("drafted", "accepted")
    )
    assert drafted[1] == drafted[0]
    assert [o.token_ids for o in cheap] == [o.token_ids for o in plain()]
    assert 0 < drafted[2] < 0.8 * drafted[0]
    assert accepted[2] / drafted[2] > accepted[0] / drafted[0]  # what is left is likelier


def test_the_estimator_watches_without_costs():
    watching = verifier(None)
    assert [o.token_ids for o in decode(verifier=watching, exits=True)] == [o.token_ids for o in plain(exits=True)]
    assert float(watching.estimator.slope) != 0.5


def test_costs_are_measured_for_every_size():
    target = tiny_target("llama", spread=0.5)
    drafter = ModelDrafter(tiny_target("llama"), sampling=SAMPLING, vocab_size=target.vocab_size)
    costs = measure_costs(target, drafter, batch_size=3, draft_tokens=2)
    assert costs.padded
    assert len(costs.draft) == 4
    assert len(costs.verify) == 10
    assert (costs.draft[1:] > 0).all()
    assert (costs.verify[1:] > 0).all()


def test_adaptive_verification_by_name(tmp_path):
    save_tiny(tmp_path / "draft", "llama")
    target = tiny_target("llama", spread=0.5)
    drafter = DrafterConfig(kind="draft_model", draft_tokens=3, model=str(tmp_path / "draft"))
    path = tmp_path / "coefficients.safetensors"
    OnlineAcceptanceEstimator(3).save(path)
    adaptive = AdaptiveConfig(enabled=True, coefficients=path)
    engine = build_engine(target, head=None, drafter=drafter, adaptive=adaptive, batch_size=2)
    assert engine.generate(requests(2, max_new_tokens=20))[0].stats.drafted > 0
    four = DrafterConfig(kind="draft_model", draft_tokens=4, model=str(tmp_path / "draft"))
    with pytest.raises(ValueError, match="is for 3 draft tokens, not 4"):
        build_engine(target, head=None, drafter=four, adaptive=adaptive)


def test_speculation_that_would_be_ignored_is_refused(tmp_path):
    target, adaptive = tiny_target(), AdaptiveConfig(enabled=True)
    ngram = DrafterConfig(kind="ngram")
    with pytest.raises(ValueError, match="do nothing without a drafter"):
        build_engine(target, head=None, acceptance=EXACT)
    with pytest.raises(ValueError, match="do nothing without a drafter"):
        HFEngine(target, acceptance=EXACT)
    with pytest.raises(ValueError, match="scores draft probabilities"):
        build_engine(target, head=None, drafter=ngram, adaptive=adaptive)
    with pytest.raises(ValueError, match="forgetting would be ignored"):
        AdaptiveConfig(forgetting=0.5)
    with pytest.raises(ValueError, match="leave those out"):
        AdaptiveConfig(enabled=True, forgetting=0.5, coefficients=tmp_path)
    with pytest.warns(UserWarning, match="does nothing at temperature 0"):
        build_engine(target, head=None, drafter=ngram, acceptance=EXACT, sampling=Sampling(temperature=0.0))
    engine = HFEngine(target, drafter=NgramDrafter(), num_draft_tokens=2, verifier=verifier(None, 2))
    with pytest.raises(ValueError, match="draft probabilities"):
        engine.generate(requests(1))
