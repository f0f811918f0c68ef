"""Gradients of module outputs as they land in a trace, and what is said about those that do not."""

from __future__ import annotations

import copy
import gc
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import gtrace
from gtrace.capture import CaptureOptions, CaptureSession
from gtrace.capture.neural import MOST_CALLS, HostBlocks
from gtrace.capture.policy import AutomaticSteps, EveryStep, parse_steps
from gtrace.errors import UsageError
from gtrace.trace.ragged import sample_indices


class Run:
    """A captured block; what the user is told is kept."""

    def __init__(self, path, kind="neural", **options):
        self.path = path
        self.said = []
        options = CaptureOptions(path, kind=kind, **({"policy": EveryStep()} | options))
        self.session = CaptureSession(options, say=self.said.append)

    def __enter__(self):
        self.session.start()
        return self

    def __exit__(self, *_):
        self.summary = self.session.finish("complete")
        self.trace = gtrace.open_trace(self.path) if self.summary.rows else None

    @property
    def steps(self):
        return {info.name: self.trace.steps(info.name, kind="neural").tolist() for info in self.infos}

    @property
    def infos(self):
        return [info for info in self.trace.tensors if info.kind == "neural"]

    def read(self, name, step, **which):
        return self.trace.read(name, step, kind="neural", **which)


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 8, 3, padding=1)
        self.fc1 = nn.Linear(8 * 4 * 4, 16)
        self.fc2 = nn.Linear(16, 10)

    def outputs(self, x):
        a = self.conv1(x)
        b = self.conv2(functional.relu(a))
        c = self.fc1(functional.max_pool2d(functional.relu(b), 2).flatten(1))
        return [a, b, c, self.fc2(functional.relu(c))]

    def forward(self, x):
        return self.outputs(x)[-1]


def mlp():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Linear(32, 10))


def batches(count=4, sizes=(8, 8, 8, 3)):
    generator = torch.Generator().manual_seed(2)
    for k in range(count):
        n = sizes[k % len(sizes)]
        yield torch.randn(n, 1, 8, 8, generator=generator), torch.randint(10, (n,), generator=generator)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.zarr"


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_gradients_are_those_of_autograd(tmp_path, suffix):
    """The last batch of each epoch is smaller."""
    torch.manual_seed(0)
    model = CNN()
    twin = copy.deepcopy(model)
    names = ["conv1", "conv2", "fc1", "fc2"]
    with Run(tmp_path / f"run.{suffix}", kind="both") as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        states = []
        for x, y in batches(8):
            states.append(copy.deepcopy(model.state_dict()))
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert run.steps == {name: list(range(8)) for name in names}
    for step, (x, y) in enumerate(batches(8)):
        twin.load_state_dict(states[step])
        outputs = twin.outputs(x)
        gradients = torch.autograd.grad(functional.cross_entropy(outputs[-1], y), outputs)
        for name, gradient in zip(names, gradients, strict=True):
            assert run.read(name, step).tobytes() == gradient.contiguous().numpy().tobytes()
    info = {info.name: info for info in run.infos}["conv2"]
    assert (info.shape, info.dtype, info.module_type) == ((8, 8, 8, 8), "float32", "Conv2d")
    assert (info.attrs["module"], info.attrs["call"], info.attrs["output"]) == ("conv2", 0, 0)
    numbers = run.trace.statistics("fc2")
    assert numbers["n_valid"].tolist() == numbers["n_total"].tolist() == [80, 80, 80, 30] * 2
    scalars = run.trace.scalars(kind="neural")
    np.testing.assert_array_equal(scalars["loss"], run.trace.scalars(kind="weight")["loss"])
    assert len([t for t in run.trace.tensors if t.kind == "weight"]) == 8
    assert run.said == []
    assert (run.summary.rows, run.summary.neural_rows, run.summary.tensors, run.summary.neural_tensors) == (8, 8, 8, 4)


def weights(kind, build, path, forward=None, steps=6, **options):
    torch.manual_seed(0)
    model = build()
    run = Run(path, kind=kind, **options) if kind else None
    if run:
        run.__enter__()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in batches(steps):
        optimizer.zero_grad()
        functional.cross_entropy(forward(model, x) if forward else model(x), y).backward()
        optimizer.step()
    if run:
        run.__exit__()
    return [p.detach().clone() for p in model.parameters()], run


@pytest.mark.parametrize("kind", ["neural", "both"])
def test_training_ends_with_the_same_weights(kind, tmp_path):
    for number, (build, forward) in enumerate(((CNN, None), (mlp, lambda m, x: m(x.flatten(1))))):
        plain, _ = weights(None, build, tmp_path, forward)
        captured, run = weights(kind, build, tmp_path / f"{number}.zarr", forward)
        assert all(torch.equal(a, b) for a, b in zip(plain, captured, strict=True))
        assert run.summary.neural_rows == 6
        assert run.summary.errors == 0


def test_the_element_cap_keeps_a_sample(path):
    torch.manual_seed(0)
    model = CNN()
    with Run(path, max_elements=100) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        expected = []
        for x, y in batches(4):
            outputs = model.outputs(x)
            loss = functional.cross_entropy(outputs[-1], y)
            expected.append(torch.autograd.grad(loss, outputs, retain_graph=True))
            optimizer.zero_grad()
            optimizer.step()  # takes what autograd.grad has shown
    numbers = run.trace.statistics("conv1")
    assert (numbers["n_valid"].tolist(), numbers["n_total"].tolist()) == ([100] * 4, [2048] * 3 + [768])
    assert run.trace.statistics("fc2")["n_valid"].tolist() == [80, 80, 80, 30]
    for step, gradients in enumerate(expected):
        whole = gradients[0].flatten().numpy()
        np.testing.assert_array_equal(run.read("conv1", step), whole[sample_indices(whole.size, 100)])
    assert {info.name: info.size for info in run.infos} == {"conv1": 100, "conv2": 100, "fc1": 100, "fc2": 100}
    assert run.infos[0].sample == {"kind": "stretches", "seed": 0}


def test_a_larger_gradient_than_the_first_one_is_cut(path):
    model = nn.Linear(3, 4)
    with Run(path) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for size in (10, 12, 100):
            (model(torch.ones(size, 3)) * torch.arange(4.0 * size).reshape(size, 4)).sum().backward()
            optimizer.step()
    numbers = run.trace.statistics("Linear")
    assert (numbers["n_valid"].tolist(), numbers["n_total"].tolist()) == ([40, 48, 50], [40, 48, 400])
    assert run.read("Linear", 2).tolist() == sample_indices(400, 50).tolist()


def test_accumulation_and_shared_modules_are_numbered(path):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3, bias=False)

        def forward(self, x):
            return self.a(self.a(x))

    model = Shared()
    nn.init.eye_(model.a.weight)
    with Run(path) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            model(torch.ones(1, 3))  # evaluation with gradients and without a backward pass
            for scale in (1.0, 10.0):
                (model(torch.ones(2, 3)) * scale).sum().backward()
            optimizer.step()
    assert run.steps == {name: [0, 1] for name in ("a", "a#1", "a#2", "a#3")}
    assert [run.read(info.name, 1)[0] for info in run.infos] == [1, 1, 10, 10]
    assert [info.attrs["call"] for info in run.infos] == [0, 1, 2, 3]


def test_only_so_many_calls_are_kept_the_first_ones(path):
    cell = nn.RNNCell(1, 1)
    with Run(path) as run:
        optimizer = torch.optim.SGD(cell.parameters(), lr=0.0)
        for _ in range(2):
            state = torch.zeros(1, 1)
            states = []
            for _ in range(MOST_CALLS + 6):
                state = cell(torch.ones(1, 1), state)
                states.append(state)
            loss = state.sum()
            expected = torch.autograd.grad(loss, states, retain_graph=True)
            optimizer.step()
    assert len(run.infos) == MOST_CALLS
    for call in (0, 1, MOST_CALLS - 1):
        name = f"RNNCell#{call}" if call else "RNNCell"
        assert run.read(name, 1).tolist() == expected[call].flatten().tolist()
    assert run.said == [
        f"gtrace: warning: calls of a module beyond the {MOST_CALLS}th of a step are left out, first: RNNCell"
    ]


def test_a_graph_that_is_used_twice_adds_up(path):
    model = nn.Linear(2, 2)
    with Run(path) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        y = model(torch.ones(1, 2))
        y.sum().backward(retain_graph=True)
        (3 * y[:, 0]).sum().backward()
        optimizer.step()
    assert run.read("Linear", 0).tolist() == [4, 1]


def test_steps_that_are_not_wanted(path):
    model = nn.Linear(3, 4)
    seen = []
    with Run(path, kind="both", policy=parse_steps("1,4")) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(6):
            seen.append(run.session._recorder.neural._hooks.listening)
            (model(torch.ones(2, 3)) * step).sum().backward()
            optimizer.step()
    assert seen == [step in (1, 4) for step in range(6)]
    assert run.steps == {"Linear": [1, 4]}
    assert run.read("Linear", 4).tolist() == [4.0] * 8


def test_the_gradient_belongs_to_the_optimizer_that_steps_next(path):
    """As in adversarial training: what the generator made before the other one's step counts for its own."""
    generator, critic = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 1))
    with Run(path) as run:
        critics = torch.optim.SGD(critic.parameters(), lr=0.0)
        generators = torch.optim.SGD(generator.parameters(), lr=0.0)
        for _ in range(2):
            fake = generator(torch.ones(3, 2))
            critic(fake.detach()).sum().backward()
            critics.step()
            (2 * critic(fake)).sum().backward()
            generators.step()
    found = [(info.name, info.optimizer) for info in run.infos]
    assert found == [("Sequential_2.0", 0), ("0", 1), ("Sequential_2.0", 1)]
    assert run.read("Sequential_2.0", 1, optimizer=0).tolist() == [1] * 3
    assert run.read("Sequential_2.0", 1, optimizer=1).tolist() == [2] * 3


def test_only_the_first_evaluation_of_a_closure(path):
    model = nn.Linear(2, 1, bias=False)
    firsts = []
    with Run(path, kind="both") as run:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        for _ in range(3):
            seen = []

            def closure(seen=seen):
                optimizer.zero_grad()
                y = model(torch.ones(2, 2))
                loss = ((y - 1) ** 4).sum()
                seen.append((4 * (y - 1) ** 3).flatten().tolist())
                loss.backward()
                return loss

            optimizer.step(closure)
            assert len(seen) > 1
            firsts.append(seen[0])
    assert run.steps == {"Linear": [0, 1, 2]}
    for step, expected in enumerate(firsts):
        np.testing.assert_allclose(run.read("Linear", step), expected, rtol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_the_scale_of_a_gradient_scaler_is_taken_out(path, fused):
    model = nn.Linear(2, 2)
    with Run(path, kind="both") as run:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for blow_up in (1.0, float("inf"), 3.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum() * blow_up).backward()
            scaler.step(optimizer)
            scaler.update()
        (5 * model(torch.ones(1, 2))).sum().backward()  # no scaler any more
        optimizer.step()
    assert run.steps == {"Linear": [0, 2, 3]}
    assert [run.read("Linear", step).tolist() for step in (0, 2, 3)] == [[1, 1], [3, 3], [5, 5]]
    assert run.trace.scalars(kind="neural")["grad_scale"].tolist()[:2] == [1024.0, 512.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_other_types_become_float32(path, dtype):
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 2, dtype=dtype))

        def forward(self, x):
            return x @ self.weight

    model = Linear()
    with Run(path, max_elements=5) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        factor = torch.tensor([0.1, 3.0]).to(dtype)
        for rows in (1, 3):
            y = model(torch.ones(rows, 3, dtype=dtype)) * factor
            (torch.view_as_real(y)[..., 0] if y.is_complex() else y).sum().backward()
            optimizer.step()
    (info,) = run.infos
    assert info.dtype == str(dtype).removeprefix("torch.")
    first = run.read("Linear", 0)
    row = torch.view_as_real(factor).flatten() if dtype.is_complex else factor
    assert first.tolist() == row.to(torch.float32).tolist()
    assert info.shape == ((1, 2, 2) if dtype.is_complex else (1, 2))
    assert run.trace.statistics("Linear")["n_total"].tolist()[1] == 3 * first.size


def test_gradients_of_any_strides(path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 1).to(memory_format=torch.channels_last)
            self.flat = nn.Identity()

        def forward(self, x):
            return self.flat(self.conv(x))

    model = Net()
    ramp = torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4)
    with Run(path, max_elements=50) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = model(torch.ones(2, 2, 4, 4).to(memory_format=torch.channels_last))
        out.backward(ramp.to(memory_format=torch.channels_last))
        optimizer.step()
    assert run.read("conv", 0).tolist() == sample_indices(96, 50).tolist()
    assert run.steps == {"conv": [0], "flat": [0]}


def test_what_is_left_out_is_said_once(path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
            self.used = nn.Linear(3, 3)
            self.unused = nn.Linear(3, 3)

        def forward(self, x):
            x = self.frozen(x)
            self.unused(x)
            return self.used(x)

    with Run(path) as run:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    assert run.steps == {"used": [0, 1, 2]}
    assert run.said == [
        "gtrace: note: 1 module (frozen) with outputs that need no gradient: skipped",
        (
            "gtrace: note: 1 module (unused) whose gradient never arrived: skipped (the loss does not depend on the "
            "output, or it is a view that was changed in place)"
        ),
    ]


@pytest.mark.parametrize("part", [False, True])
def test_a_compiled_module_is_named_with_what_to_do(path, part):
    torch._dynamo.reset()
    with Run(path, kind="both") as run:
        model = CNN()
        if part:
            model.conv1 = torch.compile(model.conv1, backend="eager")
        else:
            model = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches(3):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    name = "conv1" if part else "CNN"
    assert run.said[0] == (
        f"gtrace: warning: neural gradients inside of the compiled '{name}' are not recorded; run without "
        "torch.compile to record them"
    )
    assert len(run.said) == (1 if part else 2)
    assert run.summary.rows == 3
    assert list(run.steps) == (["conv2", "fc1", "fc2"] if part else [])
    assert run.summary.errors == 0


def test_a_compiled_function_is_told_of(path):
    torch._dynamo.reset()
    with Run(path, kind="both") as run:
        model = nn.Linear(3, 2)
        call = torch.compile(lambda x: model(x), backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        call(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    (said,) = run.said
    assert said.startswith("gtrace: note: no gradient of a module's output arrived in 1 of 1 recorded steps")


def test_patterns_choose_modules(path):
    with Run(path, include=("conv*", "fc1.*"), exclude=("conv2*", "nothing"), kind="both") as run:
        model = CNN()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches(2):
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert [t.name for t in run.trace.tensors] == ["conv1.weight", "conv1.bias", "fc1.weight", "fc1.bias", "conv1"]
    (complaint,) = run.summary.complaints
    assert complaint.startswith("--exclude 'nothing' matched no tensor")


def test_the_budget_counts_both_kinds(tmp_path):
    rows = {}
    for kind in ("weight", "neural", "both"):
        _, run = weights(kind, CNN, tmp_path / f"{kind}.zarr", steps=8, budget=60_000)
        assert run.summary.over_budget
        rows[kind] = run.summary.rows
        stored = sum(4 * int(run.trace.statistics(t.name, kind=t.kind)["n_valid"].sum()) for t in run.trace.tensors)
        assert stored <= 60_000
    assert rows["both"] < min(rows["weight"], rows["neural"])
    _, run = weights("both", CNN, tmp_path / "auto.zarr", steps=12, budget=200_000, policy=AutomaticSteps())
    assert 0 < run.summary.rows < 12
    assert run.summary.neural_rows == run.summary.rows


def test_record_takes_the_model_given_and_no_other(tmp_path):
    model, other = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with gtrace.capture.record(model, optimizer, tmp_path / "run.zarr", kind="neural", max_elements=4):
        for _ in range(2):
            nn.ReLU()(other(model(torch.ones(2, 3)))).sum().backward()
            optimizer.step()
    trace = gtrace.open_trace(tmp_path / "run.zarr")
    assert [(info.name, info.kind, info.size) for info in trace.tensors] == [("0", "neural", 4), ("1", "neural", 4)]
    assert trace.attrs["capture"]["kind"] == "neural"
    assert trace.attrs["capture"]["max_elements"] == 4
    assert trace.attrs["model"] == "Sequential"
    before = torch.nn.modules.module._global_forward_hooks
    assert len(before) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "nural"}, "'nural' is no kind of gradient; did you mean neural"),
        ({"max_elements": 5}, "--max-elements is for gradients of module outputs"),
        ({"kind": "both", "max_elements": 0}, "write 1 or more"),
    ],
)
def test_wrong_options(tmp_path, options, message):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(UsageError, match=message),
        gtrace.capture.record(model, optimizer, tmp_path / "r.h5", **options),
    ):
        pass


def test_modules_that_are_gone_leave_no_trouble(path):
    with Run(path) as run:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        for step in range(4):
            (nn.Hardtanh(-9, 9)(weight * (step + 1))).sum().backward()
            optimizer.step()
            gc.collect()
    assert run.steps == {"unnamed/Hardtanh": [0, 1, 2, 3]}
    assert run.summary.errors == 0


def test_waiting_rows_are_bounded():
    blocks = HostBlocks(limit=4 * 100)
    row = [blocks.take(80)]
    blocks.wait()
    blocks.hand_over(row)
    blocks.wait()
    more = [blocks.take(80)]
    assert more[0].data_ptr() != row[0].data_ptr()
    blocks.hand_over(more)
    done = threading.Event()
    waiting = threading.Thread(target=lambda: (blocks.wait(), done.set()))
    waiting.start()
    assert not done.wait(0.05)
    blocks.release(row)
    assert done.wait(10)
    assert blocks.take(80).data_ptr() == row[0].data_ptr()


def test_blocks_that_nobody_needs_any_more_make_room():
    blocks = HostBlocks(limit=4 * 100)
    for elements in range(1, 60):
        blocks.reuse([blocks.take(elements)])
        assert blocks._free_bytes <= 400
        assert blocks._free_bytes == 4 * sum(b.numel() for free in blocks._free.values() for b in free)
