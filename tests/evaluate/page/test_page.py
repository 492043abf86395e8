"""The page's structure, and that no text of it can do anything."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

import pytest

from ace_learn.evaluate.page import Cell, Figure, Page, Table, TraceParagraph, render_page, write_page
from tests.evaluate.page.content import LONG, figures, page, trace

VOID = {"meta", "link", "br", "img", "input", "hr"}
MINIMAL_SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1">{}</svg>'


class Tree(HTMLParser):
    """Tags with their attributes and the texts under each class, with a check that all tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("class") or ""))

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open:
            self.texts.append((self.open[-1][1], data))

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    def attribute(self, name: str) -> list[str]:
        return [attributes[name] or "" for _, attributes in self.tags if name in attributes]


@pytest.fixture(scope="module")
def html() -> str:
    return render_page(page())


@pytest.fixture(scope="module")
def tree(html) -> Tree:
    return Tree(html)


def test_structure(tree):
    assert tree.count("h1") == 1
    assert tree.count("h2") == 9
    assert tree.count("h3") == 1  # inside the collapsible
    assert tree.count("details") == tree.count("summary") == 1
    assert tree.count("svg") == tree.count("figure") == tree.count("figcaption") == 4
    assert tree.count("table") == tree.count("caption") == 1
    assert tree.count("th") == 12 + 3
    assert tree.count("td") == 3 * 11
    assert Counter(attributes.get("scope") for tag, attributes in tree.tags if tag == "th") == {"col": 12, "row": 3}
    assert [attributes["lang"] for tag, attributes in tree.tags if tag == "html"] == ["en"]
    assert all(a.get("role") == "img" and a.get("aria-label") for tag, a in tree.tags if tag == "svg")


def test_every_reference_leads_to_one_id(tree):
    ids = tree.attribute("id")
    assert max(Counter(ids).values()) == 1
    targets = {value[1:] for value in tree.attribute("href") if value.startswith("#")}
    labels = set(tree.attribute("aria-labelledby"))
    clips = {name for value in tree.attribute("clip-path") for name in re.findall(r"url\(#(.*?)\)", value)}
    assert clips
    assert targets | labels | clips <= set(ids)


def test_nothing_is_fetched(html, tree):
    assert set(re.findall(r"https?://[^\"'\s<]*", html)) == {"http://www.w3.org/2000/svg"}
    assert not {"script", "img", "iframe", "object", "embed", "image"} & {tag for tag, _ in tree.tags}
    assert all(value.startswith(("#", "data:,")) for value in tree.attribute("href"))
    assert not [name for _, attributes in tree.tags for name in attributes if name.startswith(("on", "src", "xlink"))]
    style = "".join(text for _, text in tree.texts if "--ground" in text)
    assert "url(" not in style
    assert "@import" not in style


def test_hostile_text_stays_text(html, tree):
    assert "<script" not in html.lower()
    assert html.count("</style>") == 1
    shown = "".join(text for _, text in tree.texts)
    assert "<script>document.title='owned'</script></style>" in shown
    assert "{{ 7 * 7 }}" in shown
    assert LONG in shown


def test_control_characters_are_shown(html, tree):
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", html)
    shown = "".join(text for _, text in tree.texts)
    assert "bell[U+0007] escape[U+001B][31m reversed [U+202E]gnp.exe[U+202C] [U+0000] lone [U+D800]" in shown
    html.encode()
    assert type(html) is str  # what is put in later is not escaped behind the caller's back


def test_the_same_page_gives_the_same_bytes(html, tmp_path):
    write_page(tmp_path / "report.html", page())
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == html
    assert not re.search(r"20\d\d-\d\d-\d\d", html)


def test_the_exit_stands_behind_its_paragraph():
    text = render_page(Page(title="t", sections=(trace(1),)))
    assert [part.count('class="text" dir') for part in text.split("exit here")] == [2, 3]
    assert text.split("exit here")[0].count('class="row after"') == 0
    assert text.split("exit here")[1].count('class="row after"') == 3
    assert "kept the answer" in text
    changed = render_page(Page(title="t", sections=(trace(0),)))
    assert "changed the answer" in changed
    natural = render_page(Page(title="t", sections=(trace(4),)))
    assert "never fired" in natural
    assert "exit here" not in natural
    assert 'class="row after"' not in natural
    assert natural.index("Done.") < natural.index("thinking ends by itself here")


def test_bars_are_on_one_scale_and_carry_the_bound():
    text = render_page(Page(title="t", sections=(trace(1),)))
    assert re.findall(r'<i style="width:([\d.]+%)">', text) == [
        "20.0%", "100.0%", "45.0%", "66.7%", "70.0%", "33.3%", "95.0%", "0.0%",
    ]  # fmt: skip
    assert re.findall(r'<b style="left:([\d.]+%)">', text) == ["40.0%"] * 4
    assert text.count("n/a") == 0
    odd = [
        TraceParagraph(text="a", signals={"s": value}, matches=False) for value in (float("nan"), float("inf"), -3.0)
    ]
    text = render_page(Page(title="t", sections=(trace(0, paragraphs=tuple(odd), bounds={}),)))
    assert re.findall(r'<i style="width:([\d.]+%)">', text) == ["0.0%"] * 3
    assert text.count("n/a") == 2


def test_endless_text_is_cut():
    paragraph = TraceParagraph(text="y" * 100_000, matches=False, closed=False)
    text = render_page(Page(title="t", sections=(trace(0, paragraphs=(paragraph,), bounds={}),)))
    assert "[... 94,000 more characters]" in text
    assert len(text) < 40_000


def test_columns_of_numbers_are_aligned():
    rows = (("12", Cell(text="-1.50%", detail="[-2, 1]"), "3 of 4"), ("13", "n/a", "abc"))
    text = render_page(Page(title="t", sections=(Table(heading="h", columns=("a", "b", "c"), rows=rows),)))
    assert re.findall(r'<th scope="col"(.*?)>', text) == ["", ' class="number"', ""]
    empty = render_page(Page(title="t", sections=(Table(heading="h", columns=("a", "b"), rows=()),)))
    assert "<tbody>" in empty


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Table(heading="h", columns=("a", "b"), rows=(("1",),)),
            "row 0 of table 'h' has 1 cells for 2 columns",
        ),
        (lambda: Table(heading="h", columns=(), rows=()), "has no columns"),
        (lambda: trace(5), r"exit_index 5 lies outside 0\.\.4"),
        (lambda: trace(0, bounds={"nonsense": 0.5}), "bounds must be finite and of signals"),
        (lambda: trace(0, paragraphs=(TraceParagraph(text="", matches=False, closed=False),) * 2), "only the last"),
        (
            lambda: trace(
                0, paragraphs=tuple(TraceParagraph(text="", signals={n: 0.0}, matches=True) for n in "ab"), bounds={}
            ),
            "different signals",
        ),
    ],
)
def test_sections_that_cannot_be_shown_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "inner",
    [
        "<script>1</script>",
        "<style>*{display:none}</style>",
        '<rect onclick="1"/>',
        '<a href="#x"/>',
        '<use href="http://elsewhere/x"/>',
        '<rect style="fill: url(http://elsewhere/x)"/>',
        "<foreignObject/>",
        "<unclosed>",
    ],
)
def test_an_svg_that_is_no_picture_alone_is_refused(inner):
    section = Figure(heading="h", svg=MINIMAL_SVG.format(inner))
    with pytest.raises(ValueError, match="figure of the page"):
        render_page(Page(title="t", sections=(section,)))


def test_other_documents_are_no_figures():
    for svg in ("<p/>", '<!DOCTYPE svg [<!ENTITY a "b">]>' + MINIMAL_SVG.format("")):
        with pytest.raises(ValueError, match=r"an SVG for a page|a <p> and no <svg>"):
            render_page(Page(title="t", sections=(Figure(heading="h", svg=svg),)))


def test_equal_figures_on_one_page_do_not_clash():
    svg = figures()["pareto"]
    text = render_page(Page(title="t", sections=(Figure(heading="a", svg=svg), Figure(heading="b", svg=svg))))
    ids = Tree(text).attribute("id")
    assert max(Counter(ids).values()) == 1
    assert sum(name.startswith("s1-") for name in ids) == sum(name.startswith("s2-") for name in ids) > 2
