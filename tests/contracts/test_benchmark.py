import pytest

from ace_learn.contracts import KINDS
from ace_learn.contracts.benchmark import SUBJECTS, ContractBenchmark, benchmark_contracts
from ace_learn.testing import LawError
from ace_learn.testing import fuzz as fuzzing


def test_every_kind_is_measured_and_no_text_commits(capsys):
    costs = benchmark_contracts(ContractBenchmark(small=200, large=2000, naive=400, seconds=0.0))
    assert {cost.kind for cost in costs} == set(SUBJECTS) == set(KINDS)
    assert all(cost.microseconds > 0 and cost.naive_ratio > 0 for cost in costs)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(costs)


def test_sizes_that_measure_nothing_are_refused():
    with pytest.raises(ValueError, match="chunk <= small < large"):
        ContractBenchmark(small=10, large=10)


def test_fuzzing_tries_texts_that_commit_and_finds_a_broken_law(capsys, monkeypatch):
    found = fuzzing.fuzz_contracts(fuzzing.ContractFuzz(seconds=1.5))
    assert 0 < found.committed < found.texts
    assert f"{found.texts:,} texts" in capsys.readouterr().out
    monkeypatch.setattr("ace_learn.contracts.boxed.Boxed.valid", lambda contract, answer: False)
    monkeypatch.setattr(fuzzing, "SPECS", ({"kind": "boxed"},))
    with pytest.raises(LawError, match="valid"):
        fuzzing.fuzz_contracts(fuzzing.ContractFuzz(seconds=30))
