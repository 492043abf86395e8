from itertools import islice

import pytest

from ace_learn.reasoner.problems import FAMILIES
from ace_learn.tasks import TaskConfig, build_task
from ace_learn.tasks.base import Example, chat_key, distinct, interleave, user_message


def test_mix_has_all_families_distinct_prompts_and_legal_golds():
    examples = list(build_task(TaskConfig()).examples(600, seed=3))
    assert len({chat_key(example.messages) for example in examples}) == 600
    assert {example.family for example in examples} == set(FAMILIES)
    assert all(example.contract.valid(example.gold) for example in examples)
    assert {example.contract.kind for example in examples} >= {"choice", "json"}
    shares = [sum(example.family == family for example in examples) / 600 for family in FAMILIES]
    assert min(shares) > 0.2  # three equal shares; 0.2 is 7 standard deviations away


def test_short_stream_is_the_start_of_a_long_one_and_seeds_differ():
    task = build_task(TaskConfig(families=("shop",)))
    short, long, other = (list(task.examples(n, seed)) for n, seed in ((20, 0), (60, 0), (20, 1)))
    assert long[:20] == short
    assert short != other
    assert {example.family for example in long} == {"shop"}


def example_of(text):
    from ace_learn.contracts import Contract

    return Example(family="f", messages=user_message(text), contract=Contract.from_spec({"kind": "integer"}), gold=None)


def test_distinct_skips_repetitions_and_keeps_order():
    stream = (example_of(text) for text in "abacabad")
    assert [e.messages[0]["content"] for e in distinct(stream, 4)] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("stream", ["finite", "endless"])
def test_too_few_distinct_problems_are_an_error(stream):
    texts = iter("aabb") if stream == "finite" else (text for _ in range(1_000_000) for text in "ab")
    with pytest.raises(ValueError, match=r"the bag has 2 distinct problems, but 3 are wanted"):
        list(distinct((example_of(t) for t in texts), 3, patience=50, source="the bag"))


def test_interleave_ends_with_the_first_stream_that_ends():
    streams = {"a": iter([example_of("a")] * 3), "b": iter([example_of("b")] * 1000)}
    drawn = list(islice(interleave(streams, 0), 2000))
    assert sum(e.messages[0]["content"] == "a" for e in drawn) == 3


def test_unknown_family_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown families legz; known: chain, shop, legs"):
        build_task(TaskConfig(families=("legz",)))


def test_an_absurd_number_of_problems_is_refused_at_once():
    with pytest.raises(ValueError, match="at most 10000000; ask for fewer"):
        build_task(TaskConfig()).examples(10**9, seed=0)


@pytest.mark.parametrize("count", [0, -1])
def test_no_problems_are_refused_at_once(count):
    with pytest.raises(ValueError, match=f"must be >= 1, not {count}"):
        build_task(TaskConfig()).examples(count, seed=0)
