"""Traces open in the tools that people have: zarr-python, xarray, h5py, h5netcdf."""

import json

import h5py
import numpy as np
import xarray as xr
import zarr
from helpers_trace import SHAPES, STEPS, gradient, loss, present, write_steps, write_trace

from gtrace.trace import create_trace
from gtrace.trace import format as layout
from gtrace.trace.format import encode_name

GROUP = "rank00000/weight_grad"


def expected(name):
    """(step, element), NaN where the tensor is absent."""
    rows = [
        gradient(name, step).ravel() if step in present(name) else np.full(np.prod(SHAPES[name], dtype=int), np.nan)
        for step in STEPS
    ]
    return np.array(rows, np.float32)


def check_netcdf(data):
    """An xarray data set holds the made-up trace."""
    assert data["step"].values.tolist() == list(STEPS)
    assert data["loss"].values.tolist() == [loss(step) for step in STEPS]
    for name in SHAPES:
        entry = encode_name(name)
        assert data[entry].dims == ("step", f"{entry}.i")
        np.testing.assert_array_equal(data[entry].values, expected(name))
        assert data[entry].attrs["name"] == name
    assert data["present"].dims == data["norm2"].dims == ("step", "tensor")
    np.testing.assert_array_equal(data["present"].values, [[s in present(name) for name in SHAPES] for s in STEPS])


def test_zarr_python(tmp_path):
    root = zarr.open_group(write_trace(tmp_path / "run.zarr", attrs={"seed": 1}), mode="r")
    assert (root.attrs["format"], root.attrs["seed"]) == ("gtrace", 1)
    group = root[GROUP]
    assert dict(group.attrs) == {"rank": 0, "kind": "weight", "optimizer": 0}
    tables = {*layout.SCALARS, *layout.STATISTICS, "step"}
    assert {name for name, _ in group.arrays()} == {*map(encode_name, SHAPES)} | tables
    for name in SHAPES:
        assert group[encode_name(name)].metadata.zarr_format == 3
        np.testing.assert_array_equal(group[encode_name(name)][:], expected(name))


def test_metadata_are_what_zarr_python_writes_itself(tmp_path):
    """Shapes, chunks, dimensions and attributes are filled in here; zarr-python would write the same documents."""
    from zarr.core.buffer import default_buffer_prototype

    write_trace(tmp_path / "run.zarr")
    for path in (tmp_path / "run.zarr").rglob("zarr.json"):
        metadata = zarr.open(path.parent, mode="r", use_consolidated=False).metadata
        document = json.loads(path.read_text())
        document.pop("consolidated_metadata", None)
        assert json.loads(metadata.to_buffer_dict(default_buffer_prototype())["zarr.json"].to_bytes()) == document


def test_xarray_opens_zarr(tmp_path):
    with xr.open_zarr(write_trace(tmp_path / "run.zarr"), group=GROUP) as data:
        check_netcdf(data)


def test_h5py(tmp_path):
    with h5py.File(write_trace(tmp_path / "run.h5", attrs={"argv": ["a", "b"]}), "r") as file:
        assert (file.attrs["format"], file.attrs["status"], file.attrs["version"]) == ("gtrace", "complete", 1)
        assert json.loads(file.attrs["metadata"])["argv"] == ["a", "b"]
        group = file[GROUP]
        assert group["step"][:].tolist() == list(STEPS)
        for name in SHAPES:
            dataset = group[encode_name(name)]
            assert dataset.attrs["name"] == name
            np.testing.assert_array_equal(dataset[:], expected(name))
            assert dataset.dims[0][0] == group["step"]


def test_xarray_opens_hdf5(tmp_path):
    path = write_trace(tmp_path / "run.h5")
    with xr.open_dataset(path, group=GROUP, engine="h5netcdf") as data:
        check_netcdf(data)


def test_zarr_python_while_the_trace_is_written(tmp_path):
    """Rows of the journal are not there yet, and every group lists its members without a complaint."""
    with create_trace(tmp_path / "run.zarr") as writer:
        write_steps(writer, range(70))
        group = zarr.open_group(tmp_path / "run.zarr", mode="r")[GROUP]
        assert group["step"][:65].tolist() == [*range(64), -1]
        values = group["fc.weight"][:64]
        assert np.isnan(values[1:3]).all()
        np.testing.assert_array_equal(values[3:], [gradient("fc.weight", step).ravel() for step in range(3, 64)])
        assert len(list(group.members())) == len(SHAPES) + len(layout.SCALARS) + len(layout.STATISTICS) + 1
    group = zarr.open_group(tmp_path / "run.zarr", mode="r")[GROUP]
    assert group["step"][:].tolist() == list(range(70))
    assert not list((tmp_path / "run.zarr").rglob("journal"))
