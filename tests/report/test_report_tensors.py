"""Results by tensor: groups of them, and which ones to give more bits."""

import csv
import io

import numpy as np
import pytest
from helpers_report import result_of, row

import gtrace
from gtrace.errors import UsageError
from gtrace.planning import Budget, curves_of, make_plan
from gtrace.report import analyze, make_report, to_csv, to_json, to_markdown
from gtrace.report.analysis.tensors import OTHERS, group_tensors, layer_insight
from gtrace.report.inputs import Asked
from gtrace.trace import Trace

SIZES = {"conv1.weight": 900, "conv1.bias": 30, "conv2.weight": 2000, "fc.weight": 400, "scale": 7}
SPECS = ["qsgd:bits=3,bucket_size=64", "qsgd:bits=5,bucket_size=64", "terngrad:bucket_size=64"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("groups") / "run.sweep.db"


@pytest.fixture(scope="module")
def sweep(path):
    rng = np.random.default_rng(0)
    sizes = enumerate(SIZES.items())
    arrays = {name: dict(enumerate(np.float32(rng.standard_normal((2, n)) * 10.0**k))) for k, (name, n) in sizes}
    specs = [*SPECS, "qsgd:bits=4,bucket_size=64,scope=model"]
    return gtrace.run_sweep(Trace.from_arrays(arrays), specs, output=path)


def test_a_group_is_the_weighted_sum_of_its_tensors(sweep):
    conv, fc, others = group_tensors(sweep, ["conv=conv*", "fc=fc.*"])
    assert (conv.name, fc.name, others.name) == ("conv", "fc", OTHERS)
    assert conv.tensors == ("conv1.bias", "conv1.weight", "conv2.weight")
    assert (conv.elements, others.tensors) == (2930, ("scale",))
    assert conv.energy_share + fc.energy_share + others.energy_share == pytest.approx(1.0)
    for found in conv.analysis.configurations:
        mine = [row for row in sweep.rows() if row["tensor"].startswith("conv") and row["codec"] == found.spec]
        expected, drawn = ([row for row in mine if (row["draw"] >= 0) == is_draw] for is_draw in (False, True))
        want = sum(row["squared_error"] for row in expected) / sum(row["energy"] for row in expected)
        assert found.relative_variance == pytest.approx(want, rel=1e-12)
        bits = sum(row["bits_total"] * row["n"] for row in drawn) / sum(row["n"] for row in drawn)
        assert found.bits == pytest.approx(bits, rel=1e-12)
    assert len(conv.analysis.configurations) == len(SPECS)


def test_layers_tensors_and_precedence(sweep):
    by_layer = [(g.name, len(g.tensors)) for g in group_tensors(sweep, ["layer"])]
    assert by_layer == [("conv1", 2), ("conv2", 1), ("fc", 1), ("scale", 1)]
    assert {g.name for g in group_tensors(sweep, ["tensor"])} == set(SIZES)
    found = group_tensors(sweep, ["weights=*.weight", "conv=conv*", "rest=scale,*.bias"])
    assert [(g.name, g.tensors) for g in found] == [
        ("weights", ("conv1.weight", "conv2.weight", "fc.weight")), ("conv", ("conv1.bias",)), ("rest", ("scale",)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["conv"], "needs NAME=GLOB"),
        (["a=conv*", "a=fc*"], "is given twice"),
        (["a=cnov*"], "no tensor matches 'cnov\\*'"),
        (None, "only of the whole model"),
    ],
)
def test_bad_groups(sweep, groups, message):
    whole = result_of([row("*", squared_error=1.0)])
    with pytest.raises(UsageError, match=message):
        group_tensors(sweep if groups else whole, groups or ["layer"])


def test_every_form_of_a_report_has_the_groups(sweep):
    report = make_report([sweep], asked=Asked(groups=["conv=conv*"]))
    lines = list(csv.DictReader(io.StringIO(to_csv(report))))
    assert len(lines) == 2 * len(SPECS)
    assert {(line["group"], line["group_tensors"]) for line in lines} == {("conv", "3"), (OTHERS, "2")}
    assert [g["energy_share"] for g in to_json(report)["groups"][0]] == [g.energy_share for g in report.groups[0]]
    for words in ("Error by group of tensors", "conv: 3 tensors, 2,930 elements", "In conv, at "):
        assert words in to_markdown(report)
    # Without being asked nobody is shown groups.
    assert "by group" not in to_markdown(make_report([sweep]))


ELEMENTS = {"head": 1_000, "body": 8_000, "rest": 1_000}
ENERGY = {"head": 90.0, "body": 8.0, "rest": 2.0}
SPEC = "qsgd:bits=4,bucket_size=8192"


def swept(tensors=tuple(ELEMENTS), energy=ENERGY, bias=0.0):
    """Errors that fall by a factor of four with each bit, the same share of every tensor's energy."""
    return result_of(
        row(t, 0, bits=b, n=ELEMENTS[t], energy=energy[t], squared_error=energy[t] * 4.0**-b, bits_total=b)
        | {"relative_bias": bias}
        for t in tensors
        for b in range(2, 9)
    )


def test_a_plan_moves_bits_to_the_tensor_with_the_energy():
    result = swept()
    found = layer_insight(analyze(result), SPEC)
    plan = make_plan(curves_of(result), Budget("bits", 4.0, "4 bits"), name="plan", provenance={})
    assert (found.codec, found.bits, found.shares[0].name) == (SPEC, 4.0, "head")
    assert found.gain == pytest.approx(4.0**-4 / plan.totals.error)
    bits = {one.tensor: one.bits for one in plan.tensors}
    assert found.shares[0].bits == (bits["head"], bits["head"])
    assert found.rest == pytest.approx((8 * bits["body"] + bits["rest"]) / 9)
    fact, advice = found.sentences
    assert fact == "head is 10% of parameters and 90% of gradient energy."
    assert f"Give it {found.shares[0].bits[0]:.1f} bits" in advice


def test_nothing_is_said_if_nothing_is_gained():
    even = {name: float(n) for name, n in ELEMENTS.items()}
    for result in (swept(tensors=("head",)), swept(energy=even), swept(bias=0.5), result_of([])):
        assert layer_insight(analyze(result), SPEC) is None


def test_groups_of_zeros_have_no_share_of_the_energy():
    zeros = result_of([row(name, energy=0.0) for name in ("a", "b")])
    said = to_markdown(make_report([zeros], asked=Asked(groups=["tensor"])))
    assert "- a: 1 tensor, 1,000 elements, – of the energy." in said
