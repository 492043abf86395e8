"""Speculation with a draft model: invisible when greedy, lossless when sampled, and blind to batch and acceptance."""

import copy
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from ace_learn.engines.draft_model import ModelDrafter
from ace_learn.engines.sampling import Sampling
from ace_learn.exit.policy import ExitPolicy
from ace_learn.exit.tracker import ExitTracker, Hidden, Rows
from ace_learn.models.target import Target
from ace_learn.speculation.acceptance import emit, standard
from ace_learn.speculation.noise import Stream, gumbel, uniform
from ace_learn.thinking import BoundaryTables, ThinkMarkers
from tests.engines.test_hf import engine, parity_failures, requests
from tests.helpers.targets import tiny_model, tiny_target


@cache
def draft_of(target, kind):
    """The target itself, the target with noise on its weights, or a model that has nothing to do with it."""
    if kind == "copy":
        return target
    if kind == "noised":
        model = copy.deepcopy(target.model)
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=draw))
    else:  # of another architecture, and with a padded vocabulary
        model = tiny_model("llama", spread=0.3, layers=2, vocab_size=target.vocab_size + 5)
    return Target(model, target.tokenizer, target.markers, name=kind)


@pytest.mark.parametrize(
    ("kind", "draft_tokens", "batch_size"),
    [
        pytest.param(kind, k, b, marks=() if (kind, k, b) == ("noised", 4, 8) else pytest.mark.slow)
        for kind, k, b in product(("copy", "noised", "unrelated"), (1, 4, 8), (1, 8))
    ],
)
def test_a_draft_model_does_not_change_greedy_output(reasoner_target, kind, draft_tokens, batch_size):
    failures = parity_failures(
        reasoner_target,
        draft=draft_of(reasoner_target, kind),
        draft_tokens=draft_tokens,
        batch_size=batch_size,
        count=24 if batch_size > 1 else 8,
        accepts=kind != "unrelated",
    )
    assert failures == []


@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_a_greedy_copy_is_always_accepted(draft_tokens):
    """Its cache, found by position, then holds just what the target has."""
    target = tiny_target("llama", spread=0.5)
    outputs = engine(target, exits=False, draft=target, draft_tokens=draft_tokens, batch_size=5).generate(requests(12))
    for output in outputs:
        assert output.stats.drafted - output.stats.accepted <= 2 * draft_tokens  # the request and its thinking end
    assert sum(o.stats.accepted for o in outputs) > 100


def test_sampled_output_does_not_depend_on_the_batch():
    target, draft = tiny_target("llama", spread=0.5), tiny_target("qwen2", spread=0.4)
    sampling, asked = Sampling(temperature=1.2, top_k=20, top_p=0.95, seed=3), requests(10)
    runs = [
        engine(target, draft=draft, draft_tokens=3, batch_size=size, sampling=sampling).generate(asked)
        for size in (1, 4, 10)
    ]
    assert [o.token_ids for o in runs[0]] == [o.token_ids for o in runs[1]] == [o.token_ids for o in runs[2]]
    assert sum(o.stats.accepted for o in runs[0]) > 20
    assert any(o.exit for o in runs[0])


def test_a_draft_model_with_a_shorter_context_stops_drafting():
    target, draft = tiny_target("llama", spread=0.5), tiny_target("llama", spread=0.5)
    asked = requests(8, max_new_tokens=60)
    plain = engine(target, exits=False).generate(asked)
    draft.context_length = 40
    outputs = engine(target, exits=False, draft=draft, draft_tokens=4).generate(asked)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    for request, output in zip(asked, outputs, strict=True):
        assert output.stats.drafted <= 4 * max(0, 40 - len(request.prompt_ids))
    assert sum(o.stats.accepted for o in outputs) > 40


def test_drafts_follow_their_request_through_swaps_and_replaced_tokens():
    """What a session proposes is what a fresh one proposes for the same tokens."""
    draft = tiny_target("llama", spread=0.5)
    drafter = ModelDrafter(draft, sampling=Sampling(seed=2), vocab_size=draft.vocab_size)
    keys = torch.tensor([7, 8, 9])
    session = drafter.start(keys)
    sequences = [[1, 20, 33], [2, 30, 31, 32, 33], [5, 9]]
    first = session.draft(sequences, [3, 3, 3]).tokens.tolist()
    taken = [sequences[0] + first[0][:2] + [40], sequences[1] + [41], sequences[2] + first[2] + [42]]
    session.swap(0, 2)
    again = session.draft([taken[2], taken[1]], [2, 1])  # the first request has finished
    for row, (request, ids) in enumerate(((2, taken[2]), (1, taken[1]))):
        fresh = drafter.start(keys[request : request + 1]).draft([ids], [2])
        width = int(again.num_drafted[row])
        assert again.tokens[row, :width].tolist() == fresh.tokens[0, :width].tolist()
        assert torch.allclose(again.probabilities[row, :width], fresh.probabilities[0, :width], atol=1e-5)


# The joint law of tokens and exits, by enumeration: tokens a, b, a paragraph break, the think end, the think start.
TEXTS = ["a", "b", "\n\n", "</think>", "<think>"]
BREAK, END, START = 2, 3, 4
SIZE, LENGTH, COUNT = 5, 4, 200_000
SIGNAL = torch.tensor([0.9, 0.1, 0.6, 0.0, 0.0])
THRESHOLD, EWMA = 0.57, 0.5
TARGET = torch.tensor(
    [
        [0.30, 0.25, 0.35, 0.10, 0.00],
        [0.20, 0.25, 0.45, 0.10, 0.00],
        [0.45, 0.30, 0.10, 0.15, 0.00],
        [0.40, 0.30, 0.20, 0.10, 0.00],
        [0.50, 0.25, 0.20, 0.05, 0.00],
    ]
)
DRAFT = TARGET.roll(1, dims=0) * 0.7 + 0.06  # it drafts what the target never says, too


class TokenSignal:
    def __call__(self, scalars, candidates, hidden):
        return hidden.last.expand(-1, -1, 4)


def exit_of(tokens):
    """Output tokens before the forced think end, or -1: the rule, read slowly."""
    smoothed, fresh = 0.0, True
    for i, token in enumerate(tokens):
        if token == END:
            return -1
        value = float(SIGNAL[token])
        smoothed, fresh = value if fresh else (1 - EWMA) * smoothed + EWMA * value, False
        breaks = token == BREAK and i > 0 and tokens[i - 1] != BREAK  # white space at the start closes nothing
        if breaks and smoothed > THRESHOLD:
            return i + 1
    return -1


def exact_law():
    """Probability of each (first tokens, exit position)."""
    law = {}
    for tokens in product(range(SIZE), repeat=LENGTH):
        out = exit_of(tokens)
        probability = float(TARGET[START, tokens[0]])
        for i in range(1, LENGTH):
            probability *= float(tokens[i] == END) if out == i else float(TARGET[tokens[i - 1], tokens[i]])
        law[tokens, out if 0 <= out < LENGTH else -1] = probability
    return law


def tracker_for(count, draft_tokens):
    policy = ExitPolicy(predicate="all", thresholds={"confidence": THRESHOLD}, ewma=EWMA, smooth_over="tokens")
    tracker = ExitTracker(
        markers=ThinkMarkers((START,), (END,)), tables=BoundaryTables.from_texts(TEXTS), policy=policy,
        signaller=TokenSignal(), num_slots=count, window=2 * (draft_tokens + 1), device=torch.device("cpu"),
    )  # fmt: skip
    on = torch.ones(count, dtype=torch.bool)
    tracker.admit(torch.arange(count), torch.ones(count, dtype=torch.long), in_think=on, armed=on)
    return tracker


def decode(draft_tokens, *, subtract_p=True, seed=0):
    """(First tokens, exit position) of many requests, with the engine's own drafter, tracker and acceptance."""
    keys = torch.arange(COUNT)
    drafter = ModelDrafter(tiny_target(layers=1), sampling=Sampling(seed=seed), vocab_size=SIZE)
    tracker = tracker_for(COUNT, draft_tokens)
    tokens = torch.zeros(COUNT, LENGTH + draft_tokens + 1, dtype=torch.long)
    noise = gumbel(seed=seed, request=keys, position=torch.ones(COUNT, 1, dtype=torch.long), size=SIZE)[:, 0]
    tokens[:, 0] = (TARGET[START].log() + noise).argmax(-1)
    length, exits = torch.ones(COUNT, dtype=torch.long), torch.full((COUNT,), -1)
    ahead = torch.arange(draft_tokens + 1)
    while int(length.min()) < LENGTH:
        active = (length < LENGTH).nonzero()[:, 0]
        base = length[active]
        rows, laws = [tokens[active, base - 1]], []
        for k in range(draft_tokens):
            token, law = drafter.draw(DRAFT[rows[-1]].log(), keys[active], base + 1 + k)
            rows.append(token)
            laws.append(law)
        row_tokens = torch.stack(rows, dim=1)
        none = torch.zeros(row_tokens.shape)
        hidden = Hidden(SIGNAL[row_tokens][..., None], none[..., None][..., :0])
        forced = tracker.observe(active, Rows(row_tokens, base[:, None] + ahead, none, none, hidden)).forced
        verified = standard(
            target=TARGET[row_tokens],
            drafted=row_tokens[:, 1:],
            num_drafted=torch.full_like(base, draft_tokens),
            draft=torch.stack(laws, dim=1) if laws else None,
            accept_noise=uniform(
                seed=seed, request=keys[active], position=base[:, None] + 1 + ahead[:-1], stream=Stream.ACCEPT, size=1
            )[..., 0],
            forced=forced,
        )
        if not subtract_p:
            final = TARGET[row_tokens[torch.arange(len(active)), verified.num_accepted]]
            verified = verified._replace(final=final)
        last = (base + 1 + verified.num_accepted)[:, None]
        drawn = gumbel(seed=seed, request=keys[active], position=last, size=SIZE)[:, 0]
        window = emit(verified, row_tokens[:, 1:], drawn)
        tokens[active[:, None], base[:, None] + ahead] = window.tokens
        fires = (forced == END) & (ahead <= window.num_accepted[:, None])
        first = fires.any(1) & (exits[active] < 0)
        exits[active] = torch.where(first, base + fires.long().argmax(1), exits[active])
        length[active] = base + 1 + window.num_accepted
    exits[exits >= LENGTH] = -1
    return torch.cat((tokens[:, :LENGTH], exits[:, None]), dim=1)


def p_value(outcomes):
    """Chi-square of outcomes against the exact law; what is too rare is pooled."""
    law = exact_law()
    seen, counts = torch.unique(outcomes, dim=0, return_counts=True)
    observed = {(tuple(row[:-1]), row[-1]): n for row, n in zip(seen.tolist(), counts.tolist(), strict=True)}
    assert all(law.get(outcome, 0.0) > 0.0 for outcome in observed)
    common = [outcome for outcome, probability in law.items() if probability * COUNT >= 20]
    got = np.array([observed.get(outcome, 0) for outcome in common] + [0.0])
    want = np.array([law[outcome] * COUNT for outcome in common] + [0.0])
    got[-1], want[-1] = COUNT - got.sum(), COUNT - want.sum()
    return chisquare(got, want).pvalue


@pytest.mark.parametrize("draft_tokens", [0, 1, 3])
def test_the_joint_law_of_tokens_and_exits_is_the_same_with_a_drafter(draft_tokens):
    outcomes = decode(draft_tokens)
    assert 0.2 < float((outcomes[:, -1] >= 0).float().mean()) < 0.8
    assert p_value(outcomes) > 1e-3


def test_the_same_check_finds_a_draft_law_that_is_not_subtracted():
    """Drawing a rejected draft's replacement from q instead of norm(max(0, q - p)) biases the output."""
    assert p_value(decode(1, subtract_p=False)) < 1e-9
