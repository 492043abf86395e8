import re

import pytest

from ace_learn.reasoner import ANSWER_FORMATS, FAMILIES, contract_spec, generate_problems, score

COUNT = 60


def solve_shop(question: str) -> int:
    """An independent solver that reads nothing but the question."""
    total = sum(int(count) * int(price) for count, price in re.findall(r"(\d+) \w+ at (\d+)", question))
    posts = re.findall(r"The post costs (\d+)", question)
    coupons = re.findall(r"A coupon takes off (\d+)", question)
    return total + sum(map(int, posts)) - sum(map(int, coupons))


@pytest.mark.parametrize("family", FAMILIES)
def test_same_arguments_give_the_same_problems(family):
    once = list(generate_problems(family, COUNT, seed=3))
    assert once == list(generate_problems(family, COUNT, seed=3))
    assert once != list(generate_problems(family, COUNT, seed=4))
    assert once[:10] == list(generate_problems(family, 10, seed=3))


@pytest.mark.parametrize("family", FAMILIES)
def test_seeds_share_no_question(family):
    one = {problem.question for problem in generate_problems(family, 300, seed=0)}
    two = {problem.question for problem in generate_problems(family, 300, seed=1)}
    assert not one & two


@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gold_fits_the_format(family, answer_format):
    for problem in generate_problems(family, COUNT, seed=0, answer_format=answer_format):
        assert problem.answer_format == answer_format
        if answer_format == "choice":
            assert problem.options is not None
            assert len(set(problem.options)) == 4
            assert problem.gold == str(problem.value)
            assert problem.value in problem.options
        else:
            assert problem.options is None
            assert problem.gold == (problem.value if answer_format == "boxed" else {"answer": problem.value})


def test_a_chain_can_be_computed_from_its_text():
    chains = [p for p in generate_problems("chain", 300, seed=0) if p.question.startswith("Compute")]
    assert chains
    for problem in chains:
        numbers = re.sub(r"\s", "", problem.question.removeprefix("Compute").removesuffix("."))
        assert sum(int(term) for term in re.findall(r"[+-]?\d+", numbers)) == problem.value


def test_a_shop_can_be_solved_from_its_text():
    problems = list(generate_problems("shop", 200, seed=0))
    assert {word in p.question for p in problems for word in ("post", "coupon")} == {True, False}
    for problem in problems:
        assert solve_shop(problem.question) == problem.value


@pytest.mark.parametrize("family", FAMILIES)
def test_the_program_computes_the_answer(family):
    for problem in generate_problems(family, COUNT, seed=0):
        values = dict(problem.start)
        for step in problem.steps:
            for update in step.updates:
                values[update.target] = update.evaluate(values)
        assert values[problem.asked] == problem.value
        assert min(values.values()) >= 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_score_accepts_the_answer_alone(family):
    for problem in generate_problems(family, COUNT, seed=0):
        assert score(problem, problem.value)
        assert not score(problem, problem.value + 1)


def test_prompts_ask_for_their_format():
    asks = {"boxed": "\\boxed{}", "choice": "Answer: ", "json": '{"answer"'}
    for problem in generate_problems("chain", COUNT, seed=0):
        assert problem.question in problem.prompt
        assert asks[problem.answer_format] in problem.prompt
        if problem.options is not None:
            assert f"Options: {', '.join(map(str, problem.options))}." in problem.prompt


def test_contract_specs():
    kinds = {"boxed": "integer", "choice": "choice", "json": "json"}
    for problem in generate_problems("chain", COUNT, seed=0):
        assert contract_spec(problem)["kind"] == kinds[problem.answer_format]


def test_families_differ():
    lengths = {
        family: [len(problem.steps) for problem in generate_problems(family, 300, seed=0)] for family in FAMILIES
    }
    means = [sum(steps) / len(steps) for steps in lengths.values()]
    assert len({round(mean, 1) for mean in means}) == 3
