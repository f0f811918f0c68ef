"""What is drawn of steps, of bits over training, of many layers and of simulated time."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from helpers_report import result_of, row, rows_of

from gtrace.report.analysis.results import MOST_NAMED
from gtrace.report.analysis.run_logs import analyze_runs
from gtrace.report.analysis.sweep import analyze
from gtrace.report.figures import heatmap, training
from gtrace.report.figures import sweep as figures
from gtrace.report.sections.training import run_figures
from gtrace.runlog import read_runlog


@pytest.fixture(scope="module")
def sweep(whole):
    return analyze(dataclasses.replace(whole, provenance={"refit": [0, 20, 21]}))


@pytest.fixture(scope="module")
def records(log):
    found = read_runlog(log)
    for record in found:
        if record["type"] == "step":
            record["sim_seconds"] = 0.5
            record["fit_seconds"] = 0.01 if record["run"] != "none" and record["step"] in (0, 50) else 0.0
    return found


def lines(axes):
    return {line.get_label(): line for line in axes.lines}


def test_error_bars_span_the_middle_of_the_steps(sweep):
    axes = figures.rate_distortion(sweep).axes[0]
    bars = {c.get_label().lstrip("_"): c for c in axes.collections}
    (family,) = [f for f in sweep.families if f.label == "qsgdinf"]
    for i, segment in zip(family.members, bars["qsgdinf"].get_segments(), strict=True):
        expected = np.quantile(sweep.per_step[i], [0.1, 0.9])
        np.testing.assert_allclose(segment[:, 1], expected)
        np.testing.assert_allclose(segment[:, 0], sweep.configurations[i].bits)
    # Two steps have no middle.
    low, high = figures.middle_of_steps(np.array([[1.0, 2.0, np.nan], [1.0, 2.0, 3.0]]))
    assert np.isnan(low[0])
    assert np.isnan(high[0])
    assert (low[1], high[1]) == pytest.approx((1.2, 2.8))


def test_bits_over_steps_by_hand():
    rows = [
        row(layer, step, bits=3, n=n, squared_error=0.1, bits_total=bits)
        for layer, n, values in (("w", 300, (1.0, 2.0)), ("v", 100, (3.0, None)))
        for step, bits in zip((0, 10), values, strict=True)
    ]
    analysis = analyze(result_of(rows))
    np.testing.assert_allclose(analysis.bits_per_step, [[1.5, np.nan]])


def test_bits_over_steps_with_the_steps_of_updates(sweep):
    axes = figures.bits_over_steps(sweep).axes[0]
    chosen = sweep.nearest(next(f for f in sweep.families if f.label == "qsgdinf"), 3.0)
    np.testing.assert_allclose(lines(axes)["qsgdinf"].get_ydata(), sweep.bits_per_step[chosen])
    # Step 21 was asked for and not recorded.
    assert lines(axes)["updates"].get_xdata().tolist() == [0, 20]
    plain = analyze(result_of(rows_of(bits=[2, 3]), provenance={"refit": "previous"}))
    assert "updates" not in lines(figures.bits_over_steps(plain).axes[0])


def test_bits_of_a_run_with_its_updates(records):
    analysis = analyze_runs(records)
    found = lines(training.bits_over_steps(analysis).axes[0])
    assert found["uncompressed"].get_ydata().tolist() == [32.0] * 120
    assert found["qsgdinf b3"].get_ydata().tolist() == [3.0] * 120
    assert found["updates of qsgdinf b3"].get_xdata().tolist() == [0, 50]
    assert found["updates of uncompressed"].get_xdata().tolist() == []


def test_training_against_simulated_time_where_it_is_logged(records):
    analysis = analyze_runs(records)
    assert "training-over-time" in [plate.name for plate in run_figures(analysis)]
    loss, test = training.training_over_time(analysis).axes
    assert lines(loss)["every step of uncompressed"].get_xdata()[[0, -1]].tolist() == [0.5, 60.0]
    assert lines(test)["qsgdinf b3"].get_xdata()[0] == 10.0
    assert loss.get_xlabel() == "simulated time (s)"
    without = [{k: v for k, v in r.items() if k != "sim_seconds"} for r in records]
    assert "training-over-time" not in [plate.name for plate in run_figures(analyze_runs(without))]


def test_wasserstein_has_every_configuration(sweep):
    axes = figures.wasserstein(sweep).axes[0]
    for family in sweep.families:
        expected = sorted(
            (sweep.configurations[i].relative_variance, sweep.configurations[i].w1_normalized) for i in family.members
        )
        assert lines(axes)[family.label].get_xydata().tolist() == [list(point) for point in expected]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


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
    found = heatmap.row_names(names)
    assert len(found) <= MOST_NAMED
    if expected is not None:
        assert found == expected


def test_names_of_many_rows_do_not_touch():
    rows = rows_of(("qsgd",), [3], [f"model.layers.{k}.attention.weight" for k in range(200)], (0,), draws=0)
    figure = heatmap.layer_heatmap(analyze(result_of(rows)))
    figure.draw_without_rendering()
    boxes = [t.get_window_extent() for t in figure.axes[0].get_yticklabels()]
    assert len(boxes) == 50
    assert not any(a.overlaps(b) for a, b in pairwise(boxes))
    assert figure.get_figheight() < 14
