"""Plans from curves: budgets, weights, groups, what they are compared with, and how firm they are."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from helpers_plan import LAYERS, costs_of, curves_of_laws

from gtrace.errors import UsageError
from gtrace.noise import Dynamics, cost, predict
from gtrace.planning import Budget, make_plan, noise_ratios


def planned(curves, value=3.0, kind="bits", **more):
    return make_plan(curves, Budget(kind, value, f"{value:g} {kind}"), name="p", provenance={}, **more)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bits", [1.8, 2.5, 3.0, 4.7, 6.0])
def test_no_single_codec_of_as_many_bits_has_less_error(seed, bits):
    plan = planned(curves_of_laws(seed=seed), bits)
    assert plan.totals.bits <= bits * (1 + 1e-9)
    assert plan.totals.error <= min(one.error for one in plan.uniforms if one.bits <= bits) * (1 + 1e-12)
    assert plan.uniform.planned <= plan.uniform.error
    assert plan.totals.bound <= plan.totals.error


def test_the_numbers_of_a_plan_add_up():
    curves = curves_of_laws(steps=5)
    plan = planned(curves)
    assert sum(row.bits * row.elements for row in plan.tensors) == pytest.approx(plan.totals.bits * curves.elements)
    assert sum(row.error for row in plan.tensors) == pytest.approx(plan.totals.error)
    row = plan.tensors[2]
    o = curves.codecs.index(row.codec)
    assert row.error == pytest.approx(curves.error[2, :, o].sum() / curves.energy.sum())
    assert row.bits == pytest.approx(curves.bits[2, :, o].mean() / curves.sizes[2])
    # Small tensors are exact where that is free.
    assert {row.tensor: row.codec for row in planned(curves_of_laws(), 4.0).tensors}["conv.bias"] == "none"


def test_a_bound_on_the_error_takes_the_fewest_bits():
    curves = curves_of_laws()
    plan = planned(curves, 0.01, "error")
    assert plan.totals.error <= 0.01
    assert plan.totals.bound <= plan.totals.bits
    # The same bits as a budget give no less error than what was asked for.
    assert planned(curves, plan.totals.bits * 0.99).totals.error > 0.01 * 0.99
    assert plan.exchange.price > 0


def test_groups_have_one_codec_weights_move_bits_and_one_codec_for_all_is_the_best():
    curves = curves_of_laws()
    free, groups = planned(curves), {"conv.weight": "g", "head.weight": "g"}
    grouped = planned(curves, groups=groups)
    codecs = {row.tensor: row.codec for row in grouped.tensors if row.group == "g"}
    assert (set(codecs), len(set(codecs.values()))) == (set(groups), 1)
    assert grouped.totals.error >= free.totals.error * (1 - 1e-12)
    heavy = planned(curves.weighted(np.array([1, 1, 1e6, 1.0])))
    assert heavy.tensors[2].bits > free.tensors[2].bits
    single = planned(curves, one_for_all=True)
    assert {row.codec for row in single.tensors} == {single.uniform.codec} == {single.default}
    assert free.worth


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [(0.5, "bits", "take at least"), (-1, "bits", "positive"), (float("nan"), "bits", "positive"), (0, "error", "pos")],
)
def test_budgets_that_nothing_fits_into_say_what_would(value, kind, message):
    with pytest.raises(UsageError, match=message):
        planned(curves_of_laws(), value, kind)


def test_a_codec_that_is_unknown_at_one_step_is_no_option():
    curves = curves_of_laws()
    before = planned(curves).tensors[2]
    curves.error[2, 1, curves.codecs.index(before.codec)] = np.nan
    assert planned(curves).tensors[2].codec != before.codec
    # A tensor that is not there at a step leaves its codecs alone.
    curves = curves_of_laws()
    curves.error[2, 1], curves.bits[2, 1], curves.energy[2, 1] = np.nan, np.nan, np.nan
    assert planned(curves).tensors[2].codec == before.codec


SGD = Dynamics(lr=0.01)


def by_cost(curves, costs, bits):
    found = noise_ratios(curves, costs, SGD, 50, 64)
    return planned(curves.priced(found.ratio), bits, objective="cost"), found


@pytest.mark.parametrize("seed", range(4))
def test_a_plan_by_cost_has_the_least_cost_of_all_choices(seed):
    layers = {name: LAYERS[name] for name in ("conv.weight", "fc.weight", "head.weight")}
    curves = curves_of_laws(options=6, layers=layers, seed=seed)
    costs = costs_of(curves, flat=("conv.weight",))
    plan, _ = by_cost(curves, costs, 3.0)
    loss = np.vstack([cost(costs, SGD, 50, 64), np.zeros(3)])
    choices = np.array(list(itertools.product(range(7), repeat=3)))
    fits = curves.bits.mean(axis=1).T[choices, range(3)].sum(axis=1) <= 3.0 * curves.elements
    chosen = [curves.codecs.index(row.codec) for row in plan.tensors]
    assert loss[chosen, range(3)].sum() == pytest.approx(loss[choices, range(3)].sum(axis=1)[fits].min())


def test_ratios_of_a_codec_add_up_to_its_prediction_and_biased_codecs_are_left_out():
    curves = curves_of_laws()
    many = len(curves.codecs) - 1
    growth = np.full(many, np.nan)
    growth[1], growth[2] = 1.0, 10.0
    costs = costs_of(curves, unbiased=(True, False, False, False, False, *(True,) * (many - 5)), growth=growth)
    # Of the two biased ones without memory, one loses 5% of a step's progress; the other 1%, which counts as nothing.
    costs.lost[3:5] = [[0.05], [0.01]]
    plan, found = by_cost(curves, costs, 2.0)
    expected = [predict(costs, k, SGD, 50, batch=64).ratio for k in (0, 1, 4, 5)]
    assert found.ratio[:, [0, 1, 4, 5]].sum(axis=0) == pytest.approx(expected)
    assert list(found.left_out) == [curves.codecs[2], curves.codecs[3]]
    assert "its error is a bias that takes 5% of" in found.left_out[curves.codecs[3]]
    assert np.isnan(found.ratio[:, [2, 3]]).all()
    everywhere = curves.codecs.index(plan.uniform.codec)
    assert plan.uniform.error == pytest.approx(found.ratio[:, everywhere].sum())
    assert not {row.codec for row in plan.tensors} & set(found.left_out)


def test_bits_are_those_of_a_step_with_all_tensors():
    everywhere, curves = curves_of_laws(steps=4), curves_of_laws(steps=4)
    for values in (curves.energy, curves.bits, curves.error):
        values[2, 1:] = np.nan
    exact = planned(curves, 40.0)
    assert [row.bits for row in exact.tensors] == [32.0] * len(exact.tensors)
    assert exact.totals.bits == pytest.approx(32)
    assert exact.uniforms[-1].bits == pytest.approx(32)
    for groups in ({}, {"conv.weight": "g", "fc.weight": "g"}):
        plan = planned(curves, groups=groups)
        o = curves.codecs.index(plan.tensors[2].codec)
        assert plan.tensors[2].bits == pytest.approx(everywhere.bits[2, 0, o] / curves.sizes[2])
        bits = sum(row.bits * row.elements for row in plan.tensors) / curves.elements
        assert plan.totals.bits == pytest.approx(bits)
        assert bits <= 3


def test_finer_options_of_a_tensor_that_is_absent_at_some_steps_are_taken():
    curves = curves_of_laws(steps=3)
    for values in (curves.energy, curves.bits, curves.error):
        values[1, 0] = np.nan
    own = replace(
        curves.only(["none"]),
        tensors=curves.tensors[1:2],
        codecs=("bf16", "none"),
        steps=curves.steps[1:],
        bits=np.stack([np.full((1, 2), 16.0 * 16), np.full((1, 2), 32.0 * 16)], axis=2),
        error=np.zeros((1, 2, 2)),
    )
    joined = curves.joined(own)
    assert joined.codecs == (*curves.codecs[:-1], "bf16", "none")
    assert joined.means()[0][1, -2] == 16 * 16
    assert not np.isfinite(joined.means()[0][[0, 2, 3], -2]).any()
    assert np.array_equal(joined.means()[0][:, [*range(12), -1]], curves.means()[0])
