"""State dicts of torch as a source of gradients. One process reads all of them, since torch takes seconds to load."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from gtrace.cli.trace import STATE_DICTS
from gtrace.errors import TraceError
from gtrace.trace.guard import Guard


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dicts")
    with Guard([folder], STATE_DICTS) as guard:
        guard.folder = folder
        yield guard


def write(guard, content):
    """Save an object, or bytes as they are."""
    path = guard.folder / "1.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    return path


def arrays(guard, content, row=None):
    """name -> dtype and values."""
    with guard.open(write(guard, content), ".pt") as file:
        return {entry.name: (entry.dtype, file.read(entry, row)) for entry in file.entries if entry.is_real}


def test_types_layouts_and_nesting(guard):
    values = torch.tensor([[1.5, 0.0], [0.0, -2.0]])
    state = {
        "grads": [values.bfloat16(), values.to_sparse(), {"half": values.half()}],
        "p": torch.nn.Parameter(values.t()),
        "z": torch.complex(values, -values).conj(),
        "wide": torch.ones(1).expand(6),
        "fp8": values.to(torch.float8_e5m2),
        "count": torch.tensor(3),
        "epoch": 4,
    }
    found = arrays(guard, state)
    types = {"grads.0": "bfloat16", "grads.1": "float32", "grads.2.half": "float16", "p": "float32"}
    types |= {"z": "complex64", "wide": "float32", "fp8": "float8_e5m2"}
    assert {name: dtype for name, (dtype, _) in found.items()} == types
    for name in ("grads.0", "grads.1", "grads.2.half", "fp8", "p"):
        assert found[name][1].tolist() == [[1.5, 0], [0, -2]]
    assert found["z"][1].tolist() == [[1.5 + 1.5j, 0], [0, -2 - 2j]]
    assert found["wide"][1].tolist() == [1] * 6
    # An axis of steps.
    assert arrays(guard, {"w": torch.arange(6.0).reshape(3, 2).bfloat16()}, row=2)["w"][1].tolist() == [4, 5]


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class Large:
    """Takes 4.4 GB when it is unpickled; torch allows it, as it is no code."""

    def __reduce__(self):
        return bytearray, (4_400_000_000,)


def shared(times):
    """A list that holds itself 2^times times, by references."""
    value = [torch.ones(1)]
    for _ in range(times):
        value = [value, value]
    return value


def sparse(size):
    return torch.sparse_coo_tensor([[5]], [1.0], (size,), check_invariants=True)


def without_end(path):
    """A file of which the last part is gone."""
    torch.save({"w": torch.ones(1000)}, path)
    return path.read_bytes()[:-200]


HOSTILE = {
    "code": (lambda path: {"w": torch.ones(2), "e": Evil(path.with_name("owned"))}, "holds other objects than tensors"),
    "a bare pickle": (lambda path: pickle.dumps(Evil(path.with_name("owned"))), r"not a file of torch\.save"),
    "no end": (without_end, "damaged"),
    "one value 2^40 times": (lambda path: torch.ones(1).expand(2**40), r"\(1099511627776,\): declares 4.4 TB"),
    "a sparse tensor": (lambda path: sparse(2**30), "declares 4.3 GB, but has"),
    "an object of 4.4 GB": (lambda path: {"w": Large()}, "cannot be read|more memory than its arrays need"),
    "a list 2^30 times": (lambda path: shared(30), "more references than bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_one_line(name, guard):
    make, says = HOSTILE[name]
    path = write(guard, make(guard.folder / "1.pt"))
    with pytest.raises(TraceError, match=says) as caught:
        guard.open(path, ".pt")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert os.listdir(guard.folder) == ["1.pt"]
    # What torch takes with its libraries, and 256 MB.
    status = Path(f"/proc/{guard.process.pid}/status").read_text()
    assert int(status.split("VmHWM:")[1].split()[0]) < 700_000


def test_damaged_files(guard):
    whole = write(guard, {"w": torch.ones(1000)}).read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(40):
        data = bytearray(whole)
        data[int(rng.integers(600))] ^= 1 << int(rng.integers(8))
        refused = ""
        try:
            arrays(guard, bytes(data))
        except TraceError as error:
            refused = str(error)
        assert "\n" not in refused
