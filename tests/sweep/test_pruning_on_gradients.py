"""Pruning on the gradients of a network as it learns: how near each rule comes to the sparsity that is asked for."""

import json

import numpy as np
import pytest
import torch

import gtrace
from gtrace.training import load_task

SPARSITIES = [round(0.5 + 0.1 * k, 2) for k in range(5)]
RULES = ("exact", "lognormal", "normal", "topk")
STEPS = (0, 1, 40, 80)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Gradients of weights and of layer outputs; every other batch is smaller."""
    path = tmp_path_factory.mktemp("trace") / "run.zarr"
    torch.manual_seed(0)
    task = load_task("digits-cnn")
    model = task.model()
    optimizer = task.optimizer(model, task.recipe.lr)
    random = np.random.default_rng(0)
    with gtrace.capture.record(model, optimizer, path, steps=",".join(map(str, STEPS)), kind="both"):
        for step in range(STEPS[-1] + 1):
            optimizer.zero_grad()
            task.loss(model, task.batch(random, 32 if step % 2 == 0 else 20)).backward()
            optimizer.step()
    return path


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


def test_batches_of_another_size_are_pruned_by_the_threshold_of_the_step_before(trace):
    result = gtrace.run_sweep(trace, ["prune:threshold=lognormal"], kind="neural")
    sizes = dict(zip(result["step"].tolist(), result["n"].tolist(), strict=True))
    assert sizes[1] != sizes[0]
    second = (result["step"] == 1) & (result["draw"] == 0)
    assert set(result["fitted_on"][second]) == {"previous"}
    assert (np.abs(result["sparsity"][second] - 0.8) < 0.25).all()
