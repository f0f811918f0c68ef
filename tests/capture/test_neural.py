"""Gradients of module outputs as they land in a trace, and what is said about those that do not."""

import copy

import numpy as np
import pytest
import torch
from helpers_hooks import module
from helpers_neural import CNN, Run, batches, mlp, weights
from torch import nn
from torch.nn import functional

from gtrace.capture.neural import MOST_CALLS
from gtrace.trace.rows import sample_indices


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


@pytest.mark.parametrize("kind", ["neural", "both"])
def test_training_ends_with_the_same_weights(kind, tmp_path):
    for number, (build, forward) in enumerate(((CNN, None), (mlp, lambda m, x: m(x.flatten(1))))):
        plain, _ = weights(None, build, tmp_path, forward)
        captured, run = weights(kind, build, tmp_path / f"{number}.zarr", forward)
        assert all(torch.equal(a, b) for a, b in zip(plain, captured, strict=True))
        assert (run.summary.neural_rows, run.summary.errors) == (6, 0)


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
    model = module(lambda self, x: self.a(self.a(x)), a=nn.Linear(3, 3, bias=False))
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
    assert found == [("Sequential_2.0", 0), ("0", 1), ("opt1/Sequential_2.0", 1)]
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
    model = module(lambda self, x: x @ self.weight, weight=nn.Parameter(torch.ones(3, 2, dtype=dtype)))
    with Run(path, max_elements=5) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        factor = torch.tensor([0.1, 3.0]).to(dtype)
        for rows in (1, 3):
            y = model(torch.ones(rows, 3, dtype=dtype)) * factor
            (torch.view_as_real(y)[..., 0] if y.is_complex() else y).sum().backward()
            optimizer.step()
    (info,) = run.infos
    assert info.dtype == str(dtype).removeprefix("torch.")
    first = run.read("Net", 0)
    row = torch.view_as_real(factor).flatten() if dtype.is_complex else factor
    assert first.tolist() == row.to(torch.float32).tolist()
    assert info.shape == ((1, 2, 2) if dtype.is_complex else (1, 2))
    assert run.trace.statistics("Net")["n_total"].tolist()[1] == 3 * first.size


def test_gradients_of_any_strides(path):
    conv = nn.Conv2d(2, 3, 1).to(memory_format=torch.channels_last)
    model = module(lambda self, x: self.flat(self.conv(x)), conv=conv, flat=nn.Identity())
    ramp = torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4)
    with Run(path, max_elements=50) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = model(torch.ones(2, 2, 4, 4).to(memory_format=torch.channels_last))
        out.backward(ramp.to(memory_format=torch.channels_last))
        optimizer.step()
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
