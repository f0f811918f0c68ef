"""What methods are ranked by: workers, windows, coders, dominance, targets; and one ratio for one comparison."""

import json
import math

import numpy as np
import pytest
from helpers_report import result_of, row, rows_of

from gtrace.report.analysis.equal_bits import all_at_bits, at_bits, choose_targets, pareto_front
from gtrace.report.analysis.sweep import analyze
from gtrace.report.section import PARETO
from gtrace.report.sections.sweep_tables import comparison_table, configuration_table, equal_bits_table, layer_tables
from gtrace.report.sections.sweep_words import off_target, sweep_verdict

NAN = math.nan


def curve(method, points, bias=0.0, **values):
    """A method with the points (bits, error); ``bias`` is the part of each error that is bias."""
    found = []
    for b, (bits, error) in enumerate(points, 2):
        biased = None if bias is None else math.sqrt(bias * error)
        found.append(row(method=method, bits=b, squared_error=error, bits_total=bits, relative_bias=biased, **values))
    return found


def labels(analysis, bits):
    return [standing.family for standing in analysis.standings(bits)]


def test_fewer_bits_and_less_error_leads_although_nothing_lies_above():
    rows = curve("zipml", [(1.6, 0.24), (2.4, 0.04)]) + curve("alq", [(1.4, 0.5), (2.2, 0.07)])
    rows += curve("qsgdinf", [(1.3, 0.3), (1.9, 0.03)])
    analysis = analyze(result_of(rows), targets=[2])
    first = analysis.standings(2)[0]
    assert (first.family, first.error, first.bits, first.how) == ("qsgdinf", 0.03, 1.9, "fewer")
    assert sweep_verdict(analysis)[0].startswith(
        "At 2 bits per value, qsgdinf loses least (it has 3.0% of gradient energy at 1.90 bits), then zipml (9.8%)"
    )
    (cells,) = [cells for cells in equal_bits_table(analysis).rows if cells[0].text == "qsgdinf"]
    assert (cells[1].text, cells[1].detail) == ("3.0%", "b3 at 1.90 bits")


def test_a_codec_that_ends_below_a_target_without_the_least_error_is_not_ranked_there():
    found = all_at_bits([([1.0, 1.5], [0.9, 0.5]), ([1.8, 2.2], [0.2, 0.1])], 2.0)
    assert [at.outcome for at in found] == ["all-below", "interpolated"]


def test_wide_brackets_are_refused_and_said():
    rows = (
        curve("alq", [(2.1, 0.2), (3.9, 0.01)])
        + curve("qsgd", [(2.5, 0.3), (3.5, 0.1)])
        + curve("zipml", [(2.5, 0.2), (3.5, 0.1)])
    )
    table = equal_bits_table(analyze(result_of(rows), targets=[3]))
    (cells,) = [cells for cells in table.rows if cells[0].text == "alq"]
    assert cells[1].hint == "not measured near 3 bits: neighbours at 2.10 and 3.90 bits"
    assert any("alq (neighbours at 2.10 and 3.90 bits) near 3 bits" in note for note in table.notes)


# Targets


def steps_of_one(low, high, error=1.0):
    bits = np.arange(low, high + 0.01, 0.5)
    return bits.tolist(), (error * 4.0**-bits).tolist()


@pytest.mark.parametrize(
    ("curves", "targets"),
    [
        ([steps_of_one(1.5, 6), steps_of_one(2, 5.5), steps_of_one(2.5, 9), steps_of_one(7, 9)], (3.0, 4.0, 5.0)),
        # At most four, around three bits.
        ([steps_of_one(0.5, 9)] * 3, (1.0, 2.0, 3.0, 4.0)),
        # Halves beside a single whole number.
        ([steps_of_one(1.5, 2), steps_of_one(1.5, 2.2), steps_of_one(1.5, 2), steps_of_one(1.3, 1.8)], (1.5, 2.0)),
        ([steps_of_one(2, 3), steps_of_one(2.5, 4)], (2.5, 3.0)),
        ([([0.05 * k, 0.05 * k + 0.3], [0.5, 0.1]) for k in (1, 2, 3)], (0.2,)),
        # Single points are targets of their own.
        ([([0.62], [5.0])], (0.62,)),
        ([([math.nan], [1.0])], ()),
    ],
)
def test_targets_are_where_most_methods_overlap(curves, targets):
    assert choose_targets(curves) == targets


def test_a_rate_where_everybody_loses_more_than_the_gradient_is_of_no_use():
    curves = [([1.0, 1.5, 2.0], [29.0, 3.0, 0.1 * k]) for k in (1, 2, 3)]
    assert 1.0 not in choose_targets(curves)


def test_a_sweep_of_three_nominal_bits_finds_something_to_compare():
    rows = curve("qsgd", [(1.01, 29.6), (1.03, 9.2), (1.39, 3.4)])
    rows += curve("qsgdinf", [(1.07, 2.8), (1.29, 0.54), (1.69, 0.13)])
    rows += curve("zipml", [(1.07, 2.8), (1.60, 0.24), (2.38, 0.042)])
    rows += curve("alq", [(1.01, 29.6), (1.39, 0.52), (2.2, 0.072)])
    analysis = analyze(result_of(rows))
    assert analysis.targets == (1.5,)
    assert labels(analysis, 1.5) == ["qsgdinf", "zipml", "alq"]


# Workers


def test_error_is_bias_and_an_mth_of_the_variance():
    rows = curve("qsgd", [(1.5, 0.8), (2.5, 0.8)]) + curve("signsgd", [(1.5, 0.6), (2.5, 0.6)], bias=0.9)
    result = result_of(rows, provenance={"trace_attrs": {"world_size": 1}})
    assert labels(analyze(result, targets=[2]), 2) == ["signsgd", "qsgd"]
    analysis = analyze(result, targets=[2], workers=8)
    assert labels(analysis, 2) == ["qsgd", "signsgd"]
    qsgd, signs = analysis.standings(2)
    assert (qsgd.error, qsgd.bias) == pytest.approx((0.1, 0.0))
    assert (signs.error, signs.bias) == pytest.approx((0.54 + 0.06 / 8, 0.54))
    (found,) = [c for c in analysis.configurations if c.method == "signsgd" and c.nominal_bits == 2]
    assert (found.relative_variance, found.bias, found.variance) == pytest.approx((0.6, 0.54, 0.06))
    sentences = sweep_verdict(analysis)
    assert sentences[0].startswith("At 2 bits per value, qsgd loses least with 8 workers (10% of gradient energy)")
    assert "More workers do not shrink the part of an error that is bias: signsgd (99%)." in sentences
    table = equal_bits_table(analysis)
    assert "8 workers" in table.title
    assert "99% bias" in table.rows[1][1].detail


def test_workers_are_those_of_the_run_unless_asked():
    rows = curve("qsgd", [(1.5, 0.8), (2.5, 0.8)])
    four = result_of(rows, provenance={"trace_attrs": {"world_size": 4}})
    assert analyze(four).basis.workers == 4
    assert analyze(four, workers=2).basis.workers == 2
    assert analyze(result_of(rows)).basis.workers == 1


def test_an_unknown_bias_counts_as_all_of_the_error_and_that_is_said():
    rows = curve("qsgd", [(1.5, 0.8), (2.5, 0.8)]) + curve("odd", [(1.5, 0.6), (2.5, 0.6)], bias=None)
    analysis = analyze(result_of(rows), targets=[2], workers=8)
    (found,) = [s for s in analysis.standings(2) if s.family == "odd"]
    assert (found.error, found.bias) == pytest.approx((0.6, 0.6))
    assert any("the most it can be: odd" in note for note in analysis.notes)


def test_at_many_workers_a_star_is_for_what_they_see():
    rows = curve("qsgd", [(1, 29.6), (2, 0.9)]) + curve("zipml", [(1.5, 3.0), (2.5, 0.1)])
    alone, many = (analyze(result_of(rows), workers=m).configurations for m in (1, 64))
    stars = [[(c.method, c.nominal_bits) for c in found if c.pareto] for found in (alone, many)]
    assert stars[0] == [("qsgd", 3), ("zipml", 3)]
    assert ("qsgd", 2) in stars[1]


# Windows


def windowed(method, spec, errors, window_error, steps=7, bias=0.0, draw=0, bits=1.5):
    """Rows of a codec over one burst: errors of steps, and the error of their sum at the last one."""
    for step in range(steps):
        last = step == steps - 1
        yield {
            **row(step=step, method=method, draw=draw, squared_error=errors, bits_total=bits),
            "codec": spec,
            "params": json.dumps(dict(item.split("=") for item in spec.split(":")[-1].split(",") if "=" in item)),
            "bits": None,
            "relative_bias": None if bias is None else math.sqrt(bias * errors),
            "window": steps if last else None,
            "window_error": window_error if last else None,
            "window_energy": 10.0 if last else None,
        }


def sparse_and_levels(ef_window=0.85):
    rows = [*windowed("topk", "topk:ratio=0.05", 0.5, 2.82, bias=1.0)]
    rows += windowed("ef:topk", "ef:topk:ratio=0.05", 0.7, ef_window, bias=None)
    return [*rows, *windowed("qsgdinf", "qsgdinf:bits=3", 0.4, 1.4, draw=-1)]


def test_codecs_with_memory_are_ranked_by_what_has_arrived():
    analysis = analyze(result_of(sparse_and_levels()), targets=[1.5])
    assert analysis.basis.window == (7, 7)
    assert [(s.family, round(s.error, 3)) for s in analysis.standings(1.5)] == [
        ("ef:topk", 0.085),
        ("qsgdinf", 0.14),
        ("topk", 0.282),
    ]
    assert dict(zip([f.label for f in analysis.families], analysis.step_at[:, 0], strict=True)) == pytest.approx(
        {"topk": 0.5, "ef:topk": 0.7, "qsgdinf": 0.4}
    )
    sentences = sweep_verdict(analysis)
    assert sentences[0].startswith("At 1.5 bits per value, ef:topk loses least over 7 consecutive steps (8.5% of")
    table = equal_bits_table(analysis)
    assert "over 7 consecutive steps" in table.title
    assert "one step 70%" in table.rows[0][1].detail


def test_over_windows_variance_shrinks_with_workers_and_memory_does_not():
    analysis = analyze(result_of(sparse_and_levels()), targets=[1.5], workers=8)
    found = {s.family: (s.error, s.bias) for s in analysis.standings(1.5)}
    assert found["qsgdinf"] == pytest.approx((0.14 / 8, 0.0))
    assert (found["ef:topk"], found["topk"]) == (pytest.approx((0.085, 0.085)), pytest.approx((0.282, 0.282)))
    assert labels(analysis, 1.5)[0] == "qsgdinf"
    by_method = {c.method: c for c in analysis.configurations}
    assert by_method["qsgdinf"].window_variance == pytest.approx(0.14)
    assert by_method["topk"].window_variance == 0


def test_of_a_biased_draw_the_variances_of_the_steps_are_the_variance_of_the_window():
    rows = [*windowed("topk", "topk:ratio=0.05", 0.5, 8.0, bias=0.5)]
    rows += windowed("ef:topk", "ef:topk:ratio=0.05", 0.7, 0.85, bias=None)
    found = next(c for c in analyze(result_of(rows)).configurations if c.method == "topk")
    assert found.window_variance == pytest.approx(7 * 0.25 / 10)


def test_without_memory_single_steps_are_compared():
    rows = [r for r in sparse_and_levels() if r["method"] != "ef:topk"]
    analysis = analyze(result_of(rows), targets=[1.5])
    assert analysis.basis.window is None
    assert labels(analysis, 1.5) == ["qsgdinf", "topk"]
    assert next(c for c in analysis.configurations if c.method == "topk").window_error == pytest.approx(0.282)


def test_a_codec_without_windows_is_named_and_not_compared_with_those_that_have_some():
    rows = [*sparse_and_levels(), *(r | {"window": None} for r in windowed("fp", "fp:e4m3", 0.3, 1.0, bias=1.0))]
    analysis = analyze(result_of(rows), targets=[1.5])
    assert "fp" not in labels(analysis, 1.5)
    assert any("Not measured over several steps, so not compared: fp:e4m3" in note for note in analysis.notes)


def test_memory_without_windows_is_compared_by_single_steps():
    rows = [r | {"window": None} for r in sparse_and_levels()]
    assert analyze(result_of(rows)).basis.window is None


# Coders


def coded(method, points):
    """Rows of Huffman-coded payloads: (fixed, huffman, entropy, error) of each configuration."""
    for b, (fixed, huffman, entropy, error) in enumerate(points, 2):
        found = row(method=method, bits=b, draw=0, squared_error=error, bits_total=huffman, bits_shared=0.1)
        yield found | {
            "params": json.dumps({"bits": b, "coder": "huffman"}),
            "bits_fixed": fixed,
            "bits_huffman": huffman + 0.05,
            "bits_entropy": entropy,
        }


CODED = [
    *coded("zipml", [(2.0, 1.1, 1.0, 2.8), (3.0, 2.0, 1.9, 0.2), (4.0, 3.0, 2.9, 0.04)]),
    *coded("qsgdinf", [(2.0, 1.0, 0.9, 2.8), (3.0, 1.3, 1.2, 0.5), (4.0, 1.7, 1.6, 0.13), (5.0, 2.5, 2.4, 0.03)]),
    row(method="minmax", bits=8, squared_error=0.5, bits_total=3.0),
]


@pytest.mark.parametrize(("coder", "bits"), [("huffman", 3.0), ("fixed", 4.0 + 0.1), ("entropy", 2.9 + 0.1)])
def test_bits_are_those_of_one_coder(coder, bits):
    analysis = analyze(result_of(CODED), coder=coder)
    found = {(c.method, c.nominal_bits): c for c in analysis.configurations}
    assert (found["zipml", 4].bits, found["zipml", 4].bits_measured) == (pytest.approx(bits), 3.0)
    assert found["zipml", 4].bits_source == ("measured" if coder == "huffman" else "expected")
    # What sends no symbols has one number of bits.
    assert found["minmax", 8].bits == 3.0


def test_the_column_counts_when_a_configuration_uses_another_coder():
    rows = [r | {"params": json.dumps({"bits": r["bits"], "coder": "fixed"})} for r in CODED]
    found = {(c.method, c.nominal_bits): c.bits for c in analyze(result_of(rows)).configurations}
    assert found["zipml", 4] == pytest.approx(3.05 + 0.1)


def test_a_leader_that_changes_with_the_coder_is_said():
    assert labels(analyze(result_of(CODED), targets=[2]), 2)[0] == "qsgdinf"
    assert labels(analyze(result_of(CODED), targets=[3.1], coder="fixed"), 3.1)[0] == "zipml"
    same = sweep_verdict(analyze(result_of(CODED), targets=[2.5]))
    assert "At fixed width zipml leads; with Huffman codes qsgdinf does." in same
    # At 1.5 bits of fixed width nothing was measured.
    other = sweep_verdict(analyze(result_of(CODED), targets=[1.5]))
    assert "At fixed width zipml leads at 3 bits; with Huffman codes qsgdinf does at 1.5 bits." in other
    assert not any("leads at" in s and "does" in s for s in sweep_verdict(analyze(result_of(CODED[:3]))))


# One ratio for one comparison


def unequal_steps(steps=range(0, 400, 10), gap=2.0):
    """qsgd is better in all steps, most of all where gradients are large; means of steps and of sums differ."""
    for step in steps:
        energy = 10.0 if step % 20 else 0.1
        for method, error in (("qsgd", 1.0), ("nuqsgd", 4.0 if step % 20 else gap)):
            for b in (2, 3):
                numbers = {"squared_error": energy * error * 4.0**-b, "bits_total": float(b)}
                yield row(step=step, method=method, bits=b, energy=energy, **numbers)


def test_the_ratio_of_a_comparison_is_that_of_the_table():
    analysis = analyze(result_of(unequal_steps()))
    (compared,) = [c for c in analysis.comparisons if c.bits == 3]
    first, second = analysis.standings(3)
    assert compared.ratio == pytest.approx(first.error / second.error, rel=1e-12)
    assert compared.by_elements.known
    assert compared.better == pytest.approx(1.0)
    assert "of totals" not in [column.heading for column in comparison_table(analysis).columns]
    ratios = [sentence for sentence in sweep_verdict(analysis) if "times the error" in sentence]
    assert len(ratios) == 1
    assert "0.25 times the error of nuqsgd" in ratios[0]


def test_thirds_and_layers_are_ratios_of_sums_too():
    analysis = analyze(result_of(unequal_steps()))
    (compared,) = [c for c in analysis.comparisons if c.bits == 3]
    early = analysis.phases[0].at[:, analysis.targets.index(3)]
    place = {family.label: k for k, family in enumerate(analysis.families)}
    assert compared.thirds["early"] == pytest.approx(early[place["qsgd"]] / early[place["nuqsgd"]])
    by_layers = analysis.at_layers[:, analysis.targets.index(3)]
    expected = by_layers[place["qsgd"]] / by_layers[place["nuqsgd"]]
    assert math.exp(compared.by_layers.estimate) == pytest.approx(expected)


def test_without_an_interval_a_leader_must_be_better_in_most_of_training():
    rows = [
        row(step=step, method=method, bits=b, squared_error=error * 4.0**-b, bits_total=float(b))
        for step in range(8)
        for method, error in (("qsgd", 1.0), ("nuqsgd", 0.9 if step % 2 else 1.3))
        for b in (2, 3)
    ]
    sentences = sweep_verdict(analyze(result_of(rows)))
    assert (
        "qsgd and nuqsgd are too close to call: qsgd was better in 50% of training, but 8 steps are too few for a "
        "confidence interval, which needs 12." in sentences
    )


def test_no_star_for_more_error_than_the_gradient_has():
    rows = curve("qsgd", [(1.0, 29.6), (2.0, 0.9)]) + curve("zipml", [(1.1, 2.8), (2.1, 0.2)])
    cells = {cells[0].text: cells[1].text for cells in configuration_table(analyze(result_of(rows))).rows}
    assert [spec for spec, star in cells.items() if star == PARETO] == [
        "qsgd:bits=3,bucket_size=8192",
        "zipml:bits=3,bucket_size=8192",
    ]


def test_layers_rank_methods_at_equal_bits_or_not_at_all():
    def layered(method, points):
        return [
            row(tensor, step, method, b, squared_error=error, bits_total=bits)
            for tensor in "ab"
            for step in range(3)
            for b, (bits, error) in enumerate(points, 2)
        ]

    # At its configuration nearest to three bits zipml has less error, at equal bits more.
    rows = layered("qsgd", [(2.0, 0.1), (2.9, 0.05)]) + layered("zipml", [(2.4, 0.3), (3.3, 0.04)])
    found = layer_tables(analyze(result_of(rows)))
    assert len(found.tables) == 2
    for table, remark in found.tables:
        assert "least error at 2.5 bits: qsgd" in remark
        assert table.columns[-1].heading == "times least"
    alone = layer_tables(analyze(result_of(layered("qsgd", [(2.0, 0.1), (2.9, 0.05)]))))
    for table, remark in alone.tables:
        assert "least" not in remark
        assert table.columns[-1].heading != "times least"


# Words


def test_the_least_error_at_the_bits_most_methods_reach():
    rows = (
        curve("qsgd", [(1, 0.4), (2, 0.2), (3, 0.1)])
        + curve("nuqsgd", [(1, 1.6), (2, 0.8), (3, 0.4)])
        + curve("alq", [(1.5, 0.1), (2.5, 0.1)])
    )
    analysis = analyze(result_of(rows), targets=[1, 2, 3])
    assert analysis.targets[analysis.decisive] == 2
    assert sweep_verdict(analysis) == [
        "At 2 bits per value, alq loses least (10% of gradient energy), then qsgd (20%) and nuqsgd (80%).",
        (
            "alq has 0.50 times the error of qsgd and less in 100% of training, but 1 step is too few for a "
            "confidence interval, which needs 12."
        ),
        "qsgd leads at 1 and 3 bits.",
    ]


def test_of_equally_covered_bits_three_are_asked_about():
    points = [(0.5 + k, 0.5**k) for k in range(5)]
    rows = curve("qsgd", points) + curve("nuqsgd", [(bits, 0.9 * error) for bits, error in points])
    sentences = sweep_verdict(analyze(result_of(rows)))
    assert sentences[0].startswith("At 3 bits per value, nuqsgd loses least")
    assert sentences[2:] == ["nuqsgd leads at 1, 2 and 4 bits as well."]


def test_methods_within_two_percent_are_too_close_to_call():
    rows = curve("qsgd", [(2, 0.1), (3, 0.1)]) + curve("nuqsgd", [(2, 0.1015), (3, 0.1015)])
    sentences = sweep_verdict(analyze(result_of(rows)))
    assert sentences[0].endswith("qsgd loses least (10% of gradient energy), then nuqsgd (10%).")
    assert sentences[1] == "qsgd and nuqsgd are too close to call: their errors are nearly the same."


def test_one_method_is_compared_with_nothing():
    assert sweep_verdict(analyze(result_of(curve("qsgd", [(2, 0.4), (3, 0.1)])))) == [
        "At 3 bits per value, qsgd loses 10% of gradient energy; no other method was measured there."
    ]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "the sweep has no rows"),
        ([row(squared_error=None)], "no row holds an error"),
        (
            [row(method="terngrad", squared_error=2.0, bits_total=0.6)],
            "terngrad loses 200% of gradient energy; no other",
        ),
        ([row(squared_error=2.0)], "no method has both an error and a known number of bits"),
    ],
)
def test_nothing_to_compare_is_said(rows, words):
    (sentence,) = sweep_verdict(analyze(result_of(rows)))
    assert words in sentence


def test_methods_that_no_column_reaches_are_named_with_their_own_bits():
    rows = [row(method="none", squared_error=0.0, bits_total=32.0), *rows_of()]
    found = off_target(analyze(result_of(rows)))
    assert [line.split()[0] for line in found] == ["terngrad", "natural"]
    assert all(" at " in line and line.endswith(" bits") for line in found)


def test_methods_that_are_too_close_to_call_lead_together():
    rows = curve("qsgd", [(1, 0.4), (2, 0.1), (3, 0.045), (4, 0.02)])
    rows += curve("alq", [(1, 0.8), (2, 0.101), (3, 0.03), (4, 0.01)])
    rows += curve("amq", [(1.5, 0.9), (2.5, 0.9)])
    assert sweep_verdict(analyze(result_of(rows), targets=[1, 2, 3, 4]))[3:] == [
        "qsgd leads at 1 bit as well.",
        "alq leads at 3 and 4 bits as well.",
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
    ([2.03], [0.3], 2.0, 0.3, "near", 0, 0),
    ([1.95], [0.3], 2.0, NAN, "all-below", -1, -1),
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


def test_pareto_front_by_hand():
    bits = [1.0, 2.0, 2.0, 3.0, 4.0, 5.0]
    variance = [0.9, 0.5, 0.6, 0.5, 0.7, 0.1]
    assert pareto_front(bits, variance).tolist() == [True, True, False, False, False, True]
    # Equal points stand together, missing ones never.
    assert pareto_front([1.0, 1.0, NAN, 0.5], [0.2, 0.2, 0.0, NAN]).tolist() == [True, True, False, False]
    assert pareto_front([], []).tolist() == []


def test_pareto_front_against_the_definition():
    random = np.random.default_rng(0)
    bits, variance = random.integers(1, 8, (2, 60)) / 8
    no_worse = (bits <= bits[:, None]) & (variance <= variance[:, None])
    beaten = no_worse & ((bits < bits[:, None]) | (variance < variance[:, None]))
    assert pareto_front(bits.tolist(), variance.tolist()).tolist() == (~beaten.any(axis=1)).tolist()
