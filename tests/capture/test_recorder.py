"""What lands in a trace, against what a hand-written hook sees in the same run."""

import copy
import gc
import math
import threading

import numpy as np
import pytest
import torch
from helpers_capture import Captured
from helpers_hooks import module
from torch import nn
from torch.nn import functional

import gtrace
from gtrace.capture.buffers import BufferPool, RowBuffer, as_real_dense
from gtrace.capture.layout import RowLayout
from gtrace.capture.options import AutomaticSteps, EveryStep, parse_steps
from gtrace.capture.recorder import Recorder
from gtrace.torch_hooks.hooks import OptimizerStep
from gtrace.torch_hooks.naming import name_parameters


class Run(Captured):
    """A captured block in which every watched optimizer's gradients are kept by a hand-written hook, too."""

    def __init__(self, path, **options):
        super().__init__(path, **options)
        self.expected = {}

    def watch(self, optimizer, number=0):
        steps = self.expected.setdefault(number, [])

        def keep(_optimizer, _args, _kwargs):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            steps.append([None if p.grad is None else p.grad.detach().clone() for p in parameters])

        optimizer.register_step_pre_hook(keep)
        return optimizer

    def sgd(self, model):
        return self.watch(torch.optim.SGD(model.parameters(), lr=0.1))

    def check(self, names, number=0):
        """Every gradient that the hook kept is in the trace, bit for bit, and nothing else is."""
        trace, steps = self.trace, self.expected[number]
        for place, name in enumerate(names):
            there = [step for step, gradients in enumerate(steps) if gradients[place] is not None]
            assert trace.steps(name, optimizer=number).tolist() == there
            for step in there:
                gradient = as_real_dense(steps[step][place]).to(torch.float32).reshape(-1).numpy()
                assert trace.read(name, step, optimizer=number).tobytes() == gradient.tobytes()
        assert sorted(t.name for t in trace.tensors if t.optimizer == number) == sorted(names)
        assert self.said == []
        return trace


def train(model, optimizer=None, steps=4, inputs=3, classes=4):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(5, inputs, generator=generator)
        y = torch.randint(classes, (5,), generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_gradients_are_those_of_a_hand_written_hook(tmp_path, suffix):
    torch.manual_seed(0)
    with Run(tmp_path / f"run.{suffix}") as run:
        model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
        train(model, run.sgd(model))
    trace = run.check([name for name, _ in model.named_parameters()])
    info = {tensor.name: tensor for tensor in trace.tensors}
    assert (info["0.weight"].shape, info["0.weight"].dtype) == ((8, 3), "float32")
    assert info["1.bias"].module_type == "LayerNorm"
    assert (trace.status, trace.attrs["model"], trace.attrs["seed"]) == ("complete", "Sequential", 0)
    assert trace.attrs["capture"]["errors"] == 0


@pytest.mark.capture_case("gradient accumulation")
def test_loss_and_learning_rate_of_each_step(path):
    w = nn.Parameter(torch.tensor([1.0, 2.0]))
    losses = []
    with Run(path) as run:
        optimizer = torch.optim.SGD([w], lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                loss = (w**2).sum()
                loss.backward()
            losses.append(2 * loss.item())
            nn.utils.clip_grad_norm_([w], 1.0)
            optimizer.step()
            schedule.step()
    scalars = gtrace.open_trace(path).scalars()
    assert scalars["step"].tolist() == [0, 1, 2]
    assert scalars["loss"].tolist() == losses
    assert scalars["lr"].tolist() == [0.1, 0.05, 0.025]
    assert scalars["micro_batches"].tolist() == [2, 2, 2]
    assert scalars["clip_norm"][0] == pytest.approx(4 * 5**0.5)
    assert np.isnan(scalars["grad_scale"]).all()
    assert run.summary.rows == 3


@pytest.mark.capture_case("tied, frozen and unowned parameters")
def test_tied_frozen_and_bare_parameters(path):
    bare = nn.Parameter(torch.ones(()))
    with Run(path) as run:
        model = module(embedding=nn.Embedding(6, 3), body=nn.Linear(3, 3), head=nn.Linear(3, 6, bias=False))
        model.head.weight = model.embedding.weight
        model.body.bias.requires_grad_(False)
        optimizer = run.watch(torch.optim.SGD([*model.parameters(), bare], lr=0.1))
        for step in range(3):
            optimizer.zero_grad(set_to_none=True)
            hidden = model.embedding(torch.tensor([1, 2]))
            hidden = model.body(hidden) if step != 1 else hidden  # one step without this layer
            (model.head(hidden).sum() * bare).backward()
            optimizer.step()
    assert run.expected[0][1][1] is None
    run.expected[0] = [[g for p, g in enumerate(row) if p != 2] for row in run.expected[0]]
    trace = run.check(["embedding.weight", "body.weight", "unnamed/opt0.g0.p3"])
    info = {tensor.name: tensor for tensor in trace.tensors}
    assert info["embedding.weight"].aliases == ("head.weight",)
    assert info["unnamed/opt0.g0.p3"].shape == ()


def test_a_parameter_group_that_is_added_later(path):
    with Run(path) as run:
        first, second = nn.Linear(3, 4), nn.Linear(3, 4)
        optimizer = run.watch(torch.optim.SGD(first.parameters(), lr=0.1))
        train(first, optimizer, 1)
        optimizer.add_param_group({"params": second.parameters()})
        train(lambda x: first(x) + second(x), optimizer, 2)
    run.expected[0][0] += [None, None]
    run.check(["weight", "bias", "Linear_2.weight", "Linear_2.bias"])


def test_a_model_that_takes_the_place_of_another_one(path):
    """The same optimizer goes on with a new model: equal shapes continue a tensor, others begin a new one."""
    with Run(path) as run:
        model = nn.Linear(3, 4)
        optimizer = run.sgd(model)
        for bias, width in ((True, 3), (True, 3), (False, 5)):
            model = nn.Linear(width, 4, bias=bias)
            optimizer.param_groups[0]["params"] = list(model.parameters())
            train(model, optimizer, 1, inputs=width)
            del model
            gc.collect()
    expected = run.expected[0]
    run.expected[0] = [[*expected[0], None], [*expected[1], None], [None, None, expected[2][0]]]
    run.check(["weight", "bias", "weight~2"])


def one_step(path, model, loss, make=torch.optim.SGD):
    """The trace of one step of a model, or of a bare parameter."""
    bare = isinstance(model, nn.Parameter)
    with Run(path) as run:
        parameters = [model] if bare else list(model.parameters())
        optimizer = run.watch(make(parameters, lr=0.1))
        loss(model).backward()
        optimizer.step()
    return run.check(["unnamed/opt0.g0.p0"] if bare else ["weight", "bias"][: len(parameters)])


@pytest.mark.capture_case("bfloat16, float16, float64")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_become_float32(path, dtype):
    trace = one_step(path, nn.Linear(3, 4).to(dtype), lambda model: (model(torch.ones(2, 3, dtype=dtype)) ** 2).mean())
    assert trace.tensors[0].dtype == str(dtype).removeprefix("torch.")


@pytest.mark.capture_case("complex parameters")
def test_complex_parameters_keep_both_parts(path):
    trace = one_step(path, nn.Parameter(torch.tensor([1 + 2j, 3 - 1j])), lambda w: (w.abs() ** 2).sum())
    assert (trace.tensors[0].shape, trace.tensors[0].dtype) == ((2, 2), "complex64")
    assert trace.read("unnamed/opt0.g0.p0", 0).tolist() == [2.0, 4.0, 6.0, -2.0]


@pytest.mark.capture_case("sparse gradients")
def test_sparse_gradients_are_summed_and_filled(path):
    model = nn.Embedding(5, 2, sparse=True)
    trace = one_step(path, model, lambda model: model(torch.tensor([1, 3, 1])).sum(), torch.optim.SparseAdam)
    assert model.weight.grad.is_sparse
    assert trace.read("weight", 0).reshape(5, 2)[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0, 0.0]


def test_gradients_that_are_not_contiguous(path):
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    one_step(path, model, lambda model: model(x).sum())
    assert not model.weight.grad.is_contiguous()


def test_non_finite_gradients_are_recorded_as_they_are(path):
    trace = one_step(path, nn.Parameter(torch.tensor([0.0, 1.0, -1.0])), lambda w: w.sqrt().sum())
    assert trace.statistics("unnamed/opt0.g0.p0")["nonfinite"].tolist() == [2]


def test_empty_parameters_are_left_out(path):
    empty = nn.Parameter(torch.empty(0, 3))
    with Run(path) as run:
        model = nn.Linear(3, 4)
        optimizer = torch.optim.SGD([*model.parameters(), empty], lr=0.1)
        empty.grad = torch.empty(0, 3)
        train(model, optimizer, 1)
    assert [t.name for t in gtrace.open_trace(path).tensors] == ["weight", "bias"]
    assert run.summary.errors == 0


@pytest.mark.capture_case("AMP with GradScaler, fused and not")
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_under_a_scaler_are_unscaled(path, fused):
    w = nn.Parameter(torch.tensor([1.0, 2.0]))
    with Run(path) as run:
        optimizer = torch.optim.Adam([w], lr=0.0, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for blow_up in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale((w**2).sum() * blow_up).backward()
            scaler.step(optimizer)
            scaler.update()
    trace = gtrace.open_trace(path)
    assert trace.steps("unnamed/opt0.g0.p0").tolist() == [0, 2]
    assert all(trace.read("unnamed/opt0.g0.p0", step).tolist() == [2.0, 4.0] for step in (0, 2))
    assert trace.scalars()["loss"].tolist() == [5.0, 5.0]
    if fused:
        assert trace.scalars()["grad_scale"].tolist() == [1024.0, 512.0]
    assert (run.summary.skipped_steps, trace.attrs["capture"]["skipped_steps"]) == (1, 1)


@pytest.mark.capture_case("models that existed before capture")
def test_a_model_without_registration_hooks_is_named_by_a_scan(path):
    original = nn.Sequential(nn.Linear(3, 4))
    with Run(path) as run:
        model = copy.deepcopy(original)
        train(model, run.sgd(model), 1)
    run.check(["0.weight", "0.bias"])


def test_selected_steps_and_tensors(path):
    with Run(path, policy=parse_steps("1,4+2"), tensors=("0.*", "2.*"), exclude=("*.bias",)) as run:
        train(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4)), steps=8)
    trace = gtrace.open_trace(path)
    assert [t.name for t in trace.tensors] == ["0.weight", "2.weight"]
    assert trace.steps("0.weight").tolist() == [1, 4, 5]
    assert (run.summary.rows, run.summary.steps_seen, run.summary.complaints) == (3, 8, ())
    assert trace.attrs["capture"]["steps"] == "1,4+2"


def test_a_pattern_that_matches_nothing_leaves_no_trace(path):
    with Run(path, tensors=("layer*",)) as run:
        train(nn.Linear(3, 4), steps=2)
    assert not path.exists()
    assert run.summary.rows == 0
    assert run.summary.complaints == ("--tensors 'layer*' matched no tensor; known: bias, weight",)


@pytest.mark.parametrize("policy", [AutomaticSteps(), EveryStep(1)])
def test_the_budget_is_kept(path, policy):
    row = 4 * (3 * 4 + 4)
    with Run(path, policy=policy, budget=5 * row + row // 2) as run:
        train(nn.Linear(3, 4), steps=20)
    steps = gtrace.open_trace(path).steps("weight").tolist()
    assert (steps, run.summary.over_budget) == ([0, 1, 2, 3, 4], isinstance(policy, EveryStep))


def test_a_step_that_is_larger_than_the_budget_is_not_recorded(path):
    with Run(path, policy=AutomaticSteps(), budget=10) as run:
        train(nn.Linear(3, 4), steps=3)
    assert (run.summary.rows, run.summary.over_budget, path.exists()) == (0, True, False)


def test_a_trace_that_cannot_be_made_does_not_stop_training(tmp_path):
    with Run(tmp_path / "nowhere" / "run.zarr") as run:
        model = nn.Linear(3, 4)
        assert not torch.equal(model.weight.clone(), train(model, steps=20).weight)
    assert (run.summary.rows, run.summary.steps_seen) == (0, 20)
    assert run.summary.errors >= 1
    assert "does not exist" in run.said[0]


@pytest.mark.parametrize(("differ", "warnings"), [(False, 1), (True, 3)])
def test_each_kind_of_error_is_told_once_and_three_at_most(differ, warnings, path, monkeypatch):
    from gtrace.trace import TraceWriter

    commit = TraceWriter.commit

    def failing(self, step, **options):
        if step >= 2:
            raise OSError(28 + step * differ, "No space left on device")
        commit(self, step, **options)

    monkeypatch.setattr(TraceWriter, "commit", failing)
    with Run(path) as run:
        train(nn.Linear(3, 4), steps=9)
    assert (run.summary.errors, run.summary.unwritten) == (7, 7)
    assert len(run.said) == warnings
    assert run.said[0].endswith("No space left on device; training goes on")
    with gtrace.open_trace(path) as trace:
        assert (trace.attrs["capture"]["errors"], trace.attrs["capture"]["unwritten"]) == (7, {"0": "2-8"})
        assert trace.scalars()["step"].tolist() == [0, 1]


def test_training_waits_for_a_slow_disk_and_loses_nothing(path, monkeypatch):
    from gtrace.trace import TraceWriter

    commit, let_go = TraceWriter.commit, threading.Event()

    def slow(self, step, **options):
        let_go.wait(0.02)
        commit(self, step, **options)

    monkeypatch.setattr(TraceWriter, "commit", slow)
    acquired, acquire = [], BufferPool.acquire

    def kept(pool, **how):
        acquired.append(acquire(pool, **how))
        return acquired[-1]

    monkeypatch.setattr(BufferPool, "acquire", kept)
    with Run(path, queue_bytes=2 * 64) as run:
        model = nn.Linear(3, 4)
        train(model, run.sgd(model), 12)
        let_go.set()
    run.check(["weight", "bias"])
    assert len({id(buffer) for buffer in acquired if buffer is not None}) == 2


def test_a_copy_that_fails_takes_no_memory_with_it(path, monkeypatch):
    failures = [RuntimeError("once"), RuntimeError("twice")]

    def failing(copy):
        def copy_or_fail(*row):
            if failures:
                raise failures.pop()
            copy(*row)

        return copy_or_fail

    for way in ("fill", "copy"):
        monkeypatch.setattr(RowBuffer, way, failing(getattr(RowBuffer, way)))
    with Run(path, queue_bytes=1) as run:  # room for one row: a lost one would stop training for ever
        train(nn.Linear(3, 4))
    assert run.summary.errors == 2
    assert gtrace.open_trace(path).steps("weight").tolist() == [2, 3]


def uneven(several, steps=90):
    """A training in which the usual step is now and then followed by another kind of step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    late = nn.Parameter(torch.ones(2))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.05}]
    optimizer = torch.optim.SGD(groups if several else model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scaler = torch.amp.GradScaler("cpu", 4.0)

    def loss():
        return (model(torch.randn(5, 3)) * late).square().sum()

    def closure():
        optimizer.zero_grad()
        loss().backward()

    for step in range(steps):
        event = step % 10
        if event != 8:
            optimizer.zero_grad(set_to_none=event != 1)
        if event == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        elif event == 3:
            loss().backward()
        elif event == 4:
            loss().backward()
            optimizer.zero_grad()
        if event == 5:
            scaler.scale(loss() * (math.inf if step == 25 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        elif event == 6:
            optimizer.step(closure)
        else:
            if event != 8:  # the same gradients again, without a loss
                loss().backward()
            if event == 7:
                model[0].bias.grad = None
            elif event == 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
        if step > 40:
            scheduler.step()
        if step == 60:
            optimizer.add_param_group({"params": [late], "lr": 0.01})
        elif step == 70:
            other = torch.optim.SGD([late], lr=0.1)
            other.step()
    return model[0].weight.detach().numpy().tobytes()


def everything(trace):
    """What a trace holds but the times."""
    found = {}
    for key in trace.streams:
        where = {"kind": key.kind, "optimizer": key.optimizer}
        found[key] = {name: many.tobytes() for name, many in trace.scalars(**where).items() if name != "time"}
        for info in (one for one in trace.tensors if (one.kind, one.optimizer) == (key.kind, key.optimizer)):
            steps = trace.steps(info.name, **where)
            found[key, info.name] = steps.tolist(), b"".join(trace.read(info.name, s, **where).tobytes() for s in steps)
            numbers = trace.statistics(info.name, **where)
            found[key, info.name, "numbers"] = {name: many.tobytes() for name, many in numbers.items()}
    timed = ("blocked", "waited", "span")
    attrs = {name: value for name, value in trace.attrs.items() if name not in ("times", "capture")}
    return found, attrs, {name: value for name, value in trace.attrs["capture"].items() if name not in timed}


@pytest.mark.parametrize(
    ("several", "options"),
    [(False, {}), (True, {}), (False, {"budget": 3000}), (False, {"policy": parse_steps("2-30,50-64,70,80-90")})],
)
def test_a_step_that_is_like_the_one_before_is_recorded_as_any_other(tmp_path, monkeypatch, several, options):
    calls, again = [], Recorder._take_again

    def noted(*args):
        calls.append(again(*args))
        return calls[-1]

    found, weights = [], []
    for way in (lambda *_: False, noted):
        monkeypatch.setattr(Recorder, "_take_again", way)
        with Captured(tmp_path / f"{len(found)}.zarr", **options) as run:
            weights.append(uneven(several))
        settings = [(one.burst, one._settings) for one in run.session._recorder._histories.values()]
        found.append((everything(run.trace), settings, run.summary.steps_wanted, run.summary.rows))
    assert found[0] == found[1]
    assert weights[0] == weights[1] == uneven(several)
    assert False in calls
    assert several or calls.count(True) > 3


def test_a_new_parameter_at_the_address_of_one_that_is_gone():
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    layout = RowLayout(lambda o: name_parameters(o.param_groups, [model]), lambda _: True, 10**6)
    step = OptimizerStep(optimizer, 0, 0, 0.0, 1, 0.1, 1.0, 1.0)
    assert [slot.name for slot in layout.gradients(step)[0]] == ["weight", "bias"]
    gone, stays = model.weight, model.bias
    layout._known[id(stays)] = layout._known[id(gone)]  # as if the memory of one had become the other's
    assert [slot.name for slot in layout.gradients(step)[0]] == ["weight", "bias"]


def test_only_what_happens_inside_is_recorded(path):
    model = train(nn.Linear(3, 4), steps=2)
    with Run(path):
        train(model, steps=3)
    train(model, steps=2)
    assert gtrace.open_trace(path).steps("weight").tolist() == [0, 1, 2]
