"""The page in a browser: it opens from a file, asks for nothing, sorts, filters and can be read by everyone."""

import shutil

import pytest
from helpers_report import EVIL, PROVENANCE, result_of, rows_of, write_runs

from gtrace.report import write_html

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra: browser)")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

#: Reported by axe-core for rules that a reader depends on.
GRAVE = ("serious", "critical")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    rows = rows_of(layers=("conv1.weight", "fc1.weight", *EVIL), bits=range(2, 7), steps=(0, 10, 20))
    log = write_runs(folder / "train.jsonl", steps=40)
    return write_html(folder / "page.html", [result_of(rows, ["fc1: 2 NaN"], PROVENANCE)], [log])


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        # Without a sandbox: in containers, where tests run as root, there is none to have.
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def opened(browser, page_file):
    """The page, what it asked for and what it complained of; tests leave it as they found it."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(10_000)
    asked, said = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(page_file.as_uri())
    return page, asked, said


@pytest.fixture
def page(opened):
    return opened[0]


def configurations(page):
    return page.get_by_role("table", name="Configurations", exact=True)


def column(table, place):
    return table.locator(f"tbody tr:visible > :nth-child({place})").all_inner_texts()


def test_it_opens_from_a_file_asks_for_nothing_and_complains_of_nothing(opened, page_file):
    page, asked, said = opened
    assert page.title().startswith("gtrace report")
    assert asked == [page_file.as_uri()]
    assert said == []


def test_the_policy_stops_what_would_leave(browser, page_file):
    # A script that got into the page by a hole in the escaping: not run, and no address is opened.
    page = browser.new_page()
    asked = []
    page.on("request", lambda request: asked.append(request))
    broken = page_file.with_name("broken.html")
    inside = "<img src='https://example.invalid/a.png'><script>document.title = 'mine'</script></main>"
    broken.write_text(page_file.read_text(encoding="utf-8").replace("</main>", inside, 1), encoding="utf-8")
    page.goto(broken.as_uri())
    assert page.title() != "mine"
    assert page.evaluate("fetch('https://example.invalid/').then(() => 'left', () => 'stopped')") == "stopped"
    # The browser tells of what it refused, too.
    assert {(request.url, request.failure) for request in asked} == {
        (broken.as_uri(), None),
        ("https://example.invalid/a.png", "csp"),
    }
    page.close()


def test_names_are_shown_and_run_nothing(page):
    shown = page.locator(".layers summary").all_inner_texts()
    for name in EVIL:
        literal = name.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
        assert any(text.startswith(literal) for text in shown), name


def test_a_click_sorts_and_sorts_back(page):
    table = configurations(page)
    before = column(table, 1)
    head = table.get_by_role("columnheader", name="bits measured")
    button = head.get_by_role("button")
    assert head.get_attribute("aria-sort") == "none"
    place = 1 + table.locator("thead th").all_inner_texts().index(head.inner_text())
    for direction, reverse in (("ascending", False), ("descending", True)):
        button.click()
        assert head.get_attribute("aria-sort") == direction
        values = [float(text) for text in column(table, place)]
        assert values == sorted(values, reverse=reverse)
        assert values[0] != values[-1]
    button.click()
    assert head.get_attribute("aria-sort") == "none"
    assert column(table, 1) == before


def test_numbers_in_any_form_are_in_order_and_what_is_missing_is_last(page):
    table = page.get_by_role("table", name="Error at equal bits", exact=False)
    head = table.get_by_role("columnheader", name="3 bits", exact=True)
    for sign in (1, -1):
        head.get_by_role("button").click()
        texts = [text.split("\n")[0] for text in column(table, 3)]
        known = [float(text.rstrip("%")) for text in texts if text != "–"]
        assert texts[len(known) :] == ["–"] * (len(texts) - len(known))
        assert len(texts) > len(known) > 1
        assert known == sorted(known, reverse=sign < 0)
    head.get_by_role("button").click()
    rates = table.get_by_role("columnheader", name="BD-rate").get_by_role("button")
    rates.click()
    signed = [float(text.split("\n")[0].rstrip("%")) for text in column(table, 4) if text != "–"]
    assert len(signed) > 1
    assert signed == sorted(signed)
    rates.click()
    rates.click()
    sizes = page.get_by_role("table", name="Training runs")
    sent = sizes.get_by_role("columnheader", name="sent up per worker").get_by_role("button")
    sent.click()
    # 380 kB come before 6.08 MB, which a comparison of the digits would not say.
    assert [text.split()[-1] for text in column(sizes, 7)] == ["kB", "MB"]
    sent.click()
    sent.click()


def test_keys_alone_sort_and_filter(page):
    table = configurations(page)
    field = page.get_by_role("searchbox", name="Filter rows: Configurations")
    total = table.locator("tbody tr").count()
    field.focus()
    page.keyboard.type("QSGDINF bits=3")
    assert len(column(table, 1)) == 1
    assert page.get_by_role("status").filter(has_text=f"1 of {total} rows").count() == 1
    page.keyboard.press("Control+A")
    page.keyboard.type("nothing like this")
    assert column(table, 1) == []
    page.keyboard.press("Escape")
    assert field.input_value() == ""
    assert len(column(table, 1)) == total
    # From the field the next stops are the table, which scrolls, and its first heading.
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "sort"
    head = table.locator("thead th").first
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "descending"
    names = column(table, 1)
    assert names == sorted(names, reverse=True)
    page.keyboard.press("Enter")


def test_layers_are_filtered_and_opened(page):
    field = page.get_by_role("searchbox", name="Filter layers")
    field.fill("fc1")
    assert page.locator(".layers > details:visible").count() == 1
    page.get_by_role("button", name="Open all").click()
    assert page.get_by_role("table", name="fc1.weight").is_visible()
    page.get_by_role("button", name="Close all").click()
    assert not page.get_by_role("table", name="fc1.weight").is_visible()
    field.fill("")
    assert page.locator(".layers > details:visible").count() == 2 + len(EVIL)


def test_dark_and_light_differ_in_page_and_figures(page):
    def colours():
        return page.evaluate(
            """() => [getComputedStyle(document.body).backgroundColor,
                      getComputedStyle(document.querySelector("figure svg text")).fill]"""
        )

    light = colours()
    page.emulate_media(color_scheme="dark")
    dark = colours()
    # Paper is white whatever the screen is.
    page.emulate_media(color_scheme="dark", media="print")
    paper = colours()
    page.emulate_media(color_scheme="light", media="screen")
    assert light[0] == "rgb(255, 255, 255)"
    assert dark[0] != light[0]
    assert dark[1] != light[1]
    assert paper == light


def test_on_paper_everything_is_open_and_nothing_is_cut(page):
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 718, "height": 1000})
    hidden = page.evaluate(
        """() => [...document.querySelectorAll("main details > :not(summary)")].filter((e) => !e.checkVisibility(
                 {contentVisibilityAuto: true})).length"""
    )
    wide = page.evaluate(
        """() => [...document.querySelectorAll("table, figure svg")].filter(
                 (e) => e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.getAttribute("aria-label"))"""
    )
    page.set_viewport_size({"width": 1280, "height": 900})
    page.emulate_media(media="screen")
    assert hidden == 0
    assert wide == []


def test_a_narrow_window_scrolls_tables_and_not_the_page(page):
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    page.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_grave(page, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page.emulate_media(color_scheme=scheme)
    page.get_by_role("button", name="Open all").click()
    found = axe.Axe().run(page).response["violations"]
    page.get_by_role("button", name="Close all").click()
    page.emulate_media(color_scheme="light")
    assert [(v["id"], [n["html"] for n in v["nodes"]][:3]) for v in found if v["impact"] in GRAVE] == []


def test_the_page_is_there_without_its_script(browser, page_file):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_file.as_uri())
    assert page.locator("table.sortable").count() > 3
    assert page.locator("th button").count() == 0
    context.close()
