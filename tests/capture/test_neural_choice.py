"""What capture of neural gradients leaves out, is told to leave out, and how much memory it takes."""

import threading

import pytest
import torch
from helpers_neural import CNN, Run, batches, weights
from torch import nn
from torch.nn import functional

import gtrace
from gtrace.capture.neural import HostBlocks
from gtrace.capture.options import AutomaticSteps
from gtrace.errors import UsageError


@pytest.mark.parametrize("part", [False, True])
def test_a_compiled_module_is_named_with_what_to_do(path, part):
    torch._dynamo.reset()
    with Run(path, kind="both") as run:
        model = CNN()
        if part:
            model.conv1 = torch.compile(model.conv1, backend="eager")
        else:
            model = torch.compile(model, backend="eager")
        fit(model, 3)
    name = "conv1" if part else "CNN"
    assert run.said[0] == (
        f"gtrace: warning: neural gradients inside of the compiled '{name}' are not recorded; run without "
        "torch.compile to record them"
    )
    assert len(run.said) == (1 if part else 2)
    assert list(run.steps) == (["conv2", "fc1", "fc2"] if part else [])
    assert (run.summary.rows, run.summary.errors) == (3, 0)


def fit(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


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
    with Run(path, tensors=("conv*", "fc1.*"), exclude=("conv2*", "nothing"), kind="both") as run:
        fit(CNN(), 2)
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
    assert (trace.attrs["capture"]["kind"], trace.attrs["capture"]["max_elements"]) == ("neural", 4)
    assert trace.attrs["model"] == "Sequential"
    before = torch.nn.modules.module._global_forward_hooks
    assert len(before) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "nural"}, "--kind: unknown kind 'nural'; did you mean neural"),
        ({"kind": "neural", "noise": True}, "--noise is about gradients of weights"),
        ({"kind": "both", "max_elements": 0}, "--max-elements: needs a number of 1 or more, not 0"),
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
    assert run.steps == {"unnamed/Hardtanh": [0, 1, 2, 3]}
    assert run.summary.errors == 0


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
    blocks.release(row)
    assert done.wait(10)
    assert blocks.take(80).data_ptr() == row[0].data_ptr()


def test_blocks_that_nobody_needs_any_more_make_room():
    blocks = HostBlocks(limit=4 * 100)
    for elements in range(1, 60):
        blocks.reuse([blocks.take(elements)])
        assert blocks._free_bytes <= 400
        assert blocks._free_bytes == 4 * sum(b.numel() for free in blocks._free.values() for b in free)
