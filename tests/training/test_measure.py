"""What is measured on averaged gradients against plain numpy, and what noise costs against plain matrices."""

import json
import math
from itertools import permutations
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers_training import Regression
from torch import nn
from torch.nn import functional

from gtrace.noise import impulse_weight
from gtrace.report import analyze_runs
from gtrace.report.names import number
from gtrace.report.sections.training import noise_sentences
from gtrace.training import Recipe, Study
from gtrace.training.measure import GaussNewton, Measurement, NoiseAhead, outputs


class Adaptive(Regression):
    """The regression under Adam."""

    recipe: ClassVar[Recipe] = Recipe(steps=6, batch_size=8, lr=0.05)

    def optimizer(self, model, lr):
        return torch.optim.Adam(model.parameters(), lr=lr, eps=1e-4)


@pytest.mark.parametrize("task", [Regression, Adaptive])
@pytest.mark.parametrize("spec", ["qsgdinf:bits=3", "qsgdinf:bits=3,scope=model", "ef:topk:ratio=0.2"])
def test_training_that_is_measured_ends_bit_identical(task, spec):
    found = []
    for every in (None, 2):
        study = Study(task(), [spec], workers=3, measure=every)
        records = list(study.records())
        found.append([run._model.state_dict() for run in study._runs])
        measured = [r for r in records if r["type"] == "measure"]
        assert len(measured) == (0 if every is None else 6)
        assert json.dumps(study.describe()["measure"]) == ("null" if every is None else "2")
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    steps = {(r["run"], r["step"]): r for r in records if r["type"] == "step"}
    for record in measured:
        step = steps[record["run"], record["step"]]
        assert record["relative_variance"] == pytest.approx(step["relative_variance"], rel=1e-6)
        if record["run"] == "none":
            assert record["cosine"] == pytest.approx(1)
            assert record["w1"] == record["noise_ratio"] == 0
        knows = task is Adaptive and record["step"] > 0
        assert np.isfinite([record["update_error"], record["step_error"]]).all() == knows


def test_every_measure_against_numpy():
    rng = np.random.default_rng(0)
    parameters = {name: torch.nn.Parameter(torch.zeros(n)) for name, n in (("a", 40), ("b", 7))}
    optimizer = torch.optim.Adam(parameters.values(), betas=(0.9, 0.95), eps=1e-3)
    for _ in range(3):
        for p in parameters.values():
            p.grad = torch.from_numpy(rng.standard_normal(p.numel()).astype(np.float32))
        optimizer.step()
    exact = {name: list(rng.standard_normal((4, p.numel())).astype(np.float32)) for name, p in parameters.items()}
    arrived = {name: [g + rng.normal(0.1, 0.3, g.size).astype(np.float32) for g in x] for name, x in exact.items()}
    decoded = {name: np.mean(x, axis=0, dtype=np.float64).astype(np.float32) for name, x in arrived.items()}
    measurement = Measurement(optimizer, parameters)
    for name, gradients in exact.items():
        measurement.add(name, gradients, arrived[name], decoded[name])
    found = measurement.fields()

    def by_worker(tensors):
        return [{name: tensors[name][k] for name in tensors} for k in range(4)]

    def joined(tensors):
        return np.concatenate([np.asarray(tensors[name], np.float64) for name in ("a", "b")])

    g, q = joined({name: np.mean(x, axis=0) for name, x in exact.items()}), joined(decoded)
    v = joined({name: optimizer.state[p]["exp_avg_sq"].numpy() for name, p in parameters.items()})
    noise = sum(np.var(x, axis=0, ddof=1).sum() for x in exact.values()) / 4

    w1 = sum(np.abs(np.sort(np.mean(x, axis=0)) - np.sort(decoded[name])).sum() for name, x in exact.items())
    errors = [joined(a) - joined(e) for a, e in zip(by_worker(arrived), by_worker(exact), strict=True)]
    common = np.mean([one @ other for one, other in permutations(errors, 2)])

    def divisor(x):
        return np.sqrt((0.95 * v + 0.05 * x**2) / (1 - 0.95**4)) + 1e-3

    wanted = {
        "relative_variance": np.sum((q - g) ** 2) / np.sum(g**2),
        "noise_ratio": np.sum((q - g) ** 2) / noise,
        "update_error": np.sum(((q - g) / divisor(g)) ** 2) / np.sum((g / divisor(g)) ** 2),
        "step_error": np.sum((q / divisor(q) - g / divisor(g)) ** 2) / np.sum((g / divisor(g)) ** 2),
        "bias": common / np.sum(g**2),
        "w1": w1 / np.abs(g).sum(),
        "cosine": g @ q / np.sqrt((g @ g) * (q @ q)),
    }
    assert found == pytest.approx(wanted, rel=1e-5)
    together = Measurement(optimizer, parameters)
    whole = [np.concatenate(parts) for parts in zip(*exact.values(), strict=True)]
    whole_arrived = [np.concatenate(parts) for parts in zip(*arrived.values(), strict=True)]
    together.add("*", whole, whole_arrived, np.concatenate(list(decoded.values())))
    assert {**together.fields(), "w1": 0} == pytest.approx({**found, "w1": 0}, rel=1e-6)


class Classes(Regression):
    """A small network with classes as targets, and batch normalization, which has buffers."""

    name: ClassVar[str] = "classes"

    def model(self):
        return nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))

    def batch(self, random, size):
        x, y = super().batch(random, size)
        return x, (y[:, 0] > 0).long() + (y[:, 0] > 1).long()

    def criterion(self, outputs, targets):
        return functional.cross_entropy(outputs, targets)


def test_products_are_those_of_the_whole_matrix():
    task = Classes()
    torch.manual_seed(0)
    model = task.model()
    batch = task.batch(np.random.default_rng(0), 16)
    parameters, before = list(model.parameters()), [b.clone() for b in model.buffers()]
    newton = GaussNewton(task, model, batch)
    found = np.stack([newton(row) for row in np.eye(sum(p.numel() for p in parameters))])
    assert all(torch.equal(one, other) for one, other in zip(before, model.buffers(), strict=True))

    def rows(values, inputs):
        how = {"retain_graph": True, "materialize_grads": True}
        found = [torch.autograd.grad(one, inputs, **how) for one in values.flatten()]
        return torch.stack([torch.cat([part.flatten() for part in parts]) for parts in found]).double().numpy()

    scores = outputs(model, batch)
    jacobian = rows(scores, parameters)
    (slope,) = torch.autograd.grad(task.criterion(scores, batch[1]), scores, create_graph=True)
    np.testing.assert_allclose(found, jacobian.T @ rows(slope, [scores]) @ jacobian, atol=1e-6)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ratios_are_those_of_plain_matrices(kind, monkeypatch):
    task, rng = Regression(), np.random.default_rng(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 1))
    optimizer = OPTIMIZERS[kind](model.parameters())
    shapes = {name: p.shape for name, p in model.named_parameters()}
    exact = [{name: np.float32(rng.standard_normal(shape)) for name, shape in shapes.items()} for _ in range(4)]
    for name, p in model.named_parameters():
        p.grad = torch.from_numpy(exact[0][name])
    optimizer.step()
    centre = {name: np.mean([one[name] for one in exact], axis=0) for name in shapes}
    averaged = {name: np.float32(centre[name] + rng.standard_normal(shape)) for name, shape in shapes.items()}
    drawn = []
    plain = GaussNewton.__init__
    monkeypatch.setattr(GaussNewton, "__init__", lambda self, *given: drawn.append(given[-1]) or plain(self, *given))
    settings = SimpleNamespace(seed=0, steps=40, batch_size=8)
    ahead = NoiseAhead(task, model, optimizer, settings)
    found = ahead.ratio(10, exact, averaged, 0.5, 0.05)

    def joined(tensors):
        return np.concatenate([np.ravel(tensors[name]) for name, _ in model.named_parameters()]).astype(np.float64)

    inputs = np.concatenate([drawn[0][0].numpy(), np.ones((len(drawn[0][0]), 1))], 1).astype(np.float64)
    curvature = 0.5 * 2 * inputs.T @ inputs / len(inputs) + (kind != "adamw") * 0.1 * np.eye(13)
    s = np.ones(13)
    own = {"momentum": 0.9, "nesterov": True}
    if kind != "sgd":
        state = joined({name: optimizer.state[p]["exp_avg_sq"].numpy() for name, p in model.named_parameters()})
        s = (np.sqrt(state / (1 - 0.999)) + 1e-8) ** -0.5
        own = {"momentum": 0.9, "averaging": True, "decay": 0.1 * (kind == "adamw")}
    values, axes = np.linalg.eigh(s[:, None] * curvature * s)
    weight = impulse_weight(np.maximum(values, 0), 30, 0.05, **own)
    gradients = np.stack([joined(one) for one in exact])
    mean = gradients.mean(axis=0)
    error = joined(averaged) - mean
    noise = sum((weight @ (axes.T @ (s * (one - mean))) ** 2) for one in gradients) / 3 / 4
    assert found == pytest.approx(weight @ (axes.T @ (s * error)) ** 2 / noise, rel=1e-3)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_run_log_says_what_noise_costs(workers):
    codecs = ["qsgdinf:bits=2", "topk:ratio=0.2", "ef:qsgdinf:bits=2"]
    study = Study(Regression(), codecs, workers=workers, measure=2)
    records = list(study.records())
    logged = [{name: None if value != value else value for name, value in record.items()} for record in records]
    measured = [record for record in records if record["type"] == "measure"]
    for record in measured:
        ratio, known = record["filtered_ratio"], record["run"] in ("none", codecs[0])
        assert math.isfinite(ratio) == known
        assert ratio > 0 if record["run"] == codecs[0] else ratio == 0 or not known
        assert record["equivalent_batch"] == pytest.approx(8 * workers / (1 + ratio), nan_ok=True)
    assert len(measured) == 12
    (sentence,) = noise_sentences(analyze_runs([{"type": "study", **study.describe()}, *logged]))
    middle = np.median([record["equivalent_batch"] for record in measured if record["run"] == codecs[0]])
    assert f"With the noise of {codecs[0]}, a batch of {8 * workers} is as noisy as {number(middle)} " in sentence
    assert "median of 3 measured steps" in sentence
