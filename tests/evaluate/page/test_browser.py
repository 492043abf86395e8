"""The page in a real browser: it fits a phone, says nothing on the console, and shows what it holds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from ace_learn.evaluate.page import render_page
from tests.evaluate.page.content import page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DARK, LIGHT = 0, 1

# What the page cannot do for itself, since it runs no script: this copy measures itself and prints what it finds.
MEASURE = """
<script>
window.addEventListener("load", () => {
  const wide = [...document.querySelectorAll("body *")].filter(element => {
    if (element.closest(".scroll") || element.closest("svg") || element.closest("summary")) return false;
    const box = element.getBoundingClientRect();
    return box.width > 1 && box.right > document.documentElement.clientWidth + 1;
  }).map(element => element.outerHTML.slice(0, 120));
  const box = selector => document.querySelector(selector).getBoundingClientRect();
  const text = [...document.querySelectorAll("svg text")].map(element => element.getBoundingClientRect().height);
  const inside = [...document.querySelectorAll("svg text")].every(element => {
    const outer = element.closest("figure").getBoundingClientRect(), inner = element.getBoundingClientRect();
    return inner.left > outer.left - 14 && inner.right < outer.left + Math.min(outer.width, 500) + 14;
  });
  const result = {
    viewport: window.innerWidth,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    wide: wide,
    rows: document.querySelectorAll("tbody tr").length,
    paths: document.querySelectorAll("svg path").length,
    figures: [...document.querySelectorAll("svg")].every(svg => svg.getBoundingClientRect().height > 100),
    smallest: Math.min(...text),
    inside: inside,
    columns: box(".row:not(.heads) .signals").left > box(".row:not(.heads) .said").right - 1,
    ground: getComputedStyle(document.body).backgroundColor,
    curve: getComputedStyle(document.querySelector("svg path[style*='--c-blue']")).stroke,
    title: document.title,
  };
  parent.postMessage(JSON.stringify(result), "*");
});
</script>
"""
# Headless windows are 500 pixels wide at least, frames are as wide as they are told to be.
FRAME = """<!doctype html>
<html lang="en"><head><meta name="color-scheme" content="light dark"><title>frame</title>
<link rel="icon" href="data:,"></head>
<body><script>
window.addEventListener("message", event => {{
  const out = document.createElement("pre");
  out.id = "measured";
  out.textContent = event.data;
  document.body.append(out);
}});
</script>
<iframe src="{name}" width="{width}" height="900" style="border:0"></iframe>
</body></html>
"""
POLICY = re.compile(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>")

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on PATH: install one (Debian: `apt-get install chromium`)"
)


class Shown(NamedTuple):
    """What the browser made of a page: what the page measured of itself, and what it said on the console."""

    measured: dict[str, object]
    console: list[str]


def show(html: str, folder: Path, *, width: int, scheme: int) -> Shown:
    folder.mkdir()
    (folder / "page.html").write_text(html, encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(FRAME.format(name="page.html", width=width), encoding="utf-8")
    arguments = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-extensions", "--no-first-run", "--dump-dom",
        "--hide-scrollbars", "--enable-logging=stderr", "--v=0", f"--user-data-dir={folder / 'profile'}",
        "--window-size=1400,1000", f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=5000",
        frame.as_uri(),
    ]  # fmt: skip
    assert BROWSER is not None
    done = subprocess.run([BROWSER, *arguments], capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout, re.DOTALL)
    measured = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")) if found else {}
    return Shown(measured, [line for line in done.stderr.splitlines() if "CONSOLE" in line])


@pytest.fixture(scope="module")
def html() -> str:
    return render_page(page())


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(360, DARK), (1280, LIGHT)])
def test_the_page_fits_and_shows_its_data(html, tmp_path, width, scheme):
    measuring = POLICY.sub("", html).replace("</body>", MEASURE + "</body>")
    shown = show(measuring, tmp_path / "shown", width=width, scheme=scheme)
    assert shown.console == []
    measured = shown.measured
    assert measured["viewport"] == width
    assert measured["overflow"] == 0
    assert measured["wide"] == []
    assert measured["rows"] == 3
    assert measured["paths"] > 50
    assert measured["figures"] is True
    assert measured["smallest"] >= 11  # height of a line: letters of 10 pixels
    assert measured["inside"] is True
    assert measured["columns"] is (width == 1280)
    assert measured["ground"] == ("rgb(20, 24, 29)" if scheme == DARK else "rgb(255, 255, 255)")
    assert measured["curve"] == ("rgb(86, 180, 233)" if scheme == DARK else "rgb(0, 114, 178)")
    assert str(measured["title"]).startswith("Report <script>")  # no text of the page has run


@pytest.mark.slow
def test_no_script_runs_in_the_page(html, tmp_path):
    shown = show(html.replace("</body>", MEASURE + "</body>"), tmp_path / "shown", width=360, scheme=LIGHT)
    assert shown.measured == {}
    assert any("Content Security Policy" in line for line in shown.console)  # what the browser has to say is heard


@pytest.mark.slow
def test_the_page_itself_is_silent(html, tmp_path):
    assert show(html, tmp_path / "shown", width=360, scheme=LIGHT) == Shown({}, [])
