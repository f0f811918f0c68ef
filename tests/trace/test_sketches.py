"""Tensors of which a trace keeps moment sketches: written like any others, read as sketches, never as values."""

import h5py
import numpy as np
import pytest
import zarr
from helpers_trace import SUFFIXES, edit_json, gradient

from gtrace.coding.sketches import most_bytes, pack_sketch, unpack_sketch
from gtrace.errors import TraceError, UsageError
from gtrace.sketch import MomentSketch
from gtrace.trace import SketchPlan, SketchRow, create_trace, open_trace
from gtrace.trace.check import check_trace
from gtrace.trace.convert import pack_trace
from gtrace.trace.rows import checksum_bytes, row_statistics
from gtrace.trace.sketches import DEFAULT_SKETCHES, sketch_name
from gtrace.types import SummarySpec

PLAN = SketchPlan.parse("l2:512,none")
SIZE = 30_000
SHAPES = {"large": (300, 100), "small": (7,)}
STEPS = (0, 1, 5)
GROUP = "rank00000/weight_grad"


def values(name, step):
    return gradient(name, step, SHAPES[name])


def fill(writer, steps=STEPS):
    for step in steps:
        for name in SHAPES:
            if (name, step) != ("large", 1):
                writer.append(step, name, values(name, step))
        writer.commit(step, loss=0.5)


def write(path, plan=PLAN, steps=STEPS):
    with create_trace(path, sketch=plan) as writer:
        fill(writer, steps)
    return path


def same(one, other):
    for field in ("spec", "mantissa", "zeros", "size", "nonfinite", "buckets"):
        assert getattr(one, field) == getattr(other, field), field
    np.testing.assert_array_equal(one.rows, other.rows)
    np.testing.assert_array_equal(one.sums, other.sums)


def test_large_tensors_come_back_as_sketches_and_small_ones_as_values(path):
    with open_trace(write(path)) as trace:
        large, small = trace.tensors
        assert (large.name, large.shape, large.size, large.sketches) == ("large", (300, 100), SIZE, PLAN.specs)
        assert (small.name, small.sketches, large.merged) == ("small", (), 1)
        assert trace.steps("large").tolist() == [0, 5]
        numbers = trace.statistics("large")
        assert numbers["n_valid"].tolist() == numbers["n_total"].tolist() == [SIZE, SIZE]
        for k, step in enumerate((0, 5)):
            v = values("large", step).ravel()
            for spec in PLAN.specs:
                expected = unpack_sketch(pack_sketch(MomentSketch.from_spec(v, spec), 6))
                same(trace.sketch("large", step, spec.norm, spec.bucket_size), expected)
            truth = row_statistics(v)
            assert [numbers[n][k] for n in ("norm2", "absmax", "zeros", "nonfinite")] == list(truth[:4])
            row = trace.sketch_row("large", step, [])
            assert row.sketches == ()
            assert row[2:] == (truth.norm2, truth.absmax, truth.zeros, truth.nonfinite, SIZE)
            assert row.norm1 == pytest.approx(np.abs(v.astype(np.float64)).sum(), rel=1e-12)
        np.testing.assert_array_equal(trace.read("small", 1), values("small", 1))
        assert trace.sketch("small", 1, "l2", 512).size == 7
        for call, says in (
            (lambda: trace.read("large", 5), r"'large', step 5: .* sketches of it \(l2:512, none\) and no values"),
            (lambda: trace.sketch("large", 5, "linf", 512), "sketch linf:512 is not stored, only l2:512, none"),
            (lambda: trace.sketch("large", 1, "l2", 512), "no gradient at step 1"),
            (lambda: trace.sketch_row("small", 1, []), "only values"),
        ):
            with pytest.raises(UsageError, match=says):
                call()


def test_a_later_row_may_be_much_longer_than_the_first(path):
    rng = np.random.default_rng(0)
    rows = [np.zeros(SIZE, np.float32), rng.lognormal(0, 9, SIZE).astype(np.float32), np.ones(SIZE, np.float32)]
    with create_trace(path, sketch=PLAN) as writer:
        for step, row in enumerate(rows):
            writer.append(step, "x", row)
    with open_trace(path) as trace:
        for step, row in enumerate(rows):
            expected = unpack_sketch(pack_sketch(MomentSketch.of(row, "l2", 512), 6))
            same(trace.sketch("x", step, "l2", 512), expected)


@pytest.mark.parametrize("spec", [SummarySpec("l2", 7), SummarySpec("none", None)], ids=sketch_name)
@pytest.mark.parametrize("mantissa", [0, 6, 10])
def test_no_sketch_exceeds_the_width_of_a_row(spec, mantissa):
    # Every pattern of exponent and leading mantissa bits that float32 has, in random order: no bin stays empty.
    patterns = (np.arange(255 << 10, dtype=np.uint32) << 13) + np.uint32(1)
    full = np.random.default_rng(1).permutation(patterns.view(np.float32))
    length = len(pack_sketch(MomentSketch.from_spec(full, spec), mantissa))
    assert length <= most_bytes(spec, mantissa) < 64 * 1024 * 1024


def test_gradients_of_activations_of_any_size(tmp_path):
    sizes = {0: SIZE, 1: 3 * SIZE, 2: 40, 3: 0}
    with create_trace(tmp_path / "run.zarr", sketch=PLAN) as writer:
        for step, size in sizes.items():
            writer.append(step, "act", gradient("act", step, size), kind="neural", n_total=2 * size)
        # The sample of a weight keeps its values.
        writer.append(
            0, "x", np.ones(SIZE), shape=[4 * SIZE], sample={"kind": "blocks", "total": 4 * SIZE}, optimizer=1
        )
    with open_trace(tmp_path / "run.zarr") as trace:
        numbers = trace.statistics("act")
        assert numbers["n_valid"].tolist() == list(sizes.values())
        assert numbers["n_total"].tolist() == [2 * size for size in sizes.values()]
        assert [trace.sketch("act", step, "none").size for step in sizes] == list(sizes.values())
        assert trace.read("x", 0).size == SIZE


def test_what_is_sketched_hangs_on_the_size_alone():
    plan = SketchPlan.parse(DEFAULT_SKETCHES)
    sizes = [1, 1000, 10_000, 28_000, 29_000, 100_000, 8_000_000]
    assert [plan.covers(size) for size in sizes] == [False] * 4 + [True] * 3
    assert [plan.stored_bytes(size) == 4 * size for size in sizes] == [True] * 4 + [False] * 3


def test_wrong_arguments(tmp_path):
    row = SketchRow.of(np.ones(SIZE, np.float32), PLAN.specs)
    with create_trace(tmp_path / "run.zarr", sketch=PLAN) as writer:
        writer.append(0, "x", np.ones(SIZE))
        for call, match in (
            (lambda: writer.append_sketch(0, "y", row._replace(sketches=row.sketches[:1]), (SIZE,)), "other sketches"),
            (lambda: writer.append_sketch(0, "y", row, (10,)), f"{SIZE} elements, but earlier steps have 10"),
            (lambda: writer.append(0, "x", np.ones(SIZE)), "appended twice"),
            (lambda: writer.append(1, "x", np.ones(SIZE + 1)), "earlier steps have"),
            (lambda: create_trace(tmp_path / "other.zarr", attrs={"sketch": "mine"}), "not a description of stored"),
        ):
            with pytest.raises(UsageError, match=match):
                call()


@pytest.mark.parametrize("text", ["l2:0", "l3:5", "none:5", "l2:5,l2:5"])
def test_lists_of_sketches_that_are_none(text):
    with pytest.raises(UsageError, match=r"positive number|unknown norm|no buckets|twice"):
        SketchPlan.parse(text)


@pytest.mark.parametrize(("suffix", "target"), [SUFFIXES, SUFFIXES[::-1]])
def test_packing_keeps_sketches(suffix, target, tmp_path):
    path = write(tmp_path / f"run{suffix}")
    assert check_trace(path).clean
    out = pack_trace(path, tmp_path / f"out{target}")
    with open_trace(path) as old, open_trace(out) as new:
        assert new.fingerprint == old.fingerprint
        for step in (0, 5):
            mine, theirs = (trace.sketch_row("large", step, PLAN.specs) for trace in (new, old))
            assert mine.norm1 == theirs.norm1
            for one, other in zip(mine.sketches, theirs.sketches, strict=True):
                same(one, other)
    assert check_trace(out).clean


def replace_row(path, row, place, value, *, checksum=True):
    """Put other bytes in a row of a Zarr trace, with checksums that fit."""
    group = zarr.open_group(path / GROUP)
    data = bytearray(group["large"][row].tobytes())
    data[place : place + len(value)] = value
    group["large"][row] = np.frombuffer(bytes(data), np.uint8)
    if checksum:
        with open_trace(path) as trace:
            stream = trace._source.streams[0]
            stored = stream.read_rows(stream.tensors[0], row)[1][0]
        group["crc32c"][row, 0] = checksum_bytes(stored)


def refused(path, match):
    def read():
        with open_trace(path) as trace:
            for step in trace.steps("large"):
                trace.sketch_row("large", step, PLAN.specs)

    with pytest.raises(TraceError, match=match):
        read()


OTHER = SketchRow.of(np.ones(SIZE - 1, np.float32), PLAN.specs).pack(6).tobytes()


@pytest.mark.parametrize(
    ("place", "value", "checksum", "match"),
    [
        # Where the row's own length is a lie, its checksum does not matter.
        (0, b"XXXX", False, "not a row of sketches"),
        (4, (0).to_bytes(4, "little"), False, "not a row of sketches"),
        (4, (1).to_bytes(4, "little"), True, "holds other sketches than the tensor's metadata say"),
        (8, b"\xff" * 8, True, "holds other sketches than the tensor's metadata say"),
        (16, b"\xff" * 4, False, "bytes in a row of"),
        (16, (30).to_bytes(4, "little"), True, "GTS1"),
        (24, b"YYYY", True, "GTS1"),
        (90, b"\x55", True, "checksum mismatch"),
        (100, b"\x55", False, "checksum mismatch with the commit record"),
        (0, OTHER, True, "a sketch has another number of values"),
    ],
    ids=range(10),
)
def test_bytes_that_are_no_sketches(place, value, checksum, match, tmp_path):
    path = write(tmp_path / "run.zarr")
    replace_row(path, 2, place, value, checksum=checksum)
    refused(path, f"'large', step 5.*{match}")


@pytest.mark.parametrize(
    ("tensor", "told", "match"),
    [
        ("large", "l2:512", "attribute 'sketch'"),
        ("large", {"sketches": ["l2:512", "none"], "mantissa": 99}, "attribute 'sketch'"),
        ("large", {"sketches": ["l2:512"], "mantissa": 6, "fewer": {"x": 1}}, "attribute 'sketch'"),
        ("small", PLAN.describe(), "array of uint8"),
    ],
    ids=range(4),
)
def test_attributes_that_are_wrong(tensor, told, match, tmp_path):
    path = write(tmp_path / "run.zarr")
    edit_json(path / GROUP / tensor / "zarr.json", lambda d: d["attributes"].update(sketch=told))
    refused(path, match)


def test_hdf5_rows_that_are_not_there(tmp_path):
    """A length within the row's width, and far beyond what the file holds."""
    path = write(tmp_path / "run.h5")
    with h5py.File(path, "r+") as file:
        data = file[GROUP]["large"]
        head = data[0, :24]
        head[16:24] = np.frombuffer(np.array([400_000, 10], "<u4").tobytes(), np.uint8)
        data[0, :24] = head
    refused(path, "'large', step 0: the rows are missing or truncated")
