"""Exporting: what other programs read, and that an import of it is the same trace."""

import os

import numpy as np
import pytest
from helpers_trace import SHAPES, STEPS, gradient, memory_trace, present

from gtrace.errors import OutputExistsError, UsageError
from gtrace.trace import Trace, create_trace, open_trace
from gtrace.trace.exporting import ExportChoice, export_trace
from gtrace.trace.importing import import_trace


@pytest.mark.parametrize("to", ["npz", "safetensors"])
def test_import_of_an_export_is_the_same_trace(to, tmp_path):
    with memory_trace() as trace:
        made = export_trace(trace, tmp_path / "out", to)
        assert (made.steps, made.files, set(made.tensors)) == (STEPS, len(STEPS), set(SHAPES))
        assert import_trace([tmp_path / "out"], tmp_path / "back.zarr").steps == STEPS
        with open_trace(tmp_path / "back.zarr") as back:
            assert {info.name for info in back.tensors} == set(SHAPES)
            for info in back.tensors:
                assert info.shape == SHAPES[info.name]
                assert back.steps(info.name).tolist() == present(info.name)
                for step in present(info.name):
                    np.testing.assert_array_equal(back.read(info.name, step), trace.read(info.name, step))
    assert sorted(os.listdir(tmp_path)) == ["back.zarr", "out"]


def load(path):
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return dict(arrays)
    return pytest.importorskip("safetensors.numpy").load_file(path)


@pytest.mark.parametrize("to", ["npz", "safetensors"])
def test_other_libraries_read_it(to, tmp_path):
    with memory_trace() as trace:
        export_trace(trace, tmp_path / "out", to, ExportChoice(["fc.*", "embed/weight"], [4, 77]))
    assert sorted(os.listdir(tmp_path / "out")) == ["about.json", f"step_000004.{to}"]
    arrays = load(tmp_path / "out" / f"step_000004.{to}")
    assert set(arrays) == {"fc.weight", "fc.bias", "embed/weight"}
    for name, array in arrays.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, gradient(name, 4))


def test_parquet(tmp_path, monkeypatch):
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("gtrace.trace.exporting._GROUP_BYTES", 1)
    with memory_trace() as trace:
        export_trace(trace, tmp_path / "out.parquet", "parquet")
    table = pq.read_table(tmp_path / "out.parquet")
    types = ["int64", "string", "list<element: int64>", "large_list<element: float>"]
    assert table.column_names == ["step", "tensor", "shape", "values"]
    assert [str(kind) for kind in table.schema.types] == types
    rows = table.to_pylist()
    wanted = [(step, name) for step in STEPS for name in SHAPES if present(name, [step])]
    assert [(row["step"], row["tensor"]) for row in rows] == wanted
    for row in rows:
        values = np.array(row["values"], np.float32).reshape(row["shape"])
        np.testing.assert_array_equal(values, gradient(row["tensor"], row["step"]))
    assert pq.ParquetFile(tmp_path / "out.parquet").num_row_groups == len(rows)


def test_names_that_a_format_or_a_shell_dislikes(tmp_path):
    names = ["file", "../up", "a\\b", "ünï", "x.npy", "self", "step"]
    with Trace.from_arrays({name: [float(k)] for k, name in enumerate(names)}) as trace:
        export_trace(trace, tmp_path / "out", "npz")
        found = {name: array.tolist() for name, array in load(tmp_path / "out/step_000000.npz").items()}
        assert found == {name: [k] for k, name in enumerate(names)}
        import_trace([tmp_path / "out"], tmp_path / "back.zarr")
    assert [info.name for info in open_trace(tmp_path / "back.zarr").tensors] == names
    with Trace.from_arrays({"a\0b": [1.0], "__metadata__": [1.0]}) as trace:
        for to, other in (("npz", "safetensors"), ("safetensors", "npz")):
            with pytest.raises(UsageError, match=f"--to {other}"):
                export_trace(trace, tmp_path / "no", to)


def test_a_tensor_of_several_ranks_needs_a_choice(tmp_path):
    with create_trace(tmp_path / "run.zarr") as writer:
        for rank in range(2):
            writer.append(0, "w", [float(rank)], rank=rank)
    with open_trace(tmp_path / "run.zarr") as trace:
        with pytest.raises(UsageError, match="'w' exists for rank 0 and 1; choose one with --rank"):
            export_trace(trace, tmp_path / "out", "npz")
        export_trace(trace, tmp_path / "out", "npz", ExportChoice(rank=1))
    assert load(tmp_path / "out/step_000000.npz")["w"].tolist() == [1]


def test_what_is_there_is_kept(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("x")
    (tmp_path / "mine/about.json").write_text("[]")
    with memory_trace() as trace:
        export_trace(trace, tmp_path / "out", "npz", ExportChoice(steps=[0]))
        for place, force in (("out", False), ("mine", False), ("mine", True)):
            with pytest.raises(OutputExistsError, match=r"already exists|so it is kept"):
                export_trace(trace, tmp_path / place, "npz", force=force)
        export_trace(trace, tmp_path / "out", "safetensors", ExportChoice(steps=[1]), force=True)

        def stop(*_):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            export_trace(trace, tmp_path / "out", "npz", force=True, progress=stop)
    assert sorted(os.listdir(tmp_path / "out")) == ["about.json", "step_000001.safetensors"]
    assert sorted(os.listdir(tmp_path)) == ["mine", "out"]
