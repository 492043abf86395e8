import json
import random
import re

import pytest

from ace_learn.reasoner import FAMILIES, Problem, Trace, compose_trace, generate_problems, write_trace
from ace_learn.reasoner.traces import STYLES

COUNT = 200
EQUATION = re.compile(r"(\d+) ([-+*]) (?:[a-z]+ )?(\d+) = (?:[a-z]+ )?(\d+)")


def traces(family, mode="full", count=COUNT) -> list[tuple[Problem, Trace]]:
    rng = random.Random(5)
    return [(problem, compose_trace(problem, rng, mode=mode)) for problem in generate_problems(family, count, seed=2)]


def is_true(equation: tuple[str, str, str, str]) -> bool:
    left, op, right, result = equation
    one, two = int(left), int(right)
    return {"+": one + two, "-": one - two, "*": one * two}[op] == int(result)


def answer_of(problem: Problem, text: str) -> int:
    if problem.answer_format == "boxed":
        return int(re.findall(r"\\boxed\{(\d+)\}", text)[0])
    if problem.answer_format == "json":
        return int(json.loads(re.findall(r"\{.*?\}", text)[0])["answer"])
    assert problem.options is not None
    return int(re.findall(r"Answer: (\d+)", text)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_same_traces(family):
    assert traces(family) == traces(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_slip_everything_written_is_true(family):
    clean = [(problem, trace) for problem, trace in traces(family) if trace.slips == 0]
    assert len(clean) > COUNT // 4
    for problem, trace in clean:
        assert trace.stated == trace.first_stated == problem.value
        assert all(is_true(equation) for equation in EQUATION.findall(trace.think))
        assert "Wait" not in trace.think


@pytest.mark.parametrize("family", FAMILIES)
def test_a_repair_leads_to_the_truth(family):
    repaired = [(problem, trace) for problem, trace in traces(family) if trace.repaired]
    assert len(repaired) >= COUNT // 10
    for problem, trace in repaired:
        assert "Wait, it is" in trace.think
        last = re.findall(r"So the answer is (\d+)", trace.think)[-1]
        assert int(last) == trace.stated
        assert trace.stated == problem.value or trace.slips > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_slip_is_carried_on(family):
    for problem, trace in traces(family):
        derivation = trace.think.split("So the answer is")[0]
        false = [equation for equation in EQUATION.findall(derivation) if not is_true(equation)]
        assert len(false) == trace.slips
        assert trace.slips > 0 or trace.first_stated == problem.value


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["full", "unchecked", "direct"])
def test_the_answer_says_what_was_stated(family, mode):
    for problem, trace in traces(family, mode):
        if problem.options is None or trace.stated in problem.options:
            assert answer_of(problem, trace.answer) == trace.stated


@pytest.mark.parametrize("family", FAMILIES)
def test_nearly_all_end_right(family):
    right = sum(trace.stated == problem.value for problem, trace in traces(family))
    assert right >= 0.97 * COUNT


@pytest.mark.parametrize("family", FAMILIES)
def test_thoughts_go_on_after_the_answer(family):
    for _, trace in traces(family):
        assert trace.think.endswith("\n\n")
        after = trace.think.split("So the answer is")[1].split("\n\n")
        assert len(after) > 3
        assert all(paragraph.strip() for paragraph in trace.think[:-2].split("\n\n"))


def test_unchecked_thoughts_close_right_after_the_answer():
    for problem, trace in traces("chain", "unchecked"):
        if problem.options is None or trace.first_stated in problem.options:
            assert trace.think.endswith(f"So the answer is {trace.stated}.\n\n")


def test_direct_answers_have_no_thought():
    assert all(trace.think == "" and trace.stated == problem.value for problem, trace in traces("legs", "direct"))


def test_families_differ_in_slips_and_paragraphs():
    assert len({STYLES[family].slip for family in FAMILIES}) == 3
    figures = {}
    for family in FAMILIES:
        written = traces(family, count=300)
        slips = sum(trace.slips > 0 for _, trace in written) / len(written)
        paragraphs = sum(trace.think.count("\n\n") for _, trace in written) / len(written)
        figures[family] = (slips, paragraphs)
    slips, paragraphs = zip(*(figures[family] for family in FAMILIES), strict=True)
    assert slips[0] > slips[1] + 0.05
    assert paragraphs[0] > paragraphs[1] + 1


def test_modes_are_mixed_as_documented():
    rng = random.Random(0)
    written = [write_trace(problem, rng) for problem in generate_problems("chain", 500, seed=0)]
    direct = sum(trace.think == "" for trace in written) / len(written)
    assert 0.07 < direct < 0.15
    tails = sum("\n" in trace.answer for trace in written) / len(written)
    assert 0.4 < tails < 0.6
