"""Errors beside the gradients' own noise: ratios of sums, equivalent batches, verdicts, and where they are shown."""

import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers_report import result_of, row

from gtrace.costs import Cluster, Network
from gtrace.report import analyze
from gtrace.report.analysis.safety import NOT_ASKED, PER, WORKERS
from gtrace.report.figures.heatmap import layer_heatmap
from gtrace.report.figures.sweep import rate_distortion
from gtrace.report.inputs import Asked, make_report
from gtrace.report.names import number
from gtrace.report.render.html import to_html
from gtrace.report.render.markdown import to_markdown
from gtrace.report.render.records import to_json
from gtrace.report.sections import charts, sections
from gtrace.report.sections.safety import noise_table, safety_sentences, safety_table
from gtrace.report.sections.sweep import sweep_figures
from gtrace.report.statistics import ratio_of_sums
from gtrace.sweep.gradient_noise import NOISE

STEPS = range(40)
ATTRS = {"world_size": 4, "batch_size": 256, "argv": ["train.py", "--batch-size", "64", "--lr", "0.1"]}
PROVENANCE = {"noise": {"from": ["ranks"]}, "trace_attrs": ATTRS}


def swept(codecs, *, provenance=PROVENANCE, layers=("w", "b"), steps=STEPS, noise=2.0, signal=1.0):
    """A sweep whose gradients have this noise, scattered by a tenth.

    Args:
        codecs: spec -> (noise ratio or None, relative bias), or (…, drawn=True).
    """
    random = np.random.default_rng(0)
    rows, details = [], {}
    for step in steps:
        for layer in layers:
            energy = 3.0 * (2 if layer == "w" else 1)
            told = noise * energy / 3 * math.exp(0.1 * random.normal())
            details[layer, step, NOISE] = {"variance": told, "signal": signal * energy / 3, "freedom": 3}
            for k, (spec, (ratio, bias)) in enumerate(codecs.items()):
                square = bias**2 * energy
                error = square + (ratio or 0.0) * told
                values = {"noise_ratio": ratio} if ratio is not None else {}
                rows.append(
                    row(layer, step, n=1000, energy=energy, squared_error=error, relative_bias=bias)
                    | {"codec": spec, "method": spec.split(":")[0], "params": "{}", "bits": None}
                    | {"bits_total": float(k + 1), **values}
                )
    result = result_of(rows)
    result.details.update(details)
    result.provenance.clear()
    result.provenance.update(provenance)
    return result


def verdicts(codecs, **given):
    found = analyze(swept(codecs, **given))
    return {c.spec: j for c, j in zip(found.configurations, found.safety.judged, strict=True)}


def test_errors_and_noise_are_summed_before_they_are_divided():
    result = swept({"alq": (0.05, 0.0)})
    # One layer alone has ten times the noise and half the error: means of ratios would say something else.
    for (layer, _, _), told in result.details.items():
        told["variance"] *= 10 if layer == "b" else 1
    result.columns["noise_ratio"] = result["squared_error"] / [
        result.details[r["tensor"], r["step"], NOISE]["variance"] for r in result.rows()
    ]
    found = analyze(result)
    total = sum(told["variance"] for told in result.details.values())
    assert found.safety.judged[0].ratio.estimate == pytest.approx(result["squared_error"].sum() / total)
    assert found.safety.noise.estimate == pytest.approx(total / result["energy"].sum())
    assert found.safety.cells == 2 * len(STEPS)
    np.testing.assert_allclose(found.safety.ratio_per_tensor, [[0.005, 0.05]])


def test_verdicts_follow_from_the_interval_and_the_bias():
    found = verdicts({"a": (0.05, 0.0), "b": (0.5, 0.0), "c": (0.02, 0.01), "d": (0.5, 0.5), "e": (None, 0.6)})
    assert {spec: j.verdict for spec, j in found.items()} == {
        "a": "safe",
        "b": "at risk",
        "c": "safe",
        "d": "cannot tell",
        "e": "cannot tell",
    }
    assert "predicted to cost 33% of the batch (at least 3" in found["b"].reason
    assert "no average shrinks it" in found["d"].reason
    assert "how much of its error is bias" in found["e"].reason
    assert found["d"].bias == pytest.approx(0.5 * math.sqrt(3))
    assert found["e"].bounded


def test_an_error_that_is_small_beside_the_expected_gradient_is_safe_whatever_it_is():
    found = verdicts({"a": (None, 0.02)})["a"]
    assert found.verdict == "safe"
    assert found.bounded
    assert verdicts({"a": (None, 0.0)})["a"].reason == "it has no error"


def test_few_steps_prove_nothing():
    found = verdicts({"a": (0.01, 0.0)}, steps=range(5))["a"]
    assert found.verdict == "cannot tell"
    assert "5 steps are too few" in found.reason


def test_an_expected_gradient_that_is_lost_in_its_noise_is_no_measure_for_a_bias():
    found = verdicts({"a": (0.01, 0.02)}, signal=-0.01)["a"]
    assert found.verdict == "cannot tell"
    assert math.isinf(found.bias)


def test_a_layer_that_drowns_is_a_risk():
    result = swept({"a": (0.01, 0.0)})
    quiet = np.array([r["tensor"] == "b" for r in result.rows()])
    for (layer, _, _), told in result.details.items():
        told["variance"] *= 1e-3 if layer == "b" else 1
    result.columns["noise_ratio"] = np.where(quiet, 10.0, 0.01)
    found = analyze(result).safety.judged[0]
    assert found.ratio.high < 0.1
    assert (found.verdict, found.worst) == ("at risk", "b")


@pytest.mark.parametrize(
    ("provenance", "words"),
    [({}, NOT_ASKED), ({"noise": {"from": [], "why": "the trace holds one gradient a step"}}, "one gradient a step")],
)
def test_without_replicas_nothing_is_judged_and_the_reason_is_said(provenance, words):
    result = swept({"alq": (0.1, 0.0), "fp": (None, 0.3)}, provenance=provenance)
    result.details.clear()
    analysis = analyze(result)
    (sentence,) = safety_sentences(analysis)
    assert sentence.startswith("Safety unknown: ")
    assert words in sentence
    report = make_report([result])
    assert sentence.split(":")[0] in to_markdown(report)
    assert sentence.split(":")[0] in to_html(report)
    assert "Is it safe?" not in to_html(report)
    assert not any(plate.name == "equivalent-batch" for plate in sweep_figures(analysis))


def test_the_equivalent_batch_is_stated_for_the_batch_there_is():
    analysis = analyze(swept({"alq": (0.1 / 3, 0.0)}))
    size, low, high = analysis.safety.equivalent(analysis.safety.judged[0].ratio)
    assert low <= size <= high
    assert size == pytest.approx(256 / (1 + 0.1 / 3))
    assert "at batch 256 is predicted to behave like 248" in safety_sentences(analysis)[-1]
    asked = analyze(swept({"alq": (1.0, 0.0)}), batch=2048.0)
    assert asked.safety.equivalent(asked.safety.judged[0].ratio)[0] == pytest.approx(1024)
    unknown = analyze(swept({"alq": (1.0, 0.0)}, provenance={"noise": {"from": ["ranks"]}}))
    assert unknown.safety.stated_batch == PER
    assert unknown.safety.workers == WORKERS
    assert any("--batch-size" in note for note in safety_table(unknown).notes)


def test_the_command_that_tests_the_prediction():
    notes = safety_table(analyze(swept({"alq:bits=4": (0.05, 0.0)}))).notes
    script = "gtrace train --codec alq:bits=4 train.py --batch-size 64 --lr 0.1"
    assert notes[-1].endswith(f": torchrun --nproc-per-node 4 -m -- {script}")
    bare = {**PROVENANCE, "trace_attrs": {"argv": ["train.py"], "batch_size": 256}}
    notes = safety_table(analyze(swept({"alq:bits=4": (0.05, 0.0)}, provenance=bare))).notes
    assert notes[-1].endswith(": gtrace train --codec alq:bits=4 train.py")


def test_lines_of_plain_sgd_and_of_several_workers_are_in_every_figure_of_variance():
    result = swept({"alq": (0.05, 0.0), "qsgd": (0.5, 0.0)})
    result.columns["w1_normalized"] = np.full(len(result), 0.1)
    analysis = analyze(result)
    expected = analysis.safety.noise.estimate
    names = "noise of one worker", "noise of 4 workers"
    wanted = tuple(zip(names, (expected, pytest.approx(expected / 4)), strict=True))
    assert charts.rate_distortion(analysis).panels[0].lines == charts.wasserstein(analysis).panels[0].marks == wanted
    lines = {line.get_label(): line for line in rate_distortion(analysis).axes[0].lines}
    assert lines["4 workers in full precision"].get_ydata()[0] == pytest.approx(expected / 4)
    curves = {curve.label: curve for curve in charts.error_over_steps(analysis).panels[0].curves}
    for name, workers in zip(names, (1, 4), strict=True):
        np.testing.assert_allclose(curves[name].y, analysis.safety.noise_per_step / workers)
    heat, mapped = layer_heatmap(analysis).axes[0], charts.layers(analysis)
    assert heat.get_xticklabels()[-1].get_text() == "SGD: gradient noise"
    assert mapped.columns[-1] == "gradient noise"
    for shown in (heat.images[0].get_array(), np.array(mapped.values)):
        np.testing.assert_allclose(shown[:, -1], analysis.safety.noise_per_tensor)


def test_the_figure_over_the_run_leaves_out_what_has_a_bias():
    analysis = analyze(swept({"alq": (0.25, 0.0), "topk": (0.0, 0.7)}))
    (curve,) = charts.batch_over_steps(analysis).panels[0].curves
    assert curve.label == "alq"
    np.testing.assert_allclose(curve.y, 256 / 1.25)
    assert any(plate.name == "equivalent-batch" for plate in sweep_figures(analysis))


def test_tables_and_json_hold_the_same():
    result = swept({"alq": (0.25, 0.0), "fp": (0.0, 0.01)})
    report = make_report([result])
    (analysis,) = report.sweeps
    rows = {line[0].text: line for line in safety_table(analysis).rows}
    assert [cell.text for cell in rows["alq"][1:4:2]] == ["at risk", "0.250"]
    assert rows["fp"][1].text == "safe"
    per_layer = noise_table(analysis)
    assert [line[0].text for line in per_layer.rows] == ["b", "w"]
    assert per_layer.rows[0][3].detail == "0.250"
    (told,) = to_json(report)["sweeps"]
    assert told["safety"]["judged"]["alq"]["verdict"] == "at risk"
    assert told["safety"]["judged"]["alq"]["noise_ratio"] == pytest.approx(0.25)
    assert told["safety"]["noise"]["estimate"] == pytest.approx(analysis.safety.noise.estimate)
    page = to_html(report)
    for words in ("Is it safe?", "Equivalent batch size per tensor", "a prediction"):
        assert words in page or words.capitalize() in page


def test_intervals_of_ratios_of_sums_hold_the_truth():
    """Steps whose sums scatter by half: the interval of their ratio misses it in few of a hundred series."""
    missed = 0
    for seed in range(100):
        random = np.random.default_rng(seed)
        bottom = random.gamma(4.0, 1.0, 60)
        top = 0.3 * bottom * random.gamma(4.0, 0.25, 60)
        found = ratio_of_sums(top * 1e-12, bottom * 1e-12)
        assert found.estimate == pytest.approx(top.sum() / bottom.sum())
        missed += not found.low <= 0.3 <= found.high
    assert missed <= 15
    assert math.isnan(ratio_of_sums([0.0], [0.0]).estimate)


INTERVALS = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "noise_intervals.py")))


@pytest.mark.parametrize("steps", [20, 50])
@pytest.mark.parametrize("correlation", [0.3, 0.6])
def test_intervals_hold_the_truth_on_correlated_steps(steps, correlation):
    """ "Safe" rests on the upper end. The script has 2000 series of each kind, and lines for each."""
    found = [INTERVALS.measured(kind, steps, correlation, 0.8, 150) for kind in INTERVALS.KINDS]
    known, inside, above, _ = np.mean(found, axis=0)
    assert known > 0.8
    assert inside >= 0.93
    assert above <= 0.035


def test_steps_without_an_interval_say_why():
    line = np.arange(1.0, 41.0)
    assert "too correlated" in ratio_of_sums(line**4, np.ones(40)).why
    assert ratio_of_sums(line[:11], np.ones(11)).why == "11 steps are too few for a confidence interval, which needs 12"
    assert ratio_of_sums(-line, np.ones(40)).why == "the ratio is not positive"
    same = ratio_of_sums(0.5 * line, line)
    assert (same.low, same.high) == (0.5, 0.5)


def test_what_a_codec_saves_stands_beside_its_verdict():
    cluster = Cluster(Network.parse("1Gbit/s", "20us"), ranks=8, step_time=0.05)
    report = make_report([swept({"alq": (0.05, 0.0), "qsgd": (0.5, 0.0)})], asked=Asked(cluster=cluster))
    table = next(t for part in sections(report) for t in part.tables if t.title == "Is it safe?")
    at = [column.heading for column in table.columns].index("step over bf16")
    saved = report.savings[0]
    for line in table.rows:
        best = min((row for row in saved.rows if row.spec == line[0].text), key=lambda row: row.step.seconds)
        assert line[at].text == f"{number(best.over_bfloat16[0])}x"
        assert line[at].detail == best.exchange.replace("allgather", "all-gather")
    assert "step over bf16" in to_html(report)
    assert "step over bf16" not in to_html(make_report([swept({"alq": (0.05, 0.0)})]))
