import pytest

pytest.importorskip("vllm")

from ace_learn.testing.vllm.law import LawBenchmark, compare_laws
from tests.engines.vllm.planted import plant_late_rows

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_drafts_do_not_change_the_law(capsys):
    compare_laws(LawBenchmark(runner="v1", v1_tokens=50_000))
    assert "p = " in capsys.readouterr().out


@pytest.mark.proof
def test_nor_do_they_on_the_second_runner(capsys):
    compare_laws(LawBenchmark(runner="v2"))
    assert "V2: " in capsys.readouterr().out


def test_a_row_that_is_forced_late_is_found(monkeypatch, capsys):
    plant_late_rows(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        compare_laws(LawBenchmark(runner="v1", v1_tokens=20_000))
    assert ended.value.code == 1
    assert "failed: on V1 the law with drafts is another one" in capsys.readouterr().out
