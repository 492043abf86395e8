"""The API process: texts end at the commit, records are kept by the id that a client knows."""

import pytest

pytest.importorskip("vllm")

from transformers import AutoTokenizer

from ace_learn.engines.vllm.settings import Settings
from ace_learn.reasoner import weights_path

pytestmark = pytest.mark.vllm

TOKENIZER = AutoTokenizer.from_pretrained(weights_path())


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def record(finish_reason="contract", **fields):
    known = {
        "finish_reason": finish_reason, "cut": 0, "reason": "natural", "tokens_thought": 5, "think_tokens": 5,
        "surplus": 0, "hook_failures": [], "hook_off": False, "budget": None, "signals": None, "contract_valid": None,
    }  # fmt: skip
    return known | fields


class Process:
    """An output processor with an observer, and requests that it knows."""

    def __init__(self, **settings):
        from vllm.v1.engine.output_processor import OutputProcessor

        from ace_learn.engines.vllm.observer import install_observer

        self.observer = install_observer(Settings(**settings))
        self.processor = OutputProcessor(TOKENIZER, log_stats=False)
        self.parents = {}

    def add(self, key, *, n=1, **options):
        from copy import copy

        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.parallel_sampling import ParentRequest

        params = SamplingParams(**{"output_kind": RequestOutputKind.FINAL_ONLY, "n": n, **options})
        request = EngineCoreRequest(
            key, ids("a"), None, params, None, 0.0, None, None, None, external_req_id=f"x-{key}"
        )
        if n == 1:
            self.processor.add_request(request, None)
            return
        parent = ParentRequest(request)
        for index in range(n):
            child = copy(request)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            self.processor.add_request(child, None, parent, index)

    def finish(self, key, tokens, kept, *, stop_reason="ace_contract", reason=0):
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        output = EngineCoreOutput(
            key,
            list(tokens),
            finish_reason=FinishReason(reason),
            stop_reason=stop_reason,
            kv_transfer_params={"other": 1} | ({} if kept is None else {"ace_learn": kept}),
        )
        return self.processor.process_outputs([output]).request_outputs


def test_the_token_of_the_commit_keeps_its_text_up_to_the_answers_end():
    """Stock vLLM leaves the last token of a stop in the engine core out of the text."""
    process = Process()
    tokens = ids("the sum is 12")
    for key, kept, text in (
        ("a", record(), "the sum is 12"),
        ("b", record(cut=1), "the sum is 1"),
        ("c", None, TOKENIZER.decode(tokens[:-1])),
    ):
        process.add(key)
        (output,) = process.finish(key, tokens, kept)
        assert output.outputs[0].text == text
        assert list(output.outputs[0].token_ids) == tokens
        assert (output.outputs[0].finish_reason, output.kv_transfer_params["other"]) == ("stop", 1)


def test_no_more_is_cut_than_the_last_token():
    process = Process()
    tokens = ids("the sum is 12")
    process.add("a")
    (output,) = process.finish("a", tokens, record(cut=1000))
    assert output.outputs[0].text == TOKENIZER.decode(tokens[:-1])


@pytest.mark.parametrize(("include", "text"), [(False, "the "), (True, "the sum")])
def test_a_stop_string_of_the_engine_core_is_cut_as_vllm_cuts_it(include, text):
    process = Process()
    process.add("a", stop=["sum"], include_stop_str_in_output=include)
    (output,) = process.finish("a", ids("the sum"), record("stop"), stop_reason="sum")
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == (text, "sum")


def test_a_stop_string_in_the_token_of_the_commit_does_not_count():
    process = Process()
    process.add("a", stop=["2"])
    (output,) = process.finish("a", ids("the sum is 12"), record())
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("the sum is 12", "ace_contract")


def test_a_stop_token_stays_out_of_the_text():
    process = Process()
    process.add("a")
    (output,) = process.finish("a", ids("the sum is 12"), record("stop"), stop_reason=None)
    assert output.outputs[0].text == TOKENIZER.decode(ids("the sum is 12")[:-1])


def test_requests_without_text_keep_their_ids():
    process = Process()
    process.add("a", detokenize=False)
    (output,) = process.finish("a", ids("12"), record(cut=1))
    assert list(output.outputs[0].token_ids) == ids("12")


def test_all_choices_records_are_in_the_one_output_and_under_the_clients_id():
    process = Process()
    process.add("a", n=2)
    assert process.finish("1_a", ids("b"), record(tokens_thought=1)) == []
    (output,) = process.finish("0_a", ids("c"), record(tokens_thought=0))
    both = output.kv_transfer_params["ace_learn"]
    assert [(one["index"], one["tokens_thought"]) for one in both] == [(0, 0), (1, 1)]
    kept = process.observer.store.get("x-a")
    assert [(one["request_id"], one["index"], one["tokens_thought"]) for one in kept] == [("x-a", 0, 0), ("x-a", 1, 1)]


def test_an_output_of_a_request_that_is_gone_is_no_record():
    process = Process()
    process.add("a")
    process.processor.abort_requests(["a"], internal=True)
    assert process.finish("a", ids("b"), record()) == []
    assert len(process.observer.store) == 0


def test_the_oldest_records_go_first_and_a_completions_id_finds_all_its_prompts():
    from ace_learn.engines.vllm.observer import AuditStore, Finished

    store = AuditStore(2)
    for name in ("cmpl-7-0", "cmpl-7-1"):
        store.add(Finished(name, 0, {"tokens": 1}))
    assert [one["request_id"] for one in store.get("cmpl-7")] == ["cmpl-7-0", "cmpl-7-1"]
    store.add(Finished("chatcmpl-8", 0, {"tokens": 2}))
    assert store.get("cmpl-7") is None
    assert store.get("cmpl-7-1") == [{"request_id": "cmpl-7-1", "index": 0, "tokens": 1}]
    assert len(store) == 2
    nothing = AuditStore(0)
    nothing.add(Finished("a", 0, {}))
    assert nothing.get("a") is None
