"""Which tensor is worth more bits: against a plan of the same rows, and when nothing is said."""

import pytest
from helpers_report import result_of, row

from gtrace.planning import Budget, curves_of, make_plan
from gtrace.report import analyze
from gtrace.report.analysis.tensors import layer_insight

SIZES = {"head": 1_000, "body": 8_000, "rest": 1_000}
ENERGY = {"head": 90.0, "body": 8.0, "rest": 2.0}
SPEC = "qsgd:bits=4,bucket_size=8192"


def swept(tensors=tuple(SIZES), energy=ENERGY, bias=0.0):
    """Errors that fall by a factor of four with each bit, the same share of every tensor's energy."""
    return result_of(
        [
            row(t, 0, bits=b, n=SIZES[t], energy=energy[t], squared_error=energy[t] * 4.0**-b, bits_total=b)
            | {"relative_bias": bias}
            for t in tensors
            for b in range(2, 9)
        ]
    )


def test_a_plan_moves_bits_to_the_tensor_with_the_energy():
    result = swept()
    found = layer_insight(analyze(result), SPEC)
    plan = make_plan(curves_of(result), Budget("bits", 4.0, "4 bits"), name="plan", provenance={})
    assert (found.codec, found.bits, found.tensor.name) == (SPEC, 4.0, "head")
    assert found.gain == pytest.approx(4.0**-4 / plan.totals.error)
    bits = {one.tensor: one.bits for one in plan.tensors}
    assert found.tensor.bits == (bits["head"], bits["head"])
    assert found.rest == pytest.approx((8 * bits["body"] + bits["rest"]) / 9)
    assert [(one.name, one.elements, one.energy) for one in found.shares] == [
        ("head", 0.1, pytest.approx(0.9)),
        ("body", 0.8, pytest.approx(0.08)),
        ("rest", 0.1, pytest.approx(0.02)),
    ]
    fact, advice = found.sentences
    assert fact == "head is 10% of parameters and 90% of gradient energy."
    assert f"Give it {found.tensor.bits[0]:.1f} bits" in advice
    assert "at the same 4.00 bits per value" in advice


def test_without_a_recommendation_the_configuration_near_three_bits_is_planned():
    assert layer_insight(analyze(swept())).bits == 3.0
    assert layer_insight(analyze(swept()), "bf16").bits == 3.0


@pytest.mark.parametrize(
    "result",
    [
        swept(tensors=("head",)),
        swept(energy={name: float(n) for name, n in SIZES.items()}),
        swept(bias=0.5),
        result_of([]),
    ],
    ids=["one tensor", "energy as elements", "biased", "nothing"],
)
def test_nothing_is_said_if_nothing_is_gained(result):
    assert layer_insight(analyze(result), SPEC) is None
