"""Predicted losses under Adam against torch's optimizers on quadratics with known curvature and noise."""

import numpy as np
import pytest
import torch

from gtrace.noise import NoiseCosts, shorter_steps
from gtrace.noise.adam import AdamPoint, adam_ladder

WEIGHTS, LR = 12, 2e-3
KINDS = {
    "adam": (torch.optim.Adam, 0.0),
    "adam with L2": (torch.optim.Adam, 0.1),
    "adamw": (torch.optim.AdamW, 1.0),
}


def point(kind, beta2, done):
    """A quadratic that has noise in steep directions and a little in all, in the middle of training."""
    rng = np.random.default_rng(0)
    axes, others = (np.linalg.qr(rng.standard_normal((WEIGHTS, WEIGHTS)))[0] for _ in range(2))
    factors = (axes * np.sqrt(np.geomspace(2, 0.01, WEIGHTS))).T
    samples = np.concatenate([0.8 * factors, 0.05 * others]) * np.sqrt(2 * WEIGHTS)
    gradient = factors.T @ factors @ rng.standard_normal(WEIGHTS) * 0.1
    make, decay = KINDS[kind]
    coupled = np.sqrt(decay) * np.eye(WEIGHTS) if make is torch.optim.Adam else np.empty((0, WEIGHTS))
    return AdamPoint(
        gradient=gradient,
        momentum=gradient / 2,
        v=gradient**2 + (samples**2).mean(axis=0) / 64,
        done=done,
        factors=np.concatenate([factors, coupled]),
        samples=samples,
        lr=LR,
        betas=(0.9, beta2),
        decay=decay if make is torch.optim.AdamW else 0.0,
    )


def trained(kind, start, steps, batch, variance=0.0, runs=400):
    """Mean loss after some steps and its standard error, of many runs at once."""
    make, decay = KINDS[kind]
    rng = np.random.default_rng(steps)
    x = torch.zeros(runs, WEIGHTS, dtype=torch.float64, requires_grad=True)
    optimizer = make([x], lr=LR, betas=start.betas, weight_decay=decay)
    beta1, beta2 = start.betas
    optimizer.state[x] = {
        "step": torch.tensor(float(start.done), dtype=torch.float64),
        "exp_avg": torch.from_numpy(start.momentum * (1 - beta1**start.done)).expand(runs, -1).clone(),
        "exp_avg_sq": torch.from_numpy(start.v * (1 - beta2**start.done)).expand(runs, -1).clone(),
    }
    # Torch adds its weight decay itself.
    curved = start.factors[:WEIGHTS]
    for _ in range(steps):
        noise = rng.standard_normal((runs, len(start.samples))) @ start.samples / np.sqrt(len(start.samples) * batch)
        noise += rng.standard_normal((runs, WEIGHTS)) * np.sqrt(variance)
        at = x.detach().numpy()
        x.grad = torch.from_numpy(start.gradient + at @ curved.T @ curved + noise)
        optimizer.step()
    at = x.detach().numpy()
    losses = at @ start.gradient + 0.5 * ((at @ start.factors.T) ** 2).sum(axis=1)
    return losses.mean(), losses.std() / np.sqrt(runs)


def rounding(start):
    """A codec's error: as large as the noise at batch 64, the same in every element."""
    return np.full(WEIGHTS, (start.samples**2).mean() / 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [20, 100, 400])
def test_the_prediction_is_exact_while_v_stands_still(kind, steps):
    start = point(kind, 1 - 1e-9, 10**8)
    loss, error = trained(kind, start, steps, 16, rounding(start))
    assert abs(start.loss(steps, 16, rounding(start)) - loss) < 3 * error


@pytest.mark.parametrize("steps", [20, 100, 400])
def test_equivalent_batches_while_v_moves(steps):
    start = point("adam", 0.999, 400)
    variance = rounding(start)
    ladder = adam_ladder(start, steps, 64, variance, (8, 16, 32, 64, 128))
    found = [trained("adam", start, steps, batch)[0] for batch in ladder.batches]
    loss, _ = trained("adam", start, steps, 64, variance)
    measured = 1 / np.interp(loss, found[::-1], 1 / np.array(ladder.batches[::-1]))
    # One mean of v serves all steps, and the gradient that is in v does not shrink: so much is approximate.
    np.testing.assert_allclose([*ladder.losses, ladder.loss], [*found, loss], rtol=0.01)
    assert ladder.equivalent == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("workers", [1, 4])
def test_noise_of_a_codec_makes_steps_shorter(workers):
    # Each element: expected gradient 1, noise 2 and codec's variance 6 of one worker.
    noise, codec, scale = 2.0, 6.0, 1 / np.sqrt(3.0)
    costs = NoiseCosts(
        codecs=("a",),
        tensors=("w",),
        noise=np.eye(8) * noise * scale,
        gram=np.zeros((1, 1, 8, 8)),
        variance=np.array([[codec * scale]]),
        lost=np.zeros((1, 1)),
        signal=np.array([scale]),
        growth=np.array([np.nan]),
        unbiased=(True,),
        source="ranks",
        batch=64.0,
        optimizer={"kind": "Adam"},
        lr=1e-3,
        last=0,
    )
    moved = []
    for variance in (noise / workers, (noise + codec) / workers):
        rng = np.random.default_rng(0)
        x = torch.zeros(2000, requires_grad=True)
        optimizer = torch.optim.Adam([x], lr=1e-3)
        for _ in range(400):
            x.grad = torch.from_numpy(1 + np.sqrt(variance) * rng.standard_normal(2000)).float()
            optimizer.step()
        moved.append(float(x.detach().mean()))
    assert shorter_steps(costs, ["a"], workers) == pytest.approx(1 - moved[1] / moved[0], abs=0.02)
