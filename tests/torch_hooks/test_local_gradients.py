"""Gradients of one process before they are averaged; what averages them is imitated here."""

import pytest
import torch
from torch import nn

from gtrace.torch_hooks.gradients import LOCAL, REDUCED, LocalGradients
from gtrace.torch_hooks.hooks import TrainingHooks


class Watched:
    """One parameter, whose gradient at each backward pass is what the test says."""

    def __init__(self, *, strict):
        self.local = LocalGradients(lambda function, *arguments: function(*arguments))
        self.weight = nn.Parameter(torch.zeros(3))
        self.local.watch([self.weight], strict=strict)

    def backward(self, *values):
        (self.weight * torch.tensor(values)).sum().backward()

    def gradient(self):
        value, stage = self.local.gradient(self.weight, 1.0)
        return (None if value is None else value.tolist()), stage


@pytest.mark.parametrize("to_none", [True, False])
def test_what_is_set_to_zero_before_the_step_is_no_part_of_it(to_none):
    """As in a GAN: another loss reaches the parameter first."""
    watched = Watched(strict=True)
    watched.backward(2.0, 4.0, 6.0)
    watched.weight.grad = None if to_none else torch.zeros(3)
    watched.backward(1.0, 1.0, 1.0)
    assert watched.gradient() == ([1.0, 1.0, 1.0], LOCAL)
    watched.local.consume(torch.optim.SGD([watched.weight], lr=0.0))
    watched.weight.grad = None
    assert watched.gradient() == (None, LOCAL), "one of the step before"
    # Where nothing averages during the backward pass, what is there is what the optimizer uses.
    plain = Watched(strict=False)
    plain.weight.grad = torch.ones(3)
    assert plain.gradient() == ([1.0] * 3, REDUCED)


@pytest.mark.parametrize("earlier", [True, False])
def test_an_optimizer_that_was_made_before_is_watched_like_another(earlier, monkeypatch):
    """A capture around a loop, whose optimizer exists; the program averages gradients by hand, and swaps its weight."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found, replicas = [], []

    def on_step(step):
        (parameter,) = step.optimizer.param_groups[0]["params"]
        gradient, stage = step.gradient(parameter)
        found.append((gradient.tolist(), stage))
        replicas.append(step.replicas(parameter).number)

    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.0) if earlier else None
    hooks = TrainingHooks(lambda *_: True, on_step, pytest.fail, noise=True)
    hooks.install()
    try:
        optimizer = optimizer or torch.optim.SGD([weight], lr=0.0)
        for step in range(3):
            optimizer.zero_grad()
            if step == 2:
                torch.utils.swap_tensors(weight, nn.Parameter(torch.ones(2)))
            for _ in range(2):
                (weight * torch.tensor([1.0, 2.0])).sum().backward()
            weight.grad.mul_(0.5)
            optimizer.step()
    finally:
        hooks.remove()
    assert found == [([2.0, 4.0], LOCAL)] * 3
    assert replicas == [2, 2, 2]
