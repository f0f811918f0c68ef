"""The page in a browser: it opens from a file, asks for nothing, sorts, filters and can be read by everyone."""

import dataclasses
import shutil

import pytest
from helpers_report import EVIL, PROVENANCE, result_of, row, rows_of, write_runs

from gtrace.costs import Network
from gtrace.report import analyze, write_html
from gtrace.report.analysis.savings import ASSUMED, network_model, savings_of_sweep
from gtrace.sweep.gradient_noise import NOISE

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra: browser)")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

#: Reported by axe-core for rules that a reader depends on.
GRAVE = ("serious", "critical")


@pytest.fixture(scope="module")
def result():
    rows = rows_of(layers=("conv1.weight", "fc1.weight", *EVIL), bits=range(2, 7), steps=(0, 10, 20))
    return result_of(rows, ["fc1: 2 NaN"], PROVENANCE)


@pytest.fixture(scope="module")
def analysis(result):
    return analyze(result)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory, result):
    folder = tmp_path_factory.mktemp("page")
    log = write_runs(folder / "train.jsonl", steps=40)
    return write_html(folder / "page.html", [result], [log])


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        # Without a sandbox: in containers, where tests run as root, there is none to have.
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def opened_at(browser, path, width=1280, **how):
    """A page of its own, what it asked for and what it complained of."""
    page = browser.new_page(viewport={"width": width, "height": 900}, **how)
    page.set_default_timeout(10_000)
    asked, said = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(path.as_uri())
    return page, asked, said


@pytest.fixture(scope="module")
def opened(browser, page_file):
    """The one page of most tests, which leave it as they found it."""
    return opened_at(browser, page_file)


@pytest.fixture
def page(opened):
    return opened[0]


def configurations(page):
    return page.get_by_role("table", name="Every configuration", exact=True)


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


def test_a_click_sorts_and_sorts_back(page):
    table = configurations(page)
    before = column(table, 1)
    head = table.get_by_role("columnheader", name="bits", exact=True)
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


def test_what_is_missing_is_last_in_either_order(page):
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


def test_keys_alone_sort_and_filter(page):
    table = configurations(page)
    field = page.get_by_role("searchbox", name="Filter configurations: Every configuration")
    total = table.locator("tbody tr:not(:has(td[colspan]))").count()
    field.focus()
    page.keyboard.type("QSGDINF bits=3")
    assert len(column(table, 1)) == 1
    assert page.get_by_role("status").filter(has_text=f"1 of {total} configurations").count() == 1
    page.keyboard.press("Control+A")
    page.keyboard.type("nothing like this")
    assert column(table, 1) == ["No configuration matches 'nothing like this'"]
    page.keyboard.press("Escape")
    assert field.input_value() == ""
    assert len(column(table, 1)) == min(total, 25)
    # From the field the next stops are the table, which scrolls, and its first heading.
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "sort"
    head = table.locator("thead th").first
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Space")
    assert head.get_attribute("aria-sort") == "descending"
    page.keyboard.press("Enter")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_first_screen_fits_any_width(browser, page_file, width, scheme):
    page, _, said = opened_at(browser, page_file, width, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((part) => (part.open = true))")
    page.wait_for_timeout(200)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    # A table that does not fit says that it scrolls.
    boxes = "[...document.querySelectorAll('.scroll')].filter((e) => e.checkVisibility())"
    told = page.evaluate(
        f"{boxes}.map((e) => [e.scrollWidth > e.clientWidth + 1, e.nextElementSibling.checkVisibility()])"
    )
    assert all(scrolls == says for scrolls, says in told)
    assert any(scrolls for scrolls, _ in told)
    assert said == []
    page.close()


def slide(page, name, value):
    """Move a slider of the network."""
    field = page.get_by_role("slider", name=name)
    field.evaluate("(e, value) => { e.value = value; e.dispatchEvent(new Event('input')); }", value)


def test_the_sliders_time_steps_as_the_program_does(page, analysis):
    model = network_model(analysis, ASSUMED, [])
    said = page.locator(".said")
    before, path = said.inner_text(), page.locator("#network .line").first.get_attribute("d")
    assert "No cluster was given" in page.locator("#network").inner_text()
    for place, ranks in ((0, 0), (400, 2), (1000, 5)):
        slide(page, "Link speed", place)
        slide(page, "Ranks", ranks)
        bandwidth, workers = 1e8 * 4000 ** (place / 1000), (2, 4, 8, 16, 32, 64)[ranks]
        cluster = dataclasses.replace(ASSUMED, network=Network(bandwidth, 20e-6), ranks=workers)
        # The slider's own steps round the time of a step.
        step = float(page.evaluate("1e-3 * (1e5) ** (Math.round(1000 * Math.log(1e2) / Math.log(1e5)) / 1000)"))
        found = savings_of_sweep(analysis, cluster)
        shown = page.evaluate(
            """() => Object.fromEntries([...document.querySelectorAll("table[data-network] tbody tr")].filter(
                     (row) => row.cells.length > 2).map((row) => [row.cells[0].textContent.trim(),
                     Number(row.cells[row.cells.length - 2].dataset.value)]))"""
        )
        assert step == pytest.approx(cluster.step_time, rel=0.02)
        assert set(model["codecs"]) <= set(shown)
        for spec in model["codecs"]:
            assert shown[spec] == pytest.approx(found.best(spec).step.seconds, rel=1e-4)
        assert shown["bf16"] == pytest.approx(found.plain[1].step.seconds, rel=1e-4)
    assert said.inner_text() != before
    assert page.locator("#network .line").first.get_attribute("d") != path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_grave(page, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page.emulate_media(color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((part) => (part.open = true))")
    found = axe.Axe().run(page).response["violations"]
    page.evaluate("document.querySelectorAll('details').forEach((part) => (part.open = false))")
    page.emulate_media(color_scheme="light")
    assert [(v["id"], [n["html"] for n in v["nodes"]][:3]) for v in found if v["impact"] in GRAVE] == []


def test_the_page_is_there_without_its_script(browser, page_file):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_file.as_uri())
    assert page.locator("table.sortable").count() > 3
    assert page.locator("th button").count() == 0
    context.close()


#: Pairs of texts of a plot that cover each other, and texts that reach out of it.
COVERED = """() => [...document.querySelectorAll(".plot svg")].filter((svg) => svg.clientWidth).flatMap((svg) => {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
    const out = texts.filter(([, a]) => a.left < frame.left - 1 || a.right > frame.right + 1).map(([name]) => name);
    const over = ([, a], [, b]) =>
        Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
        Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
    const pairs = texts.flatMap((a, k) => texts.slice(k + 1).filter((b) => over(a, b)).map((b) => `${a[0]} / ${b[0]}`));
    return [...out, ...pairs];
})"""


def test_names_and_numbers_of_a_plot_are_whole_and_cover_no_others(browser, tmp_path):
    # Errors down to 1e-9, a rate without any other, and gradient noise just above the first points.
    codecs = {"topk": (0.3, 0.6), "qsgd": (1.0, 0.3), "alq": (2.0, 0.1), "zipml": (2.1, 0.09), "fp16": (16.0, 1e-9)}
    rows, details = [], {}
    for step in range(4):
        details["w", step, NOISE] = {"variance": 0.9, "signal": 0.1, "freedom": 3}
        for spec, (bits, error) in codecs.items():
            about = {"codec": spec, "method": spec, "params": "{}", "bits": None, "bits_total": bits}
            rows.append(row("w", step, squared_error=error) | about | {"noise_ratio": error, "relative_bias": 0.0})
    result = result_of(rows, provenance={"noise": {"from": ["ranks"]}}, details=details)
    page, _, said = opened_at(browser, write_html(tmp_path / "page.html", [result]))
    assert page.locator(".plot svg text", has_text="0.00001%").count()
    assert page.evaluate(COVERED) == []
    assert said == []


def test_lines_without_markers_look_different(browser, tmp_path):
    methods = [f"codec{k:02}" for k in range(12)]
    steps = [{"type": "step", "run": run, "step": k, "loss": 1.0 + k, "bits": 8.0} for run in methods for k in range(9)]
    records = [{"type": "study", "workers": 1}, *steps]
    page, _, _ = opened_at(browser, write_html(tmp_path / "page.html", runs=[records]))
    looks = page.evaluate(
        """() => [...document.querySelector(".drawing").querySelectorAll(".legend button")].map((button) =>
            ["svg", "path"].map((name) => button.querySelector(name)).map((own, k) =>
                own.getAttribute(k ? "stroke-dasharray" : "class")).join())"""
    )
    assert len(looks) == len(set(looks)) == len(methods)
    assert page.locator(".drawing").first.locator(".legend .marker").count() == 0
