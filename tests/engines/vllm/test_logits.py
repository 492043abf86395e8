from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ace_learn.engines.vllm.logits import allowed_ends, force_tokens, stops_on_device, stops_to_end


@pytest.mark.parametrize("temperature", [0.01, 1.0, 2.0])
def test_a_forced_row_is_one_hot_and_the_others_are_untouched(temperature):
    torch.manual_seed(0)
    logits = 30 * torch.randn(4, 9)
    logits[1] = -torch.inf
    before = logits.clone()
    forced = torch.tensor([-1, 2, 0, -1])
    assert force_tokens(logits, forced) is logits
    assert torch.equal(logits[[0, 3]], before[[0, 3]])
    assert torch.equal((logits / temperature).softmax(-1)[1:3], torch.eye(9)[[2, 0]])


def law(logits, temperature):
    return (logits.double() / temperature).softmax(-1)


def test_both_devices_do_the_same():
    draw = torch.Generator().manual_seed(5)
    logits = 4 * torch.randn(64, 8, generator=draw)
    logits[torch.rand(64, 8, generator=draw) < 0.2] = -torch.inf
    rows, temperature = torch.rand(64, generator=draw) < 0.7, torch.rand(64, generator=draw).round(decimals=1)
    ends, twin = torch.tensor([4, 1, 6]), logits.clone()
    stops_on_device(twin, rows, temperature, ends)
    assert torch.allclose(stops_to_end(logits, rows, temperature, ends), twin, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_the_think_end_gets_the_probability_of_the_stop_tokens(temperature):
    torch.manual_seed(1)
    logits = 4 * torch.randn(3, 8)
    before = law(logits, temperature)
    stop_ids = torch.tensor([1, 6])
    stops_to_end(logits, torch.tensor([True, False, True]), torch.full((3,), temperature), torch.tensor([4, 1, 6]))
    after = law(logits, temperature)
    assert torch.allclose(after[1], before[1])
    expected = before.clone()
    expected[:, 4] += before[:, stop_ids].sum(-1)
    expected[:, stop_ids] = 0
    assert torch.allclose(after[[0, 2]], expected[[0, 2]], atol=1e-6)


def test_greedy_decoding_ends_the_thinking_where_it_would_have_stopped_and_nowhere_else():
    logits = torch.tensor([[0.0, 5.0, 1.0, 2.0], [0.0, 3.0, 4.0, 2.5]])
    stops_to_end(logits, torch.ones(2, dtype=torch.bool), torch.zeros(2), torch.tensor([3, 1]))
    assert logits.argmax(-1).tolist() == [3, 2]  # together stop and end outweigh token 2, which greedy does not ask


@pytest.mark.parametrize(("odd", "column"), [(torch.nan, 4), (torch.inf, 4), (torch.inf, 1)])
def test_what_is_not_finite_is_the_same_on_both_devices(odd, column):
    logits, rows, temperature = torch.zeros(2, 8), torch.ones(2, dtype=torch.bool), torch.tensor([0.0, 0.7])
    logits[:, column] = odd
    twin, ends = logits.clone(), torch.tensor([4, 1, 6])
    stops_on_device(twin, rows, temperature, ends)
    assert torch.equal(stops_to_end(logits, rows, temperature, ends).isfinite(), twin.isfinite())


def test_a_step_of_no_rows_is_none():
    logits = torch.zeros(0, 8)
    assert stops_to_end(logits, torch.zeros(0, dtype=torch.bool), torch.zeros(0), torch.tensor([4, 1])).shape == (0, 8)


def test_a_think_end_that_is_forbidden_gets_nothing():
    logits = torch.tensor([[0.0, 5.0, 1.0, -torch.inf]])
    before = logits.clone()
    stops_to_end(logits, torch.tensor([True]), torch.ones(1), torch.tensor([3, 1]))
    assert torch.equal(logits, before)


def test_stop_tokens_that_min_tokens_hides_stay_hidden():
    logits = torch.tensor([[0.0, -torch.inf, 1.0, 2.0]])
    before = logits.clone()
    stops_to_end(logits, torch.tensor([True]), torch.ones(1), torch.tensor([3, 1]))
    assert torch.allclose(logits, before)


def packed(rows, vocab_size=70):
    bits = np.zeros((len(rows), -(-vocab_size // 32) * 32), dtype=np.uint8)
    for row, tokens in zip(bits, rows, strict=True):
        row[list(tokens)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def test_the_grammar_is_read_row_by_row_in_the_order_of_the_batch():
    grammar = SimpleNamespace(
        structured_output_request_ids=["c", "a"],
        grammar_bitmask=packed([{31, 5}, {64}, {31, 64}, {3}, {31}]),
    )
    allowed = allowed_ends(grammar, ["a", "b", "c"], np.array([2, 1, 3]), (31, 64))
    assert allowed.tolist() == [
        [[False, False], [True, False], [True, True]],  # a: rows 3 and 4 of the mask
        [[True, True]] * 3,  # b has no grammar
        [[True, False], [False, True], [True, True]],
    ]
    assert allowed_ends(None, ["a"], np.array([1]), (31,)) is None
    empty = SimpleNamespace(structured_output_request_ids=[], grammar_bitmask=packed([]))
    assert allowed_ends(empty, ["a"], np.array([1]), (31,)) is None


def test_rows_of_a_request_that_is_not_in_the_batch_are_skipped():
    grammar = SimpleNamespace(
        structured_output_request_ids=["gone", "a"], grammar_bitmask=packed([set(), set(), {31}, set()])
    )
    allowed = allowed_ends(grammar, ["a"], np.array([2]), (31,), drafts={"gone": [7], "a": [7]})
    assert allowed.tolist() == [[[True], [False]]]
