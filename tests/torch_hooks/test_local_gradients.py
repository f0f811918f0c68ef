"""Gradients of one process before they are averaged; what averages them is imitated here."""

import gc
import weakref

import pytest
import torch
from torch import nn

from gtrace.torch_hooks.gradients import LOCAL, REDUCED, LocalGradients


class Watched:
    """One parameter, whose gradient at each backward pass is what the test says."""

    def __init__(self, *, strict=True):
        self.calls, self.local = [], LocalGradients(self._guarded)
        self.weight = nn.Parameter(torch.zeros(3))
        self.local.watch([self.weight], strict=strict)

    def _guarded(self, function, *arguments):
        self.calls.append(function.__name__)
        function(*arguments)

    def backward(self, *values):
        (self.weight * torch.tensor(values)).sum().backward()

    def step(self):
        self.local.consume(torch.optim.SGD([self.weight], lr=0.0))
        self.weight.grad = None

    def gradient(self, scale=1.0):
        value, stage = self.local.gradient(self.weight, scale)
        return (None if value is None else value.tolist()), stage


@pytest.fixture
def watched():
    return Watched()


def test_micro_batches_after_an_average_are_what_they_add(watched):
    watched.backward(2.0, 4.0, 6.0)
    watched.weight.grad.copy_(torch.tensor([10.0, 20.0, 30.0]))
    watched.backward(1.0, 1.0, 1.0)
    assert watched.gradient() == ([3.0, 5.0, 7.0], LOCAL)
    assert watched.gradient(0.5) == ([6.0, 10.0, 14.0], LOCAL)


@pytest.mark.parametrize("to_none", [True, False])
def test_what_is_set_to_zero_before_the_step_is_no_part_of_it(watched, to_none):
    """As in a GAN: another loss reaches the parameter first."""
    watched.backward(2.0, 4.0, 6.0)
    watched.weight.grad = None if to_none else torch.zeros(3)
    watched.backward(1.0, 1.0, 1.0)
    assert watched.gradient() == ([1.0, 1.0, 1.0], LOCAL)
    watched.step()
    assert watched.gradient() == (None, LOCAL), "one of the step before"
    # Where nothing averages during the backward pass, what is there is what the optimizer uses.
    plain = Watched(strict=False)
    plain.weight.grad = torch.ones(3)
    assert plain.gradient() == ([1.0] * 3, REDUCED)


def test_hooks_go_and_hold_nothing(watched):
    watched.local.remove()
    watched.backward(1.0, 2.0, 3.0)
    assert watched.calls == []
    weight = nn.Parameter(torch.zeros(3))
    watched.local.watch([weight])
    weight.sum().backward()
    there = weakref.ref(weight)
    del weight
    gc.collect()
    assert there() is None
