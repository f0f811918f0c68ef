import subprocess
import sys

import pytest
import torch
from torch import nn

import gtrace
from gtrace.errors import OutputExistsError, UsageError


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def test_only_these_optimizers_and_these_names(tmp_path, model, optimizer):
    other = nn.Linear(3, 1)
    others = torch.optim.SGD(other.parameters(), lr=0.01)
    with gtrace.capture.record(nn.ModuleDict({"net": model}), optimizer, str(tmp_path / "run.h5")) as session:
        step(other, others)
        step(model, optimizer)
    assert gtrace.open_trace(tmp_path / "run.h5").tensors[0].name == "net.0.weight"
    assert session.finish("complete").steps_seen == 1


def test_an_exception_passes_and_what_is_done_is_kept(tmp_path, model, optimizer):
    def fail():
        with gtrace.capture.record(model, optimizer, tmp_path / "run.zarr"):
            step(model, optimizer)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    trace = gtrace.open_trace(tmp_path / "run.zarr")
    assert (trace.status, trace.steps("0.weight").tolist()) == ("interrupted", [0])


def test_an_existing_trace_is_left_alone(tmp_path, model, optimizer):
    path = tmp_path / "run.zarr"
    with gtrace.capture.record(model, optimizer, path):
        step(model, optimizer)
    with pytest.raises(OutputExistsError, match="already exists"), gtrace.capture.record(model, optimizer, path):
        pytest.fail("must not be entered")
    assert gtrace.open_trace(path).steps("0.weight").tolist() == [0]
    with gtrace.capture.record(model, optimizer, path, force=True):
        step(model, optimizer)
        step(model, optimizer)
    assert gtrace.open_trace(path).steps("0.weight").tolist() == [0, 1]


def test_wrong_options_are_found_before_training(tmp_path, model, optimizer):
    for options in ({"steps": "9-1"}, {"steps": "1", "every": 2}, {"budget": "much"}):
        with pytest.raises(UsageError), gtrace.capture.record(model, optimizer, tmp_path / "x.zarr", **options):
            pytest.fail("must not be entered")
    with pytest.raises(UsageError, match="zarr"), gtrace.capture.record(model, optimizer, tmp_path / "x.npz"):
        pytest.fail("must not be entered")


def test_without_torch_there_is_one_clear_line():
    code = "import sys; sys.modules['torch'] = None; from gtrace.capture import record as r; next(r(1, 2, 'x.h5').gen)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    message = "gtrace.errors.UsageError: gtrace.capture needs PyTorch, which is not installed: pip install torch"
    assert result.stderr.splitlines()[-1] == message


def test_gradients_appended_by_hand(tmp_path):
    values = torch.tensor([1.0, -2.5, 3.0])
    given = {
        "float32": nn.Parameter(values),
        "float64": values.double(),
        "bfloat16": values.bfloat16(),
        "float16": values.half(),
        "float8_e5m2": values.to(torch.float8_e5m2),
        "int64": values.long(),
        "sparse": values.to_sparse(),
    }
    with gtrace.create_trace(tmp_path / "run.zarr") as writer:
        for name, tensor in given.items():
            writer.append(0, name, tensor)
        for wrong in (values * 1j, "text", [[1.0], [1.0, 2.0]]):
            with pytest.raises(UsageError, match="tensor 'wrong': "):
                writer.append(0, "wrong", wrong)
    trace = gtrace.open_trace(tmp_path / "run.zarr")
    for info in trace.tensors:
        assert info.dtype == ("float32" if info.name == "sparse" else info.name)
        assert trace.read(info.name, 0).tolist() == given[info.name].detach().to_dense().float().tolist()
