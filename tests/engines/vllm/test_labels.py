import torch
from hypothesis import given
from hypothesis import strategies as st

from ace_learn.engines.vllm.labels import before_forced, first_forced_rows, grading

NONE = 9


def labels(num_sampled, num_rejected):
    """What vLLM's estimator takes as labels of one request: (draft, accepted)."""
    accepted = max(num_sampled - 1, 0)
    admitted = accepted + num_rejected
    return [(k, k < accepted) for k in range(8) if k <= accepted and k < admitted]


def graded(num_sampled, num_rejected, first):
    found = before_forced(torch.tensor([num_sampled]), torch.tensor([num_rejected]), torch.tensor([first]))
    return labels(int(found.num_sampled), int(found.num_rejected))


def test_hand_worked_counts():
    assert graded(5, 0, NONE) == [(0, True), (1, True), (2, True), (3, True)]  # all of four accepted
    assert graded(3, 2, NONE) == [(0, True), (1, True), (2, False)]
    assert graded(3, 2, 2) == [(0, True), (1, True)]  # draft 2 was rejected because the row was forced
    assert graded(4, 1, 2) == [(0, True), (1, True)]  # draft 2 happened to be the forced token
    assert graded(2, 3, 2) == [(0, True), (1, False)]  # rejected in front of the forced row
    assert graded(1, 4, 0) == []
    assert graded(0, 0, NONE) == []  # in the middle of a prompt


@given(st.integers(0, 5), st.integers(0, 4), st.integers(0, 6))
def test_labels_are_those_in_front_of_the_forced_row(num_sampled, num_rejected, first):
    expected = [(k, kept) for k, kept in labels(num_sampled, num_rejected) if k < first]
    assert graded(num_sampled, num_rejected, first) == expected


def test_the_first_forced_row_of_each_request():
    forced = torch.tensor([-1, 7, -1, -1, 7, 7, -1])
    local = torch.tensor([0, 1, 2, 0, 0, 1, 2])
    assert first_forced_rows(forced, local, 3).tolist() == [1, 7, 0]


def test_grading_asks_once_and_passes_steps_without_forced_rows():
    seen = []
    step = grading(lambda *given: seen.append(given), lambda requests: None)
    given_ = (torch.tensor([3]), torch.tensor([2]), torch.tensor([1]))
    step(*given_)
    assert all(a is b for a, b in zip(seen[0], given_, strict=True))
    grading(lambda *given: seen.append(given), lambda requests: torch.zeros(1, dtype=torch.long))(*given_)
    assert [value.tolist() for value in seen[1]] == [[3], [1], [0]]
