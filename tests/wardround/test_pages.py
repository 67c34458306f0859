"""The look that all reports share: it asks nobody for anything, every name on it is text, and everyone can read it."""

import itertools
import math
import re
import string
from html.parser import HTMLParser
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wardround.pages import rendering
from wardround.pages.blocks import (
    Answer,
    Claim,
    Code,
    Facts,
    Figure,
    Grid,
    Heading,
    Items,
    Page,
    Paragraph,
)
from wardround.pages.charts import HEIGHT, LEFT, TICKS, TOP, WIDTH, line_chart, nice_step

EVIL = "\"'><script>alert(1)</script><img src=http://evil onerror=x>{{ 6 * 7 }}\u202e\x1b]0;x\x07\n"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
ASKING = ("src", "href", "xlink:href", "data", "action", "srcset", "poster", "formaction", "background", "cite")
WITHOUT_END = ("meta", "img", "br", "line", "polyline")


def every_block(text: str, title: str = "") -> Page:
    """A page with each kind of block, all of whose texts are ``text``."""
    chart = line_chart(text, [(1, 0.5), (2, 0.25), (3, 1.0)], x_label=text, y_label=text, note=text, marked=2)
    assert chart is not None
    tones = [Claim(text, tone, text) for tone in ("good", "open", "bad", "plain")]  # type: ignore[arg-type]
    blocks = (
        Answer("good", text, text, tuple(tones)),
        Heading(text),
        Paragraph(text),
        Paragraph(text, warning=True),
        Paragraph(text, faint=True),
        Items(text, (text,), open=True),
        Heading(text, 3),
        Facts(((text, text),)),
        Facts(((text, text),), codes=True),
        Heading(text),
        Code(f"{text}\n{text}"),
        Grid((text, text, text), ((text, text, text),), numbers=(1,), codes=(2,)),
        Heading(text),
        Grid((text, text), (), narrow=True),
        Figure("name", text, text, b"<svg>"),
        Heading(text),
        chart,
    )
    return Page(title or text, text, blocks)


class Parsed(HTMLParser):
    """The tags of a page, what they ask others for, and whether they are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in WITHOUT_END:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_templates_lie_in_the_package() -> None:
    """They are data of the package: a wheel without them would make no report."""
    folder = files("wardround.pages") / "templates"
    assert {entry.name for entry in folder.iterdir()} == {
        "page.html", "style.css", "web.html", "web.css", "form.html", "prose.html", "live.js", "icon.svg"
    }  # fmt: skip
    assert rendering.template("page.html").count("<html") == 1


def test_a_page_asks_nobody_for_anything_and_runs_nothing() -> None:
    page = rendering.html(every_block("plain", "A title"))
    parsed = Parsed(page)
    asked = [value for _, name, value in parsed.attributes if name in ASKING]
    assert asked
    assert all(value.startswith(("#s", "data:image/svg+xml;base64,")) for value in asked)
    assert not {"script", "link", "iframe", "object", "embed", "form", "base"} & set(parsed.tags)
    assert not [name for _, name, _ in parsed.attributes if name.startswith("on") or name == "style"]
    assert not any(never in page for never in ("http:", "https:", "url(", "@import", "javascript:"))
    assert ("meta", "content", POLICY) in parsed.attributes


def test_a_page_has_a_language_a_title_and_headings_in_order() -> None:
    page = rendering.html(every_block("plain", "A title"))
    parsed = Parsed(page)
    assert ("html", "lang", "en") in parsed.attributes
    assert "<title>A title</title>" in page
    levels = [int(tag[1]) for tag in parsed.tags if re.fullmatch("h[1-6]", tag)]
    assert (levels.count(1), levels[0]) == (1, 1)
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [value for _, name, value in parsed.attributes if name == "id"]
    assert ids == ["s1", "s2", "s3", "s4"]  # and the contents name them
    assert {value for _, name, value in parsed.attributes if name == "href"} == {f"#{each}" for each in ids}


def test_every_text_is_text_wherever_it_stands() -> None:
    harmless, hostile = (rendering.html(every_block(text)) for text in ("harmless", EVIL))
    assert Parsed(hostile).tags == Parsed(harmless).tags
    assert [(tag, name) for tag, name, _ in Parsed(hostile).attributes] == [
        (tag, name) for tag, name, _ in Parsed(harmless).attributes
    ]
    assert not any(never in hostile for never in ("<script", "<img src=http", "\u202e", "\x1b", "\x07", " 42"))
    assert "&lt;script&gt;" in hostile
    assert "{{ 6 * 7 }}" in hostile
    assert "\\u202e\\x1b]0;x\\x07\\n" in hostile


@given(st.text(min_size=1, max_size=30) | st.text("`a< :&\n", min_size=1, max_size=12))
def test_no_text_changes_the_tags_of_a_page(text: str) -> None:
    """But that backticks in a sentence set what is between them as code."""

    def tags(page: str) -> list[str]:
        return [tag for tag in Parsed(page).tags if tag != "code"]

    assert tags(rendering.html(every_block(text, "title"))) == tags(rendering.html(every_block("x", "y")))


def said(text: str) -> str:
    """A paragraph of a page."""
    return re.findall("<main>\n(.*)\n</main>", rendering.html(Page("t", "a", [Paragraph(text)])), re.DOTALL)[0]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("next: `a b FILE`, then `c`.", "next: <code>a b FILE</code>, then <code>c</code>.", id="commands"),
        pytest.param("`a`: (`b`) x=`c`", "<code>a</code>: (<code>b</code>) x=<code>c</code>", id="beside signs"),
        pytest.param("`<b>` & `a'b`", "<code>&lt;b&gt;</code> &amp; <code>a&#39;b</code>", id="escaped in it"),
        pytest.param("`<script>`", "<code>&lt;script&gt;</code>", id="no tag of a stranger"),
        pytest.param("column w`x`y and `", "column w`x`y and `", id="within a word, and alone"),
        pytest.param("an `open one", "an `open one", id="not closed"),
        pytest.param("empty `` here", "empty `` here", id="empty"),
        pytest.param("`a\nb\u202e`", r"<code>a\nb\u202e</code>", id="what a screen would obey"),
    ],
)
def test_what_stands_in_backticks_is_set_as_code(text: str, shown: str) -> None:
    assert said(text) == f"<p>{shown}</p>"


def test_names_and_digests_keep_their_backticks() -> None:
    """Where a name stands by itself, two that differ in a backtick must not look alike."""
    name = "`w`"
    table = Grid((name, "n"), ((name, name),), codes=(0,), numbers=(1,))
    shown = rendering.html(Page(name, name, [Heading(name), Facts(((name, name),), codes=True), Code(name), table]))
    assert "<code>w</code>" not in shown
    assert shown.count(name) == 11


def test_every_kind_of_sentence_shows_code() -> None:
    shown = rendering.html(every_block("see `x y`", "title"))
    assert shown.count("see <code>x y</code>") == 15


def test_commands_stand_line_by_line() -> None:
    assert ">first\nsecond &amp; third\n</pre>" in rendering.html(Page("t", "a", [Code("first\nsecond & third")]))


def test_what_is_neither_text_nor_a_number_is_refused() -> None:
    with pytest.raises(TypeError, match="a page shows text and numbers, not NoneType"):
        rendering.html(Page("t", "a", [Paragraph(None)]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not bytes"):
        rendering.html(Page("t", "a", [Grid(("a",), ((b"x",),))]))  # type: ignore[arg-type]


def test_the_template_leaves_no_value_unescaped() -> None:
    text = rendering.template("page.html")
    assert not re.search(r"\|\s*(safe|attr|tojson|xmlattr)|autoescape|Markup", text.partition("#}")[2])
    assert not re.search(r"=\s*{{", text)  # a value in an attribute stands in quotation marks
    assert rendering._environment().autoescape is True
    assert rendering._environment().undefined.__name__ == "StrictUndefined"


def themes() -> dict[str, dict[str, str]]:
    """The palette in the stylesheet: the light one, and the dark one over it."""
    style = rendering.template("style.css")
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    colors = [dict(re.findall(r"--(\w+): (#[0-9a-f]{6,8});", block)) for block in (light, dark)]
    return {"light": colors[0], "dark": colors[0] | colors[1]}


def luminance(color: str) -> float:
    """WCAG 2.2, "relative luminance"."""
    red, green, blue = (linear(int(color[at : at + 2], 16) / 255) for at in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def contrast(mark: str, ground: str) -> float:
    """WCAG 2.2, "contrast ratio"."""
    dark, light = sorted((luminance(mark), luminance(ground)))
    return (light + 0.05) / (dark + 0.05)


def test_the_ratio_is_the_one_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_color_has_the_contrast_that_its_use_needs(theme: str) -> None:
    """4.5 for text and 3 for lines and marks that mean something (WCAG 2.2, 1.4.3 and 1.4.11)."""
    colors = themes()[theme]
    for ground in ("paper", "panel"):
        for text in ("ink", "faint", "accent", "good", "open", "bad"):
            assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground)
        assert contrast(colors["axis"], colors[ground]) >= 3, ground
    assert contrast(colors["ink"], colors["paper"]) >= 7


def test_every_color_stands_in_the_palette() -> None:
    style = rendering.template("style.css")
    rules = style[style.index("* {") :]
    assert set(re.findall(r"#[0-9a-fA-F]{3,8}\b", rules)) <= {"#ffffff"}  # under a picture that is drawn on white
    used = set(re.findall(r"var\(--(\w+)\)", rules))
    assert used == set(themes()["light"])


# Viénot, Brettel, Mollon 1999: what is left of linear RGB without the long or the middle cones.
WITHOUT = {
    "protan": ((0.11238, 0.88762, 0), (0.11238, 0.88762, 0), (0.00401, -0.00401, 1)),
    "deutan": ((0.29275, 0.70725, 0), (0.29275, 0.70725, 0), (-0.02234, 0.02234, 1)),
}


def lab(color: str, cones: str) -> tuple[float, float, float]:
    """CIELAB of a color as a reader without some cones sees it."""
    seen = [linear(int(color[at : at + 2], 16) / 255) for at in (1, 3, 5)]
    red, green, blue = (
        min(1.0, max(0.0, sum(weight * value for weight, value in zip(row, seen, strict=True))))
        for row in WITHOUT[cones]
    )
    xyz = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
    )
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("cones", sorted(WITHOUT))
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_readers_who_tell_fewer_colors_apart_still_tell_good_from_bad(theme: str, cones: str) -> None:
    """Beside the color, each claim has a sign and words of its own."""
    colors = themes()[theme]
    for other in ("bad", "open"):
        assert math.dist(lab(colors["good"], cones), lab(colors[other], cones)) > 25
    page = rendering.html(every_block("x"))
    assert all(glyph in page for glyph in "✓○✕")


def test_the_style_has_a_dark_theme_for_screens_paper_and_a_visible_focus() -> None:
    style = rendering.template("style.css")
    assert "@media screen and (prefers-color-scheme: dark)" in style  # paper stays white
    assert "@media print" in style
    assert ":focus-visible { outline: 3px" in style
    assert "outline: none" not in style
    assert ".wide { overflow-x: auto" in style


def test_a_table_that_scrolls_can_be_reached_by_keyboard_and_has_a_name() -> None:
    page = rendering.html(Page("t", "a", [Heading("Sites"), Grid(("a", "b"), (("x", "1"),))]))
    assert '<div class="wide" role="region" tabindex="0" aria-label="Table: Sites">' in page
    assert '<th scope="col">a</th><th scope="col" class="n">b</th>' in page
    assert '<td>x</td><td class="n">1</td>' in page


def test_a_chart_has_a_title_axes_with_units_and_its_numbers_beside_it() -> None:
    chart = line_chart("Loss", [(0, 0.71), (1, 0.5), (2, 0.42)], x_label="round", y_label="loss, no unit", marked=2)
    assert chart is not None
    page = rendering.html(Page("t", "a", [chart]))
    assert "<strong>Loss</strong>" in page
    assert 'aria-label="Loss: loss, no unit by round; the numbers are below it"' in page
    assert [tick.text for tick in chart.y_ticks] == ["0.40", "0.45", "0.50", "0.55", "0.60", "0.65", "0.70", "0.75"]
    assert [tick.text for tick in chart.x_ticks] == ["0", "1", "2"]
    assert [dot.marked for dot in chart.dots] == [False, False, True]
    assert '<tr><td class="n">2</td><td class="n">0.42</td></tr>' in page
    assert "<details>" in page


def test_an_axis_of_lengths_begins_at_zero_and_a_level_line_has_one_too() -> None:
    chart = line_chart("t", [(1, 0.9), (2, 1.0)], x_label="x", y_label="y", from_zero=True)
    assert chart is not None
    assert chart.y_ticks[0].text == "0.0"
    level = line_chart("t", [(1, 3.0), (2, 3.0)], x_label="x", y_label="y")
    assert level is not None
    assert len({dot.y for dot in level.dots}) == 1
    nothing = line_chart("t", [(1, 0.0), (2, 0.0)], x_label="x", y_label="y", from_zero=True)
    assert nothing is not None


def test_what_cannot_be_drawn_is_left_out() -> None:
    assert line_chart("t", [(1, 0.5)], x_label="x", y_label="y") is None
    assert line_chart("t", [(1, 0.5), (2, math.nan), (3, math.inf)], x_label="x", y_label="y") is None
    assert line_chart("t", [(1, -1e308), (2, 1e308)], x_label="x", y_label="y") is None


def test_many_points_are_a_line_without_dots() -> None:
    chart = line_chart("t", [(count, 1 / (count + 1)) for count in range(5000)], x_label="x", y_label="y", marked=7)
    assert chart is not None
    assert [dot.text for dot in chart.dots] == ["7: 0.125"]
    assert len(chart.x_ticks) <= TICKS + 1


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.floats(allow_nan=True)), max_size=8),
    st.booleans(),
)
def test_no_number_leaves_the_canvas(points: list[tuple[int, float]], from_zero: bool) -> None:
    if from_zero:
        points = [(count, abs(value)) for count, value in points]
    chart = line_chart("t", points, x_label="x", y_label="y", from_zero=from_zero)
    if chart is None:
        return
    for place in chart.line.split():
        x, y = map(float, place.split(","))
        assert LEFT <= x <= WIDTH
        assert TOP - 0.1 <= y <= HEIGHT
    assert 2 <= len(chart.y_ticks) <= TICKS + 3
    assert not set("".join(tick.text for tick in chart.y_ticks)) - set(string.digits + ".-+e")


@given(st.floats(1e-90, 1e90))
def test_a_step_is_round_and_there_are_few(span: float) -> None:
    step = nice_step(span)
    assert 2 <= span / step <= TICKS * 1.001
    digit = step / 10 ** math.floor(math.log10(step * 1.0001))
    assert min(abs(digit - wanted) for wanted in (1, 2, 5)) < 1e-6
