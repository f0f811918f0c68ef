"""What the experiments compute themselves: on training, MCGQ, adaptive levels, near-lognormal gradients and MQGrad."""

import math

import numpy as np
import pytest

from gtrace.codecs.fp import FloatFormat
from gtrace_experiments.reproduce import _mqgrad as mqgrad
from gtrace_experiments.reproduce import alq_fig1, alq_fig8, lognormal_fig3
from gtrace_experiments.reproduce._alq import Path, record
from gtrace_experiments.reproduce._mcgq import Logistic
from gtrace_experiments.reproduce.experiment import Context


@pytest.fixture(scope="module")
def problem():
    return Logistic.planted(Context(quick=True))


def test_the_objective_is_the_papers(problem):
    x = np.random.default_rng(3).normal(size=20)
    n = len(problem.labels)
    by_hand = sum(math.log1p(math.exp(-b * float(a @ x))) for a, b in zip(problem.samples, problem.labels, strict=True))
    assert problem.objective(x) == pytest.approx(by_hand / n + float(x @ x) / (2 * n), rel=1e-6)
    np.testing.assert_allclose(np.linalg.norm(problem.samples, axis=1), 1, rtol=1e-6)
    assert set(problem.labels) == {-1, 1}


def test_the_minimum_is_below_what_descent_finds(problem):
    best = problem.minimum()
    curve, _ = problem.descend("none", 0, epochs=40)
    assert curve[0] == pytest.approx(math.log(2))
    assert best < curve[-1] < best + 0.02
    assert len(curve) == 401


def test_descent_without_a_codec_is_plain_sgd(problem):
    """In float64 and by numerical differences of one sample's loss."""
    n, d = problem.samples.shape
    x = np.zeros(d)

    def loss(x, k):
        margin = float(problem.labels[k]) * float(problem.samples[k].astype(np.float64) @ x)
        return math.log1p(math.exp(-margin)) + float(x @ x) / (2 * n)

    for t, k in enumerate(np.random.default_rng(5).permutation(n)[:20]):
        gradient = [(loss(x + h, k) - loss(x - h, k)) / 2e-6 for h in 1e-6 * np.eye(d)]
        x = x - np.array(gradient) / (1 + t / n)
    curve, bits = problem.descend("none", 5, epochs=1)
    assert curve[1] == pytest.approx(problem.objective(x), rel=1e-5)
    assert bits == 32


def test_accumulation_helps_where_few_are_sampled(problem):
    plain, kept = (problem.descend(f"mcgq:amount=0.1{rest}", 0)[0][-1] for rest in ("", ",accumulate=true"))
    assert kept < plain


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


@pytest.fixture(scope="module")
def found():
    return mqgrad.measure(Context(quick=True))


def test_every_policy_has_a_run_on_the_clock_of_the_paper(found):
    assert {len(runs) for runs in (*found.runs.values(), found.plain)} == {1}
    assert found.clock.iteration(4) - found.clock.iteration(3) == pytest.approx(5.0)
    for name, runs in found.runs.items():
        seconds = float(runs[0].sim_seconds[0])
        bits = int(name.split()[1]) if name.startswith("fixed") else int(runs[0].codec_bits[0])
        # The range, the envelope and the padding of two tensors, and envelopes of the others.
        assert 0 <= seconds - found.clock.iteration(bits) < 0.5
    assert all(0 < share < 1 for share in found.codec_share.values())


def test_a_seed_that_does_not_arrive_makes_the_mean_infinite(found):
    high = max(float(run.loss.max()) for runs in found.runs.values() for run in runs)
    assert found.seconds("fixed 8 bits", high) < math.inf
    assert found.reached("fixed 8 bits", high) == "1 of 1"
    assert found.seconds("fixed 8 bits", 0.0) == math.inf
    assert found.reached("fixed 8 bits", 0.0) == "0 of 1"
