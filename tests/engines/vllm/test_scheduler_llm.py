"""The commit in whole engines: the reasoner in this process, with and without speculation."""

import json
import stat

import pytest

pytest.importorskip("vllm")

from ace_learn.contracts import Contract
from ace_learn.engines.hf import HFEngine
from ace_learn.engines.requests import Request
from ace_learn.engines.sampling import Sampling
from ace_learn.engines.signaller import HeadSignaller
from ace_learn.engines.vllm.settings import Settings
from ace_learn.heads.export import load_head, load_own_policy
from ace_learn.testing.vllm.heads import write_test_head
from tests.engines.vllm.engines import asked, examples, outcome, prompts_of, running, scheduler_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROBLEMS = 12
CAP = 400
GREEDY = {"temperature": 0, "max_tokens": CAP}


@pytest.fixture(scope="module")
def problems():
    """Problems of every family, so that their contracts are of several kinds."""
    return examples(PROBLEMS)


@pytest.fixture(scope="module")
def prompts(reasoner_target, problems):
    return prompts_of(reasoner_target, problems)


@pytest.fixture(scope="module")
def reference(reasoner_target, problems, prompts):
    """What the reference engine answers."""
    requests = [
        Request(key=key, prompt_ids=prompt, contract=problem.contract, max_new_tokens=CAP, eos_in_think="stop")
        for key, (prompt, problem) in enumerate(zip(prompts, problems, strict=True))
    ]
    return HFEngine(reasoner_target, sampling=Sampling(temperature=0.0)).generate(requests)


def generate(llm, prompts, params):
    return llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)


def record_of(output):
    return output.kv_transfer_params["ace_learn"]


@pytest.mark.parametrize(
    ("speculation", "asynchronous"),
    [("none", False), ("none", True), ("self", False), ("self", True)],
)
def test_every_engine_ends_every_request_as_the_reference_does(
    problems, prompts, reference, reasoner_target, speculation, asynchronous
):
    """Ids, log-probabilities, text, usage, answer: all end at the commit, and no token stands behind it."""
    with running(speculation=speculation, asynchronous=asynchronous) as llm:
        params = [asked(GREEDY | {"logprobs": 1}, problem.contract) for problem in problems]
        outputs = generate(llm, prompts, params)
        assert not scheduler_of(llm)._ace_live
    kinds = set()
    for output, expected, problem in zip(outputs, reference, problems, strict=True):
        record, done = record_of(output), output.outputs[0]
        assert tuple(done.token_ids) == expected.token_ids
        assert done.text == reasoner_target.tokenizer.decode(expected.token_ids, skip_special_tokens=True)
        assert len(done.logprobs) == len(done.token_ids)
        assert all(token in at for token, at in zip(done.token_ids, done.logprobs, strict=True))
        raw = [at[token].logprob for token, at in zip(done.token_ids, done.logprobs, strict=True)]
        assert raw == pytest.approx(expected.logprobs, abs=1e-3)
        assert record["answer"] == expected.answer
        assert record["finish_reason"] == expected.finish_reason
        assert record["tokens"] == len(expected.token_ids)
        assert record["surplus"] == 0
        assert record["exit_position"] == expected.think_end
        assert record["think_tokens"] == expected.think_tokens
        if expected.finish_reason == "contract":
            kinds.add(problem.contract.kind)
            assert (done.finish_reason, done.stop_reason) == ("stop", "ace_contract")
        spec = record["spec"]
        if speculation == "self":
            # A copy of the target is always right: 4 drafts and one more per step, cut at the commit.
            assert spec["verify_steps"] <= 2 + len(done.token_ids) / 4
            assert 0.7 * len(done.token_ids) < spec["accepted"] < len(done.token_ids)
        if speculation == "none":
            assert spec["drafted"] == spec["accepted"] == 0
    assert len(kinds) >= 3


@pytest.fixture(scope="module", params=["none", "self"])
def engine(request, tmp_path_factory):
    """One engine with an audit log."""
    log = tmp_path_factory.mktemp("log") / "audit.jsonl"
    with running(settings=Settings(audit_log=str(log), audit_records=3), speculation=request.param) as llm:
        yield llm, log


INTEGER = Contract.from_spec({"kind": "integer"})


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_are_as_in_stock_vllm_and_have_a_record(engine, prompts, include):
    """The plain request's stop is found by vLLM's own code, the other one's by ours."""
    from vllm import SamplingParams

    llm, _ = engine
    plain = SamplingParams(**GREEDY, stop=["nsw", "n\n\nS"], include_stop_str_in_output=include, logprobs=0)
    never = asked(
        GREEDY | {"stop": ["nsw", "n\n\nS"], "include_stop_str_in_output": include, "logprobs": 0},
        Contract.from_spec({"kind": "tag", "tag": "never"}),
    )
    stock = generate(llm, prompts, plain)
    ours = generate(llm, prompts, never)
    stopped = [output for output in ours if isinstance(output.outputs[0].stop_reason, str)]
    assert len(stopped) >= PROBLEMS // 2
    for one, other in zip(stock, ours, strict=True):
        assert outcome(one) == outcome(other)
        assert len(one.outputs[0].logprobs) == len(other.outputs[0].logprobs)
        assert one.kv_transfer_params is None
        assert record_of(other)["contract_valid"] is False
        assert record_of(other)["tokens"] == len(other.outputs[0].token_ids)


def test_a_commit_before_the_stop_string_wins_and_after_it_does_not(engine, prompts, problems, reference):
    """The answer's text as a stop string: it completes in the token of the commit, where the contract counts."""
    llm, _ = engine
    boxed = [i for i, expected in enumerate(reference) if expected.answer_text.endswith("}")]
    boxed = [i for i in boxed if problems[i].contract.kind == "integer"]
    assert len(boxed) >= 2
    for i in boxed[:2]:
        for stop, reason in ((f"{{{reference[i].answer}}}", "ace_contract"), ("\\boxed", "\\boxed")):
            output = generate(llm, [prompts[i]], asked(GREEDY | {"stop": [stop]}, problems[i].contract))[0]
            assert output.outputs[0].stop_reason == reason
            assert output.outputs[0].text.endswith("}") == (reason == "ace_contract")


def test_text_streams_up_to_the_answer_and_no_further(engine, prompts, problems, reference, reasoner_target):
    """Deltas join to the text and the ids of the whole, so nothing is sent that would have to be taken back."""
    from vllm.sampling_params import RequestOutputKind

    llm, _ = engine
    for i, (prompt, problem) in enumerate(zip(prompts, problems, strict=True)):
        params = asked(GREEDY, problem.contract)
        params.output_kind = RequestOutputKind.DELTA
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, params)
    texts, ids = {}, {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            key = int(output.request_id)
            texts[key] = texts.get(key, "") + output.outputs[0].text
            ids[key] = ids.get(key, ()) + tuple(output.outputs[0].token_ids)
    for i, expected in enumerate(reference):
        assert ids[i] == expected.token_ids
        assert texts[i] == reasoner_target.tokenizer.decode(expected.token_ids, skip_special_tokens=True)


def test_each_of_n_choices_has_a_record(engine, prompts, problems):
    from ace_learn.engines.vllm.observer import observer

    llm, _ = engine
    params = asked({"temperature": 1.0, "max_tokens": CAP, "n": 3, "seed": 5}, problems[0].contract)
    output = generate(llm, prompts[:1], params)[0]
    records = record_of(output)
    assert [record["index"] for record in records] == [0, 1, 2]
    assert [record["tokens"] for record in records] == [len(choice.token_ids) for choice in output.outputs]
    assert len({tuple(choice.token_ids) for choice in output.outputs}) > 1
    kept = observer().store.get(output.request_id)
    assert [(one["index"], one["tokens"]) for one in kept] == [(r["index"], r["tokens"]) for r in records]


def test_records_are_kept_counted_and_written(engine, prompts, problems):
    from prometheus_client import REGISTRY

    from ace_learn.engines.vllm.observer import observer

    def value(name, **labels):
        return REGISTRY.get_sample_value(name, labels) or 0.0

    llm, log = engine
    before = {name: value(name) for name in ("ace_learn_contract_commits_total", "ace_learn_surplus_tokens_total")}
    natural = value("ace_learn_exits_total", reason="natural")
    lines_before = len(log.read_text().splitlines()) if log.exists() else 0
    outputs = generate(llm, prompts[:5], [asked(GREEDY, problem.contract) for problem in problems[:5]])
    committed = sum(output.outputs[0].stop_reason == "ace_contract" for output in outputs)
    assert committed >= 4
    assert value("ace_learn_contract_commits_total") - before["ace_learn_contract_commits_total"] == committed
    assert value("ace_learn_surplus_tokens_total") == before["ace_learn_surplus_tokens_total"] == 0
    ended = sum(record_of(output)["reason"] == "natural" for output in outputs)
    assert value("ace_learn_exits_total", reason="natural") - natural == ended
    kept = [output for output in outputs if observer().store.get(output.request_id) is not None]
    assert len(kept) == len(observer().store) == 3
    assert observer().store.get(kept[0].request_id) == [
        {"request_id": kept[0].request_id, "index": 0, **record_of(kept[0])}
    ]
    observer().sink.close()
    written = [json.loads(line) for line in log.read_text().splitlines()][lines_before:]
    last = {line["request_id"]: line for line in written[-5:]}
    for output in outputs:
        line = last[output.request_id]
        assert {key: line[key] for key in record_of(output)} == record_of(output)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_aborted_requests_leave_nothing_behind(engine, prompts, problems):
    llm, _ = engine
    core = llm.llm_engine
    for i, (prompt, problem) in enumerate(zip(prompts, problems, strict=True)):
        core.add_request(f"gone-{i}", {"prompt_token_ids": list(prompt)}, asked(GREEDY, problem.contract))
    for _ in range(12):
        core.step()
    live = set(scheduler_of(llm)._ace_live)
    assert len(live) == PROBLEMS
    core.abort_request([f"gone-{i}" for i in range(PROBLEMS)])
    while core.has_unfinished_requests():
        core.step()
    assert not scheduler_of(llm)._ace_live


def test_a_server_with_nothing_asked_of_it_answers_as_stock(prompts):
    from vllm import SamplingParams

    answers = []
    for ours in (True, False):
        with running(ours=ours) as llm:
            outputs = generate(llm, prompts, SamplingParams(**GREEDY, logprobs=1))
            answers.append([(outcome(output), str(output.outputs[0].logprobs)) for output in outputs])
            assert all(output.kv_transfer_params is None for output in outputs)
    assert answers[0] == answers[1]


@pytest.fixture(scope="module")
def head(tmp_path_factory, reasoner_target, prompts):
    """A head folder under which about half of the problems exit."""
    folder = tmp_path_factory.mktemp("head")
    requests = [Request(key=key, prompt_ids=prompt, max_new_tokens=CAP) for key, prompt in enumerate(prompts)]
    write_test_head(folder, reasoner_target, requests)
    return folder


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize(("speculation", "asynchronous"), [("none", False), ("self", False), ("self", True)])
def test_the_record_of_an_exit_is_the_reference_engines(
    head, reasoner_target, prompts, problems, speculation, asynchronous, shadow
):
    """Place, counts and signals of every exit; in shadow mode the same, and the thinking goes on."""
    loaded = load_head(head)
    engine = HFEngine(
        reasoner_target,
        sampling=Sampling(temperature=0.0),
        policy=load_own_policy(loaded),
        signaller=HeadSignaller(loaded.head, loaded.spec, reasoner_target.device),
    )
    requests = [
        Request(key=key, prompt_ids=prompt, contract=problem.contract, max_new_tokens=CAP, eos_in_think="stop")
        for key, (prompt, problem) in enumerate(zip(prompts, problems, strict=True))
    ]
    expected = engine.generate(requests)
    exits = [output for output in expected if output.exit is not None]
    assert 0 < len(exits) < PROBLEMS
    settings = Settings(head=str(head), exits="always", shadow=shadow)
    with running(settings=settings, speculation=speculation, asynchronous=asynchronous) as llm:
        outputs = generate(llm, prompts, [asked(GREEDY, problem.contract) for problem in problems])
    for output, want in zip(outputs, expected, strict=True):
        record = record_of(output)
        if want.exit is None:
            assert (record["reason"], record["exit_position"]) == ("natural", want.think_end)
            assert record["signals"] is None
        else:
            assert record["reason"] == ("shadow" if shadow else "policy")
            told = (record["exit_position"], record["tokens_thought"], record["paragraphs"])
            assert told == (want.exit.output_index, want.exit.tokens_thought, want.exit.paragraphs)
            assert record["signals"] == pytest.approx(want.exit.signals, rel=1e-3, abs=1e-4)
        if not shadow or want.exit is None:
            assert tuple(output.outputs[0].token_ids) == want.token_ids
        else:
            assert record["think_tokens"] > record["tokens_thought"]
