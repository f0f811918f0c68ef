"""What methods are ranked by: workers, windows, coders, dominance, targets; and one ratio for one comparison."""

import json
import math

import numpy as np
import pytest
from helpers_report import result_of, row

from gtrace.report.analysis.families import all_at_bits, at_bits, choose_targets, pareto_front
from gtrace.report.analysis.sweep import analyze
from gtrace.report.inputs import make_report
from gtrace.report.sections import sections
from gtrace.report.sections.sweep import sweep_verdict

NAN = math.nan


def curve(method, *points, bias=0.0):
    """A method with the points (bits, error); ``bias`` is the part of each error that is bias."""
    return [
        row(method=method, bits=b, squared_error=error, bits_total=bits)
        | {"relative_bias": None if bias is None else math.sqrt(bias * error)}
        for b, (bits, error) in enumerate(points, 2)
    ]


def analyzed(rows, *targets, **given):
    return analyze(result_of(rows), targets=targets or None, **given)


def ranking(analysis, bits):
    """The methods at these bits with what they have there, least error first."""
    k = analysis.targets.index(bits)
    return [(family.label, family.at[k]) for family in analysis.ranking(k)]


def labels(analysis, bits):
    return [label for label, _ in ranking(analysis, bits)]


def test_fewer_bits_and_less_error_leads_although_nothing_lies_above():
    rows = curve("zipml", (1.6, 0.24), (2.4, 0.04)) + curve("alq", (1.4, 0.5), (2.2, 0.07))
    analysis = analyzed(rows + curve("qsgdinf", (1.3, 0.3), (1.9, 0.03)), 2)
    label, first = ranking(analysis, 2)[0]
    assert (label, first.variance, first.bits, first.outcome) == ("qsgdinf", 0.03, 1.9, "fewer")
    assert sweep_verdict(analysis)[0].startswith(
        "At 2 bits per value, qsgdinf loses least (it has 3.0% of gradient energy at 1.90 bits), then zipml (9.8%)"
    )
    # One that ends below a target without the least error is not ranked there.
    found = all_at_bits([([1.0, 1.5], [0.9, 0.5]), ([1.8, 2.2], [0.2, 0.1])], 2.0)
    assert [at.outcome for at in found] == ["all-below", "interpolated"]


# Targets


def steps_of_one(low, high):
    bits = np.arange(low, high + 0.01, 0.5)
    return bits.tolist(), (4.0**-bits).tolist()


@pytest.mark.parametrize(
    ("curves", "targets"),
    [
        ([steps_of_one(1.5, 6), steps_of_one(2, 5.5), steps_of_one(2.5, 9), steps_of_one(7, 9)], (3.0, 4.0, 5.0)),
        # At most four, around three bits.
        ([steps_of_one(0.5, 9)] * 3, (1.0, 2.0, 3.0, 4.0)),
        # Halves beside a single whole number.
        ([steps_of_one(1.5, 2), steps_of_one(1.5, 2.2), steps_of_one(1.5, 2), steps_of_one(1.3, 1.8)], (1.5, 2.0)),
        ([([0.05 * k, 0.05 * k + 0.3], [0.5, 0.1]) for k in (1, 2, 3)], (0.2,)),
        # At 1 bit everybody loses more than the gradient.
        ([([1.0, 1.5, 2.0], [29.0, 3.0, 0.1 * k]) for k in (1, 2, 3)], (2.0,)),
        # Single points are targets of their own.
        ([([0.62], [5.0])], (0.62,)),
        ([([math.nan], [1.0])], ()),
    ],
)
def test_targets_are_where_most_methods_overlap(curves, targets):
    assert choose_targets(curves) == targets


# Workers


def test_error_is_bias_and_an_mth_of_the_variance():
    rows = curve("qsgd", (1.5, 0.8), (2.5, 0.8)) + curve("signsgd", (1.5, 0.6), (2.5, 0.6), bias=0.9)
    result = result_of(rows, provenance={"trace_attrs": {"world_size": 1}})
    assert labels(analyze(result, targets=[2]), 2) == ["signsgd", "qsgd"]
    analysis = analyze(result, targets=[2], workers=8)
    assert labels(analysis, 2) == ["qsgd", "signsgd"]
    (_, qsgd), (_, signs) = ranking(analysis, 2)
    assert (qsgd.variance, qsgd.bias) == pytest.approx((0.1, 0.0))
    assert (signs.variance, signs.bias) == pytest.approx((0.54 + 0.06 / 8, 0.54))
    (found,) = [c for c in analysis.configurations if c.method == "signsgd" and c.nominal_bits == 2]
    assert (found.relative_variance, found.bias, found.variance) == pytest.approx((0.6, 0.54, 0.06))
    sentences = sweep_verdict(analysis)
    assert sentences[0].startswith("At 2 bits per value, qsgd loses least with 8 workers (10% of gradient energy)")
    assert "More workers do not shrink the part of an error that is bias: signsgd (99%)." in sentences


def test_workers_are_those_of_the_run_unless_asked_and_a_star_is_for_what_they_see():
    rows = curve("qsgd", (1, 29.6), (2, 0.9)) + curve("zipml", (1.5, 3.0), (2.5, 0.1))
    four = result_of(rows, provenance={"trace_attrs": {"world_size": 4}})
    found = [analyze(four), analyze(four, workers=2), analyzed(rows), analyzed(rows, workers=64)]
    assert [analysis.basis.workers for analysis in found] == [4, 2, 1, 64]
    alone, many = ([(c.method, c.nominal_bits) for c in one.configurations if c.pareto] for one in found[2:])
    # Nor is there one for more error than the gradient has.
    assert alone == [("qsgd", 3), ("zipml", 3)]
    assert ("qsgd", 2) in many


def test_an_unknown_bias_counts_as_all_of_the_error_and_that_is_said():
    rows = curve("qsgd", (1.5, 0.8), (2.5, 0.8)) + curve("odd", (1.5, 0.6), (2.5, 0.6), bias=None)
    analysis = analyzed(rows, 2, workers=8)
    found = dict(ranking(analysis, 2))["odd"]
    assert (found.variance, found.bias) == pytest.approx((0.6, 0.6))
    assert any("the most it can be: odd" in note for note in analysis.notes)


# Windows


def windowed(spec, errors, window_error, bias=0.0, draw=0):
    """Rows of a codec over one burst of seven steps: errors of steps, and the error of their sum at the last one."""
    *around, parameters = spec.split(":")
    for step in range(7):
        window = dict(zip(("window", "window_error", "window_energy"), (7, window_error, 10.0), strict=True))
        yield {
            **row(step=step, method=":".join(around), draw=draw, squared_error=errors, bits_total=1.5),
            "codec": spec,
            "params": json.dumps(dict(item.split("=") for item in parameters.split(",") if "=" in item)),
            "bits": None,
            "relative_bias": None if bias is None else math.sqrt(bias * errors),
            **(window if step == 6 else dict.fromkeys(window)),
        }


MEMORY = [
    *windowed("topk:ratio=0.05", 0.5, 2.82, bias=1.0),
    *windowed("ef:topk:ratio=0.05", 0.7, 0.85, bias=None),
    *windowed("qsgdinf:bits=3", 0.4, 1.4, draw=-1),
]


def test_codecs_with_memory_are_ranked_by_what_has_arrived():
    analysis = analyzed(MEMORY, 1.5)
    assert analysis.basis.window == (7, 7)
    assert [(label, round(at.variance, 3)) for label, at in ranking(analysis, 1.5)] == [
        ("ef:topk", 0.085), ("qsgdinf", 0.14), ("topk", 0.282),
    ]  # fmt: skip
    single = dict(zip([f.label for f in analysis.families], analysis.step_at[:, 0], strict=True))
    assert single == pytest.approx({"topk": 0.5, "ef:topk": 0.7, "qsgdinf": 0.4})
    first = sweep_verdict(analysis)[0]
    assert first.startswith("At 1.5 bits per value, ef:topk loses least over 7 consecutive steps (8.5% of")
    # With workers variance shrinks, and what a memory owes does not.
    analysis = analyzed(MEMORY, 1.5, workers=8)
    found = {label: (at.variance, at.bias) for label, at in ranking(analysis, 1.5)}
    assert found["qsgdinf"] == pytest.approx((0.14 / 8, 0.0))
    assert (found["ef:topk"], found["topk"]) == (pytest.approx((0.085, 0.085)), pytest.approx((0.282, 0.282)))
    assert labels(analysis, 1.5)[0] == "qsgdinf"
    variances = {c.method: c.window_variance for c in analysis.configurations}
    assert (variances["qsgdinf"], variances["topk"]) == (pytest.approx(0.14), 0)


def test_windows_are_counted_as_such():
    analysis = analyzed(MEMORY, 1.5)
    # One window of seven steps holds all of them: nothing is left out.
    assert not any("Compared over" in note for note in analysis.notes)
    (section,) = sections(make_report([result_of(MEMORY)]))
    assert section.facts.endswith("7 steps; 1 tensor-window compared")
    assert any("1 window is too few for a confidence interval" in sentence for sentence in section.sentences)


def test_of_a_biased_draw_the_variances_of_the_steps_are_the_variance_of_the_window():
    rows = [*windowed("topk:ratio=0.05", 0.5, 8.0, bias=0.5), *windowed("ef:topk:ratio=0.05", 0.7, 0.85, bias=None)]
    found = next(c for c in analyzed(rows).configurations if c.method == "topk")
    assert found.window_variance == pytest.approx(7 * 0.25 / 10)


def test_without_memory_or_windows_single_steps_are_compared():
    analysis = analyzed([r for r in MEMORY if r["method"] != "ef:topk"], 1.5)
    assert analysis.basis.window is None
    assert labels(analysis, 1.5) == ["qsgdinf", "topk"]
    # A codec without windows is named, and not compared with those that have some.
    analysis = analyzed([*MEMORY, *(r | {"window": None} for r in windowed("fp:e4m3", 0.3, 1.0, bias=1.0))], 1.5)
    assert "fp" not in labels(analysis, 1.5)
    assert any("Not measured over several steps, so not compared: fp:e4m3" in note for note in analysis.notes)


# Coders


def coded(method, *points):
    """Rows of Huffman-coded payloads: (fixed, huffman, entropy, error) of each configuration."""
    for b, (fixed, huffman, entropy, error) in enumerate(points, 2):
        columns = {"bits_fixed": fixed, "bits_huffman": huffman + 0.05, "bits_entropy": entropy}
        params = json.dumps({"bits": b, "coder": "huffman"})
        found = row(method=method, bits=b, draw=0, squared_error=error, bits_total=huffman, bits_shared=0.1)
        yield found | columns | {"params": params}


CODED = [
    *coded("zipml", (2.0, 1.1, 1.0, 2.8), (3.0, 2.0, 1.9, 0.2), (4.0, 3.0, 2.9, 0.04)),
    *coded("qsgdinf", (2.0, 1.0, 0.9, 2.8), (3.0, 1.3, 1.2, 0.5), (4.0, 1.7, 1.6, 0.13), (5.0, 2.5, 2.4, 0.03)),
    row(method="minmax", bits=8, squared_error=0.5, bits_total=3.0),
]


@pytest.mark.parametrize(("coder", "bits"), [("huffman", 3.0), ("fixed", 4.0 + 0.1), ("entropy", 2.9 + 0.1)])
def test_bits_are_those_of_one_coder(coder, bits):
    found = {(c.method, c.nominal_bits): c for c in analyzed(CODED, coder=coder).configurations}
    assert (found["zipml", 4].bits, found["zipml", 4].bits_measured) == (pytest.approx(bits), 3.0)
    assert found["zipml", 4].bits_source == ("measured" if coder == "huffman" else "expected")
    # What sends no symbols has one number of bits.
    assert found["minmax", 8].bits == 3.0
    # Of a configuration that uses another coder the column counts.
    other = [r | {"params": json.dumps({"bits": r["bits"], "coder": "fixed"})} for r in CODED]
    found = {(c.method, c.nominal_bits): c.bits for c in analyzed(other).configurations}
    assert found["zipml", 4] == pytest.approx(3.05 + 0.1)


def test_a_leader_that_changes_with_the_coder_is_said():
    assert labels(analyzed(CODED, 2), 2)[0] == "qsgdinf"
    assert labels(analyzed(CODED, 3.1, coder="fixed"), 3.1)[0] == "zipml"
    assert "At fixed width zipml leads; with Huffman codes qsgdinf does." in sweep_verdict(analyzed(CODED, 2.5))


# One ratio for one comparison


def unequal_steps():
    """qsgd is better in all steps, most of all where gradients are large; means of steps and of sums differ."""
    for step in range(0, 400, 10):
        energy, gap = (10.0, 4.0) if step % 20 else (0.1, 2.0)
        for method, error in (("qsgd", 1.0), ("nuqsgd", gap)):
            for b in (2, 3):
                numbers = {"squared_error": energy * error * 4.0**-b, "bits_total": float(b)}
                yield row(step=step, method=method, bits=b, energy=energy, **numbers)


def test_the_ratio_of_a_comparison_is_that_of_the_table_and_of_sums():
    analysis = analyzed(unequal_steps())
    (compared,) = [c for c in analysis.comparisons if c.bits == 3]
    (_, first), (_, second) = ranking(analysis, 3)
    assert compared.ratio == pytest.approx(first.variance / second.variance, rel=1e-12)
    assert compared.better == pytest.approx(1.0)
    (ratio,) = [sentence for sentence in sweep_verdict(analysis) if "times the error" in sentence]
    assert "0.25 times the error of nuqsgd" in ratio
    # Thirds and layers, too.
    k, place = analysis.targets.index(3), {family.label: k for k, family in enumerate(analysis.families)}
    for found, at in (
        (compared.thirds["early"], analysis.phases[0].at),
        (compared.by_layers.estimate, analysis.at_layers),
    ):
        assert found == pytest.approx(at[place["qsgd"], k] / at[place["nuqsgd"], k])


# Words


def test_the_least_error_at_the_bits_most_methods_reach():
    rows = curve("qsgd", (1, 0.4), (2, 0.2), (3, 0.1)) + curve("nuqsgd", (1, 1.6), (2, 0.8), (3, 0.4))
    analysis = analyzed(rows + curve("alq", (1.5, 0.1), (2.5, 0.1)), 1, 2, 3)
    assert analysis.targets[analysis.decisive] == 2
    assert sweep_verdict(analysis) == [
        "At 2 bits per value, alq loses least (10% of gradient energy), then qsgd (20%) and nuqsgd (80%).",
        (
            "alq has 0.50 times the error of qsgd and less in 100% of training, but 1 step is too few for a "
            "confidence interval, which needs 12."
        ),
        "qsgd leads at 1 and 3 bits.",
    ]


# Equal bits: error at a target, how it was found, and between which configurations

AT_BITS = [
    # A quarter of the way from 8 to 0.5: 8 * (1/16)^(1/4) = 4.
    ([1.0, 2.0], [8.0, 0.5], 1.25, 4.0, "interpolated", 0, 1),
    # Only the two neighbors by measured bits count, also on a curve that turns.
    ([5.0, 1.0, 3.0, 2.0], [0.001, 100.0, 0.25, 1.0], 2.5, 0.5, "interpolated", 3, 2),
    ([2.2, 1.8, 2.6], [1.0, 4.0, 0.1], 2.0, 2.0, "interpolated", 1, 0),
    # One bit apart, with fitted levels that are sent apart.
    ([2.05, 3.1], [0.4, 0.1], 2.5, 0.4 * 0.25 ** (0.45 / 1.05), "interpolated", 0, 1),
    # Of equal bits the smaller error brackets.
    ([1.0, 1.0, 2.0, 2.0], [9.0, 4.0, 1.0, 2.0], 1.5, 2.0, "interpolated", 1, 2),
    ([2.0, 3.0], [0.5, 0.1], 2.0, 0.5, "exact", 0, 0),
    # Nothing is extrapolated.
    ([1.1, 3.9], [0.5, 0.1], 1.0, NAN, "all-above", -1, -1),
    ([1.1, 3.9], [0.5, 0.1], 4.0, NAN, "all-below", -1, -1),
    # A single configuration stands for bits within 2%.
    ([1.98], [0.3], 2.0, 0.3, "near", 0, 0),
    ([2.05], [0.3], 2.0, NAN, "all-above", -1, -1),
    # Without error there is no logarithm.
    ([1.0, 2.0], [0.5, 0.0], 1.5, NAN, "lossless", 0, 1),
    # Missing numbers are no points.
    ([], [], 2.0, NAN, "unmeasured", -1, -1),
    ([NAN, 1.0], [0.5, NAN], 2.0, NAN, "unmeasured", -1, -1),
    ([1.0, NAN, 1.5, 2.0], [4.0, 1.0, NAN, 1.0], 1.5, 2.0, "interpolated", 0, 3),
    # More bits never make a method worse.
    ([1.0, 1.9, 2.3], [0.5, 0.01, 0.3], 2.2, 0.01, "fewer", 1, 1),
    ([2.1, 3.9], [0.2, 0.01], 3.0, NAN, "wide", 0, 1),
]


@pytest.mark.parametrize(("bits", "errors", "target", "error", "outcome", "lower", "upper"), AT_BITS)
def test_error_at_equal_bits(bits, errors, target, error, outcome, lower, upper):
    found = at_bits(bits, errors, target)
    assert found.variance == pytest.approx(error, rel=1e-12, nan_ok=True)
    assert (found.outcome, found.lower, found.upper) == (outcome, lower, upper)


def test_pareto_front_by_hand_and_against_the_definition():
    bits, variance = [1.0, 2.0, 2.0, 3.0, 4.0, 5.0], [0.9, 0.5, 0.6, 0.5, 0.7, 0.1]
    assert pareto_front(bits, variance).tolist() == [True, True, False, False, False, True]
    # Equal points stand together, missing ones never.
    assert pareto_front([1.0, 1.0, NAN, 0.5], [0.2, 0.2, 0.0, NAN]).tolist() == [True, True, False, False]
    assert pareto_front([], []).tolist() == []
    bits, variance = np.random.default_rng(0).integers(1, 8, (2, 60)) / 8
    no_worse = (bits <= bits[:, None]) & (variance <= variance[:, None])
    beaten = no_worse & ((bits < bits[:, None]) | (variance < variance[:, None]))
    assert pareto_front(bits.tolist(), variance.tolist()).tolist() == (~beaten.any(axis=1)).tolist()
