"""State dicts of torch as a source of gradients."""

import os
import pickle
import zipfile

import numpy as np
import pytest
import torch

from gtrace.errors import TraceError
from gtrace.torch_hooks.statedicts import OPENERS
from gtrace.trace import open_trace
from gtrace.trace.io.importing import ImportRules, import_trace


def imported(source, output, *, force=False, **rules):
    import_trace([source], output, ImportRules(openers=OPENERS, **rules), force=force)
    return open_trace(output)


def test_gradients_of_a_model(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 1))
    saved = {}
    (tmp_path / "in").mkdir()
    for step in (3, 20):
        model.zero_grad()
        model(torch.randn(7, 5)).sum().backward()
        saved[step] = {name: p.grad.clone() for name, p in model.named_parameters()}
        torch.save(saved[step], tmp_path / f"in/grads_{step}.{'pt' if step == 3 else 'pth'}")
    with imported(tmp_path / "in", tmp_path / "run.zarr") as trace:
        for name in saved[3]:
            assert trace.steps(name).tolist() == [3, 20]
            for step, grads in saved.items():
                np.testing.assert_array_equal(trace.read(name, step), grads[name].numpy().ravel())
        assert {info.name: info.shape for info in trace.tensors} == {
            name: tuple(p.shape) for name, p in model.named_parameters()
        }


def test_types_layouts_and_nesting(tmp_path):
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
    torch.save(state, tmp_path / "a_1.pt")
    with imported(tmp_path / "a_1.pt", tmp_path / "run.zarr") as trace:
        dtypes = {info.name: info.dtype for info in trace.tensors}
        assert dtypes == {
            "grads.0": "bfloat16",
            "grads.1": "float32",
            "grads.2.half": "float16",
            "p": "float32",
            "z": "complex64",
            "wide": "float32",
            "fp8": "float8_e5m2",
        }
        for name in ("grads.0", "grads.1", "grads.2.half", "fp8", "p"):
            assert trace.read(name, 1).tolist() == [1.5, 0, 0, -2]
        assert trace.read("z", 1).tolist() == [1.5, 1.5, 0, 0, 0, 0, -2, -2]
        assert trace.read("wide", 1).tolist() == [1] * 6


def test_an_axis_of_steps(tmp_path):
    torch.save({"w": torch.arange(6.0).reshape(3, 2).bfloat16()}, tmp_path / "w.pt")
    with imported(tmp_path / "w.pt", tmp_path / "run.zarr", step_axis=True) as trace:
        assert trace.read("w", 2).tolist() == [4, 5]


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_file_is_executed(tmp_path):
    torch.save({"w": torch.ones(2), "evil": Evil(tmp_path / "owned")}, tmp_path / "1.pt")
    with pytest.raises(TraceError, match=r"1.pt: holds other objects than tensors, which are never loaded") as caught:
        imported(tmp_path / "1.pt", tmp_path / "run.zarr")
    assert "\n" not in str(caught.value)
    (tmp_path / "2.pt").write_bytes(pickle.dumps(Evil(tmp_path / "owned")))
    with pytest.raises(TraceError, match=r"not a file of torch\.save"):
        imported(tmp_path / "2.pt", tmp_path / "run.zarr")
    assert sorted(os.listdir(tmp_path)) == ["1.pt", "2.pt"]


def test_damaged_files(tmp_path):
    torch.save({"w": torch.ones(1000)}, tmp_path / "1.pt")
    whole = (tmp_path / "1.pt").read_bytes()
    (tmp_path / "1.pt").write_bytes(whole[:-200])
    with pytest.raises(TraceError, match="damaged"):
        imported(tmp_path / "1.pt", tmp_path / "run.zarr")
    with zipfile.ZipFile(tmp_path / "2.pt", "w") as archive:
        archive.writestr("x", b"")
    with pytest.raises(TraceError, match="damaged"):
        imported(tmp_path / "2.pt", tmp_path / "run.zarr")
    torch.save({"w": torch.ones(1).expand(2**40)}, tmp_path / "3.pt")
    with pytest.raises(TraceError, match=r"\(1099511627776,\) cannot be in it"):
        imported(tmp_path / "3.pt", tmp_path / "run.zarr")
    rng = np.random.default_rng(0)
    for _ in range(40):
        data = bytearray(whole)
        data[int(rng.integers(600))] ^= 1 << int(rng.integers(8))
        (tmp_path / "1.pt").write_bytes(data)
        refused = ""
        try:
            imported(tmp_path / "1.pt", tmp_path / "run.zarr", force=True).close()
        except TraceError as error:
            refused = str(error)
        assert "\n" not in refused
