"""Estimates of gradient noise against linear regression, whose gradients of single samples are known exactly."""

import numpy as np
import pytest

from gtrace.noise import (
    Moments,
    Noise,
    added,
    averaged,
    equivalent_batch,
    moments,
    noise_between,
    noise_of_steps,
    noise_of_sum,
    noise_ratio,
    pooled,
)

SAMPLES, FEATURES, BATCH = 60, 12, 5
REPETITIONS, ERRORS = 200, 4.2


@pytest.fixture(scope="module")
def per_sample():
    """float64[samples, features]: gradient of (x @ w - y)^2 / 2 for each sample; the first half is a rarer kind."""
    random = np.random.default_rng(0)
    x = random.standard_t(5, (SAMPLES, FEATURES)) + 1.0
    x[::2] *= 1.5
    w, y = random.normal(1.0, 0.2, size=FEATURES), random.normal(size=SAMPLES)
    return (x @ w - y)[:, None] * x


@pytest.fixture(scope="module")
def truth(per_sample):
    """tr Cov of the mean gradient of a batch drawn with replacement, and ||E g||^2."""
    mean = per_sample.mean(axis=0)
    return float(np.square(per_sample - mean).sum() / SAMPLES / BATCH), float(mean @ mean)


def drawn(per_sample, random, number, scale=1.0):
    """float32 gradients of independent batches."""
    chosen = random.integers(SAMPLES, size=(number, BATCH))
    return [np.float32(scale * per_sample[batch].mean(axis=0)) for batch in chosen]


def check(values, expected, number):
    values = np.asarray(values)
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert abs(values.mean() - expected) < ERRORS * error
    # What n in the place of n - 1 would change is beyond that.
    assert ERRORS * error < abs(expected) / number


@pytest.mark.parametrize("ranks", [4, 8])
def test_noise_between_ranks_is_unbiased(ranks, per_sample, truth):
    random = np.random.default_rng(ranks)
    found = [noise_between(moments([drawn(per_sample, random, ranks)], ranks)) for _ in range(REPETITIONS)]
    check([noise.variance for noise in found], truth[0], ranks)
    check([noise.signal for noise in found], truth[1], ranks)
    assert {noise.freedom for noise in found} == {ranks - 1}


@pytest.mark.parametrize("divided", [True, False])
def test_noise_of_micro_batches_is_that_of_their_sum(divided, per_sample, truth):
    """A loss divided by the number of micro-batches adds up to a mean, otherwise to a sum."""
    random, parts = np.random.default_rng(3), 8
    scale = 1 / parts if divided else 1.0
    found = [noise_of_sum(moments([drawn(per_sample, random, parts, scale)], parts)) for _ in range(REPETITIONS)]
    whole = 1.0 if divided else parts**2
    check([noise.variance for noise in found], whole * truth[0] / parts, parts)
    check([noise.signal for noise in found], whole * truth[1], parts)


def test_ranks_and_micro_batches_say_the_same(per_sample, truth):
    """Ranks that hold the mean of four batches each, and one that accumulates these batches."""
    random, parts = np.random.default_rng(4), 4
    ranks, micro = [], []
    for _ in range(REPETITIONS):
        groups = [drawn(per_sample, random, parts, 1 / parts) for _ in range(4)]
        ranks.append(noise_between(moments([[np.sum(group, axis=0) for group in groups]], 4)).variance)
        micro.append(pooled([noise_of_sum(moments([group], parts)) for group in groups]).variance)
    check(micro, truth[0] / parts, parts)
    apart = np.mean(ranks) - np.mean(micro)
    assert abs(apart) < ERRORS * np.hypot(np.std(ranks), np.std(micro)) / np.sqrt(REPETITIONS)


def test_pieces_add_up_to_the_whole():
    gradients = np.random.default_rng(5).normal(size=(3, 1000)).astype(np.float32)
    found = moments(([g[k : k + 300] for g in gradients] for k in range(0, 1000, 300)), 3)
    exact = gradients.astype(np.float64)
    np.testing.assert_allclose(found, [3, np.square(exact).sum(), np.square(exact.sum(axis=0)).sum()], rtol=1e-12)


def test_by_hand():
    # What is clipped after the sum has less noise.
    found = Moments(4, 6.0, 9.0)
    whole, clipped = noise_of_sum(found, 9.0), noise_of_sum(found, 9.0 / 4)
    assert whole == noise_of_sum(found)
    assert (clipped.variance, clipped.signal) == pytest.approx((whole.variance / 4, whole.signal / 4))
    assert whole.variance + whole.signal == pytest.approx(9.0)
    # Equal gradients have none.
    noise = noise_between(Moments(3, 3 * 0.1, 9 * 0.1))
    assert 0 <= noise.variance < 1e-15
    assert noise.signal == pytest.approx(0.1)
    with pytest.raises(ValueError, match="1 gradients"):
        noise_between(Moments(1, 1.0, 1.0))
    # Parts of a model add up, and workers average.
    one, other = Noise(2.0, 1.0, 3), Noise(3.0, -0.5, 1)
    assert added([one, other]) == Noise(5.0, 0.5, 1)
    assert added([one, None]) is added([]) is pooled([]) is None
    assert pooled([one, other]) == Noise(2.25, 0.625, 4)
    assert averaged(one, 4) == Noise(0.5, 1.0, 3)
    # Bias is kept out of the ratio.
    noise, errors, biases = Noise(4.0, 1.0, 3), np.array([2.0, 2.0, 1.0]), np.array([0.0, 1.0, 1.0 - 1e-14])
    np.testing.assert_array_equal(noise_ratio(errors, biases, noise), [0.5, 0.25, 0.0])
    assert np.isnan(noise_ratio(errors, biases, Noise(0.0, 1.0, 3))).all()
    # A batch of 2,048 with a codec of a tenth of its noise has the covariance of 1,862 samples.
    assert equivalent_batch(2048, 0.1) == pytest.approx(2048 / 1.1)


def test_three_consecutive_steps_tell_the_noise_whatever_drifts_evenly():
    random = np.random.default_rng(5)
    mean, drift = random.normal(size=400), 0.3 * random.normal(size=400)
    deviation = np.linspace(0.1, 2, 400)
    found = []
    for _ in range(300):
        steps = [mean + k * drift + deviation * random.normal(size=400) for k in range(3)]
        found.append(
            noise_of_steps([[g[part].astype(np.float32) for g in steps] for part in np.split(range(400), [150])])
        )
    variances, signals = (np.array([getattr(noise, name) for noise in found]) for name in ("variance", "signal"))
    assert abs(variances.mean() - float(deviation @ deviation)) < ERRORS * variances.std() / np.sqrt(300)
    # The mean product of different steps: of the gradient half way, less what the drift takes.
    expected = float((mean + drift) @ (mean + drift) - drift @ drift / 3)
    assert abs(signals.mean() - expected) < ERRORS * signals.std() / np.sqrt(300)
