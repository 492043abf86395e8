import pytest

from ace_learn.tasks import TaskConfig, build_task
from ace_learn.tasks.base import chat_key

LEGS = TaskConfig(name="reasoning-gym:leg_counting", contract={"kind": "integer"})


def test_examples_carry_gold_contract_and_instruction():
    examples = list(build_task(LEGS).examples(30, seed=1))
    assert len({chat_key(example.messages) for example in examples}) == 30
    for example in examples:
        assert example.family == "leg_counting"
        assert example.contract.valid(example.gold)
        assert example.messages[0]["content"].endswith(example.contract.instruction())


def test_the_librarys_own_verifier_agrees_with_the_gold():
    import reasoning_gym

    verifier = reasoning_gym.create_dataset("leg_counting", seed=0, size=1)
    for example in build_task(LEGS).examples(10, seed=1):
        assert verifier.score_answer(example.gold, {"answer": example.gold}) == 1.0


def test_nearby_seeds_share_no_problems():
    # In the library itself, item i + 1 of seed s is item i of seed s + 1.
    prompts = [{chat_key(e.messages) for e in build_task(LEGS).examples(50, seed)} for seed in (0, 1)]
    assert not prompts[0] & prompts[1]


def test_params_reach_the_library():
    config = TaskConfig(
        name=LEGS.name, contract=LEGS.contract, instruct=False, params={"min_animals": 2, "max_animals": 2}
    )
    for example in build_task(config).examples(5, seed=0):
        assert example.messages[0]["content"].count(",") == 2  # "..., how many legs if you have 3 cats, 2 dogs?"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "reasoning-gym:leg_count"}, "did you mean .*leg_counting"),
        ({"name": "reasoning-gym:"}, "unknown task 'reasoning-gym:'"),
        ({"contract": None}, "needs a contract"),
        ({"params": {"max_animalz": 3}}, "max_animalz"),
        ({"params": {"min_animals": 9, "max_animals": 3}}, "params of reasoning-gym:leg_counting"),
        ({"params": {"seed": 3}}, "'seed' is set by the command"),
        ({"contract": {"kind": "integr"}}, "unknown contract kind 'integr'; known kinds: .*integer"),
    ],
)
def test_bad_settings_are_refused(fields, message):
    settings = {"name": LEGS.name, "contract": LEGS.contract} | fields
    with pytest.raises(ValueError, match=message):
        build_task(TaskConfig(**settings))


def test_gold_that_the_contract_cannot_express_is_refused():
    config = TaskConfig(name=LEGS.name, contract={"kind": "choice", "options": ["A", "B"]})
    with pytest.raises(ValueError, match=r"item 0: the gold answer '\d+' is no legal answer of the contract"):
        next(build_task(config).examples(1, seed=0))


def test_too_few_distinct_problems_are_an_error():
    tiny = {"min_animals": 1, "max_animals": 1, "min_instances": 1, "max_instances": 1}
    config = TaskConfig(name=LEGS.name, contract=LEGS.contract, params=tiny)
    with pytest.raises(ValueError, match="distinct problems, but 1000 are wanted"):
        list(build_task(config).examples(1000, seed=0))
