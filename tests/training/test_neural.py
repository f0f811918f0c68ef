import copy
import functools
import itertools

import numpy as np
import pytest
import torch
from helpers_hooks import module
from helpers_training import Faulty, Memory, Regression
from torch import nn

import gtrace
from gtrace.errors import UsageError
from gtrace.fitting.pooling import pooled
from gtrace.sketch import MomentSketch
from gtrace.training import NonfiniteGradientError, RefitSchedule, Study, train
from gtrace.training.exchange import Tally
from gtrace.training.neural import LayerCodecs, NeuralCompression
from gtrace.types import Key


def compressed(model, codec, *, refit="once", workers=1, nonfinite="skip", seed=7, layers="all"):
    chosen = gtrace.codec(codec) if isinstance(codec, str) else codec
    schedule = RefitSchedule.parse(refit)
    return NeuralCompression(
        model, chosen, workers=workers, seed=seed, refit=schedule, nonfinite=nonfinite, layers=layers
    )


def mlp(*, inplace=False):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(inplace=inplace), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))


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


def coded(codec, tensor, name, *, step=0, worker=0, seed=7, fit=True):
    """A gradient fitted, encoded and decoded by hand."""
    values = tensor.detach().numpy().reshape(-1)
    state = codec.init(values.size)
    if fit and codec.needs is not None:
        state = codec.fit(state, MomentSketch.from_spec(values, codec.needs), step)
    payload = codec.encode(state, values, Key.derive(seed, tensor=name, step=step, worker=worker))
    return torch.from_numpy(codec.decode(codec.shared(state), payload, values.size)).reshape(tensor.shape)


def watched(model, place, see):
    """Show ``see`` the gradient of the output of ``model[place]``, as it arrives in that layer's backward."""

    def hook(_module, _inputs, output):
        output.register_hook(lambda gradient: see(gradient) and None)

    model[place].register_forward_hook(hook)
    return model


def by_hand(model, batch, codec, **settings):
    """The backward pass of :func:`mlp`, one layer after the other in plain formulas."""
    first, _, second, _, third = model
    x, y = batch
    with torch.no_grad():
        h1 = torch.relu(first(x))
        h2 = torch.tanh(second(h1))
        logits = third(h2)
        d3 = (torch.softmax(logits, 1) - nn.functional.one_hot(y, 5)) / len(y)
        d3 = coded(codec, d3, "4", **settings)
        d2 = coded(codec, (d3 @ third.weight) * (1 - h2**2), "2", **settings)
        d1 = coded(codec, (d2 @ second.weight) * (h1 > 0), "0", **settings)
    found = {}
    for name, d, inside in (("0", d1, x), ("2", d2, h1), ("4", d3, h2)):
        found[f"{name}.weight"], found[f"{name}.bias"] = d.T @ inside, d.sum(0)
    return found


def close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)


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
def test_without_compression_weight_gradients_are_bit_identical(make):
    model = make()
    plain = backward(copy.deepcopy(model), data())
    same(backward(model, data(), compressed(model, "none")), plain)


def test_strides_of_gradients_are_kept():
    """A convolution takes another path for channels-last gradients; a lossless codec must not change it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 5))
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    batch = x, torch.arange(4)
    seen = []
    before = watched(copy.deepcopy(model), 0, lambda gradient: seen.append(gradient.stride()))
    backward(before, batch)
    neural = compressed(model, "int8")
    backward(watched(model, 0, lambda gradient: seen.append(gradient.stride())), batch, neural)
    assert seen[0] == seen[1] != (8 * 36, 36, 6, 1)


@pytest.mark.parametrize("spec", ["int8", "qsgdinf:bits=3", "alq:bits=3", "terngrad"])
def test_layers_read_the_decoded_gradient(spec):
    model = mlp()
    settings = {"step": 4, "worker": 1}
    found = backward(model, data(), compressed(model, spec, workers=2), **settings)
    close(found, by_hand(model, data(), gtrace.codec(spec), **settings))


def test_each_call_of_a_module_is_a_tensor_of_its_own():
    model = Reused()
    neural = compressed(model, "int8")
    backward(model, data(), neural)
    assert set(neural._layers[0]._tensors) == {"shared", "shared#1", "norm", "head"}
    tally, _ = neural.collect()
    assert (tally.float32_bits, tally.envelope_bits) == (32 * 9 * (3 * 12 + 5), 4 * 8 * 24)
    backward(model, data(), neural, step=1)
    assert len(neural._layers[0]._tensors) == 4


def test_structured_outputs():
    torch.manual_seed(0)
    model = nn.LSTM(12, 6)
    neural = compressed(model, "int8")
    with neural.batch(0):
        out, (_, c) = model(torch.randn(4, 3, 12))
        (out.sum() + 2 * c.square().sum()).backward()
    assert set(neural._layers[0]._tensors) == {"LSTM", "LSTM.out2"}


def test_a_tensor_handed_on_is_compressed_once():
    scale, inner = nn.Parameter(torch.ones(1)), nn.Linear(12, 5)
    model = module(lambda self, x: self.inner(self.scale * x), scale=scale, inner=inner)
    neural = compressed(model, "int8")
    backward(model, data(), neural)
    assert set(neural._layers[0]._tensors) == {"inner"}


def test_parallel_heads_are_all_last():
    def forward(self, x):
        x = torch.relu(self.stem(x))
        return self.one(x) + self.two(x)

    model = module(forward, stem=nn.Linear(12, 8), one=nn.Linear(8, 5), two=nn.Linear(8, 5))
    neural = compressed(model, "int8", layers="inner")
    for step in range(2):
        backward(model, data(), neural, step=step)
    assert set(neural._layers[0]._tensors) == {"stem"}


@pytest.mark.parametrize("make", [mlp, Reused])
def test_the_last_layer_is_left_out_unless_asked_for(make):
    """What reaches it comes from the loss; a view or an activation behind it changes nothing."""

    model = module(lambda self, x: torch.log_softmax(self.inside(x).reshape(-1, 5), 1), inside=make())
    neural = compressed(model, "int8", layers="inner")
    plain = backward(copy.deepcopy(model), data())
    found = backward(model, data(), neural)
    last = [name for name in plain if name.startswith(("inside.4", "inside.head"))]
    assert len(last) == 2
    same({name: found[name] for name in last}, {name: plain[name] for name in last})
    inner = [name for name in plain if name not in last]
    assert all(not torch.equal(found[name], plain[name]) for name in inner if name != "inside.shared.bias")
    assert {"inside.4", "inside.head"}.isdisjoint(neural._layers[0]._tensors)
    assert neural.collect()[0].float32_bits == 32 * 9 * (20 + 16 if make is mlp else 3 * 12)


def test_nothing_outside_of_a_batch():
    model = mlp()
    neural = compressed(model, "terngrad")
    same(backward(model, data()), backward(copy.deepcopy(model), data()))
    with neural.batch(0), torch.no_grad():
        model(data()[0])
    assert neural.collect()[0].float32_bits == 0


def test_ragged_batches_keep_what_was_fitted():
    model, codec = mlp(), gtrace.codec("alq:bits=3")
    neural = compressed(model, codec)
    backward(model, data(9), neural)
    levels = {name: tensor.sender.state.arrays["levels"] for name, tensor in neural._layers[0]._tensors.items()}
    assert neural.collect()[0].shared_bits > 0
    backward(model, data(4), neural, step=1)
    tally, _ = neural.collect()
    assert (tally.shared_bits, tally.float32_bits) == (0, 32 * 4 * (20 + 16 + 5))
    for name, tensor in neural._layers[0]._tensors.items():
        assert tensor.sender.state.arrays["levels"] is levels[name]


def test_statistics_are_refreshed_by_the_schedule():
    model = mlp()
    neural = compressed(model, "alq:bits=3", refit="0,+2")
    fitted = []
    for step in range(5):
        backward(model, data(8 + step), neural, step=step)
        fitted.append(neural._layers[0]._tensors["4"].sender.state.arrays["levels"].tobytes())
    assert [a == b for a, b in itertools.pairwise(fitted)] == [True, False, True, False]


def test_a_pooled_fit_looks_at_the_batches_before():
    random = np.random.default_rng(0)
    batches = [random.standard_t(5, 300 + 10 * step).astype(np.float32) for step in range(13)]
    made = gtrace.codec("alq:bits=4")
    layers = LayerCodecs(made, worker=0, seed=0, refit=RefitSchedule.parse("pooled:0,12"))
    for step, values in enumerate(batches):
        layers.carry("layer", values, step, Tally())
    sketches = [gtrace.MomentSketch.from_spec(values, made.needs) for values in batches[3:]]
    expected = made.fit(made.init(batches[-1].size), pooled(sketches), 12)
    found = layers._tensors["layer"].sender.state
    np.testing.assert_array_equal(made.parts.grid.levels(found), made.parts.grid.levels(expected))


def test_bits_are_those_of_the_payloads():
    model, codec = mlp(), gtrace.codec("qsgdinf:bits=4,coder=fixed")
    neural = compressed(model, codec)
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
    plain = backward(copy.deepcopy(model), data())
    same(backward(model, data(), neural), plain)
    tally, _ = neural.collect()
    assert tally.payload_bits == tally.float32_bits > 0
    assert tally.shared_bits == tally.envelope_bits == 0

    exact = []
    twin = mlp()
    for place in (0, 2, 4):
        watched(twin, place, exact.append)
    backward(twin, data())
    merged = functools.reduce(MomentSketch.merge, [MomentSketch.from_spec(g.numpy(), codec.needs) for g in exact])
    state = codec.fit(codec.init(merged.size), merged, 0)
    np.testing.assert_allclose(common(neural).arrays["levels"], state.arrays["levels"], rtol=1e-6)

    found = backward(model, data(5), neural, step=1)
    tally, _ = neural.collect()
    assert tally.payload_bits < tally.float32_bits / 4
    assert tally.shared_bits == 8 * len(codec.shared(state))
    # The second batch went through the levels of the first; now those of the second are there.
    assert not np.array_equal(common(neural).arrays["levels"], state.arrays["levels"])
    twin = mlp()
    logits = []
    backward(watched(twin, 4, logits.append), data(5))
    values = logits[0].numpy().reshape(-1)
    at = codec.init(values.size).with_arrays(**state.arrays)
    payload = codec.encode(at, values, Key.derive(7, tensor="4", step=1))
    decoded = torch.from_numpy(codec.decode(codec.shared(state), payload, values.size)).reshape(5, 5)
    torch.testing.assert_close(found["4.bias"], decoded.sum(0), rtol=1e-5, atol=1e-7)


def common(neural):
    return neural._layers[0]._fitted


def test_heterogeneous_pruning_keeps_the_mean_sparsity():
    """Shares come from all layers of the last refit step; sizes weigh."""
    model = mlp()
    neural = compressed(model, "prune:sparsity=0.8,allocation=heterogeneous", refit="0,+2")
    backward(model, data(400), neural)
    first, _ = neural.collect()
    tensors = neural._layers[0]._tensors
    sketches = {name: tensor.summary for name, tensor in tensors.items()}
    shares = gtrace.fitting.allocate_sparsity(list(sketches.values()), 0.8)
    assert [float(tensor.sender.state.arrays["target"]) for tensor in tensors.values()] == pytest.approx(list(shares))
    assert max(shares) - min(shares) > 0.01
    sizes = [sketch.size for sketch in sketches.values()]
    assert np.average(shares, weights=sizes) == pytest.approx(0.8, abs=1e-6)
    backward(model, data(400), neural, step=1)
    second, _ = neural.collect()
    # Both batches prune to the same mean, each layer alike and then by its share.
    assert first.sparsity == pytest.approx(0.8, abs=0.02)
    assert second.sparsity == pytest.approx(0.8, abs=0.02)


def test_one_format_and_scale_for_the_whole_model():
    model = mlp()
    neural = compressed(model, "fp:bits=4,scope=model")
    backward(model, data(), neural)
    backward(model, data(), neural, step=1)
    first, *others = [tensor.sender.state.arrays for tensor in neural._layers[0]._tensors.values()]
    assert first
    assert all(one[name] is first[name] for one in others for name in first)
    assert neural.collect()[0].ratio == pytest.approx(2 / (1 + 4 / 32), rel=0.03)


@pytest.mark.parametrize("spec", ["ef:topk", "dgc", "signum", "powersgd", "mcgq:accumulate=true"])
def test_codecs_with_memory_are_refused(spec):
    with pytest.raises(UsageError, match=r"keeps memory of each value between steps.*without memory"):
        Study(Regression(), [spec], kind="neural", layers="all")
    with pytest.raises(UsageError, match="kind neural: test-memory keeps memory"):
        Study(Regression(), [Memory()], kind="neural", layers="all")


@pytest.mark.parametrize("name", [n for n in gtrace.codec_names() if not gtrace.codec(n).stateful])
def test_every_codec_without_memory_trains(name):
    study = train(Regression(), [name], kind="neural", layers="all", steps=3, refit="0,+1")
    result = study.results[-1]
    assert result.steps == 3
    assert np.isfinite(result.loss)
    assert result.tally.float32_bits == 3 * 8 * 32


@pytest.mark.parametrize("task", ["digits-mlp", "digits-cnn", "char-lstm"])
def test_without_a_codec_training_is_plain_training(task):
    settings = {"steps": 3, "batch_size": 4, "workers": 2}
    plain, neural = (Study(task, [], kind=kind, layers="all", **settings) for kind in ("weight", "neural"))
    plain.run()
    neural.run()
    same(plain._runs[0]._model.state_dict(), neural._runs[0]._model.state_dict())
    tally = neural.results[0].tally
    assert (tally.ratio, tally.squared_error) == (1, 0)
    assert neural.results[0].tally.float32_bits != plain.results[0].tally.float32_bits


def test_workers_weight_gradients_are_averaged_exactly():
    task = Regression()
    study = Study(task, ["int8"], kind="neural", layers="all", workers=3, steps=1)
    model = copy.deepcopy(study._runs[1]._model)
    study.run()
    neural = compressed(model, "int8", workers=3, seed=0, refit="0,10")
    total = 0
    for worker in range(3):
        key = Key.derive(0, tensor="batch", step=0, worker=worker, role="sample")
        batch = task.batch(np.random.default_rng(key), 8)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key.low)
            model.zero_grad()
            with neural.batch(0, worker):
                task.loss(model, batch).backward()
        total = total + model[1].weight.grad.double()
    expected = model[1].weight.detach() - 0.05 * (total / 3).float()
    torch.testing.assert_close(study._runs[1]._model[1].weight.detach(), expected, rtol=1e-6, atol=1e-7)
    assert study.results[1].tally.float32_bits == 3 * 8 * 32


def test_one_worker_by_default():
    assert Study(Regression(), [], kind="neural", layers="all").settings.workers == 1
    assert Study(Regression(), []).settings.workers == 4


def test_gradients_that_are_not_finite():
    """One of two workers gets NaN: what results of them is left out of the mean, or zeros stand in their place."""
    bad = functools.partial(Faulty, lambda batch: batch % 2 == 1)
    study = Study(bad(), ["int8"], kind="neural", layers="all", workers=2, steps=3)
    study.run()
    assert np.isfinite(study.results[1].loss)
    said = "int8: step 0, worker 1, 1: 8 gradient values are not finite; weight gradients that hold any are left out"
    assert any(said in text for text in study.warnings)
    assert study.results[1].tally.float32_bits == 3 * 2 * 8 * 32
    with pytest.raises(NonfiniteGradientError, match="step 0, worker 1, neural gradient of 1: 8 of 8 gradient values"):
        Study(bad(), ["int8"], kind="neural", layers="all", workers=2, steps=3, nonfinite="error").run()


def test_zeros_in_place_of_gradients_that_are_not_finite():
    model = mlp()
    neural = compressed(model, "none", nonfinite="zero")
    x, y = data()
    with neural.batch(0):
        out = model(x)
        (nn.functional.cross_entropy(out[:4], y[:4]) + (out[4:] * float("nan")).sum()).backward()
    assert torch.isfinite(model[0].weight.grad).all()
    tally, bad = neural.collect()
    assert tally.nonfinite == bad[0].count == 5 * 5


def test_other_types_of_gradients():
    model = mlp().double()
    neural = compressed(model, "int8")
    x, y = data()
    found = backward(model, (x.double(), y), neural)
    single = backward(again := mlp(), data(), compressed(again, "int8"))
    for name, gradient in found.items():
        assert gradient.dtype == torch.float64
        torch.testing.assert_close(gradient.float(), single[name], rtol=0.1, atol=2e-3)


def test_codecs_see_the_shape_of_a_neural_gradient():
    """It changes with the batch, so it is in the state of each encoding."""
    seen = []

    class Watching(type(gtrace.codec("none"))):
        name = "test-watching"

        def encode(self, state, values, key):
            seen.append((state.size, state.shape))
            return super().encode(state, values, key)

    model = mlp()
    neural = compressed(model, Watching())
    backward(model, data(9), neural)
    backward(model, data(4), neural, step=1)
    assert seen == [(45, (9, 5)), (144, (9, 16)), (180, (9, 20)), (20, (4, 5)), (64, (4, 16)), (80, (4, 20))]
