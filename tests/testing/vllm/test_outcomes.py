"""How outcomes are counted, by hand; no engine."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency

from ace_learn.engines.vllm.hook import ExitHook
from ace_learn.engines.vllm.rows import StepRows
from ace_learn.testing.vllm import law
from ace_learn.testing.vllm.cells import CellResult
from ace_learn.testing.vllm.law import LawBenchmark, compare_laws, compare_samples, detectable, outcome, sample_laws
from ace_learn.testing.vllm.models import END_THINK
from ace_learn.testing.vllm.planted import late_rows
from ace_learn.testing.vllm.watch import Watched


def sample(*counted):
    """Requests: (ids, how often)."""
    return CellResult([list(ids) for ids, count in counted for _ in range(count)], [], Watched())


def test_an_outcome_is_where_thinking_ends_and_two_tokens_of_answer():
    assert outcome([7, 8, END_THINK, 9, 5, 5]) == (2, 9, 5)
    assert outcome([END_THINK, 9]) == (0, 9)
    assert outcome([7, 8, 9]) == (-1,)


def test_equal_samples_are_equal_and_others_are_not():
    short, long = (5, END_THINK, 6, 6), (5, 5, END_THINK, 6, 6)
    same = compare_samples("V1", sample((short, 60), (long, 40)), sample((short, 60), (long, 40)))
    assert (same.statistic, same.p_value, same.outcomes) == (0.0, 1.0, 2)
    other = compare_samples("V1", sample((short, 60), (long, 40)), sample((short, 40), (long, 60)))
    # 2 x 2 table of 60/40 against 40/60: each cell is 10 off its expected 50, 4 x 100 / 50 = 8
    assert other.statistic == pytest.approx(8.0)
    assert other.p_value == pytest.approx(0.004678, rel=1e-3)
    assert (same.distance, other.distance) == (0.0, pytest.approx(0.2))


def test_rare_outcomes_are_counted_together():
    common = ((5, END_THINK, 6, 6), 50)
    rare = [((5, 5, END_THINK, 6, token), 1) for token in range(5, 15)]
    result = compare_samples("V1", sample(common, *rare), sample(common, *rare))
    assert result.outcomes == 2
    assert np.isfinite(result.statistic)


def test_what_is_detectable_is_detected_nine_times_of_ten():
    # p = (a, b, a, b, ...) and q = (b, a, b, a, ...), whose ratio is the same everywhere: the bound is met
    outcomes, requests, level = 12, 400, 1e-4
    apart = detectable(requests, outcomes, level)
    p, q = (np.tile([1 + sign * apart, 1 - sign * apart], outcomes // 2) / outcomes for sign in (1, -1))
    assert np.abs(p - q).sum() / 2 == pytest.approx(apart)
    rng = np.random.default_rng(0)
    tables = [np.stack([rng.multinomial(requests, share) for share in (p, q)]) for _ in range(1000)]
    found = [chi2_contingency(table, correction=False).pvalue < level for table in tables]
    assert 0.87 < np.mean(found) < 0.95
    assert detectable(4 * requests, outcomes, level) == pytest.approx(apart / 2)
    assert detectable(requests, 1, level) == math.inf


def test_the_samples_have_seeds_of_their_own_and_only_the_one_with_drafts_has_the_fault(monkeypatch, tmp_path):
    asked = []

    def run(cell):
        asked.append(cell)
        return sample(((5, END_THINK, 6, 6), len(cell.requests)))

    monkeypatch.setattr(law, "run_cell", run)
    config = LawBenchmark(v1_tokens=5_000, seed=3, late=True)
    (result,) = sample_laws(config, tmp_path, ["V1"])
    assert [(cell.options["seed"], cell.late, cell.speculation is None) for cell in asked] == [
        (6, False, True),
        (7, True, False),
    ]
    assert result.requests == 358  # of 14 tokens each; 357 would fall short of 5,000


def test_a_fault_moves_an_exit_within_its_request_by_one_row(monkeypatch):
    forced = torch.tensor([END_THINK, -1, -1, -1, END_THINK, END_THINK])
    rows = StepRows(
        request_ids=["three rows", "two", "one"],
        counts=np.array([3, 2, 1]),
        tokens=torch.zeros(6, dtype=torch.long),
        positions=torch.arange(6),
        hidden=torch.zeros(6, 1),
        logits=torch.zeros(6, 1),
    )
    hook = ExitHook.__new__(ExitHook)
    monkeypatch.setattr(ExitHook, "observe", lambda self, rows: forced)
    with late_rows():
        assert ExitHook.observe(hook, rows).tolist() == [-1, END_THINK, -1, -1, END_THINK, END_THINK]
    assert ExitHook.observe(hook, rows) is forced


@pytest.mark.parametrize(("second", "found"), [((100, 100), False), ((130, 70), True)])
def test_the_command_fails_where_the_laws_differ(second, found, monkeypatch, capsys):
    outcomes = [(*(5,) * n, END_THINK, 6, 6) for n in range(10)]
    samples = [sample(*((ids, counts[n % 2]) for n, ids in enumerate(outcomes))) for counts in ((100, 100), second)]
    result = compare_samples("V1", *samples)._replace(exits=(5, 5), inside=3, tokens_per_step=2.0)
    monkeypatch.setattr(law, "sample_laws", lambda *_: [result])
    with pytest.raises(SystemExit, match="1") if found else nullcontext():
        compare_laws(LawBenchmark(runner="v1"))
    printed = capsys.readouterr().out
    assert ("failed: on V1 the law with drafts is another one" in printed) == found
    assert f"total variation {0.15 * found:.3f}" in printed
