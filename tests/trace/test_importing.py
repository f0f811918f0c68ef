"""Importing: what names say, what files hold, what is refused."""

import itertools
import os
import tracemalloc

import h5py
import numpy as np
import pytest
import zarr
from helpers_foreign import SHAPES, check_trace, tensors, write_raw_safetensors, write_safetensors
from helpers_trace import gradient

from gtrace.errors import OutputExistsError, TraceError, UsageError
from gtrace.trace import open_trace
from gtrace.trace.foreign import bfloat16
from gtrace.trace.importing import ImportRules, import_trace

STEPS = (0, 5, 100)
PLACE = "give the step's place with --pattern"


def save(path, arrays):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".safetensors":
        write_safetensors(path, arrays)
    else:
        np.save(path, arrays)


@pytest.fixture
def imported(tmp_path):
    """Import what is in the folder ``in``."""

    def run(*sources, to="run.zarr", force=False, progress=None, **rules):
        places = [tmp_path / source for source in sources] or [tmp_path / "in"]
        return import_trace(places, tmp_path / to, ImportRules(**rules), force=force, progress=progress)

    return run


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("to", ["run.zarr", "run.h5"])
def test_one_file_per_step(suffix, to, imported, tmp_path):
    for step in STEPS:
        save(tmp_path / f"in/v2-grads_{step}{suffix}", tensors(step))
    (tmp_path / "in/notes.txt").write_text("x")
    (tmp_path / "in/.hidden.npz").write_text("x")
    made = imported(to=to)
    check_trace(tmp_path / to, STEPS)
    assert (made.steps, made.files, made.ignored, made.numbering) == (STEPS, 3, 1, ("names",))
    assert set(made.tensors) == set(SHAPES)
    assert sorted(os.listdir(tmp_path)) == ["in", to]
    with open_trace(tmp_path / to) as trace:
        assert trace.attrs["imported"]["sources"] == [str(tmp_path / "in")]
        assert np.isnan(trace.scalars()["time"]).all()


def test_one_folder_per_step_and_nested_names(imported, tmp_path):
    for step in STEPS:
        for name, array in tensors(step).items():
            save(tmp_path / f"in/step_{step:06d}/net/layer.1/{name}.npy", array)
    assert imported().numbering == ("folders",)
    check_trace(tmp_path / "run.zarr", STEPS, prefix="net.layer.1.")


@pytest.mark.parametrize("order", [None, [3, 1, 2, 0]])
def test_one_file_per_tensor_with_an_axis_of_steps(order, imported, tmp_path):
    for name, shape in SHAPES.items():
        save(tmp_path / f"in/{name}.npy", np.stack([gradient(name, step, shape) for step in order or range(4)]))
    if order:
        save(tmp_path / "in/step.npy", np.array(order))
    made = imported(step_axis=True)
    assert (made.numbering, made.left_out) == (("array",) if order else ("axis",), ())
    check_trace(tmp_path / "run.zarr", range(4))


def test_an_array_of_steps_beside_the_others(imported, tmp_path):
    arrays = {name: np.stack([gradient(name, step, shape) for step in STEPS]) for name, shape in SHAPES.items()}
    (tmp_path / "in").mkdir()
    np.savez_compressed(tmp_path / "in/all.npz", step=np.array(STEPS), epoch=np.array(3), **arrays)
    made = imported()
    assert (made.numbering, made.left_out) == (("array",), ("epoch",))
    check_trace(tmp_path / "run.zarr", STEPS)


def test_a_pattern_says_what_names_mean(imported, tmp_path):
    for rank, step in itertools.product((0, 1), STEPS):
        for name, array in tensors(step + rank).items():
            save(tmp_path / f"in/rank{rank}/x/{name}-{step}.npy", array)
    made = imported(pattern="rank{rank}/*/{tensor}-{step}.npy")
    assert (made.files, made.numbering) == (18, ("pattern",))
    with open_trace(tmp_path / "run.zarr") as trace:
        assert {stream.rank for stream in trace.streams} == {0, 1}
        for rank, step in itertools.product((0, 1), STEPS):
            read = trace.read("fc.bias", step, rank=rank)
            np.testing.assert_array_equal(read, tensors(step + rank)["fc.bias"])


@pytest.mark.parametrize(
    ("files", "options", "says"),
    [
        (["a/x.npy", "a/y.npy"], {}, "pass --step-axis .* or --pattern"),
        (["g1.npz", "last.npz"], {}, f"last.npz: its name has no number, but others have one; {PLACE}"),
        (["a/x.npz", "b/x.npz"], {}, "several folders, .*--pattern"),
        (["1.npz"], {"pattern": "g-{step}.npz"}, "'g-{step}.npz' fits no file; the first file is '1.npz'"),
        (["1.npz"], {"tensors": ["z*"]}, "no gradient with such names and steps"),
        (["99999999999999999999.npz"], {}, "too large"),
        (["1.npz"], {"step_axis": True}, "lengths are 2, 7; choose arrays with --tensors"),
    ],
)
def test_what_can_be_read_in_several_ways_is_one_error(files, options, says, imported, tmp_path):
    for file in files:
        arrays = {"w": np.zeros((2, 3), np.float32), "v": np.ones(7, np.float32)}
        save(tmp_path / "in" / file, arrays if file.endswith(".npz") else arrays["w"])
    with pytest.raises(UsageError, match=says) as caught:
        imported(**options)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["in"]


def test_types(imported, tmp_path):
    bits = np.array([0x3F80, 0xC0A0, 0x7F80, 0x0001], np.uint16)
    (tmp_path / "in").mkdir()
    arrays = {"half": np.array([1.5, -65504], np.float16), "bf": bits, "count": np.array([3], np.int64)}
    arrays["f"] = np.array([[np.nan, 1.0]], np.float32)
    write_safetensors(tmp_path / "in/1.safetensors", arrays, dtypes={"bf": "BF16"})
    more = {"double": np.array([1 / 3, 1e300]), "pair": np.array([[1 + 2j, 3 - 4j]])}
    np.savez(tmp_path / "in/more1.npz", **more, fortran=np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    made = imported()
    assert (made.left_out, made.nonfinite) == (("count",), 3)
    with open_trace(tmp_path / "run.zarr") as trace:
        infos = {info.name: info for info in trace.tensors}
        kept = {"half": "float16", "bf": "bfloat16", "f": "float32", "double": "float64", "pair": "complex128"}
        assert {name: info.dtype for name, info in infos.items()} == kept | {"fortran": "float64"}
        assert trace.read("half", 1).tolist() == [1.5, -65504]
        np.testing.assert_array_equal(trace.read("bf", 1), [1, -5, np.inf, 2.0**-133])
        assert infos["pair"].shape == (1, 2, 2)
        assert trace.read("pair", 1).tolist() == [1, 2, 3, -4]
        assert trace.read("double", 1).tolist() == [np.float32(1 / 3), np.inf]
        assert trace.read("fortran", 1).tolist() == list(range(6))


def test_bfloat16_is_what_ml_dtypes_says():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.arange(1 << 16, dtype=np.uint16)
    np.testing.assert_array_equal(bfloat16(bits), bits.view(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize(("version", "chunk"), [(2, 1), (3, 2)])
def test_an_xarray_store_with_a_step_coordinate(version, chunk, imported, tmp_path):
    xarray = pytest.importorskip("xarray")
    data = {"embed": (("row",), np.zeros(3, np.float32))}
    for name, shape in SHAPES.items():
        dimensions = ("step", *(f"{name}.{k}" for k in range(len(shape))))
        data[name] = (dimensions, np.stack([gradient(name, step, shape) for step in STEPS]))
    dataset = xarray.Dataset(data, coords={"step": list(STEPS), "row": [0.5, 1.5, 2.5]})
    encoding = {name: {"chunks": (chunk, *SHAPES[name])} for name in SHAPES}
    dataset.to_zarr(tmp_path / "in.zarr", zarr_format=version, encoding=encoding, consolidated=False)
    made = imported("in.zarr")
    assert (made.numbering, made.left_out) == (("array",), ("embed",))
    check_trace(tmp_path / "run.zarr", STEPS)


def test_an_hdf5_file_with_a_step_coordinate(imported, tmp_path):
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["step"], file["row"], file["notes"] = np.array(STEPS), np.zeros(3), "text"
        file["step"].make_scale("step")
        for name, shape in SHAPES.items():
            stacked = np.stack([gradient(name, step, shape) for step in STEPS])
            made = file.create_dataset(name.replace(".", "/"), data=stacked, chunks=(2, *shape), compression="gzip")
            made.dims[0].attach_scale(file["step"])
    made = imported("in.h5", tensors=["fc*", "scale"])
    assert made.numbering == ("array",)
    check_trace(tmp_path / "run.zarr", STEPS)


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_steps_in_the_group_of_the_gradients(suffix, imported, tmp_path):
    """As xarray writes them with ``group=``; those of another group, or of two, are nobody's."""
    xarray = pytest.importorskip("xarray")

    def write(name, *groups):
        for group, steps in groups:
            data = {"w": (("step", "w.0"), np.outer(np.arange(1, len(steps) + 1), [1.0, 2.0]).astype(np.float32))}
            dataset = xarray.Dataset(data, coords={"step": steps})
            if suffix == ".zarr":
                dataset.to_zarr(tmp_path / name, group=group, zarr_format=3, mode="a", consolidated=False)
            else:
                dataset.to_netcdf(tmp_path / name, group=group, mode="a", engine="h5netcdf")
        return name

    made = imported(write(f"one{suffix}", ("runs/a", [0, 100, 300])))
    assert (made.steps, made.numbering, made.left_out) == ((0, 100, 300), ("array",), ())
    assert open_trace(tmp_path / "run.zarr").read("runs.a.w", 300).tolist() == [3, 6]
    two = write(f"two{suffix}", ("a", [0, 100, 300]), ("b", [5, 6]))
    with pytest.raises(UsageError, match=r"groups have steps of their own \(a, b\); choose one group with --tensors"):
        imported(two, force=True)
    assert imported(two, force=True, tensors=["b.*"]).steps == (5, 6)


def test_steps_in_a_group_without_names_of_axes(imported, tmp_path):
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["a/step"], file["a/w"], file["a/b/v"] = [3, 7], np.ones((2, 4), np.float32), np.zeros((2, 1), np.float32)
    assert imported("in.h5").steps == (3, 7)
    with h5py.File(tmp_path / "in.h5", "a") as file:
        file["a/other"] = np.ones(3, np.float32)  # has no axis of these steps, so nothing has
    assert imported("in.h5", force=True).steps == (0,)


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_arrays_that_would_have_one_name(suffix, imported, tmp_path):
    path = tmp_path / f"in{suffix}"
    group = zarr.open_group(path, mode="w") if suffix == ".zarr" else h5py.File(path, "w")
    for name in ("fc.weight", "fc/weight"):
        (group.create_array if suffix == ".zarr" else group.create_dataset)(name, data=np.ones(2))
    if suffix == ".h5":
        group.close()
    with pytest.raises(TraceError, match=r"arrays 'fc\.weight' and 'fc/weight' would have one name"):
        imported(path.name)


def test_links_to_folders_that_are_read_anyway_add_nothing(imported, tmp_path):
    """Whatever the order of the folder; a link to somewhere else, and one to a folder above, are followed and end."""
    for step in (1, 2):
        save(tmp_path / f"in/step_{step}/model.npz", {"w": np.full(2, float(step))})
    save(tmp_path / "elsewhere/model.npz", {"w": np.full(2, 9.0)})
    for name, target in {"aaa": "step_2", "latest": "step_2", "step_1/up": "..", "step_9": "../elsewhere"}.items():
        (tmp_path / "in" / name).symlink_to(target)
    assert imported().steps == (1, 2, 9)
    assert open_trace(tmp_path / "run.zarr").read("w", 9).tolist() == [9, 9]


def test_a_folder_that_cannot_be_read_is_not_left_out(imported, tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path / f"in/step_{step}/model.npz", {"w": np.zeros(2)})
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("step_2"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(TraceError, match=r"step_2: cannot be read \(Permission denied\)"):
        imported()


def test_what_is_there_is_kept(imported, tmp_path):
    save(tmp_path / "in/1.npz", tensors(1))
    imported()
    (tmp_path / "in/3.npz").write_bytes(b"PK")
    for force, error in ((False, OutputExistsError), (True, TraceError)):
        with pytest.raises(error):
            imported(force=force)
        check_trace(tmp_path / "run.zarr", (1,))
    save(tmp_path / "in/3.npz", tensors(3))
    imported(force=True)
    check_trace(tmp_path / "run.zarr", (1, 3))
    assert sorted(os.listdir(tmp_path)) == ["in", "run.zarr"]


def test_an_interrupt_keeps_what_was_done(imported, tmp_path):
    for step in STEPS:
        save(tmp_path / f"in/{step}.npz", tensors(step))

    def stop(done, total):
        assert total == 3
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        imported(progress=stop)
    with open_trace(tmp_path / "run.zarr") as trace:
        assert trace.status == "interrupted"
        assert trace.steps("fc.bias").tolist() == [0, 5]
    assert sorted(os.listdir(tmp_path)) == ["in", "run.zarr"]


def test_one_tensor_at_a_time_is_in_memory(imported, tmp_path):
    """Of compressed arrays of 8 MB, and of steps of 8 MB in all, no more than a few are held."""
    big = np.random.default_rng(0).standard_normal((8, 250_000)).astype(np.float32)
    (tmp_path / "in").mkdir()
    np.savez_compressed(tmp_path / "in/1.npz", **{f"t{k}": big[k] for k in range(8)})
    described = {"dtype": "F32", "shape": list(big.shape), "data_offsets": [0, big.nbytes]}
    write_raw_safetensors(tmp_path / "all.safetensors", {"w": described}, big.tobytes())
    for source, options in (("in", {}), ("all.safetensors", {"step_axis": True})):
        tracemalloc.start()
        imported(source, to=f"{source}.zarr", **options)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 0.75 * big.nbytes
