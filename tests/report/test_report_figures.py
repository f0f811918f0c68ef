import math
from xml.etree import ElementTree as ET

import matplotlib as mpl
import numpy as np
import pytest
from helpers_report import EVIL, LAYERS, METHODS, result_of, row, rows_of, write_runs
from matplotlib.figure import Figure
from matplotlib.text import Text

from gtrace.report.analysis.run_logs import analyze_runs
from gtrace.report.analysis.runs import running_mean
from gtrace.report.analysis.sweep import analyze
from gtrace.report.figures import heatmap, training
from gtrace.report.figures import sweep as figures
from gtrace.report.figures.style import _METHODS, DARK, look
from gtrace.report.figures.svg import render
from gtrace.report.names import shorten_all
from gtrace.report.sections.sweep import sweep_figures
from gtrace.report.sections.training import run_figures
from gtrace.runlog import read_runlog


@pytest.fixture(scope="module")
def runs(run_report):
    return run_report.runs[0]


def curves(axes):
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def words(figure):
    figure.draw_without_rendering()
    return {text.get_text() for text in figure.findobj(mpl.text.Text) if text.get_text()}


def boxes(axes):
    figure = axes.get_figure(root=True)
    figure.draw_without_rendering()
    renderer = figure._get_renderer()
    return [t.get_window_extent(renderer) for t in axes.texts if t.get_fontweight() == "bold"]


def test_rate_distortion_has_every_point_and_the_front(sweep):
    axes = figures.rate_distortion(sweep).axes[0]
    lines = curves(axes)
    assert set(METHODS) < set(lines)
    assert sum(len(lines[m].get_xdata()) for m in METHODS) == len(sweep.configurations)
    for c in sweep.configurations:
        assert [c.bits, c.relative_variance] in lines[c.family].get_xydata().tolist()
    front = sorted((c.bits, c.relative_variance) for c in sweep.configurations if c.pareto)
    assert lines["pareto"].get_xydata().tolist() == [list(point) for point in front]
    assert axes.get_yscale() == "log"
    assert "bits per coordinate" in axes.get_xlabel()
    assert "||g||²" in axes.get_ylabel()


def test_curves_are_named_directly_and_the_names_do_not_overlap(sweep):
    for figure in (figures.rate_distortion(sweep), figures.variance_over_steps(sweep)):
        axes = figure.axes[0]
        found = boxes(axes)
        assert len(found) == len(METHODS)
        for k, box in enumerate(found):
            assert not any(box.shrunk(0.9, 0.8).overlaps(other) for other in found[:k])
        assert axes.get_legend() is None


def test_variance_over_steps_shows_the_configuration_nearest_to_three_bits(sweep):
    axes = figures.variance_over_steps(sweep).axes[0]
    lines = curves(axes)
    assert set(lines) == set(METHODS)
    for family in sweep.families:
        chosen = sweep.nearest(family, 3.0)
        assert lines[family.label].get_xdata().tolist() == sweep.steps.tolist()
        assert lines[family.label].get_ydata().tolist() == sweep.per_step[chosen].tolist()
    assert any(text.startswith("qsgdinf b") and text.endswith(" bits") for text in words(axes.figure))


def with_everything():
    """A point or a few of every method that has a look of its own, and of one with a prefix."""
    rows = []
    for k, method in enumerate(["none", "ef:topk", *_METHODS]):
        rates = (0.001, 0.1) if method.endswith("topk") else (None,)
        for ratio in rates:
            spec = f"{method}:ratio={ratio}" if ratio else method
            rows += [
                {
                    **row(step=step, squared_error=1.1**-k, bits_total=20 * (ratio or 0.1 + k / 40)),
                    "codec": spec,
                    "method": method,
                    "bits": None,
                    "params": f'{{"ratio": {ratio}}}' if ratio else "{}",
                }
                for step in (0, 10)
            ]
    return analyze(result_of(rows))


def test_many_methods_are_listed_beside_the_axes_on_a_logarithmic_axis():
    analysis = with_everything()
    assert [f.label for f in analysis.families if f.label.endswith("topk")] == ["ef:topk", "topk"]
    assert {c.setting for c in analysis.configurations if c.method == "ef:topk"} == {"ratio 0.001", "ratio 0.1"}
    for draw in (figures.rate_distortion, figures.variance_over_steps):
        figure = draw(analysis)
        (legend,) = figure.legends
        assert len(legend.get_texts()) == len(analysis.families)
        assert not boxes(figure.axes[0])
        figure.draw_without_rendering()
        box = legend.get_window_extent()
        assert box.x0 >= figure.axes[0].get_window_extent().x1
        assert box.y0 >= 0
    assert figures.rate_distortion(analysis).axes[0].get_xscale() == "log"


def test_bits_stay_linear_where_nothing_is_squeezed(sweep):
    assert figures.rate_distortion(sweep).axes[0].get_xscale() == "linear"
    wide = [row(bits=b, squared_error=1.0, bits_total=bits) for b, bits in ((2, 1.0), (3, 16.0))]
    assert figures.rate_distortion(analyze(result_of(wide))).axes[0].get_xscale() == "log"


def test_heat_map_has_a_cell_for_every_layer_and_configuration(sweep):
    figure = heatmap.layer_heatmap(sweep)
    (image,) = figure.axes[0].images
    assert image.get_array().shape == (len(sweep.tensors), len(sweep.configurations))
    np.testing.assert_array_equal(image.get_array(), sweep.per_tensor.T)
    assert isinstance(image.norm, mpl.colors.LogNorm)
    assert {"conv1.weight", "qsgdinf b3", "terngrad"} <= words(figure)


def test_training_curves_hold_every_step_and_every_test(runs):
    for figure, x in ((training.training_over_steps(runs), "steps"), (training.training_over_bits(runs), "sent")):
        loss, test = figure.axes
        for run, name in zip(runs.runs, ("uncompressed", "qsgdinf b3"), strict=True):
            raw = curves(loss)[f"every step of {name}"]
            assert len(raw.get_xdata()) == len(run.steps) == 120
            assert raw.get_xdata()[-1] == (run.steps[-1] if x == "steps" else run.sent[-1] / 8)
            assert curves(test)[name].get_ydata().tolist() == pytest.approx((100 * run.accuracy).tolist())
            assert name in words(figure)
        assert "%" in test.get_ylabel()
        assert loss.get_yscale() == "log"
    assert "MB" in " ".join(words(figure))


def test_the_uncompressed_run_has_no_error_to_draw(runs):
    axes = training.averaged_gradient_error(runs).axes[0]
    assert "qsgdinf b3" in curves(axes)
    assert "uncompressed" not in curves(axes)


def test_a_run_with_a_prefix_is_named_and_drawn_as_its_codec_with_one(tmp_path):
    specs = ("none", "topk:ratio=0.01", "ef:topk:ratio=0.01", "ef:rotate:block=64:qsgd:bits=3")
    found = analyze_runs(read_runlog(write_runs(tmp_path / "b.jsonl", runs=specs, steps=30)))
    lines = curves(training.averaged_gradient_error(found).axes[0])
    plain, around = lines["topk ratio 0.01"], lines["ef:topk ratio 0.01"]
    assert plain.get_color() == around.get_color()
    assert plain.get_marker() == around.get_marker()
    assert (plain.get_fillstyle(), around.get_fillstyle()) == ("full", "none")
    assert lines["ef:rotate:qsgd b3"].get_color() == look("qsgd").line


def test_running_mean_by_hand():
    assert running_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [1.0, 2.0, 4.0, 6.0]


def test_gallery_offers_what_there_is(sweep, runs):
    assert [p.name for p in sweep_figures(sweep)] == [
        "rate-distortion",
        "variance-over-steps",
        "layers",
        "bits-over-steps",
        "wasserstein",
    ]
    assert [p.name for p in run_figures(runs)] == [
        "training-over-steps",
        "training-over-bits",
        "training-bits",
        "averaged-gradient",
    ]
    for plate in (*sweep_figures(sweep), *run_figures(runs)):
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
    analysis = analyze(result_of(odd_sweeps()[case]))
    empty = {"no rows", "no numbers", "no error"}
    for draw, lacking in (
        (figures.rate_distortion, {"no bits"}),
        (figures.variance_over_steps, {"no bits"}),
        (figures.bits_over_steps, {"no bits"}),
        (figures.wasserstein, {"no bits", "200 layers"}),
        (heatmap.layer_heatmap, set()),
    ):
        # The uncompressed gradient has bits, if no error.
        said = {text.get_text() for text in draw(analysis).findobj(Text)}
        assert ("nothing to draw" in said) == (
            case in empty - ({"no error"} if draw is figures.bits_over_steps else set()) | lacking
        )


def test_names_are_drawn_literally():
    # The last one needs a font that matplotlib does not bring, and it says so.
    analysis = analyze(result_of(rows_of(layers=EVIL[:-1], bits=[3])))
    drawn = words(heatmap.layer_heatmap(analysis))
    shown = {"$x^2$", "\\x1b[31mred\\x1b[0m", "\\u202eevil", "<script>alert(1)</script>"}
    assert shown <= drawn
    # Mathematics would be typeset: the dollars would not reach the file.
    rows = rows_of(methods=("qsgd",), bits=[2, 3], layers=("w",))
    rows = [{**r, "method": "$x^2$", "codec": f"{r['bits']}"} for r in rows]
    for draw in (figures.rate_distortion, figures.variance_over_steps, heatmap.layer_heatmap):
        svg = render(draw(analyze(result_of(rows))), "svg", text_as_paths=False).decode()
        assert "$x^2$" in "".join(ET.fromstring(svg).itertext())


def test_shortened_names_stay_different():
    names = [f"model.encoder.layers.{k}.{'attention.' * 9}weight" for k in range(12)]
    short = shorten_all(names, 40)
    assert len(set(short)) == 12
    assert max(map(len, short)) <= 40
    assert shorten_all(["x" * 50, "x" * 60], 20) == ["xxxxxxx…xxxxxxx #1", "xxxxxxx…xxxxxxx #2"]
    assert shorten_all([], 20) == []
    # Nothing that all share, and the numbers in the middle: they must not be what is cut out.
    names = [f"model.encoder.layers.{k}.{'attention.' * 9}{part}" for k in range(12) for part in ("weight", "bias")]
    short = shorten_all(["$x^2$", *names], 40)
    assert short[0] == "$x^2$"
    assert len(set(short)) == 25
    assert max(map(len, short)) <= 40
    assert all(f".{k // 2}…" in name for k, name in enumerate(short[1:]))


def test_a_wobble_of_a_percent_looks_like_one():
    rows = [row("w", step, squared_error=0.5 + 0.001 * step, bits_total=3.0) for step in range(4)]
    low, high = figures.variance_over_steps(analyze(result_of(rows))).axes[0].get_ylim()
    assert low < 0.3 < 0.8 < high


@pytest.mark.parametrize("layers", [("w",), ("v", "w"), LAYERS])
def test_no_word_of_a_heat_map_is_cut_off(layers):
    figure = heatmap.layer_heatmap(analyze(result_of(rows_of(("qsgd",), [3], layers, (0,), draws=0))))
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


def luminance(colour):
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_methods_look_different_always_the_same_and_legible():
    looks = {method: look(method) for method in _METHODS}
    # A method with one configuration has no line: colour and marker alone must tell it apart.
    assert len({(x.line, x.marker) for x in looks.values()}) == len(looks)
    for method in ("alq", "amq", "zipml", "topk", "qsgd"):
        alone = {(x.line, x.marker) for x in looks.values()}
        assert (look(method, 1).line, look(method, 1).marker) not in alone
        assert look(method, 1) != look(method, 2)
        assert look(method).line == look(method, 1).line == look(f"ef:{method}").line
        fills = {look(f"{prefix}{method}").fill for prefix in ("", "ef:", "rotate:", "momentum:", "ef:rotate:")}
        assert len(fills) == 5
    assert look("qsgd").line != look("qsgdinf").line
    assert look("someone's own codec") == look("someone's own codec")
    assert look("qsgd", 1) != look("qsgd")
    for x in looks.values():
        assert contrast(x.text, "#ffffff") >= 4.5
        assert contrast(DARK[x.text], DARK["#ffffff"]) >= 4.5
        assert contrast(DARK[x.line], DARK["#ffffff"]) >= 3.0
    assert math.isclose(contrast("#000000", "#ffffff"), 21)
