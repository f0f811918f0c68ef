"""From micro-batches to a noise ratio: linear regression, whose gradients of single samples are known exactly."""

import numpy as np
import pytest
import torch

import gtrace
from gtrace.sweep.gradient_noise import NOISE

SAMPLES, FEATURES, PARTS, BATCH, STEPS = 40, 30, 4, 3, 400
FEW = 40


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


def captured(problem, path, *, clip=None, steps=STEPS):
    """A trace of steps that stay at weights 0, each the mean of PARTS micro-batches."""
    x, y, *_ = problem
    model = torch.nn.Linear(FEATURES, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    generator = torch.Generator().manual_seed(1)
    with gtrace.capture.record(model, optimizer, path, noise=True):
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(PARTS):
                chosen = torch.randint(SAMPLES, (BATCH,), generator=generator)
                ((model(x[chosen]) - y[chosen]).square().mean() / PARTS).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return path


@pytest.fixture(scope="module")
def plain(problem, tmp_path_factory):
    """The trace, and a sweep of it."""
    path = captured(problem, tmp_path_factory.mktemp("noise") / "run.zarr")
    return path, gtrace.run_sweep(path, ["qsgdinf:bits=4"], draws=0)


def noises(result):
    found = [told for (*_, what), told in result.details.items() if what == NOISE]
    return np.array([told["variance"] for told in found]), np.array([told["signal"] for told in found])


def test_accumulated_micro_batches_tell_the_noise_of_the_step(problem, plain):
    result = plain[1]
    assert result.provenance["noise"] == {"from": ["micro-batches"]}
    for values, expected in zip(noises(result), problem[2:], strict=True):
        assert values.size == STEPS
        error = values.std(ddof=1) / np.sqrt(STEPS)
        assert abs(values.mean() - expected) < 4.2 * error
        assert 4.2 * error < expected / PARTS
    np.testing.assert_allclose(
        result["noise_ratio"], result["squared_error"] / noises(result)[0], rtol=1e-9, err_msg="in the order of steps"
    )


def test_clipping_scales_the_noise_as_it_scales_the_gradient(problem, plain, tmp_path):
    clip, plain = 0.5, plain[1]
    path = captured(problem, tmp_path / "clip.zarr", clip=clip, steps=FEW)
    clipped = gtrace.run_sweep(path, ["qsgdinf:bits=4"], draws=0)
    assert len(clipped["energy"]) == FEW
    np.testing.assert_allclose(clipped["energy"], clip**2, rtol=1e-5)
    np.testing.assert_allclose(noises(clipped)[0], noises(plain)[0][:FEW] * clip**2 / plain["energy"][:FEW], rtol=1e-5)
    np.testing.assert_allclose(clipped["noise_ratio"], plain["noise_ratio"][:FEW], rtol=1e-4)


def test_an_average_over_ranks_has_their_noise_divided(plain, tmp_path):
    """Averages of four ranks, each of which told of its own micro-batches."""
    path = tmp_path / "reduced.zarr"
    with gtrace.open_trace(plain[0]) as trace, gtrace.create_trace(path, attrs={"world_size": 4}) as writer:
        numbers = trace.statistics("weight")
        for k, step in enumerate(trace.steps("weight").tolist()[:FEW]):
            told = {name: numbers[name][k] for name in ("replicas", "replicas_norm2", "replicas_sum_norm2")}
            writer.append(step, "weight", trace.read("weight", step), stage="reduced", numbers=told)
            writer.commit(step)
    four, one = noises(gtrace.run_sweep(path, ["qsgdinf:bits=4"], draws=0)), noises(plain[1])
    assert four[0].size == FEW
    np.testing.assert_allclose(four[0], one[0][:FEW] / 4, rtol=1e-5)
    np.testing.assert_allclose(four[1], one[1][:FEW], rtol=1e-4)
