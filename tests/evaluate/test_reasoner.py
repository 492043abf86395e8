"""The figures of the embedded reasoner, by hand-made records."""

import pytest

from ace_learn.artifacts import read_json
from ace_learn.evaluate import reasoner as module
from ace_learn.evaluate.reasoner import ReasonerEvaluation, Solved, evaluate_reasoner, family_figures
from ace_learn.reasoner import generate_problems
from tests.helpers.records import make_record


def solved(first_stated, **changes):
    problem = next(iter(generate_problems(module.FAMILIES[0], 1, 0)))
    stated = problem.value if first_stated == "right" else first_stated
    return Solved(problem=problem, record=make_record(**changes), first_stated=stated)


def value(figures, name):
    return figures[name]["value"]


def test_figures_by_hand():
    wrong = -1
    figures = family_figures(
        [
            solved(wrong),  # stated a wrong value first, and repaired it; 4 of 4 thought tokens are needed
            solved("right", probe_correct=[True, True], first=0),  # 2 of 4 tokens are enough
            solved(wrong, full_correct=False, probe_correct=[False, False], first=0),  # never repaired
            solved(
                None, boundary=[], probe_correct=[], first=0, no_think_correct=True
            ),  # no paragraph: the full answer
            solved(None, excluded=True, full_correct=False, boundary=[], probe_correct=[]),
        ]
    )
    assert (figures["problems"], figures["excluded"]) == (5, 1)
    assert value(figures, "full_accuracy") == pytest.approx(3 / 5)  # an excluded trace is not right
    assert value(figures, "closed_after_first_paragraph") == pytest.approx(2 / 4)
    assert value(figures, "first_wrong_then_repaired") == pytest.approx(1 / 4)
    assert value(figures, "minimal_exit_saves") == pytest.approx((0 + 2 + 2 + 0) / 16)
    assert value(figures, "no_think_accuracy") == pytest.approx(1 / 4)
    assert figures["think_tokens_mean"] == 4.0
    assert figures["boundaries_mean"] == pytest.approx(6 / 4)
    interval = figures["full_accuracy"]
    assert 0 <= interval["low"] <= interval["value"] <= interval["high"] <= 1


def test_figures_of_nothing():
    figures = family_figures([solved(None, excluded=True)])
    assert figures["closed_after_first_paragraph"] is None
    assert figures["think_tokens_mean"] is None


def test_what_a_trace_stated_first(reasoner_target):
    def stated(text, **changes):
        ids = reasoner_target.tokenizer.encode(text, add_special_tokens=False)
        record = make_record(token_ids=[1, *ids, 2], think_start=1, think_end=1 + len(ids), **changes)
        return module._first_stated(record, reasoner_target)

    assert stated("So the answer is 42. So the answer is 7.") == 42
    assert stated("So the answer is -3") == -3
    assert stated("Hm.") is None
    assert stated("So the answer is 42.", excluded=True) is None


def test_minimal_tokens():
    assert make_record(first=0).minimal_tokens == 2
    assert make_record(first=1).minimal_tokens == 4
    assert make_record(first=2).minimal_tokens == 4  # no boundary matches: the whole thinking


def test_the_command_on_a_few_problems(tmp_path, capsys):
    config = ReasonerEvaluation(problems=8, greedy_problems=2, batch_size=8, output=tmp_path / "figures.json")
    figures = evaluate_reasoner(config)
    assert read_json(tmp_path / "figures.json") == figures
    assert figures["all"]["problems"] == 8
    assert sum(figures[family]["problems"] for family in module.FAMILIES) == 8
    assert "greedy accuracy" in capsys.readouterr().out
    for wrong in ({"problems": 0}, {"batch_size": 0}, {"greedy_problems": -1}):
        with pytest.raises(ValueError, match="need problems >= 1"):
            ReasonerEvaluation(**wrong)
