import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from helpers_report import EVIL, result_of, row

from gtrace.report.html import to_html
from gtrace.report.inputs import make_report
from gtrace.report.sections.charts import FRONT

VOID = {"meta", "br", "img", "input", "link", "hr"}


class Page(HTMLParser):
    """Elements, identifiers, text and attributes of a page; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []
        self.tags = [tag for tag, _ in self.elements]
        self.attributes = [pair for _, attrs in self.elements for pair in attrs.items()]
        self.ids = [value for name, value in self.attributes if name == "id"]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

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


@pytest.fixture(scope="module")
def parsed(page):
    return Page(page)


def data_of(page):
    """What the page's script draws: kind and numbers."""
    found = re.findall(r'<script class="data" type="application/json" data-kind="(\w+)">(.*?)</script>', page)
    return [(kind, json.loads(text)) for kind, text in found]


def test_the_page_is_well_formed_and_the_same_every_time(report, page, parsed):
    assert page.startswith("<!DOCTYPE html>")
    kinds = [kind for kind, _ in data_of(page)]
    assert [kinds.count(kind) for kind in ("chart", "heat", "network")] == [8, 1, 1]
    assert parsed.tags.count("h1") == 1
    assert len(parsed.ids) == len(set(parsed.ids))
    # Headings go down one level at a time.
    levels = [int(tag[1]) for tag in parsed.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    assert to_html(report) == page


def own_scripts(parsed):
    return [attrs.get("type") for tag, attrs in parsed.elements if tag == "script"].count(None)


def test_nothing_is_fetched_from_anywhere(page, parsed):
    assert own_scripts(parsed) == 1
    assert not {"link", "iframe"} & set(parsed.tags)
    for name, value in parsed.attributes:
        assert name not in ("src", "href", "data", "action", "srcset") or value.startswith("#")
    # The name of SVG's namespace is not an address.
    plain = page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert not [words for words in ("http", "@import", "url(") if words in plain]


def test_the_policy_allows_no_address_and_this_script_alone(page):
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">', page)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert "style=" not in page[page.index("<body>") : page.index("<script>")]
    assert "connect-src" not in rules
    assert page.index(policy) < page.index("<style>")


def test_figures_hold_the_numbers_of_the_report(report, page):
    (panel,) = data_of(page)[0][1]["panels"]
    named = [zip(curve["names"], curve["x"], curve["y"], strict=True) for curve in panel["curves"]]
    points = {name: (x, y) for curve in named for name, x, y in curve}
    drawn = [c for c in report.sweeps[0].configurations if c.bits > 0 and c.error > 0]
    assert set(points) == {c.spec for c in drawn}
    for c in drawn:
        assert points[c.spec] == pytest.approx((c.bits, c.error), rel=1e-4)
    front = next(curve for curve in panel["curves"] if curve["label"] == FRONT)
    assert set(front["names"]) == {c.spec for c in drawn if c.pareto}
    assert front["y"] == sorted(front["y"], reverse=True)


def test_names_are_shown_and_do_nothing():
    about = {"squared_error": 0.5, "bits_total": 2.0, "params": "x"}
    rows = [row(name, step, codec=name, method=name, **about) for name in EVIL for step in (0, 1)]
    page = to_html(make_report([result_of(rows, EVIL, {name: {"x": name} for name in EVIL})], title=" ".join(EVIL)))
    parsed = Page(page)
    assert own_scripts(parsed) == 1
    assert "onload" not in dict(parsed.attributes)
    assert not set(page) & {"\x1b", "\u202e"}
    for name in EVIL:
        assert parsed.text.count(name.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")) >= 6
