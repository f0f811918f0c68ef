"""What is measured on the averaged gradient of a training, against plain numpy and against no measuring at all."""

import json
from itertools import permutations
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers_training import Regression

from gtrace.training import Recipe, Study
from gtrace.training.measure import Measurement


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
