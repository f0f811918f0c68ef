"""Gradients of module outputs as they land in a trace, what is left out, and how much memory they take."""

import copy
import threading

import numpy as np
import pytest
import torch
from helpers_capture import Captured
from helpers_hooks import descend, module
from torch import nn
from torch.nn import functional

import gtrace
from gtrace.capture.neural import MOST_CALLS, HostBlocks
from gtrace.capture.options import AutomaticSteps, every_step
from gtrace.trace.rows import sample_indices


class Run(Captured):
    """A captured block of neural gradients."""

    def __init__(self, path, kind="neural", **options):
        super().__init__(path, kind=kind, **options)

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


def batches(count):
    generator = torch.Generator().manual_seed(2)
    for k in range(count):
        n = 3 if k % 4 == 3 else 8
        yield torch.randn(n, 1, 8, 8, generator=generator), torch.randint(10, (n,), generator=generator)


def sgd(*models, lr=0.0):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=lr)


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_gradients_are_those_of_autograd(tmp_path, suffix):
    """The last batch of each epoch is smaller."""
    model = CNN()
    twin, names, states = copy.deepcopy(model), ["conv1", "conv2", "fc1", "fc2"], []
    with Run(tmp_path / f"run.{suffix}", kind="both") as run:
        optimizer = sgd(model, lr=0.1)
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
    np.testing.assert_array_equal(*(run.trace.scalars(kind=kind)["loss"] for kind in ("neural", "weight")))
    assert run.said == []
    assert (run.summary.rows, run.summary.neural_rows, run.summary.tensors, run.summary.neural_tensors) == (8, 8, 8, 4)


def test_the_element_cap_keeps_a_sample(path):
    model, expected = CNN(), []
    with Run(path, max_elements=100) as run:
        optimizer = sgd(model)
        for x, y in batches(4):
            outputs = model.outputs(x)
            loss = functional.cross_entropy(outputs[-1], y)
            expected.append(torch.autograd.grad(loss, outputs, retain_graph=True)[0].flatten().numpy())
            optimizer.step()  # takes what autograd.grad has shown
    numbers = run.trace.statistics("conv1")
    assert (numbers["n_valid"].tolist(), numbers["n_total"].tolist()) == ([100] * 4, [2048] * 3 + [768])
    assert run.trace.statistics("fc2")["n_valid"].tolist() == [80, 80, 80, 30]
    for step, whole in enumerate(expected):
        np.testing.assert_array_equal(run.read("conv1", step), whole[sample_indices(whole.size, 100)])
    assert {info.name: info.size for info in run.infos} == {"conv1": 100, "conv2": 100, "fc1": 100, "fc2": 100}
    assert run.infos[0].sample == {"kind": "stretches", "seed": 0}


def test_a_larger_gradient_than_the_first_one_is_cut(path):
    model = nn.Linear(3, 4)
    with Run(path) as run:
        optimizer = sgd(model)
        for size in (10, 12, 100):
            (model(torch.ones(size, 3)) * torch.arange(4.0 * size).reshape(size, 4)).sum().backward()
            optimizer.step()
    numbers = run.trace.statistics("Linear")
    assert (numbers["n_valid"].tolist(), numbers["n_total"].tolist()) == ([40, 48, 50], [40, 48, 400])
    assert run.read("Linear", 2).tolist() == sample_indices(400, 50).tolist()


def test_accumulation_and_shared_modules_are_numbered(path):
    model = module(lambda self, x: self.a(self.a(x)), a=nn.Linear(3, 3, bias=False))
    nn.init.eye_(model.a.weight)
    with Run(path) as run:
        optimizer = sgd(model)
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
        optimizer = sgd(cell)
        for _ in range(2):
            states = [torch.zeros(1, 1)]
            for _ in range(MOST_CALLS + 6):
                states.append(cell(torch.ones(1, 1), states[-1]))
            expected = torch.autograd.grad(states[-1].sum(), states[1:], retain_graph=True)
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
        y = model(torch.ones(1, 2))
        y.sum().backward(retain_graph=True)
        (3 * y[:, 0]).sum().backward()
        sgd(model).step()
    assert run.read("Linear", 0).tolist() == [4, 1]


def test_the_gradient_belongs_to_the_optimizer_that_steps_next(path):
    """As in adversarial training: what the generator made before the other one's step counts for its own."""
    generator, critic = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 1))
    with Run(path) as run:
        critics, generators = sgd(critic), sgd(generator)
        for _ in range(2):
            fake = generator(torch.ones(3, 2))
            critic(fake.detach()).sum().backward()
            critics.step()
            (2 * critic(fake)).sum().backward()
            generators.step()
    found = [(info.name, info.optimizer) for info in run.infos]
    assert found == [("Sequential_2.0", 0), ("0", 1), ("opt1/Sequential_2.0", 1)]
    assert [run.read("Sequential_2.0", 1, optimizer=number).tolist() for number in (0, 1)] == [[1] * 3, [2] * 3]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(torch.optim.LBFGS, marks=pytest.mark.capture_case("LBFGS")),
        pytest.param(torch.optim.Adam, marks=pytest.mark.capture_case("closures of other optimizers")),
    ],
)
def test_only_the_first_evaluation_of_a_closure(make, path):
    model, several, firsts = nn.Linear(2, 1, bias=False), make is torch.optim.LBFGS, []
    with Run(path, kind="both") as run:
        optimizer = make(model.parameters(), lr=0.1, **({"max_iter": 4} if several else {}))
        for step in range(3):
            seen = []

            def closure(seen=seen):
                optimizer.zero_grad()
                y = model(torch.ones(2, 2))
                loss = ((y - 1) ** 4).sum()
                loss.backward()
                seen.append(((4 * (y - 1) ** 3).flatten().tolist(), model.weight.grad[0].tolist(), loss.item()))
                return loss

            returned = optimizer.step(closure=closure) if step == 1 else optimizer.step(closure)
            assert (returned.item(), len(seen) > 1) == (seen[0][2], several)
            firsts.append(seen[0])
    assert run.steps == {"Linear": [0, 1, 2]}
    for step, (outputs, weights, _) in enumerate(firsts):
        np.testing.assert_allclose(run.read("Linear", step), outputs, rtol=1e-5)
        assert run.trace.read("weight", step).tolist() == weights
    assert run.trace.scalars(kind="weight")["loss"].tolist() == [loss for *_, loss in firsts]


@pytest.mark.capture_case("AMP with GradScaler, fused and not")
@pytest.mark.parametrize("fused", [False, True])
def test_the_scale_of_a_gradient_scaler_is_taken_out(path, fused):
    model, losses = nn.Linear(2, 2), []
    with Run(path, kind="both") as run:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for blow_up in (1.0, float("inf"), 3.0):
            optimizer.zero_grad()
            losses.append(model(torch.ones(1, 2)).sum() * blow_up)
            scaler.scale(losses[-1]).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        losses.append(5 * model(torch.ones(1, 2)).sum())  # no scaler any more
        losses[-1].backward()
        optimizer.step()
    assert run.steps == {"Linear": [0, 2, 3]}
    assert run.trace.steps("weight").tolist() == [0, 2, 3]
    for step, factor in ((0, 1), (2, 3), (3, 5)):
        assert run.read("Linear", step).tolist() == [factor] * 2
        assert run.trace.read("weight", step).tolist() == [factor] * 4
    scalars = run.trace.scalars(kind="weight")
    assert scalars["loss"].tolist() == [losses[step].item() for step in (0, 2, 3)]
    assert not fused or scalars["grad_scale"].tolist()[:2] == [1024.0, 512.0]
    assert run.trace.scalars(kind="neural")["grad_scale"].tolist()[:2] == [1024.0, 512.0]
    assert (run.summary.skipped_steps, run.trace.attrs["capture"]["skipped_steps"]) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_other_types_become_float32(path, dtype):
    model = module(lambda self, x: x @ self.weight, weight=nn.Parameter(torch.ones(3, 2, dtype=dtype)))
    factor = torch.tensor([0.1, 3.0]).to(dtype)
    with Run(path, max_elements=5) as run:
        optimizer = sgd(model)
        for rows in (1, 3):
            y = model(torch.ones(rows, 3, dtype=dtype)) * factor
            (torch.view_as_real(y)[..., 0] if y.is_complex() else y).sum().backward()
            optimizer.step()
    (info,) = run.infos
    assert info.dtype == str(dtype).removeprefix("torch.")
    row = torch.view_as_real(factor).flatten() if dtype.is_complex else factor
    assert run.read("Net", 0).tolist() == row.to(torch.float32).tolist()
    assert info.shape == ((1, 2, 2) if dtype.is_complex else (1, 2))
    assert run.trace.statistics("Net")["n_total"].tolist()[1] == 3 * row.numel()


def test_gradients_of_any_strides(path):
    conv = nn.Conv2d(2, 3, 1).to(memory_format=torch.channels_last)
    model = module(lambda self, x: self.flat(self.conv(x)), conv=conv, flat=nn.Identity())
    ramp = torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4)
    with Run(path, max_elements=50) as run:
        out = model(torch.ones(2, 2, 4, 4).to(memory_format=torch.channels_last))
        out.backward(ramp.to(memory_format=torch.channels_last))
        sgd(model).step()
    assert run.read("conv", 0).tolist() == sample_indices(96, 50).tolist()
    assert run.steps == {"conv": [0], "flat": [0]}


def test_what_is_left_out_is_said_once(path):
    def forward(self, x):
        x = self.frozen(x)
        self.unused(x)
        return self.used(x)

    with Run(path) as run:
        frozen = nn.Linear(3, 3).requires_grad_(False)
        model = module(forward, frozen=frozen, used=nn.Linear(3, 3), unused=nn.Linear(3, 3))
        descend(model, sgd(model), 1, 3)
    assert run.steps == {"used": [0, 1, 2]}
    assert run.said == [
        "gtrace: note: 1 module (frozen) with outputs that need no gradient: skipped",
        (
            "gtrace: note: 1 module (unused) whose gradient never arrived: skipped (the loss does not depend on the "
            "output, or it is a view that was changed in place)"
        ),
    ]


@pytest.mark.parametrize(("budget", "policy"), [(60_000, every_step()), (200_000, AutomaticSteps())])
def test_the_budget_counts_both_kinds(budget, policy, path):
    with Run(path, kind="both", budget=budget, policy=policy) as run:
        model = CNN()
        descend(model, sgd(model), 8, 1, 8, 8, steps=12)
    assert 0 < run.summary.rows == run.summary.neural_rows < 12
    counts = [run.trace.statistics(info.name, kind=info.kind)["n_valid"] for info in run.trace.tensors]
    assert 4 * np.sum(counts) <= budget


def test_record_takes_the_model_given_and_no_other(path):
    model, other = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3)
    optimizer = sgd(model, other)
    with gtrace.capture.record(model, optimizer, path, kind="neural", max_elements=4):
        descend(lambda x: nn.ReLU()(other(model(x))), optimizer, 2, 3)
    trace = gtrace.open_trace(path)
    assert [(info.name, info.kind, info.size) for info in trace.tensors] == [("0", "neural", 4), ("1", "neural", 4)]
    assert (trace.attrs["capture"]["kind"], trace.attrs["capture"]["max_elements"]) == ("neural", 4)
    assert trace.attrs["model"] == "Sequential"
    assert not torch.nn.modules.module._global_forward_hooks


def test_waiting_rows_are_bounded():
    blocks = HostBlocks(limit=4 * 100)
    row = [blocks.take(80)]
    blocks.find_room()
    blocks.hand_over(row)
    blocks.find_room()
    more = [blocks.take(80)]
    assert more[0].data_ptr() != row[0].data_ptr()
    blocks.hand_over(more)
    done = threading.Event()
    waiting = threading.Thread(target=lambda: (blocks.find_room(), done.set()))
    waiting.start()
    assert not done.wait(0.05)
    blocks.returned.put(row)
    assert done.wait(10)
    assert blocks.take(80).data_ptr() == row[0].data_ptr()
    for elements in range(1, 60):  # blocks that nobody needs any more make room
        blocks.reuse([blocks.take(elements)])
        assert blocks._free_bytes == 4 * sum(b.numel() for free in blocks._free.values() for b in free) <= 400
