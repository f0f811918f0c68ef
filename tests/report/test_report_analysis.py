import json
import math

import numpy as np
import pytest
from helpers_report import LAYERS, METHODS, STEPS, result_of, row, rows_of

from gtrace.report.analysis.families import MEASURES, SUMMED, label
from gtrace.report.analysis.sweep import analyze
from gtrace.report.section import flat
from gtrace.report.sections.sweep_tables import configuration_table
from gtrace.sweep import COLUMNS


def by_spec(analysis):
    return {c.spec: c for c in analysis.configurations}


Q2, Q3 = "qsgd:bits=2,bucket_size=8192", "qsgd:bits=3,bucket_size=8192"


def two_cells(bits=3, errors=(1.0, 3.0), rates=(2.0, 4.0), **values):
    """Two tensors at one step: 1000 and 3000 elements, energies 2 and 6."""
    for tensor, n, energy, error, rate in zip("ab", (1000, 3000), (2.0, 6.0), errors, rates, strict=True):
        common = {"tensor": tensor, "n": n, "energy": energy, "bits": bits}
        yield row(**common, squared_error=error, bits_huffman=rate + 0.5, bits_entropy=rate, **values)
        yield row(**common, draw=0, squared_error=error * 1.5, bits_total=rate, cosine=rate / 10, **values)


def test_sums_by_hand():
    analysis = analyze(result_of(two_cells()))
    c = by_spec(analysis)[Q3]
    assert c.relative_variance == pytest.approx((1.0 + 3.0) / (2.0 + 6.0))
    assert c.bits == pytest.approx((2 * 1000 + 4 * 3000) / 4000)
    assert c.bits_huffman == pytest.approx((2.5 * 1000 + 4.5 * 3000) / 4000)
    assert (c.bits_entropy, c.cosine) == (pytest.approx(3.5), pytest.approx((0.2 * 1000 + 0.4 * 3000) / 4000))
    assert (c.ratio_float32, c.step_ratio_float32) == (pytest.approx(32 / 3.5), pytest.approx(32 / 3.5))
    assert (c.error_source, c.bits_source, c.cells) == ("expected", "measured", 2)
    assert analysis.energy_share.tolist() == pytest.approx([0.25, 0.75])
    assert analysis.elements.tolist() == [1000, 3000]
    assert analysis.per_tensor.tolist() == [pytest.approx([0.5, 0.5])]
    assert analysis.notes == ()


def test_mean_of_ratios_stands_beside_the_ratio_of_totals():
    rows = []
    for step, rate in ((0, 1.0), (1, 4.0)):
        rows.append(row("a", step=step, n=1000, energy=1.0, squared_error=0.5))
        rows.append(row("a", step=step, draw=0, n=1000, energy=1.0, squared_error=0.5, bits_total=rate))
    (c,) = analyze(result_of(rows)).configurations
    assert c.ratio_float32 == pytest.approx(32 / 2.5)
    assert c.step_ratio_float32 == pytest.approx((32 / 1 + 32 / 4) / 2)


def test_wasserstein_is_a_ratio_of_sums():
    rows = [
        row("a", draw=0, n=100, squared_error=1.0, w1=0.1, mean_abs=0.2, w1_normalized=0.5),
        row("b", draw=0, n=300, squared_error=1.0, w1=0.6, mean_abs=0.4, w1_normalized=1.5),
    ]
    c = analyze(result_of(rows)).configurations[0]
    assert c.w1_normalized == pytest.approx((100 * 0.1 + 300 * 0.6) / (100 * 0.2 + 300 * 0.4))


def test_draws_are_averaged():
    rows = [row(draw=k, squared_error=e, bits_total=b) for k, (e, b) in enumerate([(0.1, 2.0), (0.3, 4.0)])]
    analysis = analyze(result_of(rows))
    c = analysis.configurations[0]
    assert (c.relative_variance, c.bits) == (pytest.approx(0.2), pytest.approx(3.0))
    assert c.error_source == "measured"
    assert any("rounding noise" in note for note in analysis.notes)


def test_expected_bits_stand_in_where_nothing_was_encoded_and_that_is_said():
    rows = [row(squared_error=0.1, bits_huffman=2.5), row(bits=2, squared_error=0.1, bits_huffman=2.5, bits_total=2.0)]
    analysis = analyze(result_of(rows))
    assert by_spec(analysis)[Q3].bits == 2.5
    assert by_spec(analysis)[Q2].bits == 2.0
    assert {c.bits_source for c in analysis.configurations} == {"expected"}
    assert any("computed, not counted on encoded bytes: all codecs" in note for note in analysis.notes)


def test_bits_that_one_cell_lacks_are_not_made_up():
    rows = [r for r in two_cells() if not (r["tensor"] == "b" and r["draw"] == 0)]
    for r in rows:
        r["bits_huffman"] = None
    analysis = analyze(result_of(rows))
    assert math.isnan(analysis.configurations[0].bits)
    assert (analysis.targets, analysis.families[0].at) == ((), ())
    assert any("No bits known" in note for note in analysis.notes)


def test_per_step_and_per_tensor_by_hand():
    cells = [("a", 0, 1, 2), ("a", 9, 2, 2), ("b", 0, 3, 6), ("b", 9, 8, 4)]
    rows = [row(tensor, step, squared_error=error, energy=energy) for tensor, step, error, energy in cells]
    analysis = analyze(result_of(rows))
    assert analysis.tensors == ("a", "b")
    assert analysis.steps.tolist() == [0, 9]
    assert analysis.per_tensor.tolist() == [pytest.approx([3 / 4, 11 / 10])]
    assert analysis.per_step.tolist() == [pytest.approx([4 / 8, 10 / 6])]


def test_codecs_are_compared_on_the_cells_that_all_have():
    rows = [*two_cells(3), *(r for r in two_cells(2, errors=(4.0, 9.0)) if r["tensor"] == "b")]
    analysis = analyze(result_of(rows))
    assert by_spec(analysis)[Q3].relative_variance == pytest.approx(3.0 / 6.0)
    assert by_spec(analysis)[Q2].relative_variance == pytest.approx(9.0 / 6.0)
    assert analysis.cells == 1
    assert any("Compared over the 1 tensor-steps, of 2" in note for note in analysis.notes)


def test_a_codec_with_too_few_cells_does_not_take_the_others_data_away():
    rows = [row("w", step, bits=3, squared_error=0.5, bits_total=2.0) for step in range(10)]
    rows += [row("w", step, bits=2, squared_error=0.1, bits_total=1.0) for step in range(4)]
    analysis = analyze(result_of(rows))
    short = by_spec(analysis)[Q2]
    assert short.partial
    assert (short.cells, short.relative_variance, short.pareto) == (4, pytest.approx(0.1), False)
    assert by_spec(analysis)[Q3].cells == analysis.cells == 10
    assert [len(f.members) for f in analysis.families] == [1]
    assert any("too few" in note and Q2 in note for note in analysis.notes)


def test_cells_without_any_number_are_counted_and_left_out():
    rows = list(two_cells())
    rows += [row("nan", energy=None, n=50, squared_error=None, note="2 NaN") | {"relative_variance": None}]
    rows[-1]["energy"] = None
    analysis = analyze(result_of(rows))
    assert analysis.configurations[0].relative_variance == pytest.approx(0.5)
    assert any(note.startswith("1 of 3 tensor-steps") for note in analysis.notes)
    assert math.isnan(analysis.per_tensor[0, analysis.tensors.index("nan")])


def test_whole_model_rows_are_compared_with_the_sum_of_the_tensors():
    rows = list(two_cells())
    whole = json.dumps({"bits": 3, "scope": "model", "coder": "huffman"})
    spec = {"codec": "qsgd:bits=3,scope=model", "params": whole}
    rows.append(row("*", n=4000, energy=8.0, squared_error=2.0, **spec))
    rows.append(row("*", draw=0, n=4000, energy=8.0, squared_error=2.0, bits_total=3.0, **spec))
    rows.append(row("*", step=5, n=4000, energy=8.0, squared_error=80.0, bits_total=3.0, **spec))
    analysis = analyze(result_of(rows))
    found = by_spec(analysis)
    assert found[spec["codec"]].relative_variance == pytest.approx(2.0 / 8.0)
    assert found[Q3].relative_variance == pytest.approx(0.5)
    assert analysis.tensors == ("a", "b")
    assert {f.label for f in analysis.families} == {"qsgd bucket_size=- scope=model", "qsgd bucket_size=8192 scope=-"}
    assert analysis.energy_share.tolist() == pytest.approx([0.25, 0.75])
    # Alone, it is a tensor like any other.
    alone = analyze(result_of([row("*", squared_error=0.25, bits_total=2.0)]))
    assert (alone.tensors, alone.configurations[0].relative_variance) == (("*",), 0.25)


def test_the_whole_model_is_not_compared_at_a_step_with_a_hole():
    spec = {"codec": "qsgd:bits=3,scope=model", "params": json.dumps({"bits": 3, "scope": "model"})}
    rows = []
    for step in (0, 1, 2):
        rows.append(row("*", step, energy=8.0, squared_error=2.0 + step, **spec))
        rows.append(row("a", step, energy=2.0, squared_error=1.0))
        if step != 2:
            rows.append(row("b", step, energy=6.0, squared_error=3.0))
    rows.append(row("b", 2, method="nuqsgd", energy=6.0, squared_error=9.0))
    found = by_spec(analyze(result_of(rows)))
    # At step 2 the per-tensor codec lacks b: both are summed over steps 0 and 1.
    assert found[Q3].relative_variance == pytest.approx(8.0 / 16.0)
    assert found[spec["codec"]].relative_variance == pytest.approx((2.0 + 3.0) / 16.0)
    assert found[spec["codec"]].cells == 2


def test_nothing_to_sum_up():
    analysis = analyze(result_of([]))
    assert (analysis.rows, analysis.configurations, analysis.families, analysis.cells) == (0, (), (), 0)
    assert analysis.per_tensor.shape == analysis.per_step.shape == (0, 0)
    assert not analysis.measured
    analysis = analyze(result_of({**r, "squared_error": None} for r in rows_of(bits=[2])))
    assert not analysis.measured
    assert len(analysis.notes) == 1
    assert not any(c.pareto for c in analysis.configurations)
    zeros = analyze(result_of([row(energy=1.0, squared_error=0.0) | {"energy": 0.0}]))
    assert math.isnan(zeros.configurations[0].relative_variance)


def test_a_full_sweep():
    analysis = analyze(result_of(rows_of()), "x")
    assert len(analysis.configurations) == 3 * 7 + 2
    assert [f.label for f in analysis.families] == list(METHODS)
    assert set(analysis.tensors) == set(LAYERS)
    assert analysis.steps.tolist() == list(STEPS)
    assert np.isfinite(analysis.per_tensor).all()
    assert np.isfinite(analysis.per_step).all()
    for family in analysis.families:
        bits = [analysis.configurations[i].bits for i in family.members]
        assert bits == sorted(bits)
        for at in family.at:
            if at.outcome == "interpolated":
                low, high = analysis.configurations[at.lower], analysis.configurations[at.upper]
                assert low.family == high.family == family.label
                assert low.bits < at.target < high.bits
    front = [c for c in analysis.configurations if c.pareto]
    for c in analysis.configurations:
        beaten = any(p.bits <= c.bits and p.relative_variance <= c.relative_variance and p is not c for p in front)
        assert c.pareto != (beaten or c.error > 1)


def test_the_nearest_configuration_is_found_by_measured_bits():
    analysis = analyze(result_of(rows_of()))
    family = next(f for f in analysis.families if f.label == "qsgdinf")
    chosen = analysis.configurations[analysis.nearest(family, 3.0)]
    assert abs(chosen.bits - 3) == min(abs(analysis.configurations[i].bits - 3) for i in family.members)


def test_families_differ_in_everything_but_the_rate():
    parameters = [{"bits": b, "bucket_size": size, "zero": True} for b, size in ((2, 512), (3, 512), (3, None))]
    parameters += [{"ratio": 0.01}, None]
    labels = label(["a", "b", "c", "d", "e"], ["qsgd", "qsgd", "qsgd", "topk", "odd"], parameters)
    assert labels.families == ("qsgd bucket_size=512", "qsgd bucket_size=512", "qsgd bucket_size=null", "topk", "e")
    assert (labels.settings, labels.unreadable) == (("b2", "b3", "b3", "ratio 0.01", ""), ("e",))


def test_an_amount_is_not_named_beside_the_budget_that_takes_its_place():
    parameters = [{"amount": 0.1, "bits": None}, {"amount": 1.0, "bits": 4}, {"rank": 2}]
    specs = ["mcgq:amount=0.1", "mcgq:bits=4", "powersgd:rank=2"]
    found = label(specs, ["mcgq", "mcgq", "powersgd"], parameters)
    assert (found.families, found.settings) == (("mcgq", "mcgq", "powersgd"), ("amount 0.1", "b4", "rank 2"))


def test_a_metric_is_declared_once():
    assert set(SUMMED) <= set(COLUMNS)
    analysis = analyze(result_of({**r, "update_error": 0.25, "optimal_variance": 0.1} for r in rows_of(bits=[2])))
    headings = [column.heading for column in configuration_table(analysis).columns]
    known = {name: m.column.heading for name, m in MEASURES.items() if name != "model_variance"}
    assert headings == ["configuration", "", *known.values()]
    for c in analysis.configurations:
        assert flat(c).keys() >= known.keys()
        assert c.update_error == pytest.approx(0.25)
