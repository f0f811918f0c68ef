import math
from itertools import pairwise
from xml.etree import ElementTree as ET

import matplotlib as mpl
import numpy as np
import pytest
from helpers_laws import write_laws
from helpers_report import (
    EVIL,
    LAYERS,
    METHODS,
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
from gtrace.report.analysis.results import MOST_NAMED
from gtrace.report.analysis.run_logs import analyze_runs
from gtrace.report.analysis.runs import running_mean
from gtrace.report.analysis.sweep import analyze
from gtrace.report.figures import FIGURES
from gtrace.report.figures import sweep as figures
from gtrace.report.figures.charts import draw_chart
from gtrace.report.figures.style import _METHODS, DARK, look, looks_of, render, series
from gtrace.report.names import shorten_all
from gtrace.report.section import Chart, Curve, Panel
from gtrace.report.sections import charts
from gtrace.report.sections.sweep import sweep_figures
from gtrace.report.sections.training import run_figures
from gtrace.runlog import read_runlog


def analyzed(*rows, **given):
    return analyze(result_of(rows_of(**given) if given else rows))


def curves(axes):
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def test_rate_distortion_has_every_point_and_the_front(sweep):
    axes = figures.rate_distortion(sweep).axes[0]
    lines = curves(axes)
    assert set(METHODS) < set(lines)
    assert sum(len(lines[m].get_xdata()) for m in METHODS) == len(sweep.configurations)
    for c in sweep.configurations:
        assert [c.bits, c.relative_variance] in lines[c.family].get_xydata().tolist()
    front = sorted((c.bits, c.relative_variance) for c in sweep.configurations if c.pareto)
    assert lines["pareto"].get_xydata().tolist() == [list(point) for point in front]
    assert "bits per coordinate" in axes.get_xlabel()
    assert "||g||²" in axes.get_ylabel()
    # Bits stay linear where nothing is squeezed.
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "log")
    wide = analyzed(*(row(bits=b, squared_error=1.0, bits_total=bits) for b, bits in ((2, 1.0), (3, 16.0))))
    assert figures.rate_distortion(wide).axes[0].get_xscale() == "log"


def test_many_methods_are_listed_beside_the_axes_on_a_logarithmic_axis():
    # A point or a few of every method that has a look of its own, and of one with a prefix.
    rows = []
    for k, method in enumerate(["none", "ef:topk", *_METHODS]):
        for ratio in (0.001, 0.1) if method.endswith("topk") else (None,):
            about = {"codec": f"{method}:ratio={ratio}" if ratio else method, "method": method, "bits": None}
            about |= {"params": f'{{"ratio": {ratio}}}' if ratio else "{}", "bits_total": 20 * (ratio or 0.1 + k / 40)}
            rows += [row(step=step, squared_error=1.1**-k) | about for step in (0, 10)]
    analysis = analyzed(*rows)
    assert [f.label for f in analysis.families if f.label.endswith("topk")] == ["ef:topk", "topk"]
    assert {c.setting for c in analysis.configurations if c.method == "ef:topk"} == {"ratio 0.001", "ratio 0.1"}
    shown = figures.rate_distortion(analysis), draw_chart(charts.error_over_steps(analysis))
    for figure in shown:
        (legend,) = figure.legends
        assert len(legend.get_texts()) == len(analysis.families)
        figure.draw_without_rendering()
        assert not [text for text in figure.axes[0].texts if text.get_fontweight() == "bold"]
        assert legend.get_window_extent().x0 >= figure.axes[0].get_window_extent().x1
    assert shown[0].axes[0].get_xscale() == "log"


def test_long_curves_are_thinned_and_keep_both_ends(tmp_path):
    found = analyze_runs(read_runlog(write_runs(tmp_path / "long.jsonl", steps=1500)))
    curve = charts.training_curves(found, "steps").panels[0].curves[0]
    assert (len(curve.x), curve.x[0], curve.x[-1]) == (400, found.runs[0].steps[0], found.runs[0].steps[-1])


def test_a_run_with_a_prefix_is_named_and_drawn_as_its_codec_with_one(tmp_path):
    specs = ("none", "topk:ratio=0.01", "ef:topk:ratio=0.01", "ef:rotate:block=64:qsgd:bits=3")
    found = analyze_runs(read_runlog(write_runs(tmp_path / "b.jsonl", runs=specs, steps=30)))
    lines = curves(draw_chart(charts.error_of_runs(found)).axes[0])
    plain, around = lines["topk ratio 0.01"], lines["ef:topk ratio 0.01"]
    assert (plain.get_color(), plain.get_marker()) == (around.get_color(), around.get_marker())
    assert plain.get_linestyle() != around.get_linestyle()
    assert lines["ef:rotate:qsgd b3"].get_color() == look("qsgd").line


def test_gallery_offers_what_there_is(sweep, run_report):
    ours, theirs = list(sweep_figures(sweep)), list(run_figures(run_report.runs[0]))
    shown = " ".join(plate.name for plate in (*ours, *theirs))
    assert shown == (
        "rate-distortion variance-over-steps layers bits-over-steps wasserstein "
        "training-over-steps training-over-bits training-bits averaged-gradient"
    )
    for plate in (*ours, *theirs):
        assert isinstance(plate.draw(), Figure)
        assert plate.caption.endswith((".", "?"))


def odd_sweeps():
    nan = [{**r, "squared_error": None} if r["tensor"] == "fc1.weight" else r for r in rows_of(bits=[2, 3])]
    return {
        "one step": rows_of(steps=(7,), bits=[2, 3]),
        "bursts": rows_of(steps=(0, 1, 2, 3, 4, 5000), bits=[2, 3], layers=("w",)),
        "one codec": rows_of(methods=("qsgd",)),
        "one configuration": rows_of(methods=("terngrad",), layers=("w",), steps=(0,)),
        "nan": nan,
        "no rows": [],
        "no numbers": [row(squared_error=None)],
        "no error": [row(method="none", squared_error=0.0, bits_total=32.0)],
        "no bits": [row(squared_error=1.0)],
        "200 layers": rows_of(layers=[f"layer{k}" for k in range(200)], steps=(0,), bits=[3], draws=0),
        "long": rows_of(layers=[f"model.encoder.layers.{k}.{'attention.' * 9}weight" for k in range(3)], bits=[2, 3]),
        "names": rows_of(layers=EVIL, bits=[2, 3]),
    }


@pytest.mark.parametrize("case", list(odd_sweeps()))
def test_every_figure_survives_odd_input(case):
    analysis = analyzed(*odd_sweeps()[case])
    empty = {"no rows", "no numbers", "no error"}
    for figure, lacking in (
        (figures.rate_distortion(analysis), {"no bits"}),
        (draw_chart(charts.rate_distortion(analysis)), {"no bits"}),
        (draw_chart(charts.error_over_steps(analysis)), {"no bits"}),
        (draw_chart(charts.wasserstein(analysis)), {"no bits", "200 layers"}),
        (figures.layer_heatmap(analysis), set()),
    ):
        said = {text.get_text() for text in figure.findobj(Text)}
        assert ("nothing to draw" in said) == (case in empty | lacking)
    # The uncompressed gradient has bits, if no error.
    shown = charts.bits_over_steps(analysis).panels[0].curves
    assert bool(shown) == (case not in {"no rows", "no numbers", "no bits"})


def test_names_are_drawn_literally():
    # The last one needs a font that matplotlib does not bring, and it says so.
    names = {text.get_text() for text in figures.layer_heatmap(analyzed(layers=EVIL[:-1], bits=[3])).findobj(Text)}
    assert {"$x^2$", "\\x1b[31mred\\x1b[0m", "\\u202eevil", "<script>alert(1)</script>"} <= names
    # Mathematics would be typeset: the dollars would not reach the file.
    rows = rows_of(methods=("qsgd",), bits=[2, 3], layers=("w",))
    analysis = analyzed(*({**r, "method": "$x^2$", "codec": f"{r['bits']}"} for r in rows))
    over_steps = draw_chart(charts.error_over_steps(analysis))
    for figure in (figures.rate_distortion(analysis), over_steps, figures.layer_heatmap(analysis)):
        svg = render(figure, "svg", text_as_paths=False).decode()
        assert "$x^2$" in "".join(ET.fromstring(svg).itertext())


def test_shortened_names_stay_different():
    names = [f"model.encoder.layers.{k}.{'attention.' * 9}{part}" for k in range(12) for part in ("weight", "bias")]
    short = shorten_all(names[::2], 40)
    assert (len(set(short)), max(map(len, short)) <= 40) == (12, True)
    assert shorten_all(["x" * 50, "x" * 60], 20) == ["xxxxxxx…xxxxxxx #1", "xxxxxxx…xxxxxxx #2"]
    assert shorten_all([], 20) == []
    # Nothing that all share, and the numbers in the middle: they must not be what is cut out.
    first, *short = shorten_all(["$x^2$", *names], 40)
    assert (first, len(set(short)), max(map(len, short)) <= 40) == ("$x^2$", 24, True)
    assert all(f".{k // 2}…" in name for k, name in enumerate(short))


def test_a_wobble_of_a_percent_looks_like_one():
    analysis = analyzed(*(row("w", step, squared_error=0.5 + 0.001 * step, bits_total=3.0) for step in range(4)))
    low, high = draw_chart(charts.error_over_steps(analysis)).axes[0].get_ylim()
    assert low < 0.3 < 0.8 < high


@pytest.mark.parametrize("layers", [("w",), ("v", "w"), LAYERS])
def test_no_word_of_a_heat_map_is_cut_off(layers):
    figure = figures.layer_heatmap(analyzed(methods=("qsgd",), bits=[3], layers=layers, steps=(0,), draws=0))
    figure.draw_without_rendering()
    frame, map_axes = figure.bbox, figure.axes[0]
    shown = [label for axes in figure.axes for label in (axes.xaxis.label, axes.yaxis.label)]
    for text in filter(Text.get_text, (*shown, *map_axes.get_xticklabels(), *map_axes.get_yticklabels())):
        box = text.get_window_extent()
        assert frame.x0 <= box.x0 <= box.x1 <= frame.x1, text.get_text()
        assert frame.y0 <= box.y0 <= box.y1 <= frame.y1, text.get_text()


def test_files_are_the_same_every_time_and_the_callers_settings_are_left_alone(sweep):
    before = dict(mpl.rcParams)
    drawn = figures.rate_distortion(sweep)
    files = {kind: render(drawn, kind) for kind in ("png", "svg", "pdf")}
    assert [files[kind][:4] for kind in files] == [b"\x89PNG", b"<?xm", b"%PDF"]
    with mpl.rc_context({"font.size": 30.0, "axes.grid": False}):
        again = figures.rate_distortion(sweep)
        assert {kind: render(again, kind) for kind in files} == files
        assert mpl.rcParams["font.size"] == 30.0
    assert dict(mpl.rcParams) == before


def test_methods_look_different_always_the_same_and_legible():
    looks = {method: look(method) for method in _METHODS}
    # A method with one configuration has no line: colour and marker alone must tell it apart.
    alone = {(x.line, x.marker) for x in looks.values()}
    assert len(alone) == len(looks)
    for method in ("alq", "amq", "zipml", "topk", "qsgd"):
        first, second = look(method, 1), look(method, 2)
        assert (first.line, first.marker) not in alone
        assert first != second
        assert look(method).line == first.line == look(f"ef:{method}").line
        assert (
            len({look(f"{around}{method}").fill for around in ("", "ef:", "rotate:", "momentum:", "ef:rotate:")}) == 5
        )
    assert look("qsgd").line != look("qsgdinf").line
    assert look("someone's own codec") == look("someone's own codec")
    together = looks_of({"a": "alq", "a tensor": "", "b": "alq"})
    assert list(together.values()) == [look("alq"), series(3)[0], look("alq", 1)]
    # Policies of one codec differ in colour and keep its marker.
    policies = [look(name) for name in ("minmax", "minmax@adaptive", "minmax@mqgrad", "minmax@schedule")]
    assert (len({one.line for one in policies}), len({one.marker for one in policies})) == (4, 1)
    assert look("minmax@mqgrad", 1) != look("minmax@mqgrad")
    assert look("ef:minmax@mqgrad").line == look("qsgd@mqgrad").line
    for x in looks.values():
        assert contrast(x.text, "#ffffff") >= 4.5
        assert contrast(DARK[x.text], DARK["#ffffff"]) >= 4.5
        assert contrast(DARK[x.line], DARK["#ffffff"]) >= 3.0
    assert math.isclose(contrast("#000000", "#ffffff"), 21)


# Steps, bits over training, many layers


def test_running_means_middles_and_bits_over_steps_by_hand():
    assert running_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [1.0, 2.0, 4.0, 6.0]
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


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([f"w{k}" for k in range(5)], [(k, f"w{k}") for k in range(5)]),
        (
            [f"layers.{k}.{part}" for k in range(40) for part in ("attention.0.weight", "attention.1.weight", "norm")],
            [(3 * k + 1, f"layers.{k}") for k in range(40)],
        ),
        ([f"w{k}" for k in range(200)], [(k, f"w{k}") for k in range(0, 200, 4)]),
        ([f"a.{'x' * k}" for k in range(1, 71)], None),
    ],
)
def test_rows_of_a_heat_map_are_named_one_by_one_by_block_or_every_few(names, expected):
    found = figures.row_names(names)
    assert len(found) <= MOST_NAMED
    assert expected is None or found == expected


def test_names_of_many_rows_do_not_touch():
    layers = [f"model.layers.{k}.attention.weight" for k in range(200)]
    figure = figures.layer_heatmap(analyzed(methods=("qsgd",), bits=[3], layers=layers, steps=(0,), draws=0))
    figure.draw_without_rendering()
    boxes = [t.get_window_extent() for t in figure.axes[0].get_yticklabels()]
    assert len(boxes) == 50
    assert not any(a.overlaps(b) for a, b in pairwise(boxes))
    assert figure.get_figheight() < 14


# Charts: bars and points by category, marks, ticks


def axes_of(*curves, **panel):
    return draw_chart(Chart((Panel(curves, **panel),), "")).axes[0]


def test_bars_of_one_category_stand_side_by_side_and_variants_of_a_method_are_paler():
    alone = axes_of(Curve("a", ("x",), (1.0,)), Curve("b", ("y",), (2.0,)), bars=True)
    beside = axes_of(Curve("a", ("x", "y"), (1.0, 2.0)), Curve("b", ("y",), (2.0,)), bars=True)
    for axes, middles in ((alone, [0, 1]), (beside, [-0.2, 0.8, 1.2])):
        assert [bar.get_x() + bar.get_width() / 2 for bar in axes.patches] == pytest.approx(middles)
    variants = (Curve(name, ("x",), (1.0,), method=name) for name in ("alq", "alq-n"))
    plain, variant = axes_of(*variants, bars=True).patches
    assert plain.get_facecolor()[:3] == variant.get_facecolor()[:3]
    assert (plain.get_alpha(), variant.get_alpha()) == (1.0, 0.5)


def test_points_stand_in_the_place_of_bars_with_their_interval():
    axes = axes_of(Curve("a", ("x",), (91.0,), (90.0,), (93.0,), form="points"), bars=True)
    assert not axes.patches
    assert axes.lines[0].get_linestyle() == "None"
    assert axes.lines[0].get_xydata().tolist() == [[0.0, 91.0]]
    low, high = axes.collections[0].get_segments()[0]
    assert (low[1], high[1]) == (90.0, 93.0)
    assert axes.get_ylim()[0] > 50  # such an axis need not begin at 0


def test_a_mark_is_a_named_vertical_line_and_whole_numbers_have_ticks_at_whole_numbers():
    axes = axes_of(Curve("a", (0.0, 9.5), (1.0, 2.0)), marks=(("drop", 4.0),))
    assert axes.lines[-1].get_xdata() == [4.0, 4.0]
    assert [text.get_text() for text in axes.texts] == ["drop"]
    for places, whole in (((2, 3, 4), True), ((2.0, 3.0, 4.5), False)):
        ticks = axes_of(Curve("a", places, (1.0, 2.0, 3.0))).get_xticks()
        assert all(float(tick).is_integer() for tick in ticks) == whole


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
    assert draw(report, "rate-distortion").axes[0].get_xlabel() == "measured bits per coordinate"
    # The kind of gradient may be left out where there is one.
    assert draw(report, "mu-and-sigma").axes[0].get_title() == draw(report, "weight-mu-and-sigma").axes[0].get_title()


def test_names_that_say_nothing_or_not_which_are_refused(report, tmp_path):
    rows = list(rows_of(bits=[3], layers=("w",), steps=(0,), methods=("qsgd",)))
    two = load_report([write_sweep(tmp_path / f"{name}.sweep.db", rows) for name in ("a b", "c")])
    assert {"a_b-layers", "c-layers"} <= set(figure_names(two))
    assert isinstance(draw(two, "c-layers"), Figure)
    for source, name, said in (
        (report, "rate-distorsion", "'rate-distorsion': no such figure; did you mean rate-distortion"),
        (report, "neural-gradients", "'neural-gradients': these results have nothing for it; they have rate-"),
        (make_report([result_of([])]), "layers", "these results have nothing to draw"),
        (two, "layers", "choose a_b-layers, c-layers"),
    ):
        with pytest.raises(UsageError, match=said):
            draw(source, name)
