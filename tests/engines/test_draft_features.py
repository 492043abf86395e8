"""Signals that read the drafter's hidden state: captured as they are read live, whatever is drafted or accepted."""

import pytest
import torch

from ace_learn.engines.hf import HeadSignaller, HFEngine
from ace_learn.engines.loading import load_drafter
from ace_learn.engines.sampling import Sampling
from ace_learn.exit.policy import ExitPolicy
from ace_learn.features import FeatureSpec, FeatureStore
from ace_learn.heads import HeadConfig, SignalHead
from ace_learn.labels.build import BuildConfig, FeatureConfig, build_dataset
from ace_learn.models.draft_files import save_draft, weights_sha256
from ace_learn.models.target import EMBEDDED, TargetConfig
from ace_learn.speculation.drafters import DrafterConfig, DraftStates, NgramDrafter
from tests.engines.test_hf import reasoner_requests
from tests.engines.test_hidden_drafter import slow_drafts
from tests.helpers.drafts import KINDS, drafter_of, random_draft

GREEDY = Sampling(temperature=0.0)
K = 4


def head_of(target, states):
    """A head that swings with the drafter's state, which is all that it reads."""
    spec = FeatureSpec(sources=("draft",), hidden_size=target.identity.hidden_size, aux_layers=(), draft=states)
    torch.manual_seed(2)
    head = SignalHead(HeadConfig(arch="linear"), spec.size)
    with torch.no_grad():
        head.layers[0].weight.normal_(std=0.3)
    return HeadSignaller(head, spec, target.device)


def engine(target, draft, *, draft_tokens, exits=True):
    drafter = drafter_of(draft, target, sampling=GREEDY, draft_tokens=K)
    return HFEngine(
        target,
        sampling=GREEDY,
        policy=ExitPolicy(predicate="all", thresholds={"consistency": 0.6}, ewma=0.7) if exits else None,
        signaller=head_of(target, drafter.states) if exits else None,
        drafter=drafter,
        num_draft_tokens=draft_tokens,
        batch_size=8,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_exits_by_the_drafters_state_do_not_depend_on_what_is_drafted(reasoner_target, kind):
    """Drafts of 0, 2 and 4 tokens: the same state is read, and so the same exits and outputs come out."""
    draft, asked = random_draft(reasoner_target, kind), reasoner_requests(reasoner_target, 5)
    runs = [engine(reasoner_target, draft, draft_tokens=k).generate(asked) for k in (0, 2, K)]
    assert sum(o.exit is not None for o in runs[0]) >= 3
    assert sum(o.stats.drafted for o in runs[0]) == 0
    for run in runs[1:]:
        assert sum(o.stats.drafted for o in run) > 60
        assert [o.token_ids for o in run] == [o.token_ids for o in runs[0]]
        for ours, theirs in zip(run, runs[0], strict=True):
            assert (ours.exit is None) == (theirs.exit is None)
            if ours.exit is not None and theirs.exit is not None:
                assert ours.exit.output_index == theirs.exit.output_index
                assert ours.exit.signals == pytest.approx(theirs.exit.signals, abs=1e-3, nan_ok=True)


@pytest.mark.parametrize("draft_tokens", [0, K])
def test_captured_rows_are_the_states_of_whole_sequences(reasoner_target, draft_tokens):
    draft, asked = random_draft(reasoner_target, "eagle3"), reasoner_requests(reasoner_target, 2)
    rollouts = engine(reasoner_target, draft, draft_tokens=draft_tokens, exits=False).rollout(asked, "all")
    assert rollouts.rows.draft.shape[1] == 128
    for i, (request, output) in enumerate(zip(asked, rollouts.outputs, strict=True)):
        ids = [*request.prompt_ids, *output.token_ids]
        _, states = slow_drafts(draft, reasoner_target, ids, 1)
        mine = rollouts.rows.select(rollouts.rows.request == i)
        places = len(request.prompt_ids) + mine.output_index
        assert len(places) > 20
        assert torch.allclose(mine.draft, states[places - (K + 1)], atol=1e-3)


def test_a_data_set_with_the_drafters_states(reasoner_target, tmp_path):
    """Its traces are those of a build without a drafter, and it says which drafter it is and how late."""
    (tmp_path / "draft").mkdir()
    save_draft(tmp_path / "draft", random_draft(reasoner_target, "eagle3"), reasoner_target.identity)
    drafter = DrafterConfig(kind="eagle3", model=str(tmp_path / "draft"), draft_tokens=3)

    def build(name, sources, drafter):
        config = BuildConfig(
            target=TargetConfig(model=EMBEDDED, dtype="float32", device="cpu"), output=tmp_path / name,
            splits={"train": 2, "validation": 1}, max_new_tokens=300, max_answer_tokens=30,
            features=FeatureConfig(sources=sources, drafter=drafter),
        )  # fmt: skip
        return FeatureStore(build_dataset(config))

    with_draft = build("with", ("target_last", "draft"), drafter)
    without = build("without", ("target_last",), DrafterConfig())
    assert with_draft.spec.draft == DraftStates(size=128, delay=4, drafter=weights_sha256(tmp_path / "draft"))
    rows = with_draft.rows("train")
    assert torch.equal(with_draft.gather(rows, ("target_last",)), without.gather(rows, ("target_last",)))
    states = with_draft.gather(rows, ("draft",))
    assert states.shape == (len(rows), 128)
    assert float(states.std(dim=0).mean()) > 0.1


def test_what_cannot_be_is_refused(reasoner_target, tmp_path):
    draft = random_draft(reasoner_target, "eagle3")
    drafter = drafter_of(draft, reasoner_target, sampling=GREEDY, draft_tokens=K)
    other = DraftStates(size=128, delay=K + 1, drafter="another")
    options = {"policy": ExitPolicy(predicate="all", thresholds={"consistency": 0.6}), "num_draft_tokens": K}
    head = head_of(reasoner_target, other)
    with pytest.raises(ValueError, match=r"the head reads .*another.* gives .*test"):
        HFEngine(reasoner_target, signaller=head, drafter=drafter, **options)
    with pytest.raises(ValueError, match="gives None"):
        HFEngine(reasoner_target, signaller=head, drafter=NgramDrafter(), **options)
    with pytest.raises(ValueError, match="at most 4 tokens can be drafted, not 5"):
        HFEngine(reasoner_target, drafter=drafter, num_draft_tokens=K + 1)
    with pytest.raises(ValueError, match=r"ngram has no hidden states.*eagle3 or mtp"):
        load_drafter(DrafterConfig(kind="ngram"), reasoner_target, GREEDY, states_delay=K + 1)
    save_draft(tmp_path, draft, reasoner_target.identity)
    with pytest.raises(ValueError, match="holds a draft of kind eagle3, not mtp"):
        load_drafter(DrafterConfig(kind="mtp", model=str(tmp_path)), reasoner_target, GREEDY)
    with pytest.raises(ValueError, match="go together"):
        FeatureConfig(sources=("draft",))
    with pytest.raises(ValueError, match="go together"):
        FeatureConfig(drafter=DrafterConfig(kind="eagle3", model="x"))
