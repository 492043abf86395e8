"""The commit in the engine core, step by step: scripted tokens, no model."""

import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from transformers import AutoTokenizer

from ace_learn.contracts import KINDS
from ace_learn.contracts.check import load_cases
from ace_learn.engines.vllm.events import ExitEvent
from ace_learn.engines.vllm.settings import Settings
from ace_learn.reasoner import weights_path
from ace_learn.signals import SIGNALS
from tests.engines.vllm.scripted import Script

pytestmark = pytest.mark.vllm

CASES = Path(__file__).parents[2] / "cases"
TOKENIZER = AutoTokenizer.from_pretrained(weights_path())
END, THINK, CLOSE = (TOKENIZER.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<think>", "</think>"))
CHOICE = {"kind": "choice", "options": ["A", "B"]}


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def params(contract=None, **options):
    from vllm import SamplingParams

    extra = None if contract is None else {"ace_contract": json.dumps(contract)}
    made = SamplingParams(temperature=0, extra_args=extra, **{"max_tokens": 500, "logprobs": 0, **options})
    made.update_from_generation_config({}, END)
    return made


@pytest.fixture(scope="module", params=[(False, 0), (False, 4), (True, 0), (True, 4)], ids=str)
def script(request):
    asynchronous, drafts = request.param
    return Script(asynchronous=asynchronous, num_draft_tokens=drafts)


def test_every_case_of_every_kind_ends_where_its_answer_is_complete(script):
    """The cases that contracts are tested with, as requests: the answer, the text cut there, and no token behind."""
    cases = [*load_cases(CASES / "contracts.jsonl"), *load_cases(CASES / "contracts_more.jsonl")]
    cases = [case for case in cases if case.text and not case.starts_in_think and len(ids(case.text)) < 900]
    assert {case.contract["kind"] for case in cases} == set(KINDS)
    for case in cases:
        tokens = ids(case.text)
        cap = len(tokens) + (not case.truncated)
        script.add(f"{script.num_draft_tokens}-{case.id}", [*tokens, END], params(case.contract, max_tokens=cap))
    script.run(limit=3000)
    for case in cases:
        out = script.delivered(f"{script.num_draft_tokens}-{case.id}")
        record, tokens = out.record, ids(case.text)
        assert record["surplus"] == 0, case.id
        assert record["tokens"] == len(out.tokens) == len(out.logprobs), case.id
        assert out.logprobs == [-float(token) for token in out.tokens]
        if case.expected is None:
            assert (record["answer"], record["contract_valid"]) == (None, False), case.id
            assert out.tokens == (tokens if case.truncated else [*tokens, END])
            assert out.finish_reason == ("length" if case.truncated else "stop")
        else:
            assert record["answer"] == case.expected.answer, case.id
            assert out.tokens == tokens[: len(out.tokens)], case.id
            text = TOKENIZER.decode(out.tokens)
            assert text[: len(text) - record["cut"]] == case.text[: case.expected.end], case.id
            assert (out.finish_reason, out.stop_reason) == ("stop", "ace_contract"), case.id
            assert record["commit_position"] == len(out.tokens)
    assert not script.scheduler._ace_live


ANSWER = "</think>\n\nAnswer: B because it is"


@pytest.mark.parametrize("window", [1, 2, 5])
def test_what_leaves_does_not_depend_on_the_windows(window):
    outs = []
    for drafts in (0, 4):
        script = Script(num_draft_tokens=drafts)
        script.add("r", [*ids("so\n\n" + ANSWER), END], params(CHOICE), prompt=(5, THINK))
        script.run(window)
        out = script.delivered("r")
        outs.append((out.tokens, out.stop_reason, out.record["answer"], out.logprobs))
        assert out.record["reason"] == "natural"
    assert outs[0] == outs[1]
    assert outs[0][2] == "B"
    assert TOKENIZER.decode(outs[0][0]) == "so\n\n</think>\n\nAnswer: B"


def test_a_commit_beats_the_cap_at_its_token_and_loses_to_an_earlier_one():
    length = len(ids("</think>\n\nAnswer: B"))
    tokens = [*ids("</think>\n\nAnswer: B"), *ids("\nso"), END]
    for cap, reason in ((length + 1, "stop"), (length, "length"), (length - 1, "length")):
        script = Script()
        script.add("r", tokens, params(CHOICE, max_tokens=cap), prompt=(5, THINK))
        script.run()
        out = script.delivered("r")
        assert out.finish_reason == reason  # the token behind "B" decides, so at the cap nothing is
        assert len(out.tokens) == min(cap, length)
    boxed = ids("</think>\\boxed{5}")
    script = Script()
    script.add("r", [*boxed, END], params({"kind": "boxed"}, max_tokens=len(boxed)), prompt=(5, THINK))
    script.run()
    assert script.delivered("r").stop_reason == "ace_contract"


def test_the_end_of_a_text_settles_what_only_the_end_settles():
    script = Script()
    tokens = ids("</think>\n\nAnswer: B")
    script.add("r", [*tokens, END], params(CHOICE), prompt=(5, THINK))
    script.add("cut", [*tokens, END], params(CHOICE, max_tokens=len(tokens)), prompt=(5, THINK))
    script.run()
    out = script.delivered("r")
    assert (out.tokens, out.stop_reason, out.record["answer"]) == (tokens, "ace_contract", "B")
    out = script.delivered("cut")
    assert (out.tokens, out.finish_reason, out.record["answer"]) == (tokens, "length", None)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("window", [1, 5])
def test_a_stop_string_ends_the_request_in_the_engine_core(asynchronous, window):
    """Stock vLLM finds it in the API process, too late for the audit and for the tokens of the steps in flight."""
    script = Script(asynchronous=asynchronous)
    tokens = ids("</think>\n\nwell done. Answer: B because")
    script.add("r", [*tokens, END], params(CHOICE, stop=["one."]), prompt=(5, THINK))
    script.run(window)
    out = script.delivered("r")
    assert (out.finish_reason, out.stop_reason) == ("stop", "one.")
    assert "one." in TOKENIZER.decode(out.tokens)
    assert "one." not in TOKENIZER.decode(out.tokens[:-1])
    assert (out.record["finish_reason"], out.record["answer"]) == ("stop", None)


def test_scope_anywhere_reads_the_thinking():
    for scope, answer in (("anywhere", "7"), ("answer", "8")):
        script = Script()
        text = "so \\boxed{7} is it\n\n</think>\\boxed{8} yes"
        script.add("r", [*ids(text), END], params({"kind": "boxed", "scope": scope}), prompt=(5, THINK))
        script.run()
        out = script.delivered("r")
        assert out.record["answer"] == answer
        assert out.record["reason"] == ("none" if scope == "anywhere" else "natural")


def test_a_reopened_block_is_thought_again():
    script = Script()
    text = "a</think> Answer: <think> B </think> no\n\nAnswer: A\n"
    script.add("r", [*ids(text), END], params(CHOICE), prompt=(5, THINK))
    script.run()
    assert script.delivered("r").record["answer"] == "A"


def test_requests_without_our_options_are_vllms_own():
    tokens = [*ids(ANSWER), END]
    outs = []
    for ours in (True, False):
        script = Script(ours=ours)
        script.add("r", tokens, params(), prompt=(5, THINK))
        script.add("stop", tokens, params(stop=["Answer"]), prompt=(5, THINK))
        if ours:
            assert not script.scheduler._ace_live
        script.run()
        outs.append([script.delivered(key) for key in ("r", "stop")])
    assert outs[0] == outs[1]
    assert outs[0][0].record is None


def test_streaming_input_sessions_are_vllms_own():
    from vllm.v1.request import Request

    script = Script()
    session = Request("s", [5, THINK], params(CHOICE), None, resumable=True)
    script.scheduler.add_request(session)
    assert not script.scheduler._ace_live


def test_an_abort_in_the_middle_of_thinking_leaves_nothing_behind():
    from vllm.v1.request import RequestStatus

    script = Script()
    for key in ("a", "b"):
        script.add(key, [*ids("x\n\n" * 20 + ANSWER), END], params(CHOICE), prompt=(5, THINK))
    script.step()
    script.step()
    script.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert set(script.scheduler._ace_live) == {"b"}
    script.run()
    assert not script.scheduler._ace_live
    assert script.delivered("a").record is None
    assert script.delivered("b").record["answer"] == "B"


def test_options_that_the_api_process_let_through_do_not_end_the_engine(caplog):
    script = Script()
    made = params()
    made.extra_args = {"ace_contract": "no such name"}
    script.add("r", [*ids("a"), END], made)
    script.run()
    assert script.delivered("r").tokens == [*ids("a"), END]
    assert "served without exits and contract" in caplog.text


def test_a_preempted_request_goes_on_where_it_was():
    """12 blocks of 16 tokens for four requests of 80: they take turns."""
    text = "so\n\n" * 18 + ANSWER
    outs = []
    for blocks in (4000, 12):
        script = Script(blocks=blocks, asynchronous=False)
        for i in range(4):
            script.add(f"r{i}", [*ids(text), END], params(CHOICE), prompt=(5, THINK))
        preempted = 0
        requests = list(script.scheduler.requests.values())
        script.run(limit=2000)
        preempted = sum(request.num_preemptions for request in requests)
        assert (preempted > 0) == (blocks == 12)
        outs.append([script.delivered(f"r{i}")[:4] for i in range(4)])
        for out in outs[-1]:
            out[3].pop("spec")  # a resumed request verifies anew
    assert outs[0] == outs[1]


def test_an_end_by_a_rule_of_vllms_own_has_a_record_too():
    from vllm.sampling_params import RepetitionDetectionParams

    script = Script()
    rule = RepetitionDetectionParams(max_pattern_size=1, min_pattern_size=1, min_count=6)
    made = params(CHOICE, repetition_detection=rule)
    script.add("r", [*ids("</think>"), *ids("a") * 20, END], made, prompt=(5, THINK))
    script.run()
    out = script.delivered("r")
    assert (out.finish_reason, len(out.tokens)) == ("repetition", 7)
    assert (out.record["finish_reason"], out.record["tokens"], out.record["answer"]) == ("repetition", 7, None)


def fired(request_id, row, position, *, forced=True):
    return ExitEvent(request_id, row, position, 4, 2, tuple(0.5 for _ in SIGNALS), forced)


@pytest.fixture
def with_head(monkeypatch):
    """Settings with a head: only its policy and markers are read here."""
    from ace_learn.engines.vllm import scheduler
    from ace_learn.exit.policy import ExitPolicy
    from ace_learn.thinking import ThinkMarkers

    monkeypatch.setattr(Settings, "policy", lambda self: ExitPolicy(predicate="all", thresholds={"consistency": 0.4}))
    monkeypatch.setattr(scheduler, "_markers_of", lambda folder: ThinkMarkers((THINK,), (CLOSE,)))
    return Settings(head="somewhere", exits="always")


@pytest.mark.parametrize("window", [1, 2, 4])
def test_an_exit_of_the_hook_is_told_with_its_place(with_head, window):
    """The script thinks "a\\n\\nb\\n\\n" and is forced to the think end there; the hook says so of that row."""
    script = Script(settings=with_head)
    thought = ids("a\n\nb\n\n")
    tokens = [*thought, *ids(ANSWER), END]
    script.add("r", tokens, params(CHOICE), prompt=(5, THINK))

    def events(before, sampled):
        row = len(thought) - before
        return [fired("r", row, 2 + len(thought) - 1)] if 0 <= row <= 4 else []

    script.events["r"] = events
    script.run(window)
    record = script.delivered("r").record
    assert (record["reason"], record["exit_position"]) == ("policy", len(thought))
    assert record["signals"] == dict.fromkeys(SIGNALS, 0.5)
    assert record["thresholds"] == {"consistency": 0.4}
    assert (record["tokens_thought"], record["paragraphs"]) == (4, 2)
    assert record["think_tokens"] == len(thought)


def test_a_request_can_leave_exits_out(with_head):
    script = Script(settings=with_head)
    made = params()
    made.extra_args = {"ace_enabled": False}
    script.add("r", [*ids("a"), END], made, prompt=(5, THINK))
    assert not script.scheduler._ace_live


def test_a_real_connectors_parameters_stay(monkeypatch):
    script = Script()
    stock = type(script.scheduler)._free_request

    def with_connector(self, request, *args, **kwargs):
        _, of_encoder = stock(self, request, *args, **kwargs)
        return {"remote_block_ids": [1]}, of_encoder

    monkeypatch.setattr(type(script.scheduler), "_free_request", with_connector)
    script.add("r", [*ids(ANSWER), END], params(CHOICE), prompt=(5, THINK))
    script.add("plain", [*ids(ANSWER), END], params(), prompt=(5, THINK))
    script.run()
    assert script.outputs["plain"][-1].kv_transfer_params == {"remote_block_ids": [1]}
    both = script.outputs["r"][-1].kv_transfer_params
    assert (both["remote_block_ids"], both["ace_learn"]["answer"]) == ([1], "B")
