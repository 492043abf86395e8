"""The signal `acceptance`: what it is computed from, where it is read, and what it does to the law of the prefix."""

from dataclasses import replace

import pytest
import torch

from ace_learn.artifacts import write_json
from ace_learn.engines.hf import HFEngine
from ace_learn.engines.loading import build_engine, load_drafter
from ace_learn.engines.sampling import Sampling
from ace_learn.exit.policy import ExitPolicy
from ace_learn.signals import ACCEPTANCE, LEARNED, SIGNALS, with_derived
from ace_learn.speculation.adaptive import AdaptiveConfig, AdaptiveVerifier
from ace_learn.speculation.drafters import DrafterConfig, NgramDrafter
from ace_learn.speculation.estimator import OnlineAcceptanceEstimator
from tests.engines.test_hf import reasoner_requests
from tests.engines.test_hidden_drafter import slow_drafts
from tests.helpers.drafts import drafter_of, random_draft
from tests.helpers.records import write_head

SAMPLED = Sampling(temperature=0.8, seed=3)
EAGLE = DrafterConfig(kind="eagle3", model="ace_learn/reasoner-eagle3")
K = EAGLE.draft_tokens
STILL = 10**6
POLICY = ExitPolicy(predicate="all", thresholds={"acceptance": 0.9})


def watching(*, refit_interval=STILL, length=K):
    """A verifier whose estimator only watches."""
    return AdaptiveVerifier(estimator=OnlineAcceptanceEstimator(length, refit_interval=refit_interval), costs=None)


def engine(target, verifier, *, draft_tokens, policy=None, batch_size=8):
    return HFEngine(
        target,
        sampling=SAMPLED,
        policy=policy,
        drafter=load_drafter(EAGLE, target, SAMPLED, states_delay=K + 1),
        num_draft_tokens=draft_tokens,
        verifier=verifier,
        acceptance_columns=True,
        batch_size=batch_size,
    )


def signals_of(rows):
    return with_derived(torch.zeros(len(rows), len(LEARNED)), {"acceptance": rows})[:, SIGNALS.index("acceptance")]


def test_by_hand():
    """sigmoid(w f + b): f = log 9 is a law with 0.9 on its mode."""
    f = torch.tensor(9.0).log()
    rows = torch.tensor([[f, 1.0, 0.0], [f, 0.5, 0.0], [f, 0.5, -f / 2], [-f, 1.0, 0.0], [40.0, 0.5, -0.2]])
    assert signals_of(rows).tolist() == pytest.approx([0.9, 0.75, 0.5, 0.1, 1.0])
    assert POLICY.holds(with_derived(torch.zeros(5, len(LEARNED)), {"acceptance": rows})).tolist() == [
        False, False, False, False, True,
    ]  # fmt: skip
    nothing = with_derived(torch.zeros(1, len(LEARNED)), {})
    assert nothing[:, SIGNALS.index("acceptance")].isnan().all()


@pytest.mark.parametrize("draft_tokens", [pytest.param(0, marks=pytest.mark.slow), K])
def test_the_columns_are_the_drafters_law_of_the_whole_sequence_some_positions_late(reasoner_target, draft_tokens):
    """Whatever is drafted; with f = log(p / (1 - p)) of the most probable token, and the first coefficients."""
    draft, asked = random_draft(reasoner_target, "eagle3"), reasoner_requests(reasoner_target, 1)
    recorder = HFEngine(
        reasoner_target,
        sampling=SAMPLED,
        drafter=drafter_of(draft, reasoner_target, sampling=SAMPLED, draft_tokens=K),
        num_draft_tokens=draft_tokens,
        verifier=watching(),
        acceptance_columns=True,
    )
    rollouts = recorder.rollout(asked, "all")
    assert rollouts.rows.acceptance.shape[1] == len(ACCEPTANCE)
    for i, (request, output) in enumerate(zip(asked, rollouts.outputs, strict=True)):
        ids = [*request.prompt_ids, *output.token_ids]
        _, states = slow_drafts(draft, reasoner_target, ids, 1)
        with torch.inference_mode():
            top = (draft.full_logits(states[None])[0] / 0.8).softmax(-1).max(-1).values
        mine = rollouts.rows.select(rollouts.rows.request == i)
        places = len(request.prompt_ids) + mine.output_index
        assert len(places) > 20
        assert torch.allclose(mine.acceptance[:, 0], top.logit()[places - (K + 1)], atol=1e-3)
        assert torch.allclose(mine.acceptance[:, 1:], torch.tensor([0.5, -0.2]))


@pytest.mark.slow
def test_the_coefficients_move_with_traffic_and_the_signal_with_them(reasoner_target):
    """The same requests again: the same text, the same log-odds, and other predictions. The prefix law is broken."""
    asked, verifier = reasoner_requests(reasoner_target, 4), watching(refit_interval=20)
    speculating = engine(reasoner_target, verifier, draft_tokens=K)
    first, second = (speculating.rollout(asked, "all") for _ in range(2))
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    assert sum(o.stats.accepted for o in first.outputs) > 50
    assert torch.allclose(first.rows.acceptance[:, 0], second.rows.acceptance[:, 0], atol=1e-3)
    assert (signals_of(first.rows.acceptance) - signals_of(second.rows.acceptance)).abs().max() > 0.05
    assert len(first.rows.acceptance[:, 1].unique()) > 2
    assert verifier.estimator.slope not in first.rows.acceptance[:, 1]
    idle = watching(refit_interval=1)
    rows = engine(reasoner_target, idle, draft_tokens=0).rollout(asked, "all").rows
    assert torch.allclose(rows.acceptance[:, 1:], torch.tensor([0.5, -0.2]))  # nothing drafted, nothing learned


@pytest.mark.parametrize("draft_tokens", [pytest.param(0, marks=pytest.mark.slow), K])
def test_an_exit_is_where_the_captured_signal_first_says_so(reasoner_target, draft_tokens):
    """Coefficients that stand still: a live run then equals the replay of its full trace."""
    asked = reasoner_requests(reasoner_target, 4)
    traces = engine(reasoner_target, watching(), draft_tokens=draft_tokens).rollout(asked, "boundaries")
    live = engine(reasoner_target, watching(), draft_tokens=draft_tokens, policy=POLICY).generate(asked)
    fired = 0
    for i, (full, output) in enumerate(zip(traces.outputs, live, strict=True)):
        rows = traces.rows.select(traces.rows.request == i)
        inside = rows.output_index < (full.think_end or len(full.token_ids))
        signal = signals_of(rows.acceptance)
        held = rows.output_index[(signal > 0.9) & inside].tolist()
        assert (output.exit is None) == (not held)
        if output.exit is not None:
            fired += 1
            assert output.exit.output_index == held[0] + 1
            assert output.exit.signals["acceptance"] > 0.9
    assert fired >= 3


def test_where_it_cannot_be_given_it_is_refused(reasoner_target):
    draft = random_draft(reasoner_target, "eagle3")
    hidden = drafter_of(draft, reasoner_target, sampling=SAMPLED, draft_tokens=K)
    without_states = drafter_of(draft, reasoner_target, sampling=SAMPLED)
    greedy = drafter_of(draft, reasoner_target, sampling=Sampling(temperature=0.0), draft_tokens=K)
    for options, why in [
        ({}, r"this engine lacks; decode with a drafter of kind eagle3 or mtp"),
        ({"drafter": NgramDrafter(), "num_draft_tokens": K}, "this engine lacks"),
        ({"drafter": without_states, "num_draft_tokens": K, "verifier": watching()}, "this engine lacks"),
        ({"drafter": hidden, "num_draft_tokens": K}, r"needs an acceptance estimator; pass verifier="),
        ({"drafter": greedy, "num_draft_tokens": K, "verifier": watching()}, "set a temperature above 0"),
    ]:
        with pytest.raises(ValueError, match=why):
            HFEngine(reasoner_target, policy=POLICY, **options)


@pytest.mark.slow
def test_an_adaptive_engine_has_one_estimator(reasoner_target, tmp_path):
    write_head(tmp_path / "head", reasoner_target.identity)
    write_json(tmp_path / "head" / "policy.json", POLICY.to_json())
    adaptive = build_engine(
        reasoner_target, head=tmp_path / "head", sampling=SAMPLED, drafter=EAGLE, adaptive=AdaptiveConfig(enabled=True)
    )
    assert adaptive.acceptance_reader.estimator is adaptive.verifier.estimator
    assert adaptive.verifier.costs is not None
    outputs = adaptive.generate(reasoner_requests(reasoner_target, 3))
    fired = [output.exit for output in outputs if output.exit is not None]
    assert fired
    assert all(set(exit.signals) == {*LEARNED, "acceptance", "entropy"} for exit in fired)


def test_a_head_folder_whose_policy_reads_it(reasoner_target, tmp_path):
    folder = tmp_path / "head"
    head_sha256 = write_head(folder, reasoner_target.identity)
    write_json(folder / "policy.json", POLICY.to_json())
    loaded = build_engine(reasoner_target, head=folder, sampling=SAMPLED, drafter=EAGLE)
    assert loaded.drafter.states.delay == K + 1
    assert loaded.verifier.costs is None
    for kind in ("none", "ngram"):
        with pytest.raises(ValueError, match=rf"the drafter {kind} has no .*`acceptance`.*set drafter.kind eagle3"):
            build_engine(reasoner_target, head=folder, sampling=SAMPLED, drafter=DrafterConfig(kind=kind))
    with pytest.raises(ValueError, match="set a temperature above 0"):
        build_engine(reasoner_target, head=folder, sampling=Sampling(temperature=0.0), drafter=EAGLE)
    certificate = {"head_sha256": head_sha256, "sampling": {"temperature": 0.8, "top_k": 0, "top_p": 1.0}}
    write_json(folder / "policy.json", POLICY.with_certificate(certificate).to_json())
    with pytest.warns(UserWarning, match="certificate does not hold here: it reads the signal acceptance"):
        build_engine(reasoner_target, head=folder, sampling=SAMPLED, drafter=EAGLE)
    states = replace(loaded.drafter.states, delay=7)
    write_json(folder / "policy.json", POLICY.with_certificate(certificate | {"draft": states.to_json()}).to_json())
    with pytest.warns(UserWarning, match="move with traffic"):
        as_certified = build_engine(reasoner_target, head=folder, sampling=SAMPLED, drafter=EAGLE)
    assert as_certified.drafter.states == states
    other = replace(states, drafter="another").to_json()
    write_json(folder / "policy.json", POLICY.with_certificate(certificate | {"draft": other}).to_json())
    refused = pytest.raises(ValueError, match=r"acceptance of a drafter, .*another.* gives .*delay=7")
    with pytest.warns(UserWarning, match="move with traffic"), refused:
        build_engine(reasoner_target, head=folder, sampling=SAMPLED, drafter=EAGLE)
