"""What the experiments on adaptive levels and near-lognormal gradients compute themselves."""

import math

import numpy as np
import pytest

from gtrace.codecs.fp import FloatFormat
from gtrace_experiments.reproduce import alq_fig1, alq_fig8, lognormal_fig3
from gtrace_experiments.reproduce._alq import Path, record


def test_variance_over_batches_is_0_where_they_agree_and_1_where_they_have_nothing_in_common():
    random = np.random.default_rng(0)
    g = random.standard_normal(5000).astype(np.float32)
    # A short last bucket is left out; norms differ and do not count.
    assert alq_fig1.variances(np.stack([g, 3 * g, 0.1 * g]), 1000)[0] == pytest.approx(0, abs=1e-12)
    apart = random.standard_normal((4, 5500)).astype(np.float32)
    assert alq_fig1.variances(apart, 1000)[0] == pytest.approx(1, abs=0.1)
    ones = np.ones((2, 8), np.float32) * [[1], [-1]]
    # Two batches of opposite sign: coordinates are +-1 / sqrt(4), whose variance with n - 1 is 2 / 4.
    assert alq_fig1.variances(ones.astype(np.float32), 4)[0] == pytest.approx(2)


def test_variance_over_coordinates_is_that_of_values_over_the_largest():
    g = np.array([[4.0, -2.0, 0.0, 2.0], [8.0, -4.0, 0.0, 4.0]], np.float32)
    assert alq_fig1.variances(g, 4)[1] == pytest.approx(np.var([1, -0.5, 0, 0.5]))


def test_changes_are_octaves_between_windows():
    at = tuple(range(100))
    values = np.array([1.0] * 5 + [2.0] * 45 + [8.0] * 25 + [4.0] * 25)
    early, rest, jumps = alq_fig1.changes(Path((), at, 100, (50, 75), (0,), ""), values)
    assert (early, rest, jumps) == (1.0, 0.0, [2.0, -1.0])


def test_settled_is_where_the_objective_stays_near_its_end():
    assert alq_fig8.settled([5.0, 1.0, 2.0, 1.005, 1.0], 1.0) == 3
    assert alq_fig8.settled([1.0, 1.0], 1.0) == 0
    assert alq_fig8.settled([3.0, 2.0], 1.0) is None


def test_the_printed_quantizer_has_neither_subnormals_nor_a_rounded_top():
    x = np.array([1.0, 1.3, 1.9, 7.9, 8.1, 1e9, 2.0**-4, 2.0**-4 * 0.99])
    # Two exponent bits: octaves from -2 to 1; one mantissa bit: steps of half an octave's start.
    assert lognormal_fig3.rounded_as_printed(x, 1, 2).tolist() == [1.0, 1.5, 2.0, 4.0, 4.0, 4.0, 0.0, 0.0]
    assert lognormal_fig3.rounded_as_printed(np.array([0.25, 0.3]), 1, 2).tolist() == [0.25, 0.25]


def test_eq_4_is_near_the_simulation_where_mantissas_are_long_and_infinite_without_any():
    random = np.random.default_rng(1)
    for sigma in (1.0, 4.0):
        x = np.exp2(random.normal(0, sigma, 200_000))
        error = np.abs(lognormal_fig3.rounded_as_printed(x, 6, 4) - x) / x
        assert lognormal_fig3.printed(6, 4, sigma) == pytest.approx(error.mean(), rel=0.05)
    assert lognormal_fig3.printed(0, 7, 3.0) == math.inf
    # Both factors of the middle term are out of range on their own here.
    assert lognormal_fig3.printed(1, 7, 3.0) == pytest.approx(1 / (8 * math.log(2)), rel=1e-6)
    assert FloatFormat(4, 3).expected_relative_error(0.0, 3.0) < lognormal_fig3.printed(3, 4, 3.0)


def test_a_recorded_training_is_that_of_a_study(tmp_path):
    from gtrace.training import PlainTraining, Study, load_task

    task = load_task("digits-mlp")  # with dropout, whose masks must be the same
    study = Study(task, [], workers=1, steps=3, seed=4, eval_every=3)
    study.run()
    plain = PlainTraining(task, 4)
    for step in range(3):
        gradients = plain.step(batches=2 if step == 1 else 1)
        assert len(gradients) == 1 + (step == 1)
    plain.model.eval()
    assert task.evaluate(plain.model).loss == pytest.approx(study.results[0].loss, rel=1e-6)
    first, second = record(task, 4, 2, [1], [], batch_size=8, batches=2)
    assert first.steps("fc1.weight").tolist() == [1]
    again = PlainTraining(task, 4)
    again.step()
    expected = again.step(batches=2)
    for trace, tensors in zip((first, second), expected, strict=True):
        assert np.array_equal(trace.read("fc1.weight", 1), tensors["fc1.weight"])
    assert not np.array_equal(first.read("fc1.weight", 1), second.read("fc1.weight", 1))


def test_neural_traces_hold_the_inner_layers_with_matrices():
    from gtrace.training import load_task
    from gtrace_experiments.reproduce._lognormal import neural_trace

    trace = neural_trace(load_task("digits-cnn"), 0, (0, 2), 4)
    assert [info.name for info in trace.tensors] == ["conv1", "conv2", "fc1"]
    assert trace.steps("conv1", kind="neural").tolist() == [0, 2]
    assert trace.read("conv1", 2, kind="neural").size == 4 * 32 * 8 * 8
