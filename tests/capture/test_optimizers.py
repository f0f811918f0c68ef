"""Several optimizers with layers of the same names, and what a trace says about optimizers, schedulers and batches."""

import functools

import pytest
import torch
from helpers_capture import Captured
from torch import nn
from torch.optim import lr_scheduler

import gtrace
from gtrace.capture.options import every_step, parse_steps


class Generator(nn.Sequential):
    pass


class Discriminator(nn.Sequential):
    pass


def gan(steps):
    """Train; the discriminator steps twice as often, and after the generator."""
    generator = Generator(nn.Linear(4, 150), nn.ReLU(), nn.Linear(150, 9))
    discriminator = Discriminator(nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 1))
    generators = torch.optim.Adam(generator.parameters())
    discriminators = torch.optim.Adam(discriminator.parameters())
    for _ in range(steps):
        generators.zero_grad()
        discriminator(generator(torch.randn(5, 4))).sum().backward()
        generators.step()
        for _ in range(2):
            discriminators.zero_grad()
            discriminator(generator(torch.randn(5, 4)).detach()).sum().backward()
            discriminators.step()
    return generator, discriminator


def captured(path, train, **options):
    """The trace of a training, whose models live until its end."""
    with Captured(path, **options) as run:
        kept = train()
    assert run.said == []
    del kept
    return run.trace


GENERATOR = ["0.weight", "0.bias", "2.weight", "2.bias"]
DISCRIMINATOR = [f"Discriminator.{name}" for name in GENERATOR]


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_a_gan(tmp_path, suffix):
    trace = captured(tmp_path / f"run{suffix}", lambda: gan(3))
    assert trace.attrs["model"] == "Generator, Discriminator"
    shown = [*((name, 0) for name in GENERATOR), *((name, 1) for name in DISCRIMINATOR)]
    assert [(info.name, info.optimizer) for info in trace.tensors] == shown
    assert trace.steps("Discriminator.0.weight").tolist() == list(range(6))
    one = gtrace.run_sweep(trace, ["qsgd:bits=3"], jobs=1, draws=0, tensors=["Discriminator.*"])
    assert set(one["tensor"]) == set(DISCRIMINATOR)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, [*GENERATOR, *DISCRIMINATOR]),
        ({"kind": "both"}, [*GENERATOR, *DISCRIMINATOR]),
        ({"tensors": ("Discriminator.*", "0.*")}, [*GENERATOR[:2], *DISCRIMINATOR]),
    ],
)
def test_names_do_not_depend_on_which_steps_are_recorded(path, options, names):
    # The discriminator comes to step 5 long before the generator does.
    trace = captured(path, lambda: gan(6), policy=parse_steps("5"), **options)
    assert [info.name for info in trace.tensors if info.kind == "weight"] == names
    modules = {info.name for info in trace.tensors if info.kind == "neural" and info.optimizer == 1}
    assert "kind" not in options or {"opt1/Discriminator.0", "opt1/Discriminator.2"} <= modules


def test_one_model_over_two_optimizers_and_a_second_phase(path):
    """Names stay; of the same parameter in two optimizers the reader tells the later one by its number."""

    def train():
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        for parts in ([model[0], model[1]], [model]):
            optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
            model(torch.ones(2, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        return model

    trace, names = captured(path, train), ["0.weight", "0.bias", "1.weight", "1.bias"]
    shown = [(info.name, info.optimizer) for info in trace.tensors]
    assert shown == [*zip(names, (0, 0, 1, 1), strict=True), *((f"opt2/{name}", 2) for name in names)]
    for name in names:
        assert trace.read(f"opt2/{name}", 0).tobytes() == trace.read(name, 0, optimizer=2).tobytes()
        assert trace.read(f"opt2/{name}", 0).tobytes() != trace.read(name, 0).tobytes()
    swept = gtrace.run_sweep(trace, ["terngrad"], jobs=1, draws=0)
    assert set(swept["tensor"]) == {name for name, _ in shown}


STEPS, SAMPLES = 12, 5


def train(steps=STEPS, make=torch.optim.SGD, schedule=None, epoch=1, batches=1, rows=lambda _step: SAMPLES, **settings):
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
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def facts(path, every=1, **settings):
    return captured(path, functools.partial(train, **settings), policy=every_step(every)).optimizer_facts()


SGD = {"kind": "SGD", "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0, "decoupled": False}
ADAM = {"kind": "Adam", "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled": False}
NESTEROV = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}


class Own(torch.optim.Adam):
    """The same rule."""


class Lion(torch.optim.SGD):
    """Another rule."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(self.param_groups[0]["lr"] * p.grad.sign())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (NESTEROV, {**SGD, **NESTEROV}),
        ({"momentum": 0.9, "dampening": 0.5}, {**SGD, "momentum": 0.9, "dampening": 0.5}),
        ({"make": torch.optim.Adam, "weight_decay": 0.1}, {**ADAM, "weight_decay": 0.1}),
        ({"make": Own, "betas": (0.8, 0.99), "eps": 1e-4}, {**ADAM, "betas": (0.8, 0.99), "eps": 1e-4}),
        ({"make": torch.optim.AdamW}, {**ADAM, "kind": "AdamW", "weight_decay": 0.01, "decoupled": True}),
        ({"make": torch.optim.Adam, "amsgrad": True}, {**ADAM, "kind": "AMSGrad"}),
        ({"make": torch.optim.RMSprop}, {"kind": "RMSprop", "momentum": 0.0, "decoupled": False}),
        ({"make": Lion}, {"kind": "Lion", "decoupled": None}),
        ({"batches": 3}, {"batch_size": 3 * SAMPLES}),
        ({"rows": lambda step: 2 if step == 6 else 8}, {"batch_size": 8}),
        ({"rows": lambda step: 2 + step}, {"batch_size": 8, "varies": ("batch_size",)}),
    ],
)
def test_the_update_rule_and_the_size_of_batches(path, settings, expected):
    found, expected = facts(path, **settings), {"varies": (), "batch_size": SAMPLES} | expected
    assert {name: getattr(found, name) for name in expected} == expected
    assert (found.steps_seen, found.length, found.planned_steps) == (STEPS, STEPS, None)
    assert gtrace.open_trace(path).attrs["batch_size"] == found.batch_size


def test_groups_keep_what_sets_them_apart(path):
    def groups(model):
        first = {"params": [model[0].weight, model[2].weight]}
        return [first, {"params": [model[0].bias], "weight_decay": 0.0}, {"params": [model[2].bias], "lr": 0.1}]

    trace = captured(path, lambda: train(groups=groups, make=torch.optim.AdamW, weight_decay=0.02))
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
        (COSINE, 3, 120),
        (functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=50), 1, 50),
        (functools.partial(lr_scheduler.PolynomialLR, total_iters=30), 1, 30),
        (functools.partial(lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.1, total_iters=25), 1, 25),
        (functools.partial(lr_scheduler.LinearLR, start_factor=0.1, total_iters=25), 1, None),
        (functools.partial(lr_scheduler.CosineAnnealingLR, T_max=6), 1, None),
        (functools.partial(lr_scheduler.LambdaLR, lr_lambda=functools.partial(falls, num_training_steps=70)), 1, 70),
        (functools.partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.9**step), 1, None),
        (functools.partial(warmed, last=COSINE), 1, 44),
        (lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), COSINE(o)]), 1, 40),
        (COSINE, STEPS + 1, None),
    ],
)
def test_planned_steps(path, schedule, epoch, planned):
    assert facts(path, schedule=schedule, epoch=epoch).planned_steps == planned


def test_what_a_schedule_changes_is_a_median_and_no_hook_stays(path):
    schedule = functools.partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=STEPS + 1)
    alone = train(make=torch.optim.Adam, schedule=schedule)
    with Captured(path) as run:
        assert train(make=torch.optim.Adam, schedule=schedule) == alone
    assert not nn.modules.module._global_forward_pre_hooks
    found = run.trace.optimizer_facts()
    assert found.varies == ("betas",)
    assert 0.85 < found.betas[0] < 0.95
    assert found.betas[1] == 0.999
