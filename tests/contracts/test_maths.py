import threading

import pytest

from ace_learn.contracts import Contract, maths

MATHS = Contract.from_spec({"kind": "boxed", "equality": "math"})
TEXT = Contract.from_spec({"kind": "boxed"})


@pytest.mark.parametrize(
    ("a", "b"),
    [(r"\frac{1}{2}", "0.5"), (r"\sqrt{8}", r"2\sqrt{2}"), ("x^2+2x+1", "(x+1)^2"), (r"\{1,2\}", r"\{2,1\}")],
)
def test_the_same_value_written_otherwise_is_equal_by_maths_alone(a, b):
    assert MATHS.equal(a, b)
    assert MATHS.equal(b, a)
    assert not TEXT.equal(a, b)


@pytest.mark.parametrize(("a", "b"), [("3", "4"), (r"\text{east}", r"\text{west}"), ("}{", "3"), ("x" * 600, "y")])
def test_other_values_are_not(a, b):
    assert not MATHS.equal(a, b)


@pytest.mark.parametrize("hostile", ["(x+1)^{100000}", "{" * 500], ids=["power", "braces"])
def test_an_expression_that_takes_too_much_is_unequal_and_the_next_one_is_read(hostile):
    assert not MATHS.equal(hostile, "3")
    assert MATHS.equal("7^2", "98/2")


def test_a_worker_that_hangs_is_no_answer(monkeypatch):
    monkeypatch.setattr(maths, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="has not replied"):
        MATHS.equal("7^2+1", "50")
    monkeypatch.undo()
    assert MATHS.equal("7^2+1", "50")


def test_in_prose_it_compares_texts_so_that_no_exit_depends_on_the_clock():
    prose = MATHS.in_prose()
    assert prose.scope == "anywhere"
    assert not prose.equal("0.5", r"\frac{1}{2}")


def test_threads_share_a_worker():
    found = []
    pairs = [(f"{i}^2", str(i * i + i % 2)) for i in range(11, 19)]
    threads = [threading.Thread(target=lambda pair=pair: found.append((pair, MATHS.equal(*pair)))) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(found) == {pair: int(pair[0].removesuffix("^2")) % 2 == 0 for pair in pairs}


def test_without_the_library_it_is_refused(monkeypatch):
    monkeypatch.setattr(maths, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"ace-learn\[math\]"):
        Contract.from_spec({"kind": "boxed", "equality": "math"})
    with pytest.raises(ValueError, match="equality"):
        Contract.from_spec({"kind": "boxed", "equality": "nearly"})
