"""From micro-batches to a noise ratio: linear regression, whose gradients of single samples are known exactly."""

import numpy as np
import pytest
import torch

import gtrace
from gtrace.sweep.gradient_noise import NOISE

SAMPLES, FEATURES, PARTS, BATCH, STEPS = 40, 30, 4, 3, 400


@pytest.fixture(scope="module")
def problem():
    """Inputs, targets, tr Cov of the mean gradient of a batch of PARTS * BATCH samples at weights 0, and ||E g||^2."""
    random = np.random.default_rng(0)
    x = np.float32(random.normal(0.5, 1.0, (SAMPLES, FEATURES)))
    y = np.float32(random.normal(1.0, 0.5, (SAMPLES, 1)))
    gradients = -2.0 * y.astype(np.float64) * x
    mean = gradients.mean(axis=0)
    one = float(np.square(gradients - mean).sum() / SAMPLES)
    return torch.from_numpy(x), torch.from_numpy(y), one / (PARTS * BATCH), float(mean @ mean)


def captured(problem, path, *, clip=None):
    """A trace of steps that stay at weights 0, each the mean of PARTS micro-batches."""
    x, y, *_ = problem
    model = torch.nn.Linear(FEATURES, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    generator = torch.Generator().manual_seed(1)
    with gtrace.capture.record(model, optimizer, path, noise=True):
        for _ in range(STEPS):
            optimizer.zero_grad()
            for _ in range(PARTS):
                chosen = torch.randint(SAMPLES, (BATCH,), generator=generator)
                ((model(x[chosen]) - y[chosen]).square().mean() / PARTS).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return path


def noises(result):
    found = [told for (*_, what), told in result.details.items() if what == NOISE]
    assert len(found) == STEPS
    return np.array([told["variance"] for told in found]), np.array([told["signal"] for told in found])


def test_accumulated_micro_batches_tell_the_noise_of_the_step(problem, tmp_path):
    result = gtrace.run_sweep(captured(problem, tmp_path / "run.zarr"), ["qsgdinf:bits=4"], draws=0)
    assert result.provenance["noise"] == {"from": ["micro-batches"]}
    for values, expected in zip(noises(result), problem[2:], strict=True):
        error = values.std(ddof=1) / np.sqrt(STEPS)
        assert abs(values.mean() - expected) < 4.2 * error
        assert 4.2 * error < expected / PARTS
    np.testing.assert_allclose(
        result["noise_ratio"], result["squared_error"] / noises(result)[0], rtol=1e-9, err_msg="in the order of steps"
    )


def test_clipping_scales_the_noise_as_it_scales_the_gradient(problem, tmp_path):
    clip = 0.5
    plain = gtrace.run_sweep(captured(problem, tmp_path / "plain.zarr"), ["qsgdinf:bits=4"], draws=0)
    clipped = gtrace.run_sweep(captured(problem, tmp_path / "clip.zarr", clip=clip), ["qsgdinf:bits=4"], draws=0)
    np.testing.assert_allclose(clipped["energy"], clip**2, rtol=1e-5)
    np.testing.assert_allclose(noises(clipped)[0], noises(plain)[0] * clip**2 / plain["energy"], rtol=1e-5)
    np.testing.assert_allclose(clipped["noise_ratio"], plain["noise_ratio"], rtol=1e-4)


def test_an_average_over_ranks_has_their_noise_divided(problem, tmp_path):
    """Averages of four ranks, each of which told of its own micro-batches."""
    local = captured(problem, tmp_path / "local.zarr")
    with gtrace.open_trace(local) as trace:
        numbers = trace.statistics("weight")
        steps = trace.steps("weight").tolist()
        values = [trace.read("weight", step) for step in steps]
    path = tmp_path / "reduced.zarr"
    with gtrace.create_trace(path, attrs={"world_size": 4}) as writer:
        for k, step in enumerate(steps):
            told = {name: numbers[name][k] for name in ("replicas", "replicas_norm2", "replicas_sum_norm2")}
            writer.append(step, "weight", values[k], stage="reduced", numbers=told)
            writer.commit(step)
    one, four = (gtrace.run_sweep(trace, ["qsgdinf:bits=4"], draws=0) for trace in (local, path))
    np.testing.assert_allclose(noises(four)[0], noises(one)[0] / 4, rtol=1e-5)
    np.testing.assert_allclose(noises(four)[1], noises(one)[1], rtol=1e-4)
