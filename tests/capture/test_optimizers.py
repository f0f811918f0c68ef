"""Models of several optimizers with layers of the same names: every tensor is in the trace under a name of its own."""

import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers_capture import Captured
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gtrace
from gtrace.capture.options import parse_steps
from gtrace.trace.exporting import ExportChoice, export_trace


class Generator(nn.Sequential):
    pass


class Discriminator(nn.Sequential):
    pass


def gan(steps, *, wrap=lambda model: model):
    """Train; the discriminator steps twice as often, and after the generator."""
    torch.manual_seed(0)
    generator = wrap(Generator(nn.Linear(4, 150), nn.ReLU(), nn.Linear(150, 9)))
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
    with Captured(path, **options) as run:
        kept = train()
    assert run.said == []
    del kept
    return run.summary


GENERATOR = ["0.weight", "0.bias", "2.weight", "2.bias"]
DISCRIMINATOR = [f"Discriminator.{name}" for name in GENERATOR]


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_a_gan(tmp_path, suffix):
    path = tmp_path / f"run{suffix}"
    summary = captured(path, lambda: gan(3))
    assert (summary.optimizers, summary.tensors) == (2, 8)
    with gtrace.open_trace(path) as trace:
        assert trace.attrs["model"] == "Generator, Discriminator"
        shown = [*((name, 0) for name in GENERATOR), *((name, 1) for name in DISCRIMINATOR)]
        assert [(info.name, info.optimizer) for info in trace.tensors] == shown
        assert trace.steps("Discriminator.0.weight").tolist() == list(range(6))
        swept = gtrace.run_sweep(trace, ["qsgd:bits=3"], jobs=1, draws=0)
        assert set(swept["tensor"]) == {*GENERATOR, *DISCRIMINATOR}
        assert list(swept.warnings) == []
        one = gtrace.run_sweep(trace, ["qsgd:bits=3"], jobs=1, draws=0, tensors=["Discriminator.*"])
        assert set(one["tensor"]) == set(DISCRIMINATOR)
        made = export_trace(trace, tmp_path / "export", "npz", ExportChoice(steps=[2]))
        assert set(made.tensors) == {*GENERATOR, *DISCRIMINATOR}
        with np.load(tmp_path / "export" / "step_000002.npz") as arrays:
            assert arrays["Discriminator.2.weight"].shape == (1, 12)
            assert arrays["2.weight"].tobytes() == trace.read("2.weight", 2).tobytes()


def test_a_gan_with_one_model_in_a_wrapper(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts its own in the place
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        captured(tmp_path / "run.zarr", lambda: gan(2, wrap=DistributedDataParallel))
    finally:
        dist.destroy_process_group()
    with gtrace.open_trace(tmp_path / "run.zarr") as trace:
        assert [info.name for info in trace.tensors] == [*GENERATOR, *DISCRIMINATOR]


@pytest.mark.parametrize("kind", ["weight", "both"])
def test_names_do_not_depend_on_which_steps_are_recorded(tmp_path, kind):
    # The discriminator comes to step 5 long before the generator does.
    captured(tmp_path / "run.zarr", lambda: gan(6), policy=parse_steps("5"), kind=kind)
    with gtrace.open_trace(tmp_path / "run.zarr") as trace:
        there = [info.name for info in trace.tensors if info.kind == "weight"]
        modules = {info.name for info in trace.tensors if info.kind == "neural" and info.optimizer == 1}
    assert there == [*GENERATOR, *DISCRIMINATOR]
    assert kind == "weight" or {"opt1/Discriminator.0", "opt1/Discriminator.2"} <= modules


def test_weights_are_called_as_modules_are(tmp_path):
    """Here the discriminator steps first; the generator's forward pass comes first, which is what modules go by."""

    def train():
        torch.manual_seed(0)
        generator = Generator(nn.Linear(4, 9))
        discriminator = Discriminator(nn.Linear(9, 1))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (discriminator, generator)]
        discriminator(generator(torch.ones(2, 4))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        return generator, discriminator

    for kind, prefix in (("both", "Discriminator"), ("weight", "Generator")):
        captured(tmp_path / f"{kind}.zarr", train, kind=kind)
        with gtrace.open_trace(tmp_path / f"{kind}.zarr") as trace:
            names = {info.name for info in trace.tensors if info.kind == "weight"}
            modules = {info.name for info in trace.tensors if info.kind == "neural"}
        assert names == {"0.weight", "0.bias", f"{prefix}.0.weight", f"{prefix}.0.bias"}
        assert not modules or {"0", "Discriminator.0"} <= modules


def test_sketches_and_samples_of_a_gan(tmp_path):
    captured(tmp_path / "full.zarr", lambda: gan(2))
    gtrace.sketch_trace(tmp_path / "full.zarr", tmp_path / "small.zarr", sketch="l2:512", tensors=["Discriminator.*"])
    with gtrace.open_trace(tmp_path / "small.zarr") as trace:
        assert [info.name for info in trace.tensors] == DISCRIMINATOR
    captured(tmp_path / "cut.zarr", lambda: gan(2), max_elements=16384, tensors=("Discriminator.*", "0.*"))
    with gtrace.open_trace(tmp_path / "cut.zarr") as trace:
        assert [info.name for info in trace.tensors] == [*GENERATOR[:2], *DISCRIMINATOR]


def test_one_model_over_two_optimizers_and_a_second_phase(tmp_path):
    """Names stay; of the same parameter in two optimizers the reader tells the later one by its number."""

    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        for parts in ([model[0], model[1]], [model]):
            optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
            model(torch.ones(2, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        return model

    captured(tmp_path / "run.zarr", train)
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    with gtrace.open_trace(tmp_path / "run.zarr") as trace:
        shown = [(info.name, info.optimizer) for info in trace.tensors]
        assert shown == [*zip(names, (0, 0, 1, 1), strict=True), *((f"opt2/{name}", 2) for name in names)]
        for name in names:
            assert trace.read(f"opt2/{name}", 0).tobytes() == trace.read(name, 0, optimizer=2).tobytes()
            assert trace.read(f"opt2/{name}", 0).tobytes() != trace.read(name, 0).tobytes()
        swept = gtrace.run_sweep(trace, ["terngrad"], jobs=1, draws=0)
    assert set(swept["tensor"]) == {name for name, _ in shown}
