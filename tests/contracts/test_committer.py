import pytest

from ace_learn.contracts import Contract
from ace_learn.contracts.committer import Markers, ThinkFilter

MARKERS = Markers("<think>", "</think>")


def outside(pieces, *, in_think=False):
    """The text outside think spans, with "|" where a span stood."""
    found = []
    think = ThinkFilter(MARKERS, in_think=in_think)
    for feed in (*(lambda p=p: think.feed(p) for p in pieces), think.close):
        found += [("|" if piece.fresh else "") + piece.text for piece in feed()]
    return "".join(found)


@pytest.mark.parametrize(
    ("text", "in_think", "expected"),
    [
        ("a<think>b</think>c", False, "a|c"),
        ("b</think>c", True, "|c"),
        ("b</think>c", False, "b|c"),
        ("a<think>b<think>c</think>d", False, "a|d"),
        ("a<think>b</think><think>c</think>d", False, "a|d"),
        ("a<thi", False, "a<thi"),
        ("a<think>b</thi", False, "a|"),
        ("<<think>x</</think>>", False, "<|>"),
        ("a</think", False, "a</think"),
    ],
)
def test_think_spans_are_cut_out_however_the_text_is_cut(text, in_think, expected):
    assert outside([text], in_think=in_think) == expected
    assert outside(list(text), in_think=in_think) == expected
    for at in range(len(text)):
        assert outside([text[:at], text[at:]], in_think=in_think) == expected


def test_offsets_count_the_think_span():
    commit = Contract.from_spec({"kind": "boxed"}).project("<think>x</think>\\boxed{1}")
    assert commit == ("1", 25)


def test_own_markers():
    contract = Contract.from_spec({"kind": "boxed", "think_start": "[T]", "think_end": "[/T]"})
    assert contract.project("[T]\\boxed{1}[/T]\\boxed{2}").answer == "2"
    assert contract.project("<think>\\boxed{1}</think>").answer == "1"


def test_a_feed_costs_the_same_wherever_it_is_in_the_text():
    committer = Contract.from_spec({"kind": "integer"}).committer()
    for _ in range(2_000):
        committer.feed("and so on, ")
    assert len(committer._source.buf) < 400
