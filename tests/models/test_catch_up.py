"""Feeding a cache in slices and pieces leaves the same logits and the same cache as feeding it at once."""

import pytest
import torch

from ace_learn.models.catch_up import catch_up
from tests.helpers.targets import tiny_target
from tests.models.test_cache import feed, logits_of

SEQUENCES = [[1, 9, 20, 33, 4, 7, 8, 30], [2, 9, 9], [5], [3, 40, 41, 42, 43]]


@pytest.mark.parametrize("max_tokens", [1, 3, 8, 16, 100])
def test_slices_and_pieces(max_tokens):
    target = tiny_target(spread=0.3)
    cache = target.new_cache(4)
    logits = catch_up(target, cache, SEQUENCES, [8, 3, 1, 5], max_tokens=max_tokens)
    for row, ids in enumerate(SEQUENCES):
        assert torch.allclose(logits[row], logits_of(target, ids)[-1], atol=1e-4)
    cache.swap(0, 3)  # a request that ended at its first token
    grown = [[*SEQUENCES[3], 6, 7], [*SEQUENCES[1], 8], [*SEQUENCES[2], 9, 2, 3]]
    logits = catch_up(target, cache, [[6, 7], [8], [9, 2, 3]], [7, 4, 4], max_tokens=max_tokens)
    for row, ids in enumerate(grown):
        assert torch.allclose(logits[row], logits_of(target, ids)[-1], atol=1e-4)
    last = feed(target, cache, [[11], [12], [13], [14]], [7, 4, 4, 8])  # the row put aside kept its contents
    assert torch.allclose(last.logits[3, 0], logits_of(target, [*SEQUENCES[0], 14])[-1], atol=1e-4)


def test_no_forward_exceeds_the_limit(monkeypatch):
    target, sizes = tiny_target(), []
    forward = target.forward

    def counting(tokens, *args, **options):
        sizes.append(tokens.numel())
        return forward(tokens, *args, **options)

    monkeypatch.setattr(target, "forward", counting)
    for limit in (16, 5):
        catch_up(target, target.new_cache(4), SEQUENCES, [8, 3, 1, 5], max_tokens=limit)
        assert max(sizes) == limit
        sizes.clear()
