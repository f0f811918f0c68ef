"""What a sweep says beside its errors: levels that were fitted, and whether to rotate."""

import dataclasses
import json
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from helpers_report import EVIL, FITTED, fit_details, fitted_rows, result_of, row

from gtrace.codecs import codec, expected_on_any
from gtrace.report.analysis.details import common_count, levels_on
from gtrace.report.analysis.sweep import analyze
from gtrace.report.figures import sweep as levels
from gtrace.report.figures.style import render
from gtrace.report.inputs import make_report
from gtrace.report.sections.charts import sweep_figures
from gtrace.report.sections.checks import rotation_sentences
from gtrace.sweep import ResultStore


def analyzed(*rows, **details):
    return analyze(result_of(rows, **details))


def test_the_optimum_is_summed_like_the_error_and_not_made_up():
    first = row("a", energy=1.0, squared_error=0.5, optimal_variance=0.25, model_variance=0.1)
    second = row("b", energy=3.0, squared_error=0.9, optimal_variance=0.1, model_variance=0.2)
    (c,) = analyzed(first, second).configurations
    assert c.relative_variance == pytest.approx(1.4 / 4)
    assert (c.optimal_variance, c.times_optimal) == (pytest.approx((0.25 + 0.3) / 4), pytest.approx(1.4 / 0.55))
    assert c.model_variance == pytest.approx((0.1 + 0.6) / 4)
    # One cell lacks it.
    (c,) = analyzed(first, row("b", squared_error=0.5)).configurations
    assert np.isnan([c.optimal_variance, c.times_optimal]).all()
    # A gradient of zeros has no say.
    zeros = {**row("b", energy=0.0), "squared_error": 0.0}
    assert analyzed(first, zeros).configurations[0].times_optimal == 2.0


def test_details_come_back_from_a_store_and_have_their_figures(tmp_path):
    store = ResultStore.create(tmp_path / "a.sweep.db", {}, "f", force=False)
    store.add(list(fitted_rows()), details=[(*key, value) for key, value in fit_details().items()])
    store.close()
    (analysis,) = make_report([tmp_path / "a.sweep.db"]).sweeps
    assert [fit.tensor for fit in analysis.fits] == ["v", "w"]
    assert len(analysis.fits[0].levels) == 2 * (len(FITTED) - 1) + 1
    assert [plate.name for plate in sweep_figures(analysis)][-3:] == [
        "levels", "levels-of-other-tensors", "convergence",
    ]  # fmt: skip


@pytest.mark.parametrize("case", ["nothing", "no density", "no values", "exact", "other codecs", "names"])
def test_every_figure_survives_odd_details(case):
    layers = EVIL[:-1] if case == "names" else ("w",)
    details = fit_details(layers=layers)
    changed = {
        "nothing": {},
        "no density": {key: value for key, value in details.items() if "density" not in key[2]},
        "no values": {key: v | ({"share": [0.0] * 120} if "share" in v else {}) for key, v in details.items()},
        "exact": {key: v | ({"best": 0.0} if "best" in v else {}) for key, v in details.items()},
        "other codecs": {("w", 10, "levels fp:bits=3"): fit_details(layers=("w",))["w", 10, "levels zipml:bits=3"]},
    }
    analysis = analyzed(*fitted_rows(layers=layers), details=changed.get(case, details))
    n, specs = common_count(analysis.fits), {c.spec for c in analysis.configurations}
    drawn = [fit for fit in analysis.fits if levels_on(fit, specs, n)]
    assert bool(drawn) == (case in {"exact", "names"})
    assert [figure.name for figure in sweep_figures(analysis)].count("levels") == bool(drawn)
    if drawn:
        ET.fromstring(render(levels.levels_over_density(analysis, drawn), "svg", text_as_paths=False))


# Rotations

SIZE = 1 << 20
#: tensor -> error at 2.5, 3 and 3.5 bits without a rotation; eden loses 3.2% at 3 bits whatever the tensor
PLAIN = {"flat": (0.2, 0.1, 0.05), "peaked": (0.02, 0.01, 0.005), "even": (0.066, 0.0326, 0.0165)}


def rotation_of(errors, bias=0.0):
    """The rotation of a sweep of methods (name -> tensor -> errors at three numbers of bits)."""

    def one(tensor, step, method, b, bits, error):
        about = {"codec": f"{method}:bits={b}", "method": method, "params": json.dumps({"bits": b}), "n": SIZE}
        about |= {"squared_error": error, "relative_bias": bias if method == "biased" else 0.0, "bits_shared": 0.0}
        return row(tensor, step, **about, bits_huffman=bits, bits_payload=bits, bits_total=bits)

    rows = (
        one(tensor, step, method, b, bits, error)
        for method, tensors in errors.items()
        for tensor, three in tensors.items()
        for step in range(4)
        for b, bits, error in zip((3, 4, 5), (2.5, 3.0, 3.5), three, strict=True)
    )
    return analyze(result_of(rows), targets=[3.0]).rotation


def test_the_closed_form_stands_for_what_was_not_swept():
    found = rotation_of({"qsgdinf": PLAIN})
    assert (found.bits, found.measured) == (3.0, False)
    assert {one.tensor: one.verdict for one in found.layers} == {"flat": "rotate", "peaked": "leave", "even": "same"}
    near = [expected_on_any(codec("eden", bits=bits), SIZE) for bits in (3, 3.5)]
    assert all(near[1].squared_error < one.rotated_error < near[0].squared_error for one in found.known)
    first, *_, last = rotation_sentences(found)
    assert "1 of 3 tensors, with 33% of the gradient's energy: at 3 bits" in first
    assert "flat (3.2% with eden, 10% with qsgdinf)" in first
    assert "closed form" in last
    # Of tensors that hold next to nothing, the whole gradient cannot show it.
    tiny = [dataclasses.replace(one, energy=0.0 if one.tensor == "flat" else 0.5) for one in found.layers]
    assert "Rotating these" not in " ".join(rotation_sentences(dataclasses.replace(found, layers=tuple(tiny))))
    none = rotation_sentences(rotation_of({"qsgdinf": {"peaked": PLAIN["peaked"]}}))
    assert none[0] == "Rotation pays on none of 1 tensor at 3 bits: leave it out."


def test_what_was_swept_comes_before_the_closed_form_and_bias_takes_no_part():
    half = {tensor: tuple(error / 2 for error in three) for tensor, three in PLAIN.items()}
    found = rotation_of({"qsgdinf": PLAIN, "rotate:qsgdinf": half, "biased": dict.fromkeys(PLAIN, (1e-6,) * 3)}, 1e-3)
    assert found.measured
    assert [(one.plain, one.rotated) for one in found.known] == [("qsgdinf", "rotate:qsgdinf")] * 3
    assert [one.ratio for one in found.known] == pytest.approx([0.5] * 3)
    assert [one.verdict for one in found.layers] == ["rotate"] * 3


# Update errors are the last column: no verdict, and no plan, rests on them
