"""Counter-based noise: independent of batching, uniform, and different where any part of its key differs."""

import math

import pytest
import torch
from scipy.stats import kstest

from ace_learn.speculation.noise import Stream, gumbel, uniform


def draws(request, position, *, seed=3, stream=Stream.TOKEN, size=4):
    return uniform(seed=seed, request=torch.tensor(request), position=torch.tensor(position), stream=stream, size=size)


def test_a_draw_depends_on_its_key_alone():
    batch = draws([5, 6], [[10, 11], [11, 12]])
    assert torch.equal(batch[1, 0], draws([6], [[11]])[0, 0])
    assert torch.equal(batch[..., :2], draws([5, 6], [[10, 11], [11, 12]], size=2))


def test_every_part_of_the_key_matters():
    base = draws([5], [[10]])
    others = [
        draws([6], [[10]]),
        draws([5], [[11]]),
        draws([5], [[10]], seed=4),
        draws([5], [[10]], stream=Stream.ACCEPT),
        draws([5], [[10]], stream=Stream.DRAFT),
    ]
    assert all(not torch.isclose(base, other).any() for other in others)


def test_draws_are_uniform_and_gumbel():
    request, position = torch.arange(20), torch.arange(50).repeat(20, 1)
    values = uniform(seed=0, request=request, position=position, stream=Stream.TOKEN, size=20).flatten()
    assert kstest(values.numpy(), "uniform").pvalue > 1e-3
    assert values.min() > 0
    assert values.max() < 1
    noise = gumbel(seed=0, request=request, position=position, size=20).flatten()
    assert kstest(noise.numpy(), "gumbel_r").pvalue > 1e-3


def test_neighbouring_positions_are_uncorrelated():
    values = uniform(
        seed=0, request=torch.arange(200), position=torch.arange(100).repeat(200, 1), stream=Stream.TOKEN, size=1
    )[..., 0]
    along_positions = torch.corrcoef(torch.stack((values[:, :-1].flatten(), values[:, 1:].flatten())))[0, 1]
    along_requests = torch.corrcoef(torch.stack((values[:-1].flatten(), values[1:].flatten())))[0, 1]
    assert abs(along_positions) < 0.03
    assert abs(along_requests) < 0.03


def test_stored_results_depend_on_these_draws():
    """The draws of a stream never change: traces that were stored are replayed with them."""
    position = torch.tensor([[17]])
    values = [
        float(uniform(seed=7, request=torch.tensor([3]), position=position, stream=stream, size=1))
        for stream in (Stream.TOKEN, Stream.ACCEPT)
    ]
    assert values == [0.8070108415257111, 0.7352087355740768]
    noise = float(gumbel(seed=7, request=torch.tensor([3]), position=position, size=1))
    assert noise == pytest.approx(-math.log(-math.log(values[0])), rel=1e-15)
