"""The slot cache: ragged positions, overwritten drafts, forks and swaps leave the model's logits as they should be."""

import torch

from tests.helpers.targets import tiny_model, tiny_target


def logits_of(target, ids):
    """Logits of a whole sequence by the stock model without any cache."""
    with torch.inference_mode():
        return tiny_model(target.identity.name.removeprefix("tiny-"), spread=0.3)(torch.tensor([ids])).logits[0]


def feed(target, cache, rows, starts):
    tokens = torch.tensor(rows)
    positions = torch.tensor(starts)[:, None] + torch.arange(tokens.shape[1])
    return target.forward(tokens, positions, cache, longest=int(positions.max()) + 1)


def test_ragged_rows_and_overwritten_drafts():
    for architecture in ("qwen3", "llama", "qwen2"):
        target = tiny_target(architecture, spread=0.3)
        cache = target.new_cache(2)
        a, b = [1, 9, 20, 33, 4, 7, 8, 30], [2, 9, 9, 40, 41]
        feed(target, cache, [a[:3], b[:3]], [0, 0])
        feed(target, cache, [[33, 50, 51], [40, 41, 49]], [3, 3])  # drafts behind the first token
        out = feed(target, cache, [[4, 7], [41, 12]], [4, 4])  # written over the rejected ones
        assert torch.allclose(out.logits[0], logits_of(target, a)[4:6], atol=1e-4)
        assert torch.allclose(out.logits[1, 0], logits_of(target, b)[4], atol=1e-4)


def test_swap_and_fork():
    target = tiny_target(spread=0.3)
    cache = target.new_cache(2)
    a, b = [1, 9, 20, 33], [2, 8, 30, 40]
    feed(target, cache, [a, b], [0, 0])
    cache.swap(0, 1)
    out = feed(target, cache, [[5]], [4])  # row 0 is b now, and alone
    assert torch.allclose(out.logits[0, 0], logits_of(target, [*b, 5])[-1], atol=1e-4)
    fork = cache.fork(torch.tensor([1, 1, 0]), 3)
    out = feed(target, fork, [[6], [7], [8]], [3, 3, 3])
    for row, ids in enumerate(([*a[:3], 6], [*a[:3], 7], [*b[:3], 8])):
        assert torch.allclose(out.logits[row, 0], logits_of(target, ids)[-1], atol=1e-4)


def test_growth_keeps_what_was_written():
    target = tiny_target(spread=0.3)
    cache = target.new_cache(1)
    ids = torch.randint(0, 50, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    for start in range(0, 150, 30):
        out = feed(target, cache, [ids[start : start + 30]], [start])
    assert cache.capacity >= 150
    assert torch.allclose(out.logits[0], logits_of(target, ids)[120:], atol=1e-4)


def test_hidden_states_are_the_models_own():
    target = tiny_target("llama", spread=0.3)
    ids = [1, 9, 20, 33]
    out = target.forward(torch.tensor([ids]), torch.arange(4)[None], target.new_cache(1), longest=4, aux_layers=(1, 3))
    with torch.inference_mode():
        stock = tiny_model("llama", spread=0.3)(torch.tensor([ids]), output_hidden_states=True)
    assert torch.allclose(out.last[0], stock.hidden_states[-1][0], atol=1e-5)  # behind the final norm
    assert torch.allclose(out.aux[0, :, :32], stock.hidden_states[1][0], atol=1e-5)  # what enters layer 1
    assert torch.allclose(out.aux[0, :, 32:], stock.hidden_states[3][0], atol=1e-5)
    last = target.forward(torch.tensor([ids]), torch.arange(4)[None], target.new_cache(1), longest=4, last_only=True)
    assert torch.allclose(last.logits[0, 0], stock.logits[0, -1], atol=1e-4)
    assert last.last.shape == (1, 1, 32)
