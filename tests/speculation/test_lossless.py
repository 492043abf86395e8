"""The law of what is emitted, over an enumerable vocabulary and a million samples of the engine's own parts.

Requests are decoded in pairs, so that one's drafts compete with the other's. Drafts, scores and exits depend on the
tokens before them; the joint law of the first tokens is compared with exact enumeration. The same check finds the
biases that adaptive verification invites.
"""

from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from ace_learn.speculation.acceptance import emit, verify
from ace_learn.speculation.adaptive import CostTables, allocate, choose_budget, fresh_scores
from ace_learn.speculation.noise import Stream, gumbel, uniform
from ace_learn.speculation.rules import AcceptanceConfig, kl_divergence, output_law

STANDARD = AcceptanceConfig()
PAIRS, LENGTH, K = 500_000, 3, 3
Q = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]], dtype=torch.double)
P = torch.tensor([[0.3, 0.5, 0.2], [0.3, 0.3, 0.4], [0.1, 0.4, 0.5]], dtype=torch.double)
SCORE = torch.tensor([[0.9, 0.6, 0.3], [0.8, 0.9, 0.2], [0.95, 0.9, 0.1]])
"""Predicted acceptance of slot k (row) behind each token (column)."""
COSTS = CostTables(draft=np.full(3, 0.2), verify=np.array([0.0, 0.9, 1.0, 1.35, 1.7, 2.05, 2.4, 2.75, 3.1]))


def by_case(function, *columns):
    """Applies a function of one case to many, once for each case that occurs."""
    table = torch.cat([column.reshape(len(column), -1).double() for column in columns], dim=1)
    cases, place = torch.unique(table, dim=0, return_inverse=True)
    return torch.tensor([function(case) for case in cases])[place]


def budgets(scores, costs):
    """Budget of every pair."""
    return by_case(lambda case: choose_budget(case.view(2, K).numpy(), np.array([K, K]), costs), scores)


def allocations(scores, budget):
    """Verified drafts of both requests of every pair."""
    full = torch.tensor([K, K])
    return by_case(lambda case: allocate(case[:-1].view(2, K), full, int(case[-1])).tolist(), scores, budget)


def must_follow(tokens):
    """The exit rule of this test: token 0 must follow where 2 follows 1, a function of the prefix."""
    fires = (tokens[..., 1:] == 2) & (tokens[..., :-1] == 1)
    return torch.where(fires, 0, -1)


def simulate(*, q=Q, p=P, score=SCORE, costs=COSTS, budget_from="fresh", exits=False, pairs=PAIRS):
    """First tokens of 2 x pairs requests; drafts are trimmed unless `budget_from` is None."""
    count, size, ahead = 2 * pairs, len(q), torch.arange(K + 1)
    keys = torch.arange(count)
    tokens = torch.zeros(count, 2 + LENGTH + K + 1, dtype=torch.long)  # two tokens of a prompt, 0 and 0
    length = torch.full((count,), 2)
    stale = torch.ones(pairs, 2, K)
    while int(length.min()) < 2 + LENGTH:
        length = length.clamp_max(2 + LENGTH)  # one that is ready goes on until its partner is
        position = length[:, None] + ahead
        drawn = gumbel(seed=1, request=keys, position=position[:, :-1], size=size, stream=Stream.DRAFT)
        rows = [tokens[keys, length - 1]]
        for k in range(K):
            rows.append((p[rows[-1]].log() + drawn[:, k]).argmax(-1))
        row_tokens = torch.stack(rows, dim=1)
        scores = torch.stack([score[k][rows[k]] for k in range(K)], dim=1).view(pairs, 2, K)
        if budget_from is None:
            counts = torch.full((count,), K)
        else:
            counts = allocations(scores, budgets(scores if budget_from == "current" else stale, costs)).flatten()
        forced = None
        if exits:
            forced = must_follow(torch.cat((tokens[keys, length - 2][:, None], row_tokens), dim=1))
        verified = verify(
            STANDARD,
            target=q[row_tokens],
            drafted=row_tokens[:, 1:],
            num_drafted=counts,
            draft=p[row_tokens[:, :-1]],
            accept_noise=uniform(seed=1, request=keys, position=position[:, :-1], stream=Stream.ACCEPT, size=1)[..., 0],
            forced=forced,
        )
        last = (length + verified.num_accepted)[:, None]
        window = emit(verified, row_tokens[:, 1:], gumbel(seed=1, request=keys, position=last, size=size)[:, 0])
        keep = ahead <= window.num_accepted[:, None]
        old = tokens.gather(1, position)
        tokens = tokens.scatter(1, position, torch.where(keep, window.tokens, old))
        length = length + window.num_accepted + 1
        decided = window.num_accepted + 1
        flat = scores.view(count, K)
        stale = (flat if budget_from == "stale" else fresh_scores(flat, decided)).view(pairs, 2, K)
    return tokens[:, 2 : 2 + LENGTH]


def exact_law(q, *, exits=False):
    """Probability of every sequence of first tokens."""
    law = torch.zeros([len(q)] * LENGTH, dtype=torch.double)
    for outcome in product(range(len(q)), repeat=LENGTH):
        sequence, probability = [0, 0, *outcome], 1.0
        for i in range(2, 2 + LENGTH):
            fires = exits and sequence[i - 1] == 2 and sequence[i - 2] == 1
            probability *= float(sequence[i] == 0) if fires else float(q[sequence[i - 1], sequence[i]])
        law[outcome] = probability
    return law.flatten()


def p_value(outcomes, law):
    size = round(len(law) ** (1 / LENGTH))
    place = (outcomes * size ** torch.arange(LENGTH - 1, -1, -1)).sum(-1)
    counts = torch.bincount(place, minlength=len(law)).double()
    assert bool((counts[law == 0] == 0).all())
    real = law > 0
    return chisquare(counts[real].numpy(), (law[real] * len(outcomes)).numpy()).pvalue


@pytest.mark.parametrize("budget_from", [pytest.param(None, marks=pytest.mark.slow), "fresh"])
@pytest.mark.parametrize("exits", [False, True])
def test_standard_emits_the_law_of_the_target(budget_from, exits):
    """With and without adaptive verification, with and without exits, on a million requests."""
    assert p_value(simulate(budget_from=budget_from, exits=exits), exact_law(Q, exits=exits)) > 1e-3


def test_the_tables_of_this_test_trim():
    """Budgets of all sizes occur, so that the law above is that of drafts which compete."""
    behind = torch.tensor(list(product(range(3), repeat=2 * K))).view(-1, 2, K)
    scores = SCORE[torch.arange(K), behind]
    assert set(budgets(scores, COSTS).tolist()) >= {1, 2, 3, 4, 6}


def test_a_budget_from_current_scores_is_biased():
    """DESIGN 8: p = [.5, .5], q = [.2, .8], a_1 = .7, a_2 = .95 behind a and .1 behind b: the output is [.3, .7]."""
    count = 1_000_000
    drafts = torch.randint(0, 2, (count, 2), generator=torch.Generator().manual_seed(0))
    costs = CostTables(draft=np.zeros(2), verify=np.array([0.0, 1.0, 1.9, 2.0]))
    second = [choose_budget(np.array([[0.7, a]]), np.array([2]), costs) for a in (0.95, 0.1)]
    assert second == [2, 0]
    law = first_token(torch.tensor([0.5, 0.5]), torch.tensor([0.2, 0.8]), drafts, torch.tensor(second)[drafts[:, 0]])
    assert law[0] / count == pytest.approx(0.3, abs=0.003)
    assert chisquare(law, np.array([0.2, 0.8]) * count).pvalue < 1e-9


def test_trimming_on_the_sampled_token_is_biased():
    """DESIGN 8: p = [.2, .8], q = [.5, .5], drafts with p_n < .5 trimmed: the output is [.4, .6]."""
    count, p = 1_000_000, torch.tensor([0.2, 0.8])
    drafts = torch.multinomial(p, count, replacement=True, generator=torch.Generator().manual_seed(0))[:, None]
    law = first_token(p, torch.tensor([0.5, 0.5]), drafts, (p[drafts[:, 0]] >= 0.5).long())
    assert law[0] / count == pytest.approx(0.4, abs=0.003)
    assert chisquare(law, np.array([0.5, 0.5]) * count).pvalue < 1e-9


def first_token(p, q, drafts, num_drafted, config=STANDARD):
    """Counts of the first emitted token."""
    count, width = drafts.shape
    keys, position = torch.arange(count), torch.arange(width).expand(count, -1)
    verified = verify(
        config,
        target=q.expand(count, width + 1, -1),
        drafted=drafts,
        num_drafted=num_drafted,
        draft=p.expand(count, width, -1),
        accept_noise=uniform(seed=1, request=keys, position=position, stream=Stream.ACCEPT, size=1)[..., 0],
    )
    noise = gumbel(seed=1, request=keys, position=verified.num_accepted[:, None], size=len(q))[:, 0]
    return torch.bincount(emit(verified, drafts, noise).tokens[:, 0], minlength=len(q)).numpy()


@pytest.mark.parametrize(
    "config",
    [
        AcceptanceConfig(),
        AcceptanceConfig(rule="typical", epsilon=0.25),
        AcceptanceConfig(rule="cactus", delta=0.1),
        AcceptanceConfig(rule="cactus_exact", delta=0.1),
    ],
    ids=lambda config: config.rule,
)
def test_every_rule_emits_the_law_that_is_enumerated_for_it(config):
    count, q = 1_000_000, torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.double)
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.double)
    drafts = torch.multinomial(p, count, replacement=True, generator=torch.Generator().manual_seed(0))[:, None]
    law = output_law(q[None], p[None], config)[0]
    counts = first_token(p, q, drafts, torch.ones(count, dtype=torch.long), config)
    real = law.numpy() > 0
    assert (counts[~real] == 0).all()
    assert chisquare(counts[real], law.numpy()[real] * count).pvalue > 1e-3
    if config.rule != "standard":
        assert float(kl_divergence(law, q)) > 0.01


SAME_Q, SAME_P = (torch.tensor([row, row], dtype=torch.double) for row in ([0.2, 0.8], [0.5, 0.5]))
TELLTALE = torch.tensor([[0.7, 0.7], [0.9, 0.9], [0.95, 0.1]])
STEEP = CostTables(draft=np.zeros(3), verify=np.array([0.0, 1.0, 2.0, 2.95, 3.8, 4.4, 5.0, 5.1, 5.2]))


@pytest.mark.parametrize(("budget_from", "is_lossless"), [("fresh", True), ("stale", False), ("current", False)])
def test_scores_of_drafts_whose_noise_is_drawn_again_may_not_choose_the_budget(budget_from, is_lossless):
    """Keyed by position, a redrafted token is the one that the last step's scores have seen."""
    outcomes = simulate(q=SAME_Q, p=SAME_P, score=TELLTALE, costs=STEEP, budget_from=budget_from, pairs=250_000)
    found = p_value(outcomes, exact_law(SAME_Q))
    assert found > 1e-3 if is_lossless else found < 1e-9
