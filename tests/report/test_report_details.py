"""What a sweep says beside its errors: levels that were fitted, whether to rotate, and errors of Adam's update."""

import json
from xml.etree import ElementTree as ET

import click
import numpy as np
import pytest
from helpers_report import EVIL, FITTED, fit_details, fitted_rows, result_of, row, rows_of

import gtrace
from gtrace.cli.plan import command
from gtrace.codecs import codec, expected_on_any
from gtrace.report.analysis.details import common_count, tensors_with_levels
from gtrace.report.analysis.sweep import analyze
from gtrace.report.figures import sweep as levels
from gtrace.report.figures.style import render
from gtrace.report.inputs import make_report
from gtrace.report.sections.checks import rotation_sentences
from gtrace.report.sections.sweep import sweep_figures
from gtrace.report.sections.sweep_tables import configuration_table
from gtrace.report.sections.sweep_words import sweep_verdict
from gtrace.sweep import ResultStore, run_sweep


def analyzed(*rows, **details):
    return analyze(result_of(rows, **details))


def headings(table):
    return [column.heading for column in table.columns]


@pytest.fixture(scope="module")
def fitted():
    return result_of(fitted_rows(), details=fit_details())


@pytest.fixture(scope="module")
def sweep(fitted):
    return analyze(fitted)


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


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["itself", "itself", "previous"], "previous"),
        (["-", None], ""),
        (["itself", "pooled 1 step", "pooled 2 steps", "pooled 2 steps"], "pooled 2 steps"),
    ],
)
def test_what_levels_were_fitted_to(values, said):
    found = analyzed(*(row(step=k, squared_error=1.0, fitted_on=value) for k, value in enumerate(values)))
    assert found.configurations[0].fitted_on == said


def test_the_table_has_the_columns_where_they_say_something(sweep):
    table = configuration_table(sweep)
    lines = {line[0].text: line for line in table.rows}
    assert headings(table)[2:7] == ["vNMSE", "of it bias", "optimal", "times optimal", "model says"]
    shown = [cell.text for cell in lines["alq:bits=3,law=truncnorm"][2:7]]
    assert shown == ["0.250", "–", "0.125", "2.00", "0.0625"]
    assert "times optimal" not in headings(configuration_table(analyzed(*rows_of(bits=[2, 3]))))


def test_the_largest_tensor_comes_first_the_whole_model_last_at_the_same_number_of_levels(sweep):
    whole = [*fitted_rows(), *fitted_rows(layers=("*",))]
    fits = analyzed(*whole, details=fit_details(layers=("*", "w", "v"))).fits
    assert [fit.tensor for fit in fits] == ["v", "w", "*"]
    both = {**fit_details(step=0), **fit_details(step=10)}
    assert {fit.step for fit in analyzed(*fitted_rows(), details=both).fits} == {10}
    assert common_count(sweep.fits) == 8


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


def odd_details():
    one = fit_details(layers=("w",))
    return {
        "nothing": {},
        "no density": {key: value for key, value in one.items() if "density" not in key[2]},
        "no values": {key: v | ({"share": [0.0] * 120} if "share" in v else {}) for key, v in one.items()},
        "exact": {key: v | ({"best": 0.0} if "best" in v else {}) for key, v in one.items()},
        "other codecs": {("w", 10, "levels fp:bits=3"): one["w", 10, "levels zipml:bits=3"]},
        "names": fit_details(layers=EVIL[:-1]),
    }


@pytest.mark.parametrize("case", list(odd_details()))
def test_every_figure_survives_odd_details(case):
    details = odd_details()[case]
    layers = tuple(dict.fromkeys(name for name, _, _ in details)) or ("w",)
    analysis = analyzed(*fitted_rows(layers=layers), details=details)
    drawn = tensors_with_levels(analysis.fits, {c.spec for c in analysis.configurations})
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


def updated(path, *, moments):
    rng = np.random.default_rng(0)
    with gtrace.create_trace(path) as writer:
        for step in range(3):
            for name, size in (("large", 1e3), ("small", 1.0)):
                writer.append(step, name, (size * rng.standard_normal(512)).astype(np.float32))
                if moments:
                    # Half of the elements hardly ever move: an error there is a large one.
                    v = np.float32(size**2 * np.where(np.arange(512) % 2, 1.0, 1e-6))
                    writer.append(step, name, v, kind="second_moment", decay=1.0, eps=1e-12)
    with gtrace.open_trace(path) as trace:
        return run_sweep(trace, ["qsgdinf:bits=3,bucket_size=64", "fp:e4m0", "signsgd"])


def test_update_errors_are_the_last_detail_and_no_verdict_or_plan_rests_on_them(tmp_path):
    known, unknown = (updated(tmp_path / f"{moments}.zarr", moments=moments) for moments in (True, False))
    analysis, other = analyze(known), analyze(unknown)
    for c in analysis.configurations:
        chosen = (known["codec"] == c.spec) & (known["draw"] == -1)
        # Tensors of one size weigh alike, and so do steps at equal distances.
        assert c.update_error == pytest.approx(known["update_error"][chosen].mean())
    assert headings(configuration_table(analysis))[-1] == "update error"
    assert "update error" not in headings(configuration_table(other))
    assert sweep_verdict(analysis) == sweep_verdict(other)
    with pytest.raises(click.BadParameter, match="'cost', 'error'"):
        command.make_context("plan", [str(tmp_path), "--budget", "3bits", "--objective", "update"])
