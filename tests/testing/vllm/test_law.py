import pytest

pytest.importorskip("vllm")

from ace_learn.testing.vllm.law import LawBenchmark, compare_laws

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_drafts_do_not_change_the_law(capsys):
    compare_laws(LawBenchmark(runner="v1", v1_tokens=50_000))
    assert "p = " in capsys.readouterr().out


@pytest.mark.proof
def test_nor_do_they_on_the_second_runner(capsys):
    compare_laws(LawBenchmark(runner="v2"))
    assert "V2: " in capsys.readouterr().out


@pytest.mark.parametrize("runner", ["v1", pytest.param("v2", marks=pytest.mark.proof)])
def test_a_row_that_is_forced_late_is_found(runner, capsys):
    with pytest.raises(SystemExit) as ended:
        compare_laws(LawBenchmark(runner=runner, v1_tokens=20_000, late=True))
    assert ended.value.code == 1
    assert f"failed: on {runner.upper()} the law with drafts is another one" in capsys.readouterr().out
