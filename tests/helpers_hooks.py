"""Shared by the tests of the hooks: what they tell of a loop, and the smallest thing to train."""

import torch
from torch import nn

from gtrace.torch_hooks.hooks import TrainingHooks


class Watch:
    """Hooks that keep each step with copies of its gradients."""

    def __init__(self, wants=lambda *_: True, on_step=None, optimizers=None, **more):
        self.steps, self.gradients, self.errors = [], [], []
        self.hooks = TrainingHooks(wants, on_step or self.keep, self.errors.append, optimizers, **more)

    def keep(self, step):
        self.steps.append(step)
        parameters = [p for group in step.optimizer.param_groups for p in group["params"]]
        self.gradients.append([None if p.grad is None else p.grad.detach().clone() for p in parameters])

    def __getattr__(self, name):
        return getattr(self.hooks, name)

    def __enter__(self):
        self.hooks.install()
        return self

    def __exit__(self, *_):
        self.hooks.remove()
        assert self.errors == []


def weight(*values):
    return nn.Parameter(torch.tensor(values or (1.0, 2.0)))


def quadratic(parameter):
    return (parameter**2).sum()


def module(forward=lambda self, *_: None, **parts):
    """A module with these parts whose call is ``forward``."""
    made = type("Net", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def descend(model, optimizer, *shape, steps=3):
    """Steps of an optimizer on the squares of what a model makes of noise of this shape."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(*shape)).square().mean().backward()
        optimizer.step()
