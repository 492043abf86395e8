"""Boundaries are decided on token ids, and never depend on how the tokenizer cut the break."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ace_learn.thinking import IN_BREAK, BoundaryTables, MarkerMatcher, ThinkMarkers, closes_think, opens_think
from tests.helpers.targets import tiny_tokenizer


def boundaries(tokens):
    """Indices of the boundary tokens among `tokens`, each a text."""
    tables = BoundaryTables.from_texts(tokens)
    standing, found = torch.tensor([IN_BREAK]), []
    for i in range(len(tokens)):
        standing, closes = tables.advance(standing, torch.tensor([i]))
        found += [i] if bool(closes) else []
    return found


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["a", ".\n\n", "b"], [1]),
        (["a", "\n", "\n", "b"], [2]),  # the break spans two tokens
        (["a", ".\n", "\n", "b"], [2]),
        (["a", "\n", "  ", "\n", "b"], [3]),  # a blank line that holds spaces
        (["a", "\n \t\n", "b"], [1]),
        (["a", "\n\n", "\n", " \n\n", "b"], [1]),  # white space behind a boundary is not a second one
        (["a", "\n\n\n", "b", "\n\n"], [1, 3]),
        (["a", "\n", "b", "\n", "c"], []),  # single newlines
        (["a\n\nb", "c"], []),  # the break is followed by text within the token
        (["a\n\n  ", "b"], [0]),
        (["a", "\n", "\nb"], []),  # the text up to the token does not end in a break
        (["\n\n", "a", "\n\n"], [2]),  # nothing before the first break
        (["a", "\r\n\r\n", "b"], [1]),
        (["", "a", "", "\n\n"], [3]),
    ],
)
def test_boundaries(tokens, expected):
    assert boundaries(tokens) == expected


@given(st.lists(st.text(alphabet="ab\n \t", min_size=1, max_size=4), min_size=1, max_size=12))
def test_a_boundary_is_where_the_text_ends_in_a_new_blank_line(tokens):
    """A slow reading of the definition on the text agrees with the tables."""
    expected, text = [], ""
    for i, token in enumerate(tokens):
        tail_before = text[len(text.rstrip()) :]
        text += token
        tail = text[len(text.rstrip()) :]
        ended_before = bool(tail_before.count("\n") >= 2 and not token.strip())
        if text.strip() and tail.count("\n") >= 2 and not ended_before:
            expected.append(i)
    assert boundaries(tokens) == expected


def test_multi_token_marker_is_matched_across_false_starts():
    matcher = MarkerMatcher((1, 1, 2), 5, torch.device("cpu"))
    matched, complete = torch.zeros(1), []
    for token in [1, 1, 1, 2, 0, 1, 2, 1, 1, 2]:
        matched = matcher.advance(matched, torch.tensor([token]))
        complete.append(bool(matched == matcher.length))
    assert complete == [False, False, False, True, False, False, False, False, False, True]


def test_prompt_that_leaves_the_block_open():
    markers = ThinkMarkers((7,), (8, 9))
    assert opens_think([1, 7, 2], markers)
    assert not opens_think([1, 7, 2, 8, 9], markers)
    assert opens_think([7, 8, 9, 7], markers)
    assert not opens_think([1, 2], markers)
    assert not opens_think([1, 7, 2, 3, 4], markers)  # the user wrote it


def test_tokenizer_without_markers_is_refused_with_a_remedy():
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match=r"no think marker '<reason>'.*--target.think.start"):
        ThinkMarkers.from_tokenizer(tokenizer, start="<reason>")
    many = ThinkMarkers.from_tokenizer(tokenizer, start="so", end="sum", multi_token=True)
    assert many.start == tuple(tokenizer.encode("so"))


def test_a_template_that_closes_the_block_disables_thinking():
    markers = ThinkMarkers((4,), (5, 6))
    assert closes_think([1, 4, 2, 5, 6], markers)
    assert closes_think([1, 4, 2, 5, 6, 2, 2], markers)
    assert not closes_think([4, 2, 5, 6, 1, 1, 1], markers)  # an earlier turn
    assert not closes_think([1, 4], markers)
    assert not closes_think([1, 2, 6], markers)
    assert not closes_think([], markers)


def test_markers_are_looked_for_at_the_end_alone():
    class Prompt(list):
        def __getitem__(self, place):
            assert not isinstance(place, slice) or place.start >= -7
            return super().__getitem__(place)

    markers = ThinkMarkers((4,), (5, 6))
    assert opens_think(Prompt([0] * 100_000 + [4]), markers)
    assert closes_think(Prompt([0] * 100_000 + [5, 6]), markers)
