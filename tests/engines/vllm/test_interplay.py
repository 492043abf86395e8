"""Exits beside what else a request or an engine may be configured for, on the V1 runner."""

import pytest

pytest.importorskip("vllm")

from ace_learn.engines.loading import load_engine
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.models.target import TargetConfig, load_target
from ace_learn.testing.vllm.engine import running_engine
from ace_learn.testing.vllm.heads import write_test_head
from ace_learn.testing.vllm.models import END_THINK, WORDS, tiny_prompts, write_tiny_models
from ace_learn.testing.vllm.speculation import speculation_of
from ace_learn.testing.vllm.watch import watching

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REQUESTS, TOKENS, LONGEST = 16, 72, 72
ON = {"ace_enabled": True}
PARAGRAPH_ENDS = {i for i, word in enumerate(WORDS) if word.endswith("\n")}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_tiny_models(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def prompts():
    return tiny_prompts(REQUESTS, longest=LONGEST)


@pytest.fixture(scope="module")
def head(models, prompts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    target = load_target(TargetConfig(model=str(models.target), dtype="float32", device="cpu"))
    write_test_head(folder, target, asked(prompts), share=0.7)
    return folder


@pytest.fixture(scope="module")
def early(models, head, prompts):
    """What the HF engine answers with exits."""
    engine = load_engine(str(models.target), head=head, sampling=Sampling(temperature=0.0))
    return engine.generate(asked(prompts))


@pytest.fixture(scope="module")
def full(models, prompts):
    """What it answers without."""
    engine = load_engine(str(models.target), sampling=Sampling(temperature=0.0))
    return [list(output.token_ids) for output in engine.generate(asked(prompts))]


@pytest.fixture(scope="module", params=["none", "draft_model", "draft_model, asynchronous"])
def llm(request, models, head):
    from vllm.config import ReasoningConfig

    with running_engine(
        models.target,
        settings={"head": str(head)},
        speculation=speculation_of(request.param.partition(",")[0], models),
        async_scheduling="asynchronous" in request.param,
        reasoning_config=ReasoningConfig(reasoning_start_str="<think>", reasoning_end_str="</think>"),
    ) as engine:
        yield engine


def asked(prompts):
    return [
        Request(key=i, prompt_ids=tuple(ids), max_new_tokens=TOKENS, min_tokens=TOKENS) for i, ids in enumerate(prompts)
    ]


def generate(llm, prompts, params=None, **shared):
    from vllm import SamplingParams

    shared = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "extra_args": ON} | shared
    given = [SamplingParams(**shared | own) for own in params or [{}] * len(prompts)]
    return llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], given, use_tqdm=False)


def ids_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def records_of(outputs):
    return [output.kv_transfer_params["ace_learn"] for output in outputs]


def answers(early):
    return [list(output.token_ids) for output in early]


def end_of(ids):
    return ids.index(END_THINK) if END_THINK in ids else len(ids)


def worker_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker


def test_the_requests_are_worth_testing(early, full):
    exits = [output.exit.output_index for output in early if output.exit is not None]
    assert len(exits) >= REQUESTS // 2
    assert len(set(exits)) >= 5
    assert answers(early) != full


def test_exits_are_those_of_the_reference(llm, prompts, early):
    outputs = generate(llm, prompts)
    assert ids_of(outputs) == answers(early)
    assert [record["exit_position"] for record in records_of(outputs)] == [
        None if output.exit is None else output.exit.output_index for output in early
    ]


def test_the_tighter_of_budget_and_exit_ends_the_thinking(llm, prompts, early, full):
    budgets = [(9, 20, 33, 1000)[i % 4] for i in range(REQUESTS)]
    params = [{"thinking_token_budget": budget} for budget in budgets]
    stock = [end_of(ids) for ids in ids_of(generate(llm, prompts, params, extra_args=None))]
    assert stock == [min(budget, TOKENS) for budget in budgets]
    outputs = generate(llm, prompts, params)
    expected = [min(end, end_of(ids)) for end, ids in zip(stock, answers(early), strict=True)]
    assert [end_of(ids) for ids in ids_of(outputs)] == expected
    assert all(ids[:end] == whole[:end] for ids, whole, end in zip(ids_of(outputs), full, expected, strict=True))
    reasons = [record["reason"] for record in records_of(outputs)]
    assert {"budget", "policy"} <= set(reasons)
    for reason, budget, end in zip(reasons, budgets, expected, strict=True):
        assert reason == ("length" if end == TOKENS else "budget" if end == budget else "policy")


def test_nothing_is_forced_against_a_grammar(llm, prompts):
    from vllm.sampling_params import StructuredOutputsParams

    paragraphs = StructuredOutputsParams(regex=r"((a|b|c|d|e)( so| ok| yes)\n\n){40}")
    stock = generate(llm, prompts, extra_args=None, structured_outputs=paragraphs, ignore_eos=False)
    outputs = generate(llm, prompts, structured_outputs=paragraphs, ignore_eos=False)
    assert ids_of(outputs) == ids_of(stock)
    assert all(END_THINK not in ids for ids in ids_of(outputs))
    assert sum(record["blocked"] for record in records_of(outputs)) > 0
    assert all(record["hook_failures"] == [] for record in records_of(outputs))


def test_stop_strings_end_the_answer_and_min_tokens_hides_them(llm, prompts, early):
    token = max(range(14, len(WORDS)), key=lambda i: sum(ids[end_of(ids) :].count(i) for ids in answers(early)))
    for least in (0, 50):
        expected = []
        for ids in answers(early):
            stop = next((i for i, other in enumerate(ids) if other == token and i >= least), None)
            expected.append(ids if stop is None else ids[: stop + 1])
        outputs = generate(llm, prompts, stop=[WORDS[token]], min_tokens=least)
        assert ids_of(outputs) == expected
        stopped = [len(ids) < TOKENS for ids in expected]
        assert sum(stopped) >= 3
        assert [output.outputs[0].finish_reason == "stop" for output in outputs] == stopped


def test_log_probabilities_stay_the_models(llm, prompts, early):
    outputs = generate(llm, prompts, logprobs=1, prompt_logprobs=1)
    assert ids_of(outputs) == answers(early)
    for output, expected in zip(outputs, early, strict=True):
        done = output.outputs[0]
        found = [values[token].logprob for token, values in zip(done.token_ids, done.logprobs, strict=True)]
        assert found == pytest.approx(expected.logprobs, abs=2e-3)
        if expected.exit is not None:
            assert found[expected.exit.output_index] < -1
    stock = generate(llm, prompts, extra_args=None, prompt_logprobs=1)
    for ours, other in zip(outputs, stock, strict=True):
        found, wanted = (
            [next(iter(values.values())).logprob for values in output.prompt_logprobs[1:]] for output in (ours, other)
        )
        assert found == pytest.approx(wanted, abs=1e-4)


def test_each_of_n_choices_exits_at_its_own_boundary(llm, prompts):
    outputs = generate(llm, prompts, n=3, temperature=1.0)
    choices = [list(choice.token_ids) for output in outputs for choice in output.outputs]
    assert len({tuple(ids) for ids in choices}) == len(choices) == 3 * REQUESTS
    ends = [end_of(ids) for ids in choices]
    exits = [(ids, end) for ids, end in zip(choices, ends, strict=True) if END_THINK in ids]
    at_boundaries = sum(ids[end - 1] in PARAGRAPH_ENDS for ids, end in exits)
    assert len(exits) >= REQUESTS
    assert at_boundaries >= 0.75 * len(exits)  # now and then the model says it by itself, anywhere


def test_requests_without_thinking_are_left_alone(llm):
    prompts = tiny_prompts(REQUESTS, longest=20, think=False)
    outputs = generate(llm, prompts)
    assert ids_of(outputs) == ids_of(generate(llm, prompts, extra_args=None))
    assert {record["reason"] for record in records_of(outputs)} == {"none"}


def test_aborts_in_the_middle_of_thinking_leave_nothing_behind(llm, prompts, early):
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, extra_args=ON)
    for i, ids in enumerate(prompts):
        engine.add_request(f"abort-{i}", {"prompt_token_ids": list(ids)}, params)
    found, steps = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if steps == 6:
            engine.abort_request([f"abort-{i}" for i in range(0, REQUESTS, 2)])
    kept = range(1, REQUESTS, 2)
    assert {i: found[f"abort-{i}"] for i in kept} == {i: answers(early)[i] for i in kept}
    generate(llm, prompts[:1], max_tokens=1, extra_args=None)  # the last requests are let go of with the next step
    assert worker_of(llm).ace_status() == {"exits": True, "off": False, "followed": 0, "slots": 0}
    assert engine.engine_core.engine_core.scheduler._ace_live == {}


@pytest.mark.parametrize("drafting", ["none", "draft_model"])
def test_chunks_preemption_and_the_prefix_cache_change_nothing(models, head, prompts, early, drafting):
    with (
        running_engine(
            models.target,
            settings={"head": str(head)},
            speculation=speculation_of(drafting, models),
            enable_prefix_caching=True,
            block_size=32,
            max_model_len=160,
            max_num_batched_tokens=48,
            num_gpu_blocks_override=14,
        ) as engine,
        watching(engine) as watched,
    ):
        assert ids_of(generate(engine, prompts)) == answers(early)
        assert watched.preemptions > 0
        longest = max(range(REQUESTS), key=lambda i: len(prompts[i]))
        for _ in range(2):
            (again,) = generate(engine, [prompts[longest]])
            assert list(again.outputs[0].token_ids) == answers(early)[longest]
        assert again.num_cached_tokens > 0


@pytest.mark.parametrize("drafting", ["none", "draft_model"])
def test_two_tensor_parallel_ranks_exit_alike(models, head, prompts, early, drafting):
    with running_engine(
        models.target,
        settings={"head": str(head)},
        speculation=speculation_of(drafting, models),
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    ) as engine:
        assert ids_of(generate(engine, prompts)) == answers(early)
        statuses = engine.collective_rpc("ace_status")
    assert [status["off"] for status in statuses] == [False, False]
