import pytest

pytest.importorskip("vllm")

from ace_learn.testing.vllm.parity import ParityBenchmark, compare_engines
from ace_learn.testing.vllm.planted import late_rows

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.proof
@pytest.mark.parametrize("part", ["v1", "v2", "reasoner"])
def test_greedy_outputs_are_the_same_in_all_engines(part, capsys):
    compare_engines(ParityBenchmark(parts=(part,)))
    assert "all required" in capsys.readouterr().out


def test_a_state_machine_that_is_off_by_one_row_is_found(capsys):
    config = ParityBenchmark(parts=("v1",), draftings=("none", "draft_model"), modes=("plain",))
    with late_rows(), pytest.raises(SystemExit) as ended:
        compare_engines(config)
    assert ended.value.code == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed: ")]
    assert any("draft_model" in line and "outputs are those without drafts" in line for line in failed)
    assert not any(" none " in line for line in failed)
