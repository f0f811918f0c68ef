"""torch.compile around models, steps and whole loops: same graphs, same bits, and the gradients are there."""

import numpy as np
import pytest
import torch
from helpers_capture import Captured
from torch import nn

from gtrace.capture.options import EveryStep

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of every kind, while it compiles
STEPS = 5


def train(compiled, backend):
    """Final weights, gradients of each step, and what was compiled."""
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    forward = torch.compile(model, backend=backend) if "model" in compiled else model
    gradients = []

    def clipped_step():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def iteration(x):
        optimizer.zero_grad()
        forward(x).square().mean().backward()
        step()

    step = torch.compile(clipped_step, backend=backend) if "step" in compiled else clipped_step
    run = torch.compile(iteration, backend=backend) if "loop" in compiled else iteration
    for _ in range(STEPS):
        run(torch.randn(5, 4))
        gradients.append([p.grad.clone() for p in model.parameters()])
    graphs = {name: counters["stats"][name] for name in ("calls_captured", "unique_graphs")}
    return [p.detach().clone() for p in model.parameters()], gradients, graphs


def check(tmp_path, compiled, backend, every):
    weights, gradients, graphs = train(compiled, backend)
    with Captured(tmp_path / "run.zarr", policy=EveryStep(every)) as run:
        captured = train(compiled, backend)
    assert run.said == []
    assert all(torch.equal(a, b) for a, b in zip(weights, captured[0], strict=True))
    assert captured[2] == graphs
    assert graphs["unique_graphs"] > 0
    trace = run.trace
    assert [info.name for info in trace.tensors] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for step in range(0, STEPS, every):
        for info, gradient in zip(trace.tensors, gradients[step], strict=True):
            assert np.array_equal(trace.read(info.name, step), gradient.reshape(-1).numpy())
    assert np.isfinite(trace.scalars()["loss"]).all()


@pytest.mark.capture_case("torch.compile of model, step and loop (eager, aot_eager)")
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(("compiled", "backend"), [("model and step", "eager"), ("loop", "aot_eager")])
def test_the_same_graphs_and_bits(tmp_path, compiled, backend, every):
    check(tmp_path, compiled, backend, every)
