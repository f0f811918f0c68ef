"""Pruning on the gradients of a network as it learns: how near each rule comes to the sparsity that is asked for."""

import json
import math

import numpy as np
import pytest
import torch

import gtrace
from gtrace import fitting
from gtrace.sketch import MomentSketch
from gtrace.sweep import EXPECTATION
from gtrace.training import load_task

SPARSITIES = [round(0.5 + 0.05 * k, 2) for k in range(10)]
RULES = ("exact", "lognormal", "normal", "topk")
STEPS = (0, 1, 40, 80)


@pytest.fixture(scope="module", params=["digits-mlp", "digits-cnn"])
def trace(request, tmp_path_factory):
    """Gradients of weights and of layer outputs; every other batch is smaller."""
    path = tmp_path_factory.mktemp("trace") / "run.zarr"
    torch.manual_seed(0)
    task = load_task(request.param)
    model = task.model()
    optimizer = task.optimizer(model, task.recipe.lr)
    random = np.random.default_rng(0)
    with gtrace.capture.record(model, optimizer, path, steps=",".join(map(str, STEPS)), kind="both"):
        for step in range(STEPS[-1] + 1):
            optimizer.zero_grad()
            task.loss(model, task.batch(random, 32 if step % 2 == 0 else 20)).backward()
            optimizer.step()
    return path


def cosine(sketch, asked):
    return fitting.pruned_cosine(fitting.threshold("exact", min(float(asked), 1 - 1e-12), sketch), sketch)


def by_rule(trace, kind):
    """|expected sparsity - max(asked, zeros that are there)| by rule, then by (tensor, step, asked)."""
    codecs = [gtrace.codec("prune", sparsity=s, threshold=rule) for s in SPARSITIES for rule in RULES]
    result = gtrace.run_sweep(trace, [*codecs, "none"], draws=0, refit="each", kind=kind, jobs=2)
    rows = list(result.rows())
    there = {(r["tensor"], r["step"]): r["sparsity"] for r in rows if r["method"] == "none"}
    off = {rule: {} for rule in RULES}
    for r in rows:
        if r["method"] == "prune":
            asked = r["sparsity_asked"]
            miss = abs(r["sparsity"] - max(asked, there[r["tensor"], r["step"]]))
            off[json.loads(r["params"])["threshold"]][r["tensor"], r["step"], asked] = miss
    return off


@pytest.mark.parametrize("kind", ["weight", "neural"])
def test_the_exact_rule_reaches_the_sparsity_of_every_layer(trace, kind):
    off = by_rule(trace, kind)
    tensors = {tensor for tensor, _, _ in off["exact"]}
    assert len(tensors) >= 4
    assert len(off["exact"]) == len(tensors) * len(STEPS) * len(SPARSITIES)
    assert max(off["exact"].values()) <= 3e-4
    mean = {rule: np.mean(list(values.values())) for rule, values in off.items()}
    assert mean["exact"] < mean["lognormal"] / 20
    assert mean["lognormal"] < mean["normal"] < mean["topk"]


def test_what_is_realized_lies_within_the_scatter_of_draws(trace):
    result = gtrace.run_sweep(trace, ["prune:sparsity=0.7"], draws=8, refit="each", kind="neural", jobs=2)
    for tensor in set(result["tensor"]):
        for step in STEPS:
            here = (result["tensor"] == tensor) & (result["step"] == step)
            n = int(result["n"][here][0])
            expected = float(result["sparsity"][here & (result["draw"] == EXPECTATION)][0])
            realized = result["sparsity"][here & (result["draw"] >= 0)]
            scatter = math.sqrt(expected * (1 - expected) / n)
            assert abs(realized.mean() - expected) <= 4.5 * scatter / math.sqrt(8) + 1e-9
            assert realized.std() <= 3 * scatter + 1e-9


@pytest.mark.parametrize("kind", ["weight", "neural"])
def test_every_tensor_has_the_sparsity_that_is_asked_for_by_default(trace, kind):
    result = gtrace.run_sweep(trace, ["prune:sparsity=0.9", "topk-prune:sparsity=0.9", "none"], draws=0, kind=kind)
    there = result["sparsity"][result["method"] == "none"]
    for method, off in (("prune", 3e-4), ("topk-prune", 0.02)):
        found = result["method"] == method
        assert set(result["fitted_on"][found]) == {"itself"}
        if method == "topk-prune":
            # Of a layer with a few values only whole ones can be cut, and ties stay together.
            found &= result["n"] > 200
            there = result["sparsity"][(result["method"] == "none") & (result["n"] > 200)]
        miss = np.abs(result["sparsity"][found] - np.maximum(0.9, there))
        assert miss.mean() <= off


def test_floats_keep_what_absmax_keeps_and_more(trace):
    """By default, on weight gradients: the scale is the tensor's own, whatever the schedule of fits."""
    specs = ["fp:e2m1", "fp:e4m3", "fp:e5m2", "fp:bits=8"]
    result = gtrace.run_sweep(trace, [*specs, *(f"{spec},scale=absmax" for spec in specs)], draws=0)
    error = {}
    for spec in dict.fromkeys(result["codec"].tolist()):
        here = result["codec"] == spec
        assert set(result["fitted_on"][here]) == {"itself"}
        error[spec] = result["squared_error"][here].sum() / result["energy"][here].sum()
        if "absmax" not in spec:
            bound = result["squared_error"][result["codec"] == f"{spec},scale=absmax"]
            assert (result["squared_error"][here] <= bound * (1 + 1e-12)).all()
    assert error["fp:e2m1"] < 0.05
    assert error["fp:bits=8"] <= min(error["fp:e4m3"], error["fp:e5m2"]) < 0.0016


def test_batches_of_another_size_are_pruned_by_the_threshold_of_the_step_before(trace):
    result = gtrace.run_sweep(trace, ["prune:threshold=lognormal"], kind="neural")
    sizes = dict(zip(result["step"].tolist(), result["n"].tolist(), strict=True))
    assert sizes[1] != sizes[0]
    second = (result["step"] == 1) & (result["draw"] == 0)
    assert set(result["fitted_on"][second]) == {"previous"}
    assert (np.abs(result["sparsity"][second] - 0.8) < 0.25).all()


@pytest.mark.parametrize("kind", ["weight", "neural"])
def test_heterogeneous_allocation_never_loses_on_real_gradients(trace, kind):
    with gtrace.open_trace(trace) as opened:
        for step in STEPS:
            names = [info.name for info in opened.tensors if info.kind == kind]
            sketches = [MomentSketch.of(opened.read(name, step, kind=kind), norm="none") for name in names]
            sizes = [sketch.size for sketch in sketches]
            there = np.array([sketch.zeros / sketch.size for sketch in sketches])
            for s in (0.5, 0.7, 0.8, 0.9, 0.95):
                alike = np.maximum(s, there)
                mean = float(np.average(alike, weights=sizes))
                shares = fitting.allocate_sparsity(sketches, mean)
                assert np.average(shares, weights=sizes) == pytest.approx(mean, abs=1e-9)
                mixed, plain = (
                    np.average([cosine(sketch, a) for sketch, a in zip(sketches, asked, strict=True)], weights=sizes)
                    for asked in (shares, alike)
                )
                assert mixed >= plain - 1e-12
