import pytest
import torch

from ace_learn.engines.vllm.cpu_fix import expand, install, none_of_none


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_value_is_repeated_over_its_drafts_and_the_greedy_one_replaced(dtype):
    output = torch.full((6,), 77).to(dtype)
    expand(output, torch.tensor([2, 0, 5, 3]).to(dtype), torch.tensor([3, 4, 4, 6], dtype=torch.int32), 0, 1)
    assert output.tolist() == [2, 2, 2, 1, 3, 3]  # the third request has no drafts
    assert output.dtype == dtype


@pytest.mark.vllm
@pytest.mark.slow
def test_the_kernel_of_a_cpu_build_is_right_once_it_is_installed():
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    current_platform.register_triton_kernel_overrides()  # as a worker does before it is built
    install()
    installed = rejection_sampler.expand_kernel
    install()
    assert rejection_sampler.expand_kernel is installed
    output = torch.full((3,), -1.0)
    rejection_sampler._expand(output, torch.tensor([0.7, 0.0]), torch.tensor([2, 3], dtype=torch.int32), 0, 1)
    assert output.tolist() == pytest.approx([0.7, 0.7, 1.0])


def test_top_k_of_no_rows_is_no_rows():
    seen = []

    def top_k(logits, k):
        seen.append(k.max())  # as vLLM's does, which raises where there is no row
        return logits + 1

    repaired = none_of_none(top_k)
    nothing = torch.zeros(0, 5)
    assert repaired(nothing, torch.zeros(0, dtype=torch.int32)) is nothing
    assert repaired(torch.zeros(2, 5), torch.tensor([1, 3])).tolist() == [[1.0] * 5] * 2
    assert seen == [3]
