import pytest
from hypothesis import given
from hypothesis import strategies as st

from ace_learn.contracts import Contract
from ace_learn.engines.answer_reader import AnswerReader, Piece, tokens_behind

BOXED = Contract.from_spec({"kind": "boxed"})


@pytest.mark.parametrize(
    ("tokens", "cut", "behind"),
    [
        (("ab", "cd", "ef"), 6, 0),
        (("ab", "cd", "ef"), 5, 0),
        (("ab", "cd", "ef"), 4, 1),
        (("ab", "cd", "ef"), 1, 2),
        (("ab", "cd", "ef"), 0, 3),
        (("ab", "cd", "ef", "<eos>"), 6, 1),
        (("thought", "ab", "cd", "ef", "<eos>"), 3, 2),
    ],
)
def test_tokens_behind_a_cut_by_their_texts(tokens, cut, behind):
    piece = Piece("abcdef", len(tokens), token_texts=tuple(token.encode() for token in tokens))
    assert tokens_behind(piece, cut) == behind


@pytest.mark.parametrize(("cut", "behind"), [(6, 0), (5, 0), (4, 1), (3, 1), (2, 2), (0, 3)])
def test_tokens_behind_a_cut_by_their_share(cut, behind):
    assert tokens_behind(Piece("abcdef", 3), cut) == behind
    assert tokens_behind(Piece("abcdef", 3, token_texts=(b"x", b"y", b"z")), cut) == behind, "texts of something else"


def test_a_character_of_several_tokens():
    halves = "é".encode()
    piece = Piece("aé!", 4, token_texts=(b"a", halves[:1], halves[1:], b"!"))
    assert [tokens_behind(piece, cut) for cut in range(4)] == [4, 3, 1, 0]


PLAIN = "<think>so \\boxed{6}?</think>It is \\boxed{7}. Done."


@given(st.lists(st.integers(0, len(PLAIN))))
def test_the_cut_into_pieces_does_not_matter(cuts):
    ends = sorted({*cuts, len(PLAIN)})
    reader = AnswerReader(BOXED)
    for start, end in zip([0, *ends], ends, strict=False):
        reader.read(Piece(PLAIN[start:end], end - start))
    assert reader.commit is not None
    assert (reader.commit.answer, reader.commit.end) == ("7", PLAIN.index("7") + 2)
    assert reader.texts() == ("It is \\boxed{7}", "so \\boxed{6}?")
    assert reader.raw == PLAIN
    tokens = reader.tokens()
    assert (tokens.received, tokens.kept) == (len(PLAIN), reader.commit.end)
    assert tokens.thought == len("<think>so \\boxed{6}?</think>")


def test_channels_mean_what_markers_mean():
    apart, written = AnswerReader(BOXED), AnswerReader(BOXED)
    for kind, text in [("reasoning", "so "), ("reasoning", "</th"), ("content", ""), ("content", "\\boxed{"),
                       ("reasoning", "hm"), ("content", "8}"), ("content", "\\boxed{7} x")]:  # fmt: skip
        apart.read(Piece(text, 1, kind))
    for text in ["<think>so ", "</th", "</think>", "\\boxed{", "<think>hm</think>", "8}", "\\boxed{7} x"]:
        written.read(Piece(text, 1))
    assert apart.commit == written.commit._replace(end=apart.commit.end)
    assert apart.commit.answer == "7", "what stands on the two sides of a think span is not read together"
    assert apart.texts() == written.texts()
    assert apart.raw == "<think>so </th</think>\\boxed{<think>hm</think>8}\\boxed{7} x"


@pytest.mark.parametrize(("kinds", "thought"), [("rrcc", 2), ("rrrr", 4), ("ccrr", 2), ("rcrc", 2), ("cccc", 0)])
def test_tokens_of_a_channel(kinds, thought):
    reader = AnswerReader(BOXED)
    for place, kind in enumerate(kinds):
        reader.read(Piece(f"text {place}", 1, "reasoning" if kind == "r" else "content"))
    assert reader.tokens() == (4, 4, thought)


def test_an_end_without_a_start_makes_thinking_of_what_came_before():
    reader = AnswerReader(BOXED)
    for text in ["\\boxed", "{5</think>", "\\boxed{7}"]:
        reader.read(Piece(text, 2))
    assert reader.texts() == ("\\boxed{7}", "\\boxed{5")
    assert (reader.tokens().thought, reader.tokens().kept) == (4, 6)


def test_a_block_that_the_template_opens():
    reader = AnswerReader(BOXED, starts_in_think=True)
    for text in ["\\boxed{5}", "</think>", "\\boxed{7}"]:
        reader.read(Piece(text, 1))
    assert (reader.commit.answer, reader.texts()) == ("7", ("\\boxed{7}", "\\boxed{5}"))
    assert reader.raw == "<think>\\boxed{5}</think>\\boxed{7}"


def test_thinking_without_an_end_has_no_answer():
    reader = AnswerReader(BOXED)
    reader.read(Piece("<think>\\boxed{5}", 3))
    assert reader.close(truncated=False) is None
    assert reader.texts() == ("", "\\boxed{5}")
    assert reader.tokens() == (3, 3, 3)


def test_the_token_that_completes_the_answer_is_kept_and_those_that_settle_it_are_not():
    reader = AnswerReader(Contract.from_spec({"kind": "integer"}))
    for text in ["The answer", " is", " 4", "2", ".", " So"]:
        if reader.read(Piece(text, 1)) is not None:
            break
    assert reader.commit.answer == "42"
    tokens = reader.tokens()
    assert (tokens.kept, tokens.received) == (4, 6)
    assert reader.texts().answer == "The answer is 42"
