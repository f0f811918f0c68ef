import json
import math

import pytest
from helpers_report import result_of, row

from gtrace.report.analysis.families import label
from gtrace.report.analysis.sweep import analyze

Q2, Q3 = "qsgd:bits=2,bucket_size=8192", "qsgd:bits=3,bucket_size=8192"


def analyzed(*rows):
    """The analysis, and its configurations by spec."""
    analysis = analyze(result_of(rows))
    return analysis, {c.spec: c for c in analysis.configurations}


def noted(analysis, *words):
    return any(all(word in note for word in words) for note in analysis.notes)


def two_cells(bits=3, errors=(1.0, 3.0)):
    """Two tensors at one step: 1000 and 3000 elements, energies 2 and 6."""
    for tensor, n, energy, error, rate in zip("ab", (1000, 3000), (2.0, 6.0), errors, (2.0, 4.0), strict=True):
        common = {"tensor": tensor, "n": n, "energy": energy, "bits": bits}
        yield row(**common, squared_error=error, bits_huffman=rate + 0.5, bits_entropy=rate)
        yield row(**common, draw=0, squared_error=error * 1.5, bits_total=rate, cosine=rate / 10)


def test_sums_by_hand():
    analysis, found = analyzed(*two_cells())
    c = found[Q3]
    assert c.relative_variance == pytest.approx((1.0 + 3.0) / (2.0 + 6.0))
    assert c.bits == pytest.approx((2 * 1000 + 4 * 3000) / 4000)
    assert c.bits_huffman == pytest.approx((2.5 * 1000 + 4.5 * 3000) / 4000)
    assert (c.bits_entropy, c.cosine) == (pytest.approx(3.5), pytest.approx((0.2 * 1000 + 0.4 * 3000) / 4000))
    assert (c.ratio_float32, c.step_ratio_float32) == (pytest.approx(32 / 3.5), pytest.approx(32 / 3.5))
    assert (c.error_source, c.bits_source, c.cells) == ("expected", "measured", 2)
    assert analysis.energy_share.tolist() == pytest.approx([0.25, 0.75])
    assert analysis.per_tensor.tolist() == [pytest.approx([0.5, 0.5])]
    cells = [("a", 0, 1, 2), ("a", 9, 2, 2), ("b", 0, 3, 6), ("b", 9, 8, 4)]
    analysis, _ = analyzed(
        *(row(name, step, squared_error=error, energy=energy) for name, step, error, energy in cells)
    )
    assert (analysis.tensors, analysis.steps.tolist()) == (("a", "b"), [0, 9])
    assert analysis.per_tensor.tolist() == [pytest.approx([3 / 4, 11 / 10])]
    assert analysis.per_step.tolist() == [pytest.approx([4 / 8, 10 / 6])]


def test_means_of_ratios_and_of_draws_and_ratios_of_sums():
    rows = []
    for step, rate in ((0, 1.0), (1, 4.0)):
        rows.append(row("a", step=step, squared_error=0.5))
        rows.append(row("a", step=step, draw=0, squared_error=0.5, bits_total=rate))
    c = analyzed(*rows)[1][Q3]
    assert c.ratio_float32 == pytest.approx(32 / 2.5)
    assert c.step_ratio_float32 == pytest.approx((32 / 1 + 32 / 4) / 2)
    c = analyzed(
        row("a", draw=0, n=100, squared_error=1.0, mean_abs=0.2, mean_abs_error=0.1, w1_normalized=0.5),
        row("b", draw=0, n=300, squared_error=1.0, mean_abs=0.4, mean_abs_error=0.8, w1_normalized=1.5),
    )[1][Q3]
    weights = 100 * 0.2 + 300 * 0.4
    assert c.w1_normalized == pytest.approx((100 * 0.2 * 0.5 + 300 * 0.4 * 1.5) / weights)
    assert c.mean_abs_error == pytest.approx((100 * 0.1 + 300 * 0.8) / weights)
    pairs = [(0.1, 2.0), (0.3, 4.0)]
    analysis, found = analyzed(*(row(draw=k, squared_error=e, bits_total=b) for k, (e, b) in enumerate(pairs)))
    c = found[Q3]
    assert (c.relative_variance, c.bits, c.error_source) == (pytest.approx(0.2), pytest.approx(3.0), "measured")
    assert noted(analysis, "rounding noise")


def test_expected_bits_stand_in_where_nothing_was_encoded_and_none_are_made_up():
    analysis, found = analyzed(
        row(squared_error=0.1, bits_huffman=2.5), row(bits=2, squared_error=0.1, bits_huffman=2.5, bits_total=2.0)
    )
    assert [(found[spec].bits, found[spec].bits_source) for spec in (Q2, Q3)] == [(2.0, "expected"), (2.5, "expected")]
    assert noted(analysis, "computed, not counted on encoded bytes: all codecs")
    rows = [r for r in two_cells() if not (r["tensor"] == "b" and r["draw"] == 0)]
    analysis, found = analyzed(*(r | {"bits_huffman": None} for r in rows))
    assert math.isnan(found[Q3].bits)
    assert (analysis.targets, analysis.families[0].at) == ((), ())
    assert noted(analysis, "No bits known")


def test_codecs_are_compared_on_the_cells_that_all_have():
    analysis, found = analyzed(*two_cells(3), *(r for r in two_cells(2, errors=(4.0, 9.0)) if r["tensor"] == "b"))
    assert found[Q3].relative_variance == pytest.approx(3.0 / 6.0)
    assert found[Q2].relative_variance == pytest.approx(9.0 / 6.0)
    assert analysis.cells == 1
    assert noted(analysis, "Compared over the 1 tensor-steps, of 2")
    # A codec with too few cells does not take the others' data away.
    rows = [row("w", step, bits=3, squared_error=0.5, bits_total=2.0) for step in range(10)]
    analysis, found = analyzed(*rows, *(row("w", step, bits=2, squared_error=0.1, bits_total=1.0) for step in range(4)))
    short = found[Q2]
    assert (short.partial, short.cells, short.relative_variance, short.pareto) == (True, 4, pytest.approx(0.1), False)
    assert found[Q3].cells == analysis.cells == 10
    assert [len(f.members) for f in analysis.families] == [1]
    assert noted(analysis, "too few", Q2)
    # Cells without any number are counted and left out.
    nothing = row("nan", n=50, squared_error=None, note="2 NaN") | {"energy": None, "relative_variance": None}
    analysis, found = analyzed(*two_cells(), nothing)
    assert found[Q3].relative_variance == pytest.approx(0.5)
    assert noted(analysis, "1 of 3 tensor-steps")


WHOLE = {"codec": "qsgd:bits=3,scope=model", "params": json.dumps({"bits": 3, "scope": "model"})}


def test_whole_model_rows_are_compared_with_the_sum_of_the_tensors():
    analysis, found = analyzed(
        *two_cells(),
        row("*", n=4000, energy=8.0, squared_error=2.0, **WHOLE),
        row("*", draw=0, n=4000, energy=8.0, squared_error=2.0, bits_total=3.0, **WHOLE),
        row("*", step=5, n=4000, energy=8.0, squared_error=80.0, bits_total=3.0, **WHOLE),
    )
    assert found[WHOLE["codec"]].relative_variance == pytest.approx(2.0 / 8.0)
    assert found[Q3].relative_variance == pytest.approx(0.5)
    assert analysis.tensors == ("a", "b")
    # At step 2 the per-tensor codec lacks b: both are summed over steps 0 and 1.
    rows = [row("b", 2, method="nuqsgd", energy=6.0, squared_error=9.0)]
    for step in (0, 1, 2):
        rows.append(row("*", step, energy=8.0, squared_error=2.0 + step, **WHOLE))
        rows.append(row("a", step, energy=2.0, squared_error=1.0))
        rows += [row("b", step, energy=6.0, squared_error=3.0)] if step != 2 else []
    _, found = analyzed(*rows)
    whole = found[WHOLE["codec"]]
    assert found[Q3].relative_variance == pytest.approx(8.0 / 16.0)
    assert (whole.relative_variance, whole.cells) == (pytest.approx((2.0 + 3.0) / 16.0), 2)


def test_families_differ_in_everything_but_the_rate():
    parameters = [{"bits": b, "bucket_size": size, "zero": True} for b, size in ((2, 512), (3, 512), (3, None))]
    families, settings = label("abcde", ["qsgd", "qsgd", "qsgd", "topk", "odd"], [*parameters, {"ratio": 0.01}, None])
    assert families == ("qsgd bucket_size=512", "qsgd bucket_size=512", "qsgd bucket_size=null", "topk", "e")
    assert settings == ("b2", "b3", "b3", "ratio 0.01", "")
