"""``gtrace.capture.record``, and gradients that a program writes into a trace itself."""

import pytest
import torch
from helpers_hooks import descend
from torch import nn

import gtrace
from gtrace.capture import record
from gtrace.errors import OutputExistsError, UsageError


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def test_only_these_optimizers_and_these_names(tmp_path, model, optimizer):
    other = nn.Linear(3, 1)
    with record(nn.ModuleDict({"net": model}), optimizer, str(tmp_path / "run.h5")) as session:
        descend(other, torch.optim.SGD(other.parameters(), lr=0.01), 2, 3)
        descend(model, optimizer, 2, 3, steps=1)
    assert gtrace.open_trace(tmp_path / "run.h5").tensors[0].name == "net.0.weight"
    assert session.finish("complete").steps_seen == 1


def test_an_exception_passes_and_what_is_done_is_kept(path, model, optimizer):
    optimizer.register_step_post_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), record(model, optimizer, path):
        descend(model, optimizer, 2, 3, steps=1)
    trace = gtrace.open_trace(path)
    assert (trace.status, trace.steps("0.weight").tolist()) == ("interrupted", [0])


def test_an_existing_trace_is_left_alone(path, model, optimizer):
    with record(model, optimizer, path):
        descend(model, optimizer, 2, 3, steps=1)
    with pytest.raises(OutputExistsError, match="already exists"), record(model, optimizer, path):
        pytest.fail("must not be entered")
    assert gtrace.open_trace(path).steps("0.weight").tolist() == [0]
    with record(model, optimizer, path, force=True):
        descend(model, optimizer, 2, 3, steps=2)
    assert gtrace.open_trace(path).steps("0.weight").tolist() == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": "9-1"}, "--steps"),
        ({"steps": "1", "every": 2}, "exclude each other"),
        ({"budget": "much"}, "is not a valid size"),
        ({"kind": "outer"}, "--every 100"),
        ({"kind": "updates"}, "did you mean update"),
        ({"kind": "nural"}, "--kind: unknown kind 'nural'; did you mean neural"),
        ({"kind": "weight,update,"}, "unknown kind ''"),
        ({"kind": "update", "noise": True}, "add weight to --kind"),
        ({"kind": "neural", "noise": True}, "--noise is about gradients of weights"),
        ({"kind": "neural", "optimizer_state": True}, "--optimizer-state is about gradients of weights"),
        ({"kind": "neural", "second_moments": True}, "--second-moments is about gradients of weights"),
        ({"second_moments": True, "sketch": "l2:512"}, "--sketch"),
        ({"kind": "both", "max_elements": 0}, "--max-elements: needs a number of 1 or more, not 0"),
        ({"path": "run.npz"}, "zarr"),
    ],
)
def test_wrong_options_are_found_before_training(tmp_path, model, optimizer, options, message):
    path = tmp_path / options.pop("path", "run.h5")
    with pytest.raises(UsageError, match=message), record(model, optimizer, path, **options):
        pytest.fail("must not be entered")


def test_gradients_appended_by_hand(path):
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
    with gtrace.create_trace(path) as writer:
        for name, tensor in given.items():
            writer.append(0, name, tensor)
        for wrong in (values * 1j, "text", [[1.0], [1.0, 2.0]]):
            with pytest.raises(UsageError, match="tensor 'wrong': "):
                writer.append(0, "wrong", wrong)
    trace = gtrace.open_trace(path)
    for info in trace.tensors:
        assert info.dtype == ("float32" if info.name == "sparse" else info.name)
        assert trace.read(info.name, 0).tolist() == given[info.name].detach().to_dense().float().tolist()
