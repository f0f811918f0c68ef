"""Optimizers that own one parameter each and step while the backward pass goes on."""

import numpy as np
import pytest
import torch
from helpers_capture import Captured
from torch import nn

from gtrace.capture.options import EveryStep, parse_steps
from gtrace.trace import open_trace


def train(gradients=None, steps=4, fail=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Linear(2, 2))
    model[3].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in trained}

    def step(parameter):
        if gradients is not None:
            gradients[-1].append((parameter.numel(), parameter.grad.clone()))
        if fail and len(gradients) == 2 and parameter.numel() == 5:
            raise ZeroDivisionError
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(steps):
        if gradients is not None:
            gradients.append([])
        try:
            model(torch.randn(6, 3)).square().sum().backward()
        except ZeroDivisionError:
            model.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def capture(path, policy=None, **how):
    gradients = []
    with Captured(path, policy=policy or EveryStep()) as run:
        weights = train(gradients, **how)
    assert run.said == []
    return weights, gradients, run.summary


@pytest.mark.capture_case("optimizers inside the backward pass")
def test_one_stream_with_one_row_per_backward_pass(tmp_path):
    plain = train()
    weights, gradients, summary = capture(tmp_path / "run.zarr")
    assert all(torch.equal(a, b) for a, b in zip(plain, weights, strict=True))
    assert (summary.rows, summary.optimizers, summary.steps_seen) == (4, 1, 4)
    trace = open_trace(tmp_path / "run.zarr")
    assert [key.optimizer for key in trace.streams] == [0]
    assert {info.name: info.size for info in trace.tensors} == {
        "0.weight": 15,
        "0.bias": 5,
        "2.weight": 10,
        "2.bias": 2,
    }
    sizes = {info.size: info.name for info in trace.tensors}
    for step in range(4):
        for size, gradient in gradients[step]:
            assert np.array_equal(trace.read(sizes[size], step), gradient.reshape(-1).numpy())
    scalars = trace.scalars()
    assert np.isfinite(scalars["loss"]).all()
    assert scalars["lr"].tolist() == [0.01] * 4


def test_chosen_steps(tmp_path):
    _, gradients, summary = capture(tmp_path / "run.zarr", parse_steps("1,3"))
    assert (summary.rows, summary.steps_seen) == (2, 4)
    trace = open_trace(tmp_path / "run.zarr")
    expected = dict(gradients[3])[15].reshape(-1).numpy()
    assert np.array_equal(trace.read("0.weight", 3), expected)


@pytest.mark.capture_case("optimizers inside the backward pass")
def test_a_backward_pass_that_fails_does_not_mix_with_the_next(tmp_path):
    _, gradients, _ = capture(tmp_path / "run.zarr", fail=True)
    trace = open_trace(tmp_path / "run.zarr")
    assert trace.steps("0.weight").tolist() == [0, 2, 3]
    assert trace.steps("2.weight").tolist() == [0, 1, 2, 3]
    assert np.array_equal(trace.read("0.weight", 2), dict(gradients[2])[15].reshape(-1).numpy())
