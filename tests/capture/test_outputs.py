"""Gradients of module outputs as hooks see them, against those that autograd gives when asked."""

import dataclasses
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from helpers_hooks import module
from torch import nn
from torch.utils.checkpoint import checkpoint

from gtrace.capture.neural import NeuralRecorder
from gtrace.capture.options import CaptureOptions
from gtrace.torch_hooks.naming import ModulePaths


class Watch:
    """Hooks around a block; what arrived is kept in the order of calls."""

    def __init__(self, *models, keeps=lambda _name: True, on_gradient=None):
        self.gradients, self.errors, self.paused = {}, [], False
        about = {"keeps": keeps, "paused": lambda: self.paused, "on_error": self.errors.append}
        self.hooks = NeuralRecorder(CaptureOptions(Path("run.zarr")), lambda: models, scan=False, say=print, **about)
        self.hooks.paths = ModulePaths(lambda: models, scan=False)
        self.hooks._store = on_gradient or self._keep
        self.hooks.listening = True

    def _keep(self, output, gradient):
        key = (output.order, output.place, output.name.name)
        assert not gradient.requires_grad
        self.gradients[key] = self.gradients.get(key, 0) + gradient.clone()

    def __enter__(self):
        self.hooks.install()
        return self

    def __exit__(self, *_):
        self.hooks.remove()
        assert self.errors == []

    @property
    def names(self):
        return [path for *_, path in sorted(self.gradients)]

    def of(self, name):
        return [self.gradients[key] for key in sorted(self.gradients) if key[2] == name]


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def unchanged(model, x):
    """The gradients of the weights are bit for bit the same with the hooks; returns what these saw."""
    plain = gradients(model, x)
    with Watch(model) as watch:
        assert all(map(torch.equal, gradients(model, x), plain))
    return watch


def test_a_relu_that_works_in_place():
    watch = unchanged(nn.Sequential(nn.Linear(3, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)), torch.randn(5, 3))
    assert watch.names == ["0", "1", "2"]
    (before,), (after,) = watch.of("0"), watch.of("1")
    assert torch.equal(before, torch.where(before != 0, after, torch.zeros(())))
    assert (before != after).any()


def test_a_view_that_is_changed_in_place():
    """Autograd replaces the function behind the view, and with it the hook: no gradient, and no harm."""

    def forward(self, x):
        y = self.flat(self.body(x).reshape(3, 2, 3))
        y.mul_(2)
        return y

    watch = unchanged(module(forward, body=nn.Linear(4, 6), flat=nn.Flatten()), torch.randn(3, 4))
    assert watch.names == ["body"]
    assert watch.hooks.watched == {"body": True, "flat": False}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules_count_once(reentrant):
    def forward(self, x):
        return checkpoint(self.block, self.first(x), use_reentrant=reentrant)

    model = module(forward, first=nn.Linear(3, 4), block=nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    x = torch.randn(5, 3)
    watch = unchanged(model, x)
    assert sorted(watch.names) == ["block.0", "block.1", "first"]
    hidden = model.block[0](model.first(x))
    (expected,) = torch.autograd.grad(model.block[1](hidden).square().sum(), hidden)
    assert torch.equal(watch.of("block.0")[0], expected)


def test_structured_outputs():
    @dataclasses.dataclass
    class Result:
        scores: torch.Tensor
        note: str

    class Many(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return OrderedDict(a=[y, torch.tensor([1])], b=(Result(y * 2, "x"), None), c={"d": y.detach()})

    model = Many(3, 2)
    with Watch(model) as watch:
        out = model(torch.randn(4, 3))
        (out["a"][0].sum() + 5 * out["b"][0].scores.sum()).backward()
    assert [place for _, place, _ in sorted(watch.gradients)] == [0, 2]
    assert [set(g.flatten().tolist()) for _, g in sorted(watch.gradients.items())] == [{11.0}, {5.0}]


def test_nothing_is_watched_without_gradients_or_need():
    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    with Watch(model) as watch:
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(torch.ones(1, 3))
        watch.hooks.listening = False
        loss = model(x).sum()
        watch.hooks.listening = True
        loss.backward()
        watch.paused = True
        model(x).sum().backward()
        watch.paused = False
        # Function transforms and tensors without values are left alone.
        weights = dict(model.named_parameters())
        torch.func.grad(lambda w: torch.func.functional_call(model, w, x).sum())(weights)
        nn.Linear(3, 2, device="meta")(torch.ones(1, 3, device="meta"))
        assert (watch.gradients, set(watch.hooks.watched)) == ({}, set())
        loss = model(x).sum()
        watch.hooks.listening = False
        loss.backward()
        assert watch.gradients == {}
    with Watch(model, keeps=lambda name: name.name != "Linear") as watch:
        model(x).sum().backward()
        assert watch.hooks.watched == {}


def test_an_error_in_the_observer_does_not_stop_training():
    def fail(_output, _gradient):
        raise OSError("full")

    model = nn.Linear(3, 2)
    watch = Watch(model, on_gradient=fail)
    watch.hooks.install()
    model(torch.ones(1, 3)).sum().backward()
    watch.hooks.remove()
    assert [str(error) for error in watch.errors] == ["full"]
    assert model.weight.grad is not None
