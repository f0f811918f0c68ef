"""A codec in the backward pass: what layers read, what is fitted and counted, and shadows of exact gradients."""

import copy
import functools
import itertools

import numpy as np
import pytest
import torch
from helpers_hooks import module
from helpers_training import Faulty, Regression, without_times
from torch import nn

import gtrace
from gtrace.errors import UsageError
from gtrace.sketch import MomentSketch
from gtrace.training import NonfiniteGradientError, Recipe, Study, StudyOptions, load_task, train
from gtrace.training.neural import NeuralCompression, shadow
from gtrace.types import Key


def compressed(model, codec, *, refit="once", layers="all", **options):
    chosen = gtrace.codec(codec) if isinstance(codec, str) else codec
    given = StudyOptions(kind="neural", seed=7, refit=refit, layers=layers, **options)
    return NeuralCompression(model, chosen, given.settings(Recipe(steps=1, batch_size=1, lr=0.1), ()))


def tensors(neural):
    return neural.workers[0]._tensors


def mlp(*, inplace=False):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(inplace=inplace), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))


#: places of its layers with parameters
LAYERS = ("0", "2", "4")


def data(size=9):
    random = torch.Generator().manual_seed(size)
    return torch.randn(size, 12, generator=random), torch.randint(5, (size,), generator=random)


def backward(model, batch, neural=None, *, step=0, worker=0):
    """Gradients of the parameters."""
    model.zero_grad()
    x, y = batch
    if neural is None:
        nn.functional.cross_entropy(model(x), y).backward()
    else:
        with neural.batch(step, worker):
            nn.functional.cross_entropy(model(x), y).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def coded(codec, tensor, name, *, step=0, worker=0, fit=True, state=None):
    """A gradient fitted, unless there is a state, encoded and decoded by hand."""
    values = tensor.detach().numpy().reshape(-1)
    if state is None:
        state = codec.init(values.size)
        if fit and codec.needs:
            state = codec.fit(state, MomentSketch.from_spec(values, codec.needs), step)
    payload = codec.encode(state, values, Key.derive(7, tensor=name, step=step, worker=worker))
    return torch.from_numpy(codec.decode(codec.shared(state), payload, values.size)).reshape(tensor.shape)


def watched(model, place, see):
    """Show ``see`` the gradient of the output of ``model[place]``, as it arrives in that layer's backward."""

    def hook(_module, _inputs, output):
        output.register_hook(lambda gradient: see(gradient) and None)

    model[place].register_forward_hook(hook)
    return model


def by_hand(model, batch, codec, names=LAYERS, **settings):
    """Weight gradients of :func:`mlp` in plain formulas; the gradients of these layers' outputs are coded."""
    inside, y = [batch[0]], batch[1]
    found = {}
    with torch.no_grad():
        for layer in model:
            inside.append(inside[-1].relu() if isinstance(layer, nn.ReLU) else layer(inside[-1]))
        d = (torch.softmax(inside[-1], 1) - nn.functional.one_hot(y, 5)) / len(y)
        for k, layer in reversed(list(enumerate(model))):
            if isinstance(layer, nn.Linear):
                d = coded(codec, d, str(k), **settings) if str(k) in names else d
                found[f"{k}.weight"], found[f"{k}.bias"] = d.T @ inside[k], d.sum(0)
                d = d @ layer.weight
            else:
                d = d * (inside[k + 1] > 0 if isinstance(layer, nn.ReLU) else 1 - inside[k + 1] ** 2)
    return found


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


class Reused(nn.Module):
    """One linear layer twice, a frozen one, in-place activations, and a normalization."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.shared = nn.Linear(12, 12)
        self.norm = nn.BatchNorm1d(12)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.relu(self.shared(self.frozen(x)))
        return self.head(self.relu(self.norm(self.shared(x))))


@pytest.mark.parametrize("make", [mlp, functools.partial(mlp, inplace=True), Reused])
def test_without_compression_or_outside_of_a_batch_weight_gradients_are_bit_identical(make):
    model = make()
    plain = backward(copy.deepcopy(model), data())
    same(backward(copy.deepcopy(model), data(), compressed(model, "none")), plain)
    model = make()
    neural = compressed(model, "terngrad")
    same(backward(model, data()), plain)
    with neural.batch(0), torch.no_grad():
        model(data()[0])
    assert neural.collect()[0].float32_bits == 0


@pytest.mark.parametrize("spec", ["int8", "qsgdinf:bits=3", "alq:bits=3", "terngrad"])
def test_layers_read_the_decoded_gradient(spec):
    model, settings = mlp(), {"step": 4, "worker": 1}
    found = backward(model, data(), compressed(model, spec, workers=2), **settings)
    wanted = by_hand(model, data(), gtrace.codec(spec), **settings)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [mlp, Reused])
def test_the_last_layer_is_left_out_unless_asked_for(make):
    """What reaches it comes from the loss; a view or an activation behind it changes nothing."""
    model = module(lambda self, x: torch.log_softmax(self.inside(x).reshape(-1, 5), 1), inside=make())
    plain = backward(copy.deepcopy(model), data())
    neural = compressed(model, "int8", layers="inner")
    found = backward(model, data(), neural)
    last = {name for name in plain if name.startswith(("inside.4", "inside.head"))}
    assert len(last) == 2
    for name in plain.keys() - {"inside.shared.bias"}:
        assert torch.equal(found[name], plain[name]) == (name in last)
    assert {"inside.4", "inside.head"}.isdisjoint(tensors(neural))
    assert neural.collect()[0].float32_bits == 32 * 9 * (20 + 16 if make is mlp else 3 * 12)


def test_ragged_batches_keep_what_was_fitted_until_the_schedule_says_otherwise():
    model = mlp()
    neural = compressed(model, "alq:bits=3", refit="0,+2")
    fitted, shared = [], []
    for step in range(5):
        backward(model, data(8 + step), neural, step=step)
        tally, _ = neural.collect()
        assert tally.float32_bits == 32 * (8 + step) * (20 + 16 + 5)
        shared.append(tally.shared_bits > 0)
        fitted.append(tensors(neural)["4"].sender.state.arrays["levels"].tobytes())
    assert [a == b for a, b in itertools.pairwise(fitted)] == [True, False, True, False]
    assert shared == [True, False, True, False, True]


def test_bits_are_those_of_the_payloads():
    model = mlp()
    neural = compressed(model, "qsgdinf:bits=4,coder=fixed")
    backward(model, data(16), neural)
    tally, bad = neural.collect()
    assert bad == ()
    # One norm a tensor, 4 bits a value.
    assert tally.payload_bits == 3 * 32 + 4 * 16 * (20 + 16 + 5)
    assert tally.squared_error == tally.worker_squared_error > 0
    assert 0 < tally.sparsity < 1
    assert 0 < tally.relative_variance < 1
    assert 0 < tally.fit_seconds < tally.codec_seconds
    assert neural.collect()[0].payload_bits == 0


def test_scope_model_is_fitted_to_all_layers_of_the_batch_before():
    model, codec = mlp(), gtrace.codec("alq:bits=3,scope=model")
    neural = compressed(model, codec, refit="0,+1")

    def levels():
        return neural.workers[0]._fitted.arrays["levels"]

    plain = backward(copy.deepcopy(model), data())
    same(backward(model, data(), neural), plain)
    tally, _ = neural.collect()
    assert tally.payload_bits == tally.float32_bits > 0
    assert tally.shared_bits == tally.envelope_bits == 0

    exact, twin = [], mlp()
    for place in (0, 2, 4):
        watched(twin, place, exact.append)
    backward(twin, data())
    merged = functools.reduce(MomentSketch.merge, [MomentSketch.from_spec(g.numpy(), codec.needs) for g in exact])
    state = codec.fit(codec.init(merged.size), merged, 0)
    np.testing.assert_allclose(levels(), state.arrays["levels"], rtol=1e-6)

    found = backward(model, data(5), neural, step=1)
    tally, _ = neural.collect()
    assert tally.payload_bits < tally.float32_bits / 4
    assert tally.shared_bits == 8 * len(codec.shared(state))
    # The second batch went through the levels of the first; now those of the second are there.
    assert not np.array_equal(levels(), state.arrays["levels"])
    logits = []
    backward(watched(mlp(), 4, logits.append), data(5))
    at = codec.init(logits[0].numel()).with_arrays(**state.arrays)
    decoded = coded(codec, logits[0], "4", step=1, state=at)
    torch.testing.assert_close(found["4.bias"], decoded.sum(0), rtol=1e-5, atol=1e-7)


def test_heterogeneous_pruning_keeps_the_mean_sparsity():
    """Shares come from all layers of the last refit step; sizes weigh."""
    model = mlp()
    neural = compressed(model, "prune:sparsity=0.8,allocation=heterogeneous", refit="0,+2")
    for step in range(2):
        # Both batches prune to the same mean, each layer alike and then by its share.
        backward(model, data(400), neural, step=step)
        assert neural.collect()[0].sparsity == pytest.approx(0.8, abs=0.02)
    sketches = [tensor.summary for tensor in tensors(neural).values()]
    shares = list(gtrace.fitting.allocate_sparsity(sketches, 0.8))
    assert [float(tensor.sender.state.arrays["target"]) for tensor in tensors(neural).values()] == pytest.approx(shares)
    assert max(shares) - min(shares) > 0.01
    assert np.average(shares, weights=[sketch.size for sketch in sketches]) == pytest.approx(0.8, abs=1e-6)


@pytest.mark.parametrize("codec", ["ef:topk", "dgc", "signum", "powersgd", "mcgq:accumulate=true"])
def test_codecs_with_memory_are_refused(codec):
    with pytest.raises(UsageError, match=r"kind neural: .* keeps memory of each value between steps.*without memory"):
        Study(Regression(), [codec], kind="neural", layers="all")


@pytest.mark.parametrize("name", [n for n in gtrace.codec_names() if not gtrace.codec(n).stateful])
def test_every_codec_without_memory_trains(name):
    result = train(Regression(), [name], kind="neural", layers="all", steps=3, refit="0,+1").results[-1]
    assert result.steps == 3
    assert np.isfinite(result.loss)
    assert result.tally.float32_bits == 3 * 8 * 32


@pytest.mark.parametrize("task", ["digits-mlp", "digits-cnn", "char-lstm"])
def test_without_a_codec_training_is_plain_training(task):
    settings = {"steps": 3, "batch_size": 4, "workers": 2}
    plain, neural = train(task, [], **settings), train(task, [], kind="neural", layers="all", **settings)
    same(plain._runs[0]._model.state_dict(), neural._runs[0]._model.state_dict())
    tally = neural.results[0].tally
    assert (tally.ratio, tally.squared_error) == (1, 0)
    assert tally.float32_bits != plain.results[0].tally.float32_bits


def test_gradients_that_are_not_finite():
    """One of two workers gets NaN: what results of them is left out of the mean, or zeros stand in their place."""
    bad = functools.partial(Faulty, lambda batch: batch % 2 == 1)
    settings = {"kind": "neural", "layers": "all", "workers": 2, "steps": 3}
    study = train(bad(), ["int8"], **settings)
    assert np.isfinite(study.results[1].loss)
    said = "int8: step 0, worker 1, 1: 8 gradient values are not finite; weight gradients that hold any are left out"
    assert any(said in text for text in study.warnings)
    assert study.results[1].tally.float32_bits == 3 * 2 * 8 * 32
    with pytest.raises(NonfiniteGradientError, match="step 0, worker 1, neural gradient of 1: 8 of 8 gradient values"):
        train(bad(), ["int8"], nonfinite="error", **settings)
    model, (x, y) = mlp(), data()
    neural = compressed(model, "none", nonfinite="zero")
    with neural.batch(0):
        out = model(x)
        (nn.functional.cross_entropy(out[:4], y[:4]) + (out[4:] * float("nan")).sum()).backward()
    assert torch.isfinite(model[0].weight.grad).all()
    tally, bad = neural.collect()
    assert tally.nonfinite == bad[0].count == 5 * 5


PARTS = ("cosine_alone", "error_alone", "cosine", "error")


class Difficult(Regression):
    """Dropout, batch normalization, in-place activations, and a layer used twice."""

    def model(self):
        return nn.Sequential(nn.Dropout(0.3), Reused())


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


def apart(a, b):
    """Cosine and error in float64."""
    a, b = a.double().flatten(), b.double().flatten()
    return [float(a @ b / ((a @ a) * (b @ b)).sqrt()), float((((b - a) ** 2).sum() / (a @ a)).sqrt())]


@pytest.mark.parametrize("spec", ["int8", "bf16", "terngrad:coder=fixed", "qsgdinf:bits=3,coder=fixed"])
def test_figures_are_those_of_a_plain_reimplementation(spec):
    model, batch, codec = mlp(inplace=True), data(), gtrace.codec(spec)
    parameters = dict(model.named_parameters())
    exact, every, *alone = (
        by_hand(model, batch, codec, names, fit=False) for names in ((), LAYERS, *((name,) for name in LAYERS))
    )
    # A schedule without a step before the first: codecs are as they were made.
    neural = compressed(model, spec, refit="9")
    with neural.batch(0) as opened:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward(retain_graph=True)
        before = {name: p.grad.clone() for name, p in parameters.items()}
        found = shadow(opened, loss, parameters, neural.owners)
    assert [item.tensor for item in found] == list(parameters)
    for item in found:
        name = item.tensor
        own = alone[LAYERS.index(name.partition(".")[0])]
        expected = apart(exact[name], own[name]) + apart(exact[name], every[name])
        assert [getattr(item, part) for part in PARTS] == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert torch.equal(parameters[name].grad, before[name])
    last = found[-1]
    assert (last.cosine_alone, last.error_alone) == (last.cosine, last.error)
    assert found[0].error > found[0].error_alone > 0


def test_other_types_of_gradients():
    model, (x, y) = mlp().double(), data()
    found = backward(model, (x.double(), y), compressed(model, "int8"))
    single = backward(again := mlp(), data(), compressed(again, "int8"))
    for name, gradient in found.items():
        assert gradient.dtype == torch.float64
        torch.testing.assert_close(gradient.float(), single[name], rtol=0.1, atol=2e-3)


def test_strides_of_gradients_are_kept():
    """A convolution takes another path for channels-last gradients; a lossless codec must not change it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 5))
    model = model.to(memory_format=torch.channels_last)
    batch = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last), torch.arange(4)
    seen = []
    backward(watched(copy.deepcopy(model), 0, lambda gradient: seen.append(gradient.stride())), batch)
    neural = compressed(model, "int8")
    backward(watched(model, 0, lambda gradient: seen.append(gradient.stride())), batch, neural)
    assert seen[0] == seen[1] != (8 * 36, 36, 6, 1)
