import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from helpers_report import EVIL, LAYERS, result_of, row, rows_of

from gtrace.report.inputs import make_report
from gtrace.report.render.html import flatten, to_html

VOID = {"meta", "br", "img", "input", "link", "hr"}


class Page(HTMLParser):
    """Elements, identifiers, text and attributes of a page; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.attributes, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def report(whole, log):
    return make_report([whole], [log], title="Both")


@pytest.fixture(scope="module")
def page(report):
    return to_html(report)


def test_the_page_is_well_formed(page):
    parsed = Page(page)
    assert page.startswith("<!DOCTYPE html>")
    assert page.index("<code>sweep</code>") < page.index("<code>train.jsonl</code>")
    assert parsed.tags.count("svg") == 5 + 4
    assert parsed.tags.count("h1") == 1
    assert len(parsed.ids) == len(set(parsed.ids))
    assert parsed.tags.count("table") == 5 + len(LAYERS) + 3


def test_nothing_is_fetched_from_anywhere(page):
    parsed = Page(page)
    assert parsed.tags.count("script") == 1
    assert "link" not in parsed.tags
    assert "iframe" not in parsed.tags
    for name, value in parsed.attributes:
        if name in ("src", "href", "data", "action", "srcset"):
            assert value.startswith(("#", "data:image/png;base64,"))
    assert "http" not in page.replace("http-equiv", "")
    assert "@import" not in page
    assert set(re.findall(r"url\((.)", page)) <= {"#"}


def test_every_reference_inside_a_figure_has_its_target(page):
    ids = set(Page(page).ids)
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', page))
    assert used
    assert {a or b for a, b in used} == ids


def test_the_policy_allows_no_address_and_this_script_alone(page):
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">', page)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert "connect-src" not in rules
    assert page.index(policy) < page.index("<style>")


def test_every_layer_has_a_section(page):
    layers = page[page.index('class="layers"') : page.index("Relative variance per tensor</summary>")]
    assert re.findall(r"<summary>(\S+) ", layers) == sorted(LAYERS)
    one = layers[: layers.index("</details>")]
    (least,) = re.findall(r"least error at 2 bits: ([^<]+)</span>", one)
    assert re.findall(r"<code>([^<]+)</code>", one)[0] == least
    numbers = [float(n) for n in re.findall(r"<td>([\d.e-]+)</td></tr>", one)]
    assert numbers[0] == 1.0
    assert numbers == sorted(numbers)


def test_the_answer_comes_first(page):
    text = Page(page).text
    order = [
        "Both",
        "At 2 bits per value, qsgdinf",
        "Trained with qsgdinf",
        "Error at equal bits",
        "Error against measured bits",
        "Configurations",
        "Error over training",
        "Error per layer",
        "Relative variance per tensor",
        "fc1: 2 NaN",
        "gtrace sweep digits_cnn.zarr",
        "Training runs",
        "Training against steps",
        "How to read this page",
    ]
    places = []
    for words in order:
        places.append(text.index(words, places[-1] if places else text.index("Both\n") if "Both\n" in text else 0))
    assert places == sorted(places)


def test_figures_follow_the_colours_of_the_page(page):
    figures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert "prefers-color-scheme" in page
    for figure in figures:
        named = set(re.findall(r"var\((--c[0-9a-f]{6})\)", figure))
        assert named
        assert all(f"{name}:#" in page for name in named)
        # Black and white on the heat map belong to its colours; everything else is a variable.
        assert set(re.findall(r"#[0-9a-f]{6}", figure)) <= {"#111111", "#fefefe"}
        assert 'role="img"' in figure
        assert "aria-label" in figure


def test_names_are_shown_and_do_nothing():
    rows = [
        row(name, codec=name, method=name, squared_error=0.5, bits_total=2.0, step=step, params="x")
        for name in EVIL
        for step in (0, 1)
    ]
    page = to_html(make_report([result_of(rows, EVIL, {name: {"x": name} for name in EVIL})], title=" ".join(EVIL)))
    parsed = Page(page)
    assert parsed.tags.count("script") == 1
    assert "onload" not in dict(parsed.attributes)
    assert not set(page) & {"\x1b", "\u202e"}
    for name in EVIL:
        shown = name.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
        assert parsed.text.count(shown) >= 6


def test_the_page_is_the_same_every_time(report, page):
    assert to_html(report) == page


def test_two_hundred_layers_stay_small():
    layers = [f"model.layers.{k}.attention.weight" for k in range(200)]
    page = to_html(make_report([result_of(rows_of(layers=layers, steps=(0,), bits=(3,), draws=0))]))
    assert len(page) < 1_000_000
    text = Page(page).text
    assert text.count("model.layers.199.attention.weight") == 2
    # The heat map names every few of the rows.
    assert 40 < len(re.findall(r"\.\d+\.attention\.weight", text)) - 400 <= 70


@pytest.mark.parametrize(
    ("rows", "figures", "words"),
    [
        ([], 0, "the sweep has no rows"),
        ([row(squared_error=None)], 0, "no row holds an error"),
        ([row(squared_error=0.5, bits_total=3.0)], 3, "no other method was measured there"),
        ([row(squared_error=0.5)], 2, "No bits known"),
        ([row(method="none", squared_error=0.0, bits_total=32.0)], 0, "Nothing to compare"),
    ],
)
def test_little_or_nothing_still_makes_a_page(undrawn, rows, figures, words):
    parsed = Page(to_html(make_report([result_of(rows)])))
    assert parsed.tags.count("svg") == figures
    assert words in parsed.text


def test_nested_facts_become_lines():
    assert flatten({"a": 1, "b": {"c": "x", "d": [1, 2]}}) == [("a", "1"), ("b.c", "x"), ("b.d", "[1, 2]")]
