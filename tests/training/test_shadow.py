import copy

import numpy as np
import pytest
import torch
from helpers_training import Regression, without_times
from torch import nn

import gtrace
from gtrace.training import Evaluation, RefitSchedule, Study, load_task
from gtrace.training.neural import NeuralCompression, ShadowError, ShadowSummary, compare, shadow
from gtrace.types import Key

PARTS = ("cosine_alone", "error_alone", "cosine", "error")


class Network(nn.Module):
    """Dropout, batch normalization, an in-place activation, a layer used twice, and a tied weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 8)
        self.norm = nn.BatchNorm1d(8)
        self.relu = nn.ReLU(inplace=True)
        self.twice = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.twice.weight
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        x = self.dropout(self.relu(self.norm(self.first(x))))
        return self.head(self.tied(self.relu(self.twice(self.relu(self.twice(x))))))


class Difficult(Regression):
    def model(self):
        return Network()

    def evaluate(self, model):
        return Evaluation(self.loss(model, (self._x, self._y)).item(), None)


def run(task, spec="qsgdinf:bits=3", **settings):
    study = Study(task, [spec], kind="neural", layers="all", **settings)
    return study, list(study.records())


@pytest.mark.parametrize("task", [Difficult(), "digits-mlp", "char-lstm"])
def test_training_with_shadows_ends_bit_identical_to_training_without(task):
    if task == "char-lstm":
        task = load_task(task)
        task._test = task._test[:200]  # reading all of it takes longer than the training
    settings = {"steps": 5, "batch_size": 2, "workers": 2, "refit": "0,+2"}
    with_, found = run(task, shadow=2, **settings)
    without, plain = run(task, **settings)
    for a, b in zip(with_._runs, without._runs, strict=True):
        one, other = ({**r._model.state_dict(), **r._optimizer.state_dict()["state"]} for r in (a, b))
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert without_times(r for r in found if r["type"] != "shadow") == without_times(plain)
    assert sorted({r["step"] for r in found if r["type"] == "shadow"}) == [0, 2, 4]
    assert without.results[1].shadow.steps == 0


def hooked(model, spec, refit="once"):
    schedule = RefitSchedule.parse(refit)
    return NeuralCompression(
        model, gtrace.codec(spec), workers=1, seed=0, refit=schedule, nonfinite="skip", layers="all"
    )


def shadows(model, spec):
    """tensor -> its shadow, after one batch."""
    neural = hooked(model, spec)
    with neural.batch(0) as batch:
        loss = model(torch.randn(8, 12)).square().mean()
        loss.backward(retain_graph=True)
        found = shadow(batch, loss, dict(model.named_parameters()), neural.owners)
    return {item.tensor: item for item in found}


def naive(model, batch, codec, worker=0, seed=0):
    """Cosines and errors on a plain MLP, from formulas and one loop over layers."""
    x, y = batch
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    names = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    inputs, masks = [x], []
    with torch.no_grad():
        for layer in layers[:-1]:
            out = layer(inputs[-1])
            masks.append(out > 0)
            inputs.append(torch.relu(out))
        out = layers[-1](inputs[-1])
        start = (torch.softmax(out, 1) - nn.functional.one_hot(y, out.shape[1])) / len(y)

    def coded(values, name):
        flat = values.numpy().reshape(-1)
        state = codec.init(flat.size)
        payload = codec.encode(state, flat, Key.derive(seed, tensor=name, step=0, worker=worker))
        return torch.from_numpy(codec.decode(b"", payload, flat.size)).reshape(values.shape)

    def gradients(compressed):
        d, found = start, {}
        with torch.no_grad():
            for k in range(len(layers) - 1, -1, -1):
                if names[k] in compressed:
                    d = coded(d, names[k])
                found[f"{names[k]}.weight"], found[f"{names[k]}.bias"] = d.T @ inputs[k], d.sum(0)
                d = d @ layers[k].weight * masks[k - 1] if k else None
        return {name: g.double().reshape(-1).numpy() for name, g in found.items()}

    exact, every = gradients(()), gradients(names)
    alone = {f"{name}.{kind}": gradients([name])[f"{name}.{kind}"] for name in names for kind in ("weight", "bias")}

    def apart(a, b):
        return [float(a @ b / np.sqrt((a @ a) * (b @ b))), float(np.sqrt(((b - a) ** 2).sum() / (a @ a)))]

    return {name: apart(exact[name], alone[name]) + apart(exact[name], every[name]) for name in exact}


@pytest.mark.parametrize("spec", ["int8", "bf16", "terngrad:coder=fixed", "qsgdinf:bits=3,coder=fixed"])
def test_figures_are_those_of_a_plain_reimplementation(spec):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 16), nn.ReLU(inplace=True), nn.Linear(16, 5))
    x, y = torch.randn(9, 12), torch.randint(5, (9,))
    codec = gtrace.codec(spec)
    expected = naive(model, (x, y), codec)
    # A schedule without a step before the first: codecs are as they were made.
    neural = hooked(model, spec, refit="9")
    with neural.batch(0) as batch:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        before = {name: p.grad.clone() for name, p in model.named_parameters()}
        found = shadow(batch, loss, dict(model.named_parameters()), neural.owners)
    assert [item.tensor for item in found] == [name for name, _ in model.named_parameters()]
    for item in found:
        assert [getattr(item, part) for part in PARTS] == pytest.approx(expected[item.tensor], rel=1e-3, abs=1e-6)
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, before[name])
    last = found[-1]
    assert (last.cosine_alone, last.error_alone) == (last.cosine, last.error)
    assert found[0].error > found[0].error_alone > 0


def test_the_last_layer_of_a_difficult_model_and_the_tied_one():
    """Alone means every output of every module that has the weight; nothing of it is counted."""
    torch.manual_seed(2)
    model, task = Network(), Difficult()
    neural = hooked(model, "int8", refit="9")
    assert neural.owners["twice.weight"] == {"twice", "tied"}
    with neural.batch(0) as batch:
        loss = task.loss(model, task.batch(np.random.default_rng(0), 8))
        loss.backward(retain_graph=True)
        counted = copy.deepcopy(neural._tally)
        found = {item.tensor: item for item in shadow(batch, loss, dict(model.named_parameters()), neural.owners)}
        # first, norm, head once; twice twice; tied with twice for the weight, and alone for its bias.
        assert batch.previewed == 1 + 1 + 1 + 3 + 2 + 1
    after = neural.collect()[0]
    for name in ("payload_bits", "float32_bits", "squared_error"):
        assert getattr(counted, name) == getattr(after, name)
    assert found["head.weight"].cosine_alone == found["head.weight"].cosine
    # Normalization takes out what the bias before it adds: its exact gradient is nothing but rounding.
    del found["first.bias"]
    for name, item in found.items():
        assert 0.99 < item.cosine_alone <= 1, name
        assert 0 < item.error_alone < 0.1, name


def test_a_lossless_codec_has_no_error_and_a_parameter_without_a_hooked_output_none_of_its_own():
    class Bare(nn.Module):
        """Uses its layer's weight without calling it."""

        def __init__(self):
            super().__init__()
            self.inside, self.head = nn.Linear(12, 8), nn.Linear(8, 1)

        def forward(self, x):
            return self.head(nn.functional.linear(x, self.inside.weight))

    torch.manual_seed(0)
    for item in shadows(Network(), "none").values():
        assert item.error == item.error_alone == 0
        assert item.cosine == pytest.approx(1, abs=1e-12)
    found = shadows(Bare(), "int8")
    assert "inside.bias" not in found
    assert np.isnan(found["inside.weight"].cosine_alone)
    assert 0 < found["inside.weight"].error < 0.1


def test_the_summary_of_a_run():
    study, found = run(Difficult(), steps=6, shadow=3)
    summary = study.results[1].shadow
    logged = [r for r in found if r["type"] == "shadow"]
    assert {r["run"] for r in logged} == {"qsgdinf:bits=3"}
    assert summary.steps == 2
    assert summary.seconds > 0
    for item in summary.tensors:
        own = [[r[part] for part in PARTS] for r in logged if r["tensor"] == item.tensor]
        assert len(own) == 2
        assert [getattr(item, part) for part in PARTS] == pytest.approx(np.mean(own, axis=0))
    assert summary.cosine == pytest.approx(np.mean([item.cosine for item in summary.tensors]))
    assert summary.worst.cosine == min(item.cosine for item in summary.tensors)


def test_a_gradient_of_zero_has_no_angle():
    assert np.isnan(compare(np.zeros(3), np.ones(3))).all()
    assert compare(np.ones(3), np.zeros(3)) == (0, 1)
    summary = ShadowSummary()
    assert np.isnan(summary.cosine)
    assert summary.worst is None
    summary.add([ShadowError("a", 1.0, 0.0, float("nan"), 1.0), ShadowError("b", 1.0, 0.0, 0.5, 1.0)])
    assert (summary.worst.tensor, summary.cosine) == ("b", 0.5)
