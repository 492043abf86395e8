"""`standard` acceptance is lossless: hand-worked steps, and the law of its output over an enumerable vocabulary."""

import pytest
import torch
from scipy.stats import chisquare

from ace_learn.speculation.acceptance import emit, follow, standard
from ace_learn.speculation.noise import Stream, gumbel, uniform

P = torch.tensor([0.2, 0.8])
Q = torch.tensor([0.5, 0.5])


def step(q, p, drafted, u, num_drafted=None, forced=None):
    """One request; without noise the final token is the mode."""
    q, p = torch.as_tensor(q)[None], None if p is None else torch.as_tensor(p)[None]
    verified = standard(
        target=q,
        drafted=torch.tensor([drafted]),
        num_drafted=torch.tensor([len(drafted) if num_drafted is None else num_drafted]),
        draft=p,
        accept_noise=torch.tensor([u], dtype=torch.double),
        forced=None if forced is None else torch.tensor([forced]),
    )
    tokens = emit(verified, torch.tensor([drafted]), torch.zeros(1, q.shape[-1], dtype=torch.double)).tokens
    kept = int(verified.num_accepted[0]) + 1
    return tokens[0, :kept].tolist(), kept - 1


def test_by_hand():
    q = [[0.5, 0.5], [0.1, 0.9]]
    p = [[0.2, 0.8]]
    assert step(q, p, [1], [0.62]) == ([1, 1], 1)  # 0.62 < 0.5 / 0.8, bonus is the mode of q
    assert step(q, p, [1], [0.63]) == ([0], 0)  # rejected: max(0, q - p) = [0.3, 0]
    assert step(q, p, [0], [0.999]) == ([0, 1], 1)  # q / p = 2.5: always accepted
    assert step(q, None, [1], [0.49]) == ([1, 1], 1)  # a deterministic drafter: accepted with q_n
    assert step(q, None, [1], [0.51]) == ([0], 0)


def test_first_rejection_ends_the_window_and_missing_drafts_are_no_rejection():
    q = [[0.5, 0.5], [0.9, 0.1], [0.0, 1.0]]
    assert step(q, None, [0, 1], [0.1, 0.2]) == ([0, 0], 1)
    assert step(q, None, [0, 0], [0.1, 0.2]) == ([0, 0, 1], 2)
    assert step(q, None, [0, 0], [0.1, 0.2], num_drafted=1) == ([0, 0], 1)
    assert step(q, None, [0, 0], [0.1, 0.2], num_drafted=0) == ([0], 0)


@pytest.mark.parametrize("p", [None, [[0.3, 0.7]]])
def test_a_forced_row_is_a_one_hot_row(p):
    q, one_hot = [[0.5, 0.5], [1.0, 0.0]], [[0.0, 1.0], [1.0, 0.0]]
    for drafted, u, expected in (([1], 0.999, ([1, 0], 1)), ([0], 1e-9, ([1], 0))):
        assert step(one_hot, p, drafted, [u]) == expected
        assert step(q, p, drafted, [u], forced=[1, -1]) == expected
    assert step(q, p, [1], [1e-9], forced=[-1, 1]) == ([1, 1], 1)  # behind the accepted drafts, against the mode


def test_rows_with_one_possible_token_are_followed():
    choice, drafted = torch.tensor([[1, 2, 3]] * 4), torch.tensor([[1, 2], [1, 0], [0, 2], [1, 2]])
    window = follow(choice, drafted, torch.tensor([2, 2, 2, 1]))
    assert window.num_accepted.tolist() == [2, 1, 0, 1]
    kept = [row[: n + 1] for row, n in zip(window.tokens.tolist(), window.num_accepted.tolist(), strict=True)]
    assert kept == [[1, 2, 3], [1, 2], [1], [1, 2]]


def sampled(q, p, drafts, num_drafted=1):
    """Counts of the first emitted token over many requests."""
    count = len(drafts)
    request, position = torch.arange(count), torch.zeros(count, 1, dtype=torch.long)
    verified = standard(
        target=q.expand(count, 2, -1),
        drafted=drafts[:, None],
        num_drafted=torch.as_tensor(num_drafted).expand(count),
        draft=None if p is None else p.expand(count, 1, -1),
        accept_noise=uniform(seed=1, request=request, position=position, stream=Stream.ACCEPT, size=1)[..., 0],
    )
    noise = gumbel(seed=1, request=request, position=verified.num_accepted[:, None], size=len(q))[:, 0]
    return torch.bincount(emit(verified, drafts[:, None], noise).tokens[:, 0], minlength=len(q))


def expected(q, count):
    return (q.double() / q.double().sum() * count).numpy()


def test_output_law_is_the_targets():
    count = 200_000
    drafts = torch.multinomial(P, count, replacement=True)
    assert chisquare(sampled(Q, P, drafts), expected(Q, count)).pvalue > 1e-4
    q = torch.tensor([0.1, 0.2, 0.3, 0.4])
    drafts = torch.full((count,), 2)
    assert chisquare(sampled(q, None, drafts), expected(q, count)).pvalue > 1e-4


def test_the_same_check_finds_a_bias():
    """Trimming drafts by the probability of the sampled token biases the output to [.4, .6] (DESIGN 8)."""
    count = 200_000
    drafts = torch.multinomial(P, count, replacement=True)
    law = sampled(Q, P, drafts, num_drafted=(P[drafts] >= 0.5).long())
    assert law[0] / count == pytest.approx(0.4, abs=0.01)
    assert chisquare(law, expected(Q, count)).pvalue < 1e-9
