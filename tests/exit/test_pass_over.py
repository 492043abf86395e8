import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_learn.exit.state import Span, SpanMachine
from ace_learn.thinking import BoundaryTables, ThinkMarkers

TEXTS = ["a", "\n", "\n\n", ".\n\n", "<t>", "</", "t>", "b", " ", "b "]
QUIET = (0, 7, 8, 9)
MACHINE = SpanMachine(ThinkMarkers((4,), (5, 6)), BoundaryTables.from_texts(TEXTS), torch.device("cpu"))


def after(span, tokens, logprobs):
    if not tokens:
        return span
    spans = MACHINE.advance(span, torch.tensor([tokens]), torch.tensor([logprobs]))
    return Span(*(field[:, -1] for field in spans))


@settings(max_examples=300, deadline=None)
@given(
    before=st.lists(st.integers(0, len(TEXTS) - 1), max_size=12),
    passed=st.lists(st.sampled_from(QUIET), max_size=6),
    padding=st.lists(st.integers(0, len(TEXTS) - 1), min_size=1, max_size=3),
    in_think=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_passing_over_quiet_tokens_is_reading_them_one_by_one(before, passed, padding, in_think, seed):
    drawn = -torch.rand(len(before) + len(passed) + len(padding), generator=torch.Generator().manual_seed(seed))
    logprobs = drawn.tolist()
    span = after(Span.initial(torch.tensor([float(in_think)])), before, logprobs[: len(before)])
    tokens, given_ = torch.tensor([passed + padding]), torch.tensor([logprobs[len(before) :]])
    quiet = torch.arange(tokens.shape[1])[None] < len(passed)
    found = MACHINE.pass_over(span, tokens, given_, quiet)
    expected = after(span, passed, logprobs[len(before) : len(before) + len(passed)])
    assert torch.equal(found.pack(), expected.pack())
