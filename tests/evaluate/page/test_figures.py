from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy.stats import binomtest

from ace_learn.evaluate.page import bars_svg, reliability, training_curves_svg, wilson_interval
from ace_learn.evaluate.page.svg import WIDTH
from ace_learn.evaluate.style import PALETTE, look, words
from ace_learn.heads.metrics import expected_calibration_error
from tests.evaluate.page.content import figures

SVG = "{http://www.w3.org/2000/svg}"
TEXT_SCALE = 11


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return figures()


@pytest.mark.parametrize("name", ["pareto", "reliability", "training", "bars"])
def test_figures_are_scalable_themed_and_reproducible(drawn, name):
    svg = drawn[name]
    root = ElementTree.fromstring(svg)
    assert "width" not in root.attrib
    assert float(root.attrib["viewBox"].split()[2]) == WIDTH
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)]
    assert min(sizes) >= TEXT_SCALE
    assert "font:" not in svg
    bare = re.sub(r"var\(--c-\w+, #[0-9a-f]{6}\)", "", svg)
    assert set(re.findall(r"#[0-9a-f]{6}\b", bare)) <= {"#ffffff", "#000000"}
    assert figures()[name] == svg


def test_words_on_figures(drawn):
    assert {"full thinking", "learned exit", "accuracy, %"} <= set(texts(drawn["pareto"]))
    assert {"count", "observed share", "predicted probability"} <= set(texts(drawn["reliability"]))
    assert {"confidence", "progress", "weights kept: epoch 8", "epoch", "weight"} <= set(texts(drawn["training"]))
    shown = texts(drawn["bars"])
    assert {"all signals", "0.900 [0.800, 0.950]", "n/a", "default"} <= set(shown)
    assert any("$x^2$" in text for text in shown)  # no mathematics
    assert "without <script>document.title" in shown
    assert not any("\x07" in text for text in shown)


def test_bars_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="bars need as many labels"):
        bars_svg([], [])
    with pytest.raises(ValueError, match="not 2, 1, 2 and 2"):
        bars_svg(["a", "b"], [1.0])


def test_bars_have_the_length_of_their_values():
    svg = bars_svg(["one", "half", "minus"], [1.0, 0.5, -0.5])
    root = ElementTree.fromstring(svg)
    bars = [p.get("d", "") for p in root.iter(f"{SVG}path") if "--c-blue" in p.get("style", "")]
    ends = [[float(x) for x in re.findall(r"[ML] ([-\d.]+) ", bar)] for bar in bars]
    lengths = [max(xs) - min(xs) for xs in ends]
    assert lengths[1] == pytest.approx(lengths[0] / 2, rel=1e-3)
    assert lengths[2] == pytest.approx(lengths[1], rel=1e-3)
    assert max(ends[2]) == pytest.approx(min(ends[0]), abs=1e-3)


def test_curves_without_weights_or_kept_epoch():
    svg = training_curves_svg({"train": [1.0, 0.5], "validation": [1.0, float("nan")]})
    assert {"train", "validation", "loss"} <= set(texts(svg))
    assert "weight" not in texts(svg)


def test_reliability_by_hand():
    predicted = np.array([0.05, 0.15, 0.12, 0.95, 1.0, 0.91])
    observed = np.array([False, True, False, True, True, False])
    result = reliability(predicted, observed)
    np.testing.assert_array_equal(result.counts, [1, 2, 3])
    np.testing.assert_allclose(result.predicted, [0.05, 0.135, 2.86 / 3])
    np.testing.assert_allclose(result.observed, [0, 0.5, 2 / 3])
    assert result.ece == pytest.approx((0.05 + abs(0.27 - 1) + abs(2.86 - 2)) / 6)
    assert result.ece == expected_calibration_error(observed, predicted)
    assert f"{result.ece:.3f}" in result.caption
    for at, (hits, n) in enumerate([(0, 1), (1, 2), (2, 3)]):
        wilson = binomtest(hits, n).proportion_ci(method="wilson")
        assert (result.low[at], result.high[at]) == pytest.approx((wilson.low, wilson.high))


def test_wilson_interval_is_scipys():
    hits, counts = np.array([0, 3, 50, 10]), np.array([5, 7, 80, 10])
    low, high = wilson_interval(hits, counts, confidence=0.9)
    for place, (k, n) in enumerate(zip(hits.tolist(), counts.tolist(), strict=True)):
        wilson = binomtest(k, n).proportion_ci(confidence_level=0.9, method="wilson")
        assert (low[place], high[place]) == pytest.approx((wilson.low, wilson.high))


@pytest.mark.parametrize("predicted", [np.array([]), np.array([0.5, np.nan]), np.array([1.5, 0.1])])
def test_reliability_refuses_what_are_no_probabilities(predicted):
    with pytest.raises(ValueError, match="predictions"):
        reliability(predicted, np.zeros(predicted.shape, dtype=bool))


def luminance(colour: str) -> float:
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_are_legible_on_both_grounds():
    for colour in PALETTE:
        if colour.name != "grid":
            assert contrast(colour.light, "#ffffff") >= 4.5, colour
            assert contrast(colour.light, "#f3f5f7") >= 4, colour
            assert contrast(colour.dark, "#14181d") >= 4.5, colour
            assert contrast(colour.dark, "#1e242b") >= 4.5, colour
    assert len({colour.light for colour in PALETTE}) == len({colour.name for colour in PALETTE}) == len(PALETTE)


def test_known_methods_keep_their_look_anywhere():
    assert look("learned", 0) == look("learned", 5)
    assert look("mine", 0) != look("mine", 1)
    assert words("no_think") == "no thinking"
    assert words("my_method") == "my method"
