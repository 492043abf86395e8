"""Token streams against a byte-level tokenizer, in which a character may be split over tokens."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ace_learn.contracts import Contract
from ace_learn.contracts.stream import Detokenizer, TokenStream

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("<", "t"), ("1", "2"), ("12", "3"), ("}", "."), ("}.", "Ġ"), ("B", "."), (".", "Ċ")]


def byte_level_tokenizer():
    vocab = {token: i for i, token in enumerate([*BYTES, *(a + b for a, b in MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<think>", "</think>"])
    return tokenizer


TOKENIZER = byte_level_tokenizer()
DECODE = partial(TOKENIZER.decode, skip_special_tokens=False)


def ids(text):
    return TOKENIZER.encode(text).ids


def stream(spec, **kwargs):
    return TokenStream(Contract.from_spec(spec).committer(**kwargs), DECODE)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_pieces_join_to_the_text_also_where_a_character_is_split(text):
    detokenizer = Detokenizer(DECODE)
    pieces = [detokenizer.push(i) for i in ids(text)]
    assert "".join(pieces) + detokenizer.flush() == text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, len(BYTES) - 1), max_size=60))
def test_pieces_join_to_the_text_of_any_bytes(tokens):
    detokenizer = Detokenizer(DECODE)
    pieces = [detokenizer.push(i) for i in tokens]
    assert "".join(pieces) + detokenizer.flush() == DECODE(tokens)


def test_no_piece_holds_half_a_character():
    detokenizer = Detokenizer(DECODE)
    pieces = [detokenizer.push(i) for i in ids("a€😀")]
    assert pieces == ["a", "", "", "€", "", "", "", "😀"]


def test_a_window_is_all_that_is_decoded():
    sizes = []

    def decode(tokens):
        sizes.append(len(tokens))
        return DECODE(tokens)

    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.push(i) for i in ids("\N{SNOWMAN}x" * 500))
    assert text == "\N{SNOWMAN}x" * 500
    assert max(sizes) <= 16
    assert len(sizes) < 1.2 * len(ids(text))


def test_the_token_in_which_the_end_falls_is_kept():
    text = "\\boxed{7}. Hope"
    commit = stream({"kind": "boxed"}).push(ids(text))
    assert commit.commit == ("7", 9)
    # One token per character up to the "7"; "}. " is one token and holds the end.
    assert commit.num_tokens == 9
    assert DECODE(ids(text)[:9]) == "\\boxed{7}. "


def test_tokens_that_only_served_to_decide_are_dropped():
    text = "Answer: 12 cm of cloth"
    committed = stream({"kind": "integer"}).push(ids(text))
    assert committed.commit == ("12", 10)
    assert DECODE(ids(text)[: committed.num_tokens]) == "Answer: 12"


def test_offsets_count_characters_not_bytes():
    text = "🙂🙂 so \\boxed{é}"
    committed = stream({"kind": "boxed"}).push(ids(text))
    assert committed.commit == ("é", len(text))
    assert committed.num_tokens == len(ids(text))


@pytest.mark.parametrize("window", [1, 3, 8])
def test_windows_of_any_size_commit_alike(window):
    text = "<think>Answer: 5\n</think>Then ÷ and: Answer: 123\nand more of it"
    whole = stream({"kind": "integer"}).push(ids(text))
    parts = stream({"kind": "integer"})
    tokens = ids(text)
    for at in range(0, len(tokens), window):
        parts.push(tokens[at : at + window])
    assert parts.close() == whole
    assert whole.commit.answer == "123"


def test_the_end_settles_what_a_cut_does_not():
    for truncated, answer in ((True, None), (False, "12")):
        tokens = stream({"kind": "integer"})
        assert tokens.push(ids("Answer: 12")) is None
        committed = tokens.close(truncated=truncated)
        assert (committed and committed.commit.answer) == answer
        assert committed is None or committed.num_tokens == len(ids("Answer: 12"))


def test_an_empty_stream_closes_without_a_commit():
    assert stream({"kind": "boxed"}).close() is None


def test_the_end_of_text_gives_up_half_a_character():
    tokens = ids("Answer: 12€")[:-1]
    committing = stream({"kind": "integer"})
    assert committing.push(tokens) is None
    assert committing.close().commit == ("12", 10)
