import re
from xml.etree import ElementTree as ET

import matplotlib as mpl
import numpy as np
import pytest
from helpers_laws import write_laws
from helpers_report import (
    EVIL,
    ODD_SWEEPS,
    contrast,
    fit_details,
    fitted_rows,
    result_of,
    row,
    rows_of,
    write_runs,
    write_sweep,
)
from matplotlib.figure import Figure
from matplotlib.text import Text

from gtrace.errors import UsageError
from gtrace.report import draw, figure_names, load_report, make_report
from gtrace.report.analysis.runs import analyze_runs
from gtrace.report.analysis.sweep import analyze
from gtrace.report.figures import FIGURES
from gtrace.report.figures import sweep as figures
from gtrace.report.figures.charts import draw_chart
from gtrace.report.figures.style import _METHODS, DARK, look, render
from gtrace.report.names import shorten_all
from gtrace.report.sections.charts import sweep_figures
from gtrace.report.sections.training import training_curves
from gtrace.runlog import read_runlog


def analyzed(*rows, **given):
    return analyze(result_of(rows_of(**given) if given else rows))


def test_long_curves_are_thinned_and_keep_both_ends(tmp_path):
    found = analyze_runs(read_runlog(write_runs(tmp_path / "long.jsonl", steps=1500)))
    curve = training_curves(found, "steps").panels[0].curves[0]
    assert (len(curve.x), curve.x[0], curve.x[-1]) == (400, found.runs[0].steps[0], found.runs[0].steps[-1])


@pytest.mark.parametrize("case", ODD_SWEEPS)
def test_every_figure_survives_odd_input(case):
    analysis = analyzed(*ODD_SWEEPS[case]())
    nothing = case in {"no rows", "nothing but NaN", "no error at all", "gradients of zero"}
    for figure, lacking in ((figures.rate_distortion(analysis), {"no bits"}), (figures.layer_heatmap(analysis), set())):
        said = {text.get_text() for text in figure.findobj(Text)}
        assert ("nothing to draw" in said) == (nothing or case in lacking)
    found = {spec.name: spec for spec in sweep_figures(analysis)}
    for spec in found.values():
        spec.draw()
    assert ("rate-distortion" in found) == (not nothing and case != "no bits")
    assert ("variance-over-steps" in found) == (not nothing)
    # Without bits no configuration is the nearest to three.
    for name in {"rate-distortion", "variance-over-steps"} & set(found):
        said = {text.get_text() for text in draw_chart(found[name].chart).findobj(Text)}
        assert ("nothing to draw" in said) == (case == "no bits")


def test_names_are_drawn_literally():
    # The last one needs a font that matplotlib does not bring, and it says so.
    names = {text.get_text() for text in figures.layer_heatmap(analyzed(layers=EVIL[:-1], bits=[3])).findobj(Text)}
    assert {"$x^2$", "\\x1b[31mred\\x1b[0m", "\\u202eevil", "<script>alert(1)</script>"} <= names
    # Mathematics would be typeset: the dollars would not reach the file.
    rows = rows_of(methods=("qsgd",), bits=[2, 3], layers=("w",))
    analysis = analyzed(*({**r, "method": "$x^2$", "codec": f"{r['bits']}"} for r in rows))
    over_steps = next(spec for spec in sweep_figures(analysis) if spec.name == "variance-over-steps").draw()
    for figure in (figures.rate_distortion(analysis), over_steps, figures.layer_heatmap(analysis)):
        svg = render(figure, "svg", text_as_paths=False).decode()
        assert "$x^2$" in "".join(ET.fromstring(svg).itertext())


def test_shortened_names_stay_different():
    names = [f"model.encoder.layers.{k}.{'attention.' * 9}{part}" for k in range(12) for part in ("weight", "bias")]
    short = shorten_all(names[::2], 40)
    assert (len(set(short)), max(map(len, short)) <= 40) == (12, True)
    assert shorten_all(["x" * 50, "x" * 60], 20) == ["xxxxxxx…xxxxxxx #1", "xxxxxxx…xxxxxxx #2"]
    assert shorten_all([], 20) == []


def test_files_are_the_same_every_time_and_the_callers_settings_are_left_alone(sweep):
    before = dict(mpl.rcParams)
    drawn = figures.rate_distortion(sweep)
    files = {kind: render(drawn, kind) for kind in ("png", "svg", "pdf")}
    assert [files[kind][:4] for kind in files] == [b"\x89PNG", b"<?xm", b"%PDF"]
    # A hash of its place, as matplotlib names a clip, changes from process to process.
    clips = set(re.findall(rb"url\(#([^)]+)\)", files["svg"]))
    assert clips == {b"clip%d" % k for k in range(len(clips))} != set()
    with mpl.rc_context({"font.size": 30.0, "axes.grid": False}):
        again = figures.rate_distortion(sweep)
        assert {kind: render(again, kind) for kind in files} == files
        assert mpl.rcParams["font.size"] == 30.0
    assert dict(mpl.rcParams) == before


def test_methods_look_different_always_the_same_and_legible():
    looks = {method: look(method) for method in _METHODS}
    # A method with one configuration has no line: colour and marker alone must tell it apart.
    assert len({(x.line, x.marker) for x in looks.values()}) == len(looks)
    assert look("alq", 1) != look("alq", 2)
    assert look("alq").line == look("alq", 1).line == look("ef:alq").line
    assert len({look(f"{around}alq").fill for around in ("", "ef:", "rotate:", "momentum:", "ef:rotate:")}) == 5
    # Policies of one codec differ in colour and keep its marker.
    policies = [look(name) for name in ("minmax", "minmax@adaptive", "minmax@mqgrad", "minmax@schedule")]
    assert (len({one.line for one in policies}), len({one.marker for one in policies})) == (4, 1)
    for x in looks.values():
        assert contrast(x.text, "#ffffff") >= 4.5
        assert contrast(DARK[x.text], DARK["#ffffff"]) >= 4.5
        assert contrast(DARK[x.line], DARK["#ffffff"]) >= 3.0


def test_middles_and_bits_over_steps_by_hand():
    # Two steps have no middle.
    low, high = figures.middle_of_steps(np.array([[1.0, 2.0, np.nan], [1.0, 2.0, 3.0]]))
    assert np.isnan([low[0], high[0]]).all()
    assert (low[1], high[1]) == pytest.approx((1.2, 2.8))
    found = analyzed(
        *(
            row(layer, step, bits=3, n=n, squared_error=0.1, bits_total=bits)
            for layer, n, values in (("w", 300, (1.0, 2.0)), ("v", 100, (3.0, None)))
            for step, bits in zip((0, 10), values, strict=True)
        )
    )
    np.testing.assert_allclose(found.bits_per_step, [[1.5, np.nan]])


# Figures by their names


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gallery")
    trace = write_laws(folder / "t.zarr", kinds=("weight",), steps=(0,))
    sweep = result_of(fitted_rows(), details=fit_details())
    return make_report([sweep], [write_runs(folder / "a.jsonl", steps=20)], [trace])


def test_every_figure_of_a_report_is_in_the_register_and_drawn_by_its_name(report):
    own = {name.removeprefix("weight-") if name != "weight-gradients" else name for name in figure_names(report)}
    assert own < set(figure_names()) == set(FIGURES)
    # What this report lacks; other tests draw those.
    assert " ".join(sorted(set(FIGURES) - own)) == (
        "neural-gradients plan-bits plan-budgets plan-frontier savings training-over-time wasserstein weight-gradients"
    )
    # The kind of gradient may be left out where there is one.
    assert draw(report, "mu-and-sigma").axes[0].get_title() == draw(report, "weight-mu-and-sigma").axes[0].get_title()


def test_names_that_say_nothing_or_not_which_are_refused(report, tmp_path):
    rows = list(rows_of(bits=[3], layers=("w",), steps=(0,), methods=("qsgd",)))
    two = load_report([write_sweep(tmp_path / f"{name}.sweep.db", rows) for name in ("a b", "c")])
    assert {"a_b-wasserstein", "c-wasserstein"} <= set(figure_names(two))
    assert isinstance(draw(two, "c-wasserstein"), Figure)
    for source, name, said in (
        (report, "neural-gradients", "'neural-gradients': these results have nothing for it; they have rate-"),
        (two, "wasserstein", "choose a_b-wasserstein, c-wasserstein"),
    ):
        with pytest.raises(UsageError, match=said):
            draw(source, name)
