import difflib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ace_learn.contracts import Contract
from ace_learn.contracts.patch import MAX_HEADER, MAX_PATCH

PATCH = Contract.from_spec({"kind": "patch"})
lines = st.lists(st.sampled_from(["a", "b", "-- c", "++ d", "@@ -1 +1 @@", "```", " e", "\\ f", "--- g"]), max_size=8)


def diff(before, after, *, context=3):
    return "".join(f"{line}\n" for line in difflib.unified_diff(before, after, "a/x", "b/x", n=context, lineterm=""))


@settings(max_examples=200, deadline=None)
@given(lines, lines, st.sampled_from([0, 1, 3]), st.sampled_from(["", "```diff\n", "Look:\n"]))
def test_what_difflib_writes_is_read_as_it_stands(before, after, context, lead):
    patch = diff(before, after, context=context)
    tail = "```\nThat is all.\n" if "```" in lead else "That is all.\n"
    commit = PATCH.project(f"{lead}{patch}{tail}")
    if before == after:
        assert commit is None
    else:
        assert commit is not None
        assert commit.answer == patch
        assert commit.end == len(lead) + len(patch) + (3 if "```" in lead else -1)


@settings(max_examples=100, deadline=None)
@given(lines, lines)
def test_the_context_does_not_matter_and_the_change_does(before, after):
    if before == after:
        return
    assert PATCH.equal(diff(before, after, context=0), diff(before, after, context=3))
    assert not PATCH.equal(diff(before, after), diff(before, [*after, "h"]))


def test_a_change_at_another_line_is_another_change():
    a = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
    assert not PATCH.equal(a, a.replace("-1 +1", "-7 +7"))
    assert not PATCH.equal(a, a.replace("/x", "/y"))
    assert not PATCH.equal(a, "b")
    assert not PATCH.equal("b", "b")


@pytest.mark.parametrize(
    "patch",
    [
        f"--- a/{'x' * MAX_HEADER}\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n",
        "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+" + "b" * MAX_PATCH + "\n",
        "--- a/x\n+++ b/x\n@@ -1,9999999999 +1 @@\n-a\n+b\n",
        "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b",
        "+++ b/x\n@@ -1 +1 @@\n-a\n+b\n",
    ],
    ids=["long header", "long patch", "huge count", "no line break at the end", "target without source"],
)
def test_what_is_no_patch(patch):
    assert not PATCH.valid(patch)


def test_a_long_line_breaks_a_fenced_patch_and_what_follows_is_read():
    good = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
    text = f"```diff\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+{'b' * 70_000}\n```\n{good}."
    commit = PATCH.project(text)
    assert commit is not None
    assert commit.answer == good
