import re

import pytest

from ace_learn.contracts.source import Source

RUN = re.compile(r"[a-z]*")


def waiting(step):
    """Whether a computation asks for more text."""
    return next(step, "done") is None


def result(step):
    with pytest.raises(StopIteration) as stopped:
        next(step)
    return stopped.value.value


def test_peek_waits_for_a_character_and_is_empty_past_the_end():
    source = Source()
    step = source.peek()
    assert waiting(step)
    source.push("a")
    assert result(step) == "a"
    source.closed = True
    assert result(source.peek(1)) == ""


def test_a_run_goes_on_over_chunks_and_stops_at_its_limit():
    source = Source()
    step = source.skip(RUN)
    source.push("ab")
    assert waiting(step)
    source.push("c1")
    assert result(step) == 3
    assert source.offset == 3
    assert result(Source.whole("abcdef").skip(RUN, limit=4)) == 4


def test_a_word_waits_for_its_end_and_for_what_an_apostrophe_brings():
    source = Source()
    step = source.word()
    for piece in ("is", "n", "'"):
        source.push(piece)
        assert waiting(step)
    source.push("t it")
    assert result(step) == "isn't"


def test_old_text_is_dropped_but_for_the_look_back():
    source = Source(lookback=3)
    source.push("abcdef")
    source.pos = 6
    source.push("gh")
    assert source.buf == "defgh"
    assert source.offset == 6
    assert source.before(3) == "def"


def test_rewinding_brings_back_the_look_back_before_the_mark():
    source = Source(lookback=2)
    source.push("abcd")
    source.pos = 3
    source.mark()
    for _ in range(4):
        source.pos = len(source.buf)
        source.push("efgh")
    source.pos = len(source.buf)
    assert source.marked() == "d" + "efgh" * 4
    source.rewind()
    assert source.offset == 3
    assert source.before(2) == "bc"
    assert source.buf[source.pos :] == "d" + "efgh" * 4


def test_find_stops_at_its_limit_however_the_text_is_cut():
    for pieces in (["aaaaX"], ["a", "aaa", "X"], ["aaa", "aX"]):
        source = Source()
        step = source.find(re.compile("X"), limit=4)
        for piece in pieces:
            source.push(piece)
            if not waiting(step):
                break
        assert source.offset == 4
