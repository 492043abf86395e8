"""A request's outcome does not depend on how its tokens were cut into windows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_learn.contracts import Contract
from ace_learn.engines.live import LiveRequest
from ace_learn.engines.requests import Request
from ace_learn.models.target import Target
from ace_learn.thinking import ThinkMarkers
from tests.helpers.targets import WORDS, tiny_model, tiny_tokenizer

ID = {word: i for i, word in enumerate(WORDS)}
EOS, OPEN, CLOSE = ID["<eos>"], ID["<think>"], ID["</think>"]
SINGLE = ThinkMarkers((OPEN,), (CLOSE,))
DOUBLE = ThinkMarkers((ID[" wait"], ID[" then"]), (ID[" then"], ID[" the"]))
TARGETS = {
    markers: Target(tiny_model(layers=1), tiny_tokenizer(), markers, name="tiny") for markers in (SINGLE, DOUBLE)
}
SPECS = [
    {"kind": "boxed"},
    {"kind": "choice", "options": ["a", "b"]},
    {"kind": "boxed", "scope": "anywhere"},
]
PIECES = st.sampled_from(
    [
        EOS,
        OPEN,
        CLOSE,
        ID[" wait"],
        ID[" then"],
        ID[" the"],
        ID["\n\n"],
        ID["\\boxed{7}"],
        ID["."],
        *range(20, 32),
        ID["a"],
    ]
)


def outcome(target, request, tokens, cuts):
    """Feeds tokens in windows of the given sizes, as the engine does; forced tokens come between."""
    live, at, turn = LiveRequest(request, target), 0, 0
    while live.finish is None and at < len(tokens):
        if live.pending:
            live.push([live.pending.pop(0)], [0.0])
            continue
        window = tokens[at : at + cuts[turn % len(cuts)]]
        turn += 1
        before = live.length
        live.push(window, [0.0] * len(window), num_accepted=len(window) - 1)
        at += max(1, live.length - before)
    if live.finish is None:
        return None
    output = live.output()
    return (
        output.token_ids,
        output.answer,
        output.finish_reason,
        output.answer_text,
        output.think_start,
        output.think_end,
    )


@settings(max_examples=300, deadline=None)
@given(
    st.lists(PIECES, min_size=4, max_size=30),
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
    st.sampled_from(SPECS),
    st.sampled_from([SINGLE, DOUBLE]),
    st.booleans(),
    st.integers(0, 5),
    st.sampled_from([None, 3, 6]),
    st.sampled_from([(), (".",), ("a.",)]),
    st.sampled_from(["force_think_end", "stop"]),
)
def test_windows_do_not_matter(tokens, cuts, spec, markers, opened, minimum, cap, stop, eos_in_think):
    request = Request(
        key=0,
        prompt_ids=(9, 9, *markers.start) if opened else (9,),
        contract=Contract.from_spec(spec),
        max_new_tokens=24,
        max_answer_tokens=cap,
        min_tokens=minimum,
        stop=stop,
        eos_in_think=eos_in_think,
    )
    target = TARGETS[markers]
    assert outcome(target, request, tokens, cuts) == outcome(target, request, tokens, [1])


def ids(*words):
    return [ID[word] for word in words]


def run(tokens, *, spec=None, markers=SINGLE, cuts=(50,), **options):
    contract = None if spec is None else Contract.from_spec(spec)
    request = Request(key=0, prompt_ids=(9, *markers.start), contract=contract, **options)
    return outcome(TARGETS[markers], request, tokens, list(cuts))


LETTER = {"kind": "choice", "options": ["a", "b"], "cues": ["sum is"]}


def test_an_answer_at_the_very_end_is_settled_by_the_stop_token_and_keeps_no_surplus():
    tokens = ids("</think>", " sum", " is", " ", "a", "<eos>")
    token_ids, answer, reason, text, *_ = run(tokens, spec=LETTER)
    assert (answer, reason, text) == ("a", "contract", " sum is a")
    assert token_ids == tuple(tokens[:-1])


def test_what_stands_behind_the_stop_token_is_never_read():
    assert run(ids("</think>", " sum", " is", " ", "a", "<eos>", "b"), spec=LETTER)[1] == "a"


def test_text_before_and_behind_a_reopened_block_is_not_joined():
    tokens = ids("</think>", " sum", " is", "<think>", "c", "</think>", " ", "a", ".", "<eos>")
    assert run(tokens, spec=LETTER)[1] is None


def test_scope_anywhere_reads_the_thinking():
    tokens = ids("c", "\\boxed{7}", "c", "</think>", "a", "<eos>")
    assert run(tokens, spec={"kind": "boxed", "scope": "anywhere"})[1:3] == ("7", "contract")
    assert run(tokens, spec={"kind": "boxed"})[1] is None


def test_a_hidden_stop_string_does_not_hide_later_ones():
    tokens = ids("</think>", ".", "a", "a", "a", ".", "b", "b")
    token_ids, _, reason, text, *_ = run(tokens, stop=(".",), min_tokens=3)
    assert (reason, text) == ("stop", ".aaa")
    assert len(token_ids) == 6


def test_a_character_of_a_marker_is_not_the_marker():
    """With markers of two tokens, a stop token in the thinking becomes both tokens of the think end."""
    tokens = [ID["c"], ID[" the"], ID["c"], EOS, ID["a"], EOS]
    token_ids, _, reason, text, start, end = run(tokens, markers=DOUBLE)
    assert token_ids == (*tokens[:3], *DOUBLE.end, ID["a"], EOS)
    assert (reason, text, start, end) == ("stop", "a", 0, 3)


@pytest.mark.parametrize("cuts", [(1,), (3,), (50,)])
def test_a_stop_token_in_the_thinking_ends_the_request_where_it_says_so(cuts):
    tokens = ids("c", "<eos>", "</think>", " sum", " is", " ", "a", "<eos>", "b")
    asked = {"spec": LETTER, "cuts": cuts, "eos_in_think": "stop"}
    token_ids, answer, reason, text, start, end = run(tokens, **asked)
    assert token_ids == tuple(tokens[:2])
    assert (answer, reason, text, start, end) == (None, "stop", "", 0, None)
    assert run(tokens, min_tokens=2, **asked)[:3] == (tuple(tokens[:-2]), "a", "contract")  # hidden from the first two
    assert run(tokens, spec=LETTER, cuts=cuts)[0][:3] == (*ids("c"), CLOSE, CLOSE)  # by default it is the think end


@pytest.mark.parametrize("cap", [2, 4])
def test_answer_cap(cap):
    token_ids, _, reason, *_ = run(ids("c", "</think>", "a", "a", "a", "a", "a"), max_answer_tokens=cap)
    assert reason == "length"
    assert len(token_ids) == 2 + cap


def test_accepted_drafts_that_a_late_commit_removes_are_not_counted():
    request = Request(key=0, prompt_ids=(9, OPEN), contract=Contract.from_spec(LETTER))
    live = LiveRequest(request, TARGETS[SINGLE])
    live.push(ids("</think>", " sum", " is", " ", "a"), [0.0] * 5, num_accepted=4)
    live.push(ids(".", " "), [0.0] * 2, num_accepted=1)
    output = live.output()
    assert output.answer == "a"
    assert len(output.token_ids) == 5
    assert output.stats.accepted == 4


def test_a_step_counts_the_drafts_that_it_kept():
    live = LiveRequest(Request(key=0, prompt_ids=(9, OPEN)), TARGETS[SINGLE])
    live.push(ids("a", "b", "c"), [0.0] * 3, num_accepted=2)
    assert live.accepted_since(0) == 2
    live.push(ids("a", "<eos>", "c", "d"), [0.0] * 4, num_accepted=3)  # the stop token becomes the think end
    assert live.accepted_since(3) == 1
