"""What lands in a trace, against what a hand-written hook sees in the same run."""

import copy
import gc
import math
import threading
import time

import numpy as np
import pytest
import torch
from helpers_capture import Captured
from helpers_hooks import module
from torch import nn

from gtrace.capture import buffers
from gtrace.capture.buffers import BufferPool
from gtrace.capture.options import AutomaticSteps, every_step, parse_steps
from gtrace.capture.recorder import Recorder
from gtrace.capture.summary import result_text
from gtrace.trace import TraceWriter


def train(model, optimizer=None, steps=4, inputs=3):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, inputs, generator=generator)).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_gradients_are_those_of_a_hand_written_hook(tmp_path, suffix):
    torch.manual_seed(0)
    with Captured(tmp_path / f"run.{suffix}") as run:
        model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4))
        train(model, run.sgd(model))
    train(model)  # outside of the block nothing is recorded
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
    with Captured(path) as run:
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
    scalars = run.trace.scalars()
    assert scalars["step"].tolist() == [0, 1, 2]
    assert scalars["loss"].tolist() == losses
    assert scalars["lr"].tolist() == [0.1, 0.05, 0.025]
    assert scalars["micro_batches"].tolist() == [2, 2, 2]
    assert scalars["clip_norm"][0] == pytest.approx(4 * 5**0.5)
    assert np.isnan(scalars["grad_scale"]).all()
    assert run.summary.rows == 3


@pytest.mark.capture_case("tied, frozen and unowned parameters")
def test_tied_frozen_bare_and_empty_parameters(path):
    bare, empty = nn.Parameter(torch.ones(())), nn.Parameter(torch.empty(0, 3))
    with Captured(path) as run:
        model = module(embedding=nn.Embedding(6, 3), body=nn.Linear(3, 3), head=nn.Linear(3, 6, bias=False))
        model.head.weight = model.embedding.weight
        model.body.bias.requires_grad_(False)
        optimizer = run.watch(torch.optim.SGD([*model.parameters(), bare, empty], lr=0.1))
        for step in range(3):
            optimizer.zero_grad(set_to_none=True)
            empty.grad = torch.empty(0, 3)
            hidden = model.embedding(torch.tensor([1, 2]))
            hidden = model.body(hidden) if step != 1 else hidden  # one step without this layer
            (model.head(hidden).sum() * bare).backward()
            optimizer.step()
    assert run.expected[0][1][1] is None
    run.expected[0] = [[row[0], row[1], row[3]] for row in run.expected[0]]
    trace = run.check(["embedding.weight", "body.weight", "unnamed/opt0.g0.p3"])
    info = {tensor.name: tensor for tensor in trace.tensors}
    assert info["embedding.weight"].aliases == ("head.weight",)
    assert info["unnamed/opt0.g0.p3"].shape == ()
    assert run.summary.errors == 0


def test_a_model_that_takes_the_place_of_another_one(path):
    """The same optimizer goes on with a new model: equal shapes continue a tensor, others begin a new one."""
    with Captured(path) as run:
        model = nn.Linear(3, 4)
        optimizer = run.sgd(model)
        for bias, width in ((True, 3), (True, 3), (False, 5)):
            model = nn.Linear(width, 4, bias=bias)
            optimizer.param_groups[0]["params"] = list(model.parameters())
            train(model, optimizer, 1, inputs=width)
            del model
            gc.collect()
    one, two, three = run.expected[0]
    run.expected[0] = [[*one, None], [*two, None], [None, None, three[0]]]
    run.check(["weight", "bias", "weight~2"])


@pytest.mark.capture_case("earlier layers unfrozen later, parameters in another order")
@pytest.mark.parametrize("widths", [(3, 3, 3), (3, 5, 2)])
def test_tensors_that_come_in_another_order_than_they_first_had_gradients(path, widths):
    """Of equal shapes, one could take another's place unnoticed."""
    with Captured(path, kind="weight,update,momentum", second_moments=True) as run:
        model = nn.Sequential(nn.Linear(*widths[:2]), nn.Linear(*widths[1:]))
        model[0].requires_grad_(False)
        optimizer = run.watch(torch.optim.Adam(model.parameters(), lr=0.1))
        train(model, optimizer)
        model.requires_grad_(True)
        train(model, optimizer)
        optimizer.param_groups[0]["params"].reverse()
        train(model, optimizer)
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    for row in run.expected[0][8:]:
        row.reverse()
    for place, name in enumerate(names):
        first = 4 * name.startswith("0")
        assert run.trace.steps(name).tolist() == [*range(first, 12)]
        means = squares = torch.zeros(())
        for step in range(first, 12):
            gradient = run.expected[0][step][place].reshape(-1)
            if step > first:
                found = run.trace.read(name, step, kind="second_moment")
                np.testing.assert_allclose(found, squares, rtol=1e-5)
            means, squares = 0.9 * means + 0.1 * gradient, 0.999 * squares + 0.001 * gradient**2
            np.testing.assert_array_equal(run.trace.read(name, step), gradient)
            np.testing.assert_allclose(run.trace.read(name, step, kind="momentum"), means, rtol=1e-4, atol=1e-7)
            number = step - first + 1
            update = 0.1 * means / (1 - 0.9**number) / ((squares / (1 - 0.999**number)).sqrt() + 1e-8)
            np.testing.assert_allclose(run.trace.read(name, step, kind="update"), update, rtol=1e-3, atol=1e-6)
    assert run.summary.errors == 0


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_in_a_group_twice(path):
    with Captured(path, kind="weight,update") as run:
        model = nn.Linear(3, 4)
        train(model, run.watch(torch.optim.SGD([model.weight, model.bias, model.weight], lr=0.1)))
    assert run.summary.errors == 0
    for step, (weight, bias, _) in enumerate(run.expected[0]):
        np.testing.assert_array_equal(run.trace.read("weight", step), weight.reshape(-1))
        np.testing.assert_array_equal(run.trace.read("bias", step), bias)
        assert run.trace.steps("weight", kind="update").tolist() == [0, 1, 2, 3]


def test_threads_that_train_at_once_start_one_writer(path, monkeypatch):
    start = threading.Thread.start

    def slowly(thread):
        if thread.name == "gtrace-writer":
            time.sleep(0.2)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slowly)
    with Captured(path) as run:
        threads = [threading.Thread(target=train, args=(nn.Linear(3, 4),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (run.said, run.summary.errors) == ([], 0)
    assert [run.trace.scalars(optimizer=number)["step"].size for number in (0, 1)] == [4, 4]


@pytest.mark.parametrize("noise", [False, True])
def test_tensors_that_the_program_swaps(path, noise):
    """torch refuses those with weak references: by itself, and when it moves models of tensor subclasses."""
    with Captured(path, noise=noise, kind="weight,momentum") as run:
        model, other = nn.Linear(3, 4), nn.Linear(3, 4)
        optimizer = run.watch(torch.optim.Adam(model.parameters()))
        train(model, optimizer)
        torch.utils.swap_tensors(model.weight, other.weight)
        train(model, optimizer)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.double().float()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        train(model, optimizer)
    assert run.trace.steps("weight", kind="momentum").tolist() == [*range(12)]
    for step, (weight, bias) in enumerate(run.expected[0]):
        np.testing.assert_array_equal(run.trace.read("weight", step), weight.reshape(-1))
        np.testing.assert_array_equal(run.trace.read("bias", step), bias)
    assert run.summary.errors == 0
    assert [t.name for t in run.trace.tensors if t.kind == "weight"] == ["weight", "bias"]


def test_a_parameter_that_gets_another_shape_is_another_tensor(path):
    """Network surgery by ``.data``, in the middle of steps that are like the ones before; and back again."""
    with Captured(path) as run:
        model = nn.Linear(30, 4)
        optimizer = run.sgd(model)
        for rows in (4, 2, 4):
            model.weight.data, model.bias.data = torch.randn(rows, 30), torch.randn(rows)
            train(model, optimizer, 3, inputs=30)
    run.expected[0] = [
        [None, None, *row] if 3 <= step < 6 else [*row, None, None] for step, row in enumerate(run.expected[0])
    ]
    run.check(["weight", "bias", "weight~2", "bias~2"])


def bare(*values):
    return module(w=nn.Parameter(torch.tensor(values)))


def squares(model):
    return model(torch.ones(2, 3, dtype=model.weight.dtype)).square().mean()


RARE = torch.tensor([1, 3, 1])


def image():
    return torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)


FLOATS = pytest.mark.capture_case("bfloat16, float16, float64")
COMPLEX, SPARSE = pytest.mark.capture_case("complex parameters"), pytest.mark.capture_case("sparse gradients")


@pytest.mark.parametrize(
    ("build", "loss", "dtype"),
    [
        pytest.param(lambda: nn.Linear(3, 4).to(torch.bfloat16), squares, "bfloat16", marks=FLOATS),
        pytest.param(lambda: nn.Linear(3, 4).to(torch.float16), squares, "float16", marks=FLOATS),
        pytest.param(lambda: nn.Linear(3, 4).to(torch.float64), squares, "float64", marks=FLOATS),
        pytest.param(lambda: bare(1 + 2j, 3 - 1j), lambda m: (m.w.abs() ** 2).sum(), "complex64", marks=COMPLEX),
        pytest.param(lambda: nn.Embedding(5, 2, sparse=True), lambda m: m(RARE).sum(), "float32", marks=SPARSE),
        (lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), lambda m: m(image()).sum(), "float32"),
        (lambda: bare(0.0, 1.0, -1.0), lambda m: m.w.sqrt().sum(), "float32"),  # not finite
    ],
)
def test_gradients_of_every_kind_become_plain_float32(path, build, loss, dtype):
    with Captured(path) as run:
        model = build()
        make = torch.optim.SparseAdam if isinstance(model, nn.Embedding) else torch.optim.SGD
        optimizer = run.watch(make(model.parameters(), lr=0.1))
        loss(model).backward()
        optimizer.step()
    info = run.check([name for name, _ in model.named_parameters()]).tensors[0]
    assert info.dtype == dtype
    assert info.shape == ((2, 2) if dtype == "complex64" else tuple(next(model.parameters()).shape))


@pytest.mark.capture_case("models that existed before capture")
def test_a_model_without_registration_hooks_is_named_by_a_scan(path):
    original = train(nn.Sequential(nn.Linear(3, 4)))
    with Captured(path) as run:
        model = copy.deepcopy(original)
        train(model, run.sgd(model), 1)
    run.check(["0.weight", "0.bias"])


def test_a_trace_that_cannot_be_made_does_not_stop_training(tmp_path):
    with Captured(tmp_path / "nowhere" / "run.zarr") as run:
        model = nn.Linear(3, 4)
        assert not torch.equal(model.weight.clone(), train(model, steps=20).weight)
    assert (run.summary.rows, run.summary.steps_seen) == (0, 20)
    assert run.summary.errors >= 1
    assert "does not exist" in run.said[0]
    assert result_text(run.summary, run.path) == "nothing was captured: see the warnings above"


@pytest.mark.parametrize(("differ", "warnings"), [(False, 1), (True, 3)])
def test_each_kind_of_error_is_told_once_and_three_at_most(differ, warnings, path, monkeypatch):
    commit = TraceWriter.commit

    def failing(self, step, **options):
        if step >= 2:
            raise OSError(28 + step * differ, "No space left on device")
        commit(self, step, **options)

    monkeypatch.setattr(TraceWriter, "commit", failing)
    monkeypatch.setattr(TraceWriter, "together", lambda *_args, **_options: 1)
    with Captured(path) as run:
        train(nn.Linear(3, 4), steps=9)
    assert (run.summary.errors, run.summary.unwritten) == (7, 7)
    assert len(run.said) == warnings
    assert run.said[0].endswith("No space left on device; training goes on")
    capture = run.trace.attrs["capture"]
    assert (capture["errors"], capture["unwritten"]) == (7, {"0": "2-8"})
    assert run.trace.scalars()["step"].tolist() == [0, 1]


def test_training_waits_for_a_slow_disk_and_loses_nothing(path, monkeypatch):
    commit, acquire = TraceWriter.commit, BufferPool.acquire
    let_go, acquired = threading.Event(), []

    def slow(self, step, **options):
        let_go.wait(0.02)
        commit(self, step, **options)

    def kept(pool, **how):
        acquired.append(acquire(pool, **how))
        return acquired[-1]

    monkeypatch.setattr(TraceWriter, "commit", slow)
    monkeypatch.setattr(BufferPool, "acquire", kept)
    with Captured(path, queue_bytes=2 * 64) as run:
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

    for owner, way in ((torch, "_foreach_copy_"), (buffers, "_memmove")):
        monkeypatch.setattr(owner, way, failing(getattr(owner, way)))
    with Captured(path, queue_bytes=1) as run:  # room for one row: a lost one would stop training for ever
        train(nn.Linear(3, 4))
    assert run.summary.errors == 2
    assert run.trace.steps("weight").tolist() == [2, 3]


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
            closure()
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
            torch.optim.SGD([late], lr=0.1).step()
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


@pytest.mark.parametrize("policy", [AutomaticSteps(), every_step(1)])
def test_the_budget_is_kept(path, policy):
    row = 4 * (3 * 4 + 4)
    with Captured(path, policy=policy, budget=5 * row + row // 2) as run:
        train(nn.Linear(3, 4), steps=20)
    assert run.trace.steps("weight").tolist() == [0, 1, 2, 3, 4]
    assert run.summary.over_budget == (not isinstance(policy, AutomaticSteps))


@pytest.mark.capture_case("AMP with GradScaler, fused and not")
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_under_a_scaler_are_unscaled(path, fused):
    w = nn.Parameter(torch.tensor([1.0, 2.0]))
    with Captured(path) as run:
        optimizer = torch.optim.Adam([w], lr=0.0, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for blow_up in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale((w**2).sum() * blow_up).backward()
            scaler.step(optimizer)
            scaler.update()
    trace = run.trace
    assert trace.steps("unnamed/opt0.g0.p0").tolist() == [0, 2]
    assert all(trace.read("unnamed/opt0.g0.p0", step).tolist() == [2.0, 4.0] for step in (0, 2))
    assert trace.scalars()["loss"].tolist() == [5.0, 5.0]
    if fused:
        assert trace.scalars()["grad_scale"].tolist() == [1024.0, 512.0]
    assert (run.summary.skipped_steps, trace.attrs["capture"]["skipped_steps"]) == (1, 1)


def test_selected_steps_and_tensors(path):
    with Captured(path, policy=parse_steps("1,4+2"), tensors=("0.*", "2.*"), exclude=("*.bias",)) as run:
        train(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4)), steps=8)
    assert [t.name for t in run.trace.tensors] == ["0.weight", "2.weight"]
    assert run.trace.steps("0.weight").tolist() == [1, 4, 5]
    assert (run.summary.rows, run.summary.steps_seen, run.summary.complaints) == (3, 8, ())
    assert run.trace.attrs["capture"]["steps"] == "1,4+2"
