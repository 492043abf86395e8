"""Speculation with EAGLE-3 and MTP: invisible when greedy, lossless when sampled, and blind to batch and acceptance."""

from functools import partial
from itertools import product

import pytest
import torch
from scipy.stats import chi2_contingency

from ace_learn.drafts.config import DraftShape
from ace_learn.drafts.draft import fresh_mtp
from ace_learn.engines import batch, hidden_drafter
from ace_learn.engines.hf import HFEngine
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.models.catch_up import catch_up, pieces
from tests.engines.test_hf import engine, parity_failures, reasoner_requests, requests
from tests.helpers.drafts import KINDS, drafter_of, random_draft, trained_draft
from tests.helpers.targets import tiny_target


@pytest.mark.parametrize(
    ("kind", "trained", "draft_tokens"),
    [
        pytest.param(kind, trained, k, marks=() if (kind, trained, k) == ("eagle3", False, 4) else pytest.mark.slow)
        for kind, trained, k in product(KINDS, (True, False), (1, 4, 8))
    ],
)
def test_a_draft_module_does_not_change_greedy_output(reasoner_target, kind, trained, draft_tokens):
    if trained:
        draft = trained_draft(reasoner_target, kind, tuple(reasoner_requests(reasoner_target, 24)))
    else:
        draft = random_draft(reasoner_target, kind)
    failures = parity_failures(
        reasoner_target, draft=draft, draft_tokens=draft_tokens, batch_size=8, count=24 if trained else 8,
        accepts=trained,
    )  # fmt: skip
    assert failures == []


@pytest.mark.parametrize("experts", [0, None])
def test_a_block_of_qwen3_next_for_its_own_family_does_not_change_greedy_output(experts):
    target = tiny_target("qwen3_next", spread=0.3)
    draft = fresh_mtp(DraftShape(style="qwen3_next", experts=experts), target, signals=()).eval()
    asked = requests(10, max_new_tokens=60)
    plain = engine(target).generate(asked)
    speculated = engine(target, draft=draft, draft_tokens=3, batch_size=4).generate(asked)
    assert [o.token_ids for o in speculated] == [o.token_ids for o in plain]
    assert sum(o.stats.accepted for o in speculated) > 0
    assert sum(o.stats.drafted - o.stats.accepted for o in speculated) > 50


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_output_does_not_depend_on_the_batch(kind):
    target = tiny_target("llama", spread=0.5)
    draft = random_draft(target, kind)
    sampling, asked = Sampling(temperature=1.2, top_k=20, top_p=0.95, seed=3), requests(10, max_new_tokens=50)
    runs = [
        engine(target, draft=draft, draft_tokens=3, batch_size=size, sampling=sampling).generate(asked)
        for size in (1, 4, 10)
    ]
    assert [o.token_ids for o in runs[0]] == [o.token_ids for o in runs[1]] == [o.token_ids for o in runs[2]]
    assert sum(o.stats.accepted for o in runs[0]) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_output_has_the_targets_law(kind):
    """The first tokens of many samples, with and without a draft that proposes other tokens than the target."""
    target, count = tiny_target("llama", spread=0.5), 3000
    sampling = Sampling(temperature=1.5, top_k=4, seed=1)
    asked = [Request(key=i, prompt_ids=(30, 31, 3), max_new_tokens=4) for i in range(count)]
    speculated = engine(
        target, exits=False, draft=random_draft(target, kind), draft_tokens=3, batch_size=count, sampling=sampling
    ).generate(asked)
    other = Sampling(temperature=1.5, top_k=4, seed=2)
    plain = engine(target, exits=False, batch_size=count, sampling=other).generate(asked)
    assert sum(o.stats.accepted for o in speculated) > 0.1 * count
    texts = [[o.token_ids for o in outputs] for outputs in (speculated, plain)]
    common = [text for text in set(texts[1]) if texts[1].count(text) >= 10]
    table = torch.tensor([[outputs.count(text) for text in common] for outputs in texts])
    rest = count - table.sum(1, keepdim=True)
    assert len(common) > 20
    assert chi2_contingency(torch.cat((table, rest), dim=1).numpy()).pvalue > 1e-3


def slow_drafts(draft, target, ids, count):
    """Greedy drafts for a sequence, with nothing kept: whole sequences through target and draft."""
    tokens, places = torch.tensor([ids]), torch.arange(len(ids))[None]
    taps = draft.taps(target.identity.num_layers)
    seen = target.forward(tokens, places, target.new_cache(1), longest=len(ids), aux_layers=taps).aux[:, :-1]
    with torch.inference_mode():
        cache, rows = draft.new_cache(1), len(ids) - 1
        out = draft.decode(tokens[:, 1:], draft.fuse(seen), places[:, :rows], cache, longest=rows)
        states, drafts = out.read[0], []
        for ahead in range(count):
            drafts.append(int(draft.full_logits(out.read[:, -1:]).argmax()))
            place = torch.tensor([[rows + ahead]])
            out = draft.decode(
                torch.tensor([[drafts[-1]]]), out.fed_back[:, -1:], place, cache, longest=rows + ahead + 1
            )
    return drafts, states


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_tokens", [16_384, 7])
def test_drafts_and_states_are_those_of_whole_sequences(kind, max_tokens, monkeypatch):
    """Whatever was accepted, rejected, swapped or skipped before, and however the prompts were cut into pieces."""
    monkeypatch.setattr(hidden_drafter, "pieces", partial(pieces, max_tokens=max_tokens))
    monkeypatch.setattr(batch, "catch_up", partial(catch_up, max_tokens=max_tokens))
    target = tiny_target("qwen3", spread=0.5)
    draft, k = random_draft(target, kind), 3
    drafter = drafter_of(draft, target, sampling=Sampling(temperature=0.0), draft_tokens=k)
    given = []

    class Spy:
        taps, states = drafter.taps, drafter.states

        def start(self, keys):
            session = drafter.start(keys)
            propose = session.draft

            def draft(sequences, room):
                drafts = propose(sequences, room)
                given.extend(
                    (list(ids), drafts.tokens[i, : room[i]].tolist(), drafts.states[i])
                    for i, ids in enumerate(sequences)
                )
                return drafts

            session.draft = draft
            return session

    asked = requests(7, max_new_tokens=40)
    sampling = Sampling(temperature=0.7, seed=4)
    HFEngine(target, sampling=sampling, drafter=Spy(), num_draft_tokens=k, batch_size=7).generate(asked)
    assert len(given) > 150
    assert any(not drafts for _, drafts, _ in given)
    for ids, drafts, states in given[::5]:
        expected, of_rows = slow_drafts(draft, target, ids, k)
        assert drafts == expected[: len(drafts)]
        known = min(k + 1, len(of_rows))
        assert torch.allclose(states[-known:], of_rows[-known:], atol=1e-4)
