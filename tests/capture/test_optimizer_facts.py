"""What a trace says about optimizers, schedulers and batches is what the program had."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers_capture import Captured
from helpers_hooks import module
from torch import nn
from torch.optim import lr_scheduler

import gtrace
from gtrace.capture.options import EveryStep

STEPS, ROWS = 12, 5


def train(steps=STEPS, make=torch.optim.SGD, schedule=None, epoch=1, batches=1, rows=lambda _step: ROWS, **settings):
    """Final weights of a small training; ``schedule`` makes a scheduler that steps once in ``epoch`` steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    groups = settings.pop("groups", lambda model: model.parameters())
    optimizer = make(groups(model), **{"lr": 0.01, **settings})
    scheduler = None if schedule is None else schedule(optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(batches):
            model(torch.randn(rows(step), 4)).square().mean().backward()
        optimizer.step()
        model.eval()(torch.randn(99, 4))
        model.train()
        if scheduler is not None and (step + 1) % epoch == 0:
            scheduler.step()
    return [p.detach().clone() for p in model.parameters()]


def captured(path, every=1, **settings):
    with Captured(path / "run.zarr", policy=EveryStep(every)) as run:
        train(**settings)
    assert run.said == []
    return run.trace


SGD = {"kind": "SGD", "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0, "decoupled": False}
ADAM = {"kind": "Adam", "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled": False}


NESTEROV = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}


class Own(torch.optim.Adam):
    """The same rule."""


class Lion(torch.optim.SGD):
    """Another rule."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.sign())


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({}, SGD),
        (NESTEROV, {**SGD, **NESTEROV}),
        ({"momentum": 0.9, "dampening": 0.5}, {**SGD, "momentum": 0.9, "dampening": 0.5}),
        ({"make": torch.optim.Adam, "weight_decay": 0.1}, {**ADAM, "weight_decay": 0.1}),
        ({"make": Own, "betas": (0.8, 0.99), "eps": 1e-4}, {**ADAM, "betas": (0.8, 0.99), "eps": 1e-4}),
        ({"make": torch.optim.AdamW}, {**ADAM, "kind": "AdamW", "weight_decay": 0.01, "decoupled": True}),
        ({"make": torch.optim.Adam, "amsgrad": True}, {**ADAM, "kind": "AMSGrad"}),
        ({"make": torch.optim.RMSprop}, {"kind": "RMSprop", "momentum": 0.0, "decoupled": False}),
        ({"make": Lion}, {"kind": "Lion", "decoupled": None}),
    ],
)
def test_the_update_rule(tmp_path, settings, facts):
    found = captured(tmp_path, **settings).optimizer_facts()
    assert {name: getattr(found, name) for name in facts} == facts
    assert (found.steps_seen, found.length, found.planned_steps, found.varies) == (STEPS, STEPS, None, ())
    assert found.batch_size == ROWS


def test_groups_keep_what_sets_them_apart(tmp_path):
    def groups(model):
        first = {"params": [model[0].weight, model[2].weight]}
        return [first, {"params": [model[0].bias], "weight_decay": 0.0}, {"params": [model[2].bias], "lr": 0.1}]

    trace = captured(tmp_path, groups=groups, make=torch.optim.AdamW, weight_decay=0.02)
    found = {info.name: trace.optimizer_facts().of_tensor(info.attrs) for info in trace.tensors}
    apart = {name: (own.weight_decay, round(own.lr_ratio, 6)) for name, own in found.items()}
    same = dict.fromkeys(("0.weight", "2.weight"), (0.02, 1.0))
    assert apart == {**same, "0.bias": (0.0, 1.0), "2.bias": (0.02, 10.0)}


def falls(step, num_training_steps):
    return max(0.0, 1 - step / num_training_steps)


def warmed(optimizer, last):
    first = lr_scheduler.LinearLR(optimizer, total_iters=4)
    return lr_scheduler.SequentialLR(optimizer, [first, last(optimizer)], milestones=[4])


COSINE = functools.partial(lr_scheduler.CosineAnnealingLR, T_max=40)


@pytest.mark.parametrize(
    ("schedule", "epoch", "planned"),
    [
        (COSINE, 1, 40),
        (COSINE, 3, 120),
        (functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=50), 1, 50),
        (functools.partial(lr_scheduler.PolynomialLR, total_iters=30), 1, 30),
        (functools.partial(lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.1, total_iters=25), 1, 25),
        (functools.partial(lr_scheduler.LinearLR, start_factor=0.1, total_iters=25), 1, None),
        (functools.partial(lr_scheduler.StepLR, step_size=5), 1, None),
        (functools.partial(lr_scheduler.CosineAnnealingLR, T_max=6), 1, None),
        (functools.partial(lr_scheduler.LambdaLR, lr_lambda=functools.partial(falls, num_training_steps=70)), 1, 70),
        (functools.partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.9**step), 1, None),
        (functools.partial(warmed, last=COSINE), 1, 44),
        (functools.partial(warmed, last=functools.partial(lr_scheduler.ExponentialLR, gamma=0.9)), 1, None),
        (lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), COSINE(o)]), 1, 40),
        (COSINE, STEPS + 1, None),
    ],
)
def test_planned_steps(tmp_path, schedule, epoch, planned):
    assert captured(tmp_path, schedule=schedule, epoch=epoch).optimizer_facts().planned_steps == planned


@pytest.mark.parametrize(("epoch", "planned"), [(1, 300), (7, 2100), (90, 27000)])
def test_planned_steps_if_few_steps_are_recorded(tmp_path, epoch, planned):
    schedule = functools.partial(lr_scheduler.CosineAnnealingLR, T_max=300)
    trace = captured(tmp_path, every=150, steps=295, schedule=schedule, epoch=epoch)
    assert (trace.optimizer_facts().planned_steps, trace.optimizer_facts().steps_seen) == (planned, 295)


def test_a_scheduler_that_was_made_before_the_block(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = COSINE(optimizer)
    with gtrace.capture.record(model, optimizer, tmp_path / "run.zarr"):
        for _ in range(3):
            model(torch.ones(7, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
    facts = gtrace.open_trace(tmp_path / "run.zarr").optimizer_facts()
    assert (facts.planned_steps, facts.batch_size) == (40, 7)


def test_what_a_schedule_changes_is_a_median(tmp_path):
    schedule = functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=STEPS + 1)
    facts = captured(tmp_path, make=torch.optim.Adam, schedule=schedule).optimizer_facts()
    assert facts.varies == ("betas",)
    assert 0.85 < facts.betas[0] < 0.95
    assert facts.betas[1] == 0.999


@pytest.mark.parametrize(
    ("settings", "batch", "varies"),
    [
        ({"batches": 3}, 3 * ROWS, ()),
        ({"rows": lambda step: 2 if step == 6 else 8}, 8, ()),
        ({"rows": lambda step: 2 + step}, 8, ("batch_size",)),
    ],
)
def test_batch_size(tmp_path, settings, batch, varies):
    trace = captured(tmp_path, **settings)
    facts = trace.optimizer_facts()
    assert (facts.batch_size, facts.varies, trace.attrs["batch_size"]) == (batch, varies, batch)


def test_a_model_that_takes_keywords(tmp_path):
    with Captured(tmp_path / "run.zarr") as run:
        model = module(lambda self, *, x, scale: scale * self.inner(x), inner=nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(x=torch.ones(6, 4), scale=torch.ones(1)).sum().backward()
            optimizer.step()
    assert run.trace.optimizer_facts().batch_size == 6


def test_optimizers_of_a_gan_have_facts_of_their_own(tmp_path):
    with Captured(tmp_path / "run.zarr") as run:
        make, judge = nn.Linear(2, 3), nn.Linear(3, 1)
        makes, judges = torch.optim.SGD(make.parameters(), lr=0.1), torch.optim.Adam(judge.parameters())
        for _ in range(4):
            judge(make(torch.ones(5, 2))).sum().backward()
            makes.step()
            for _ in range(2):
                judge(make(torch.ones(6, 2)).detach()).sum().backward()
                judges.step()
    facts = [run.trace.optimizer_facts(optimizer) for optimizer in range(3)]
    found = [(one.kind, one.steps_seen, one.batch_size) for one in facts]
    assert found == [("SGD", 4, 5), ("Adam", 8, 6), (None, None, 5)]


def test_nothing_changes_the_training_and_no_hook_stays(tmp_path):
    alone = train(schedule=COSINE)
    hooks = nn.modules.module._global_forward_pre_hooks
    with Captured(tmp_path / "run.zarr"):
        watched = train(schedule=COSINE)
    assert not hooks
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
