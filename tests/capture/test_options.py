"""``gtrace.capture.record`` and its options: which steps, which tensors, and what is refused."""

import itertools

import pytest
import torch
from helpers_hooks import descend
from torch import nn

import gtrace
from gtrace.capture import record
from gtrace.capture.options import (
    HORIZON,
    AutomaticSteps,
    TensorSelection,
    _bursts,
    parse_size,
    parse_steps,
)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": "9-1"}, "--steps"),
        ({"steps": "1", "every": 2}, "exclude each other"),
        ({"budget": "much"}, "is not a valid size"),
        ({"kind": "outer"}, "--every 100"),
        ({"kind": "nural"}, "--kind: unknown kind 'nural'; did you mean neural"),
        ({"kind": "update", "noise": True}, "add weight to --kind"),
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
    types = ("float64", "bfloat16", "float16", "float8_e5m2", "int64")
    given = {"float32": nn.Parameter(values), "sparse": values.to_sparse()}
    given |= {name: values.to(getattr(torch, name)) for name in types}
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


def chosen(policy, end, capacity=10**18):
    return [step for step in range(end) if policy.coming(step, capacity) == step]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("0", [0]),
        ("3-9:3", [3, 6, 9]),
        ("3-8:3", [3, 6]),
        (" 1 , 4-5 , 18+2 ", [1, 4, 5, 18, 19]),
        ("4-6,5-7", [4, 5, 6, 7]),
    ],
)
def test_lists_of_steps(text, steps):
    assert chosen(parse_steps(text), 20) == steps
    assert str(parse_steps(text)) == text.strip()


@pytest.mark.parametrize(
    "text", ["", "a", "1,", "5-3", "-3", "3-", "1+0", "1+", "2-8:0", "1.5", "1 2", "auto,3", "2-4+3"]
)
def test_what_is_no_list_of_steps(text):
    with pytest.raises(UsageError, match="--steps"):
        parse_steps(text)


def bursts_of(steps):
    """Lengths of the stretches of consecutive steps."""
    starts = [k for k, step in enumerate(steps) if k == 0 or step != steps[k - 1] + 1]
    return [end - start for start, end in itertools.pairwise([*starts, len(steps)])]


@pytest.mark.parametrize("capacity", [*range(70), 160, 1000, 20_000])
def test_automatic_steps_are_bursts_that_fit_the_budget(capacity):
    policy = AutomaticSteps()
    # Where bursts begin is where they may meet: beyond the dense start a sample of steps is enough.
    _, length, starts = _bursts(capacity)
    near = {step for start in starts for step in range(start - 2, start + length + 2)}
    steps = [step for step in sorted({*range(capacity + 2), *near}) if policy.coming(step, capacity) == step]
    assert len(steps) == policy.most(capacity) == max(1, capacity)
    assert steps[: (capacity + 1) // 2] == list(range((capacity + 1) // 2))
    assert min(bursts_of(steps)) >= min(capacity, 3 if capacity < 8 else 4) or capacity == 0
    assert steps[-1] < HORIZON


def test_automatic_steps_are_at_growing_distances():
    steps = chosen(AutomaticSteps(), HORIZON, 160)
    assert bursts_of(steps) == [80] + [10] * 8
    ratios = [b / a for a, b in itertools.pairwise([80] + [steps[k] for k in range(80, 160, 10)])]
    assert max(ratios) / min(ratios) < 1.05
    assert chosen(AutomaticSteps(), 5000) == list(range(5000)), "without a limit"


SIZES = {"0": 0, "1000": 1000, "4GB": 4 * 10**9, "4 gb": 4 * 10**9, "500M": 5 * 10**8, "2KiB": 2048, "7B": 7}


@pytest.mark.parametrize("text", [*SIZES, "1.5GiB", "", "GB", "-1", "4XB", "1e9", "4 G B"])
def test_sizes(text):
    expected = {**SIZES, "1.5GiB": 3 * 2**29}.get(text)
    if expected is None:
        with pytest.raises(UsageError, match="is not a valid size"):
            parse_size(text)
    else:
        assert parse_size(text) == expected


def test_selection_by_patterns():
    selection = TensorSelection(("conv*", "head.weight"), ("*.bias",))
    names = ["conv1.weight", "conv1.bias", "fc.weight", "head.weight"]
    assert [name for name in names if selection.keeps(name)] == ["conv1.weight", "head.weight"]
    assert selection.complaints() == []
    assert TensorSelection(("head.*",)).keeps("embedding.weight", ("head.weight",)), "an alias"
    assert not TensorSelection((), ("head.*",)).keeps("embedding.weight", ("head.weight",))
    assert not TensorSelection(("Conv*",)).keeps("conv1.weight")
    assert TensorSelection().keeps("anything")


def test_an_existing_trace_is_left_alone(path, model, optimizer):
    with record(model, optimizer, path):
        descend(model, optimizer, 2, 3, steps=1)
    with pytest.raises(OutputExistsError, match="already exists"), record(model, optimizer, path):
        pytest.fail("must not be entered")
    assert gtrace.open_trace(path).steps("0.weight").tolist() == [0]
    with record(model, optimizer, path, force=True):
        descend(model, optimizer, 2, 3, steps=2)
    assert gtrace.open_trace(path).steps("0.weight").tolist() == [0, 1]
