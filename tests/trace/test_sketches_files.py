"""Checks, repair and packing of traces that keep sketches; several processes and the journal."""

import numpy as np
import pytest
from helpers_trace import SUFFIXES, gradient

from gtrace.trace import create_trace, open_trace
from gtrace.trace.check import check_trace, repair_trace
from gtrace.trace.convert import pack_trace
from gtrace.trace.shared import join_trace

SIZES = {"large": 30_000, "small": 7}
# Rows of different lengths, the later ones in several chunks.
STEPS = range(5)


def values(name, step):
    return gradient(name, step, (SIZES[name],)) * (0 if name == "large" and step == 0 else 1)


def write(path):
    with create_trace(path, sketch="l2:512,none") as writer:
        for step in STEPS:
            for name in SIZES:
                writer.append(step, name, values(name, step))
            writer.commit(step)
    return path


def rows(trace, info):
    return [trace.sketch_row(info.name, step, info.sketches) for step in trace.steps(info.name).tolist()]


@pytest.mark.parametrize(("suffix", "target"), [SUFFIXES, SUFFIXES[::-1]])
def test_packing_keeps_sketches(suffix, target, tmp_path):
    path = write(tmp_path / f"run{suffix}")
    assert check_trace(path).clean
    out = pack_trace(path, tmp_path / f"out{target}")
    with open_trace(path) as old, open_trace(out) as new:
        assert new.fingerprint == old.fingerprint
        (info,) = (info for info in new.tensors if info.sketches)
        for mine, theirs in zip(rows(new, info), rows(old, info), strict=True):
            assert mine.norm1 == theirs.norm1
            for one, other in zip(mine.sketches, theirs.sketches, strict=True):
                np.testing.assert_array_equal(one.sums, other.sums)
    assert check_trace(out).clean


@pytest.mark.parametrize("name", ["large", "small"])
def test_repair_leaves_out_what_is_damaged(name, tmp_path):
    path = write(tmp_path / "run.zarr")
    chunk = path / "rank00000" / "weight_grad" / name / ("c.2.0" if name == "large" else "c.0.0")
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    assert check_trace(path).wrong == (1 if name == "large" else 5)
    repair_trace(path)
    assert check_trace(path).clean
    with open_trace(path) as trace:
        assert [info.name for info in trace.tensors] == (["large", "small"] if name == "large" else ["large"])
        assert trace.steps("large").tolist() == ([0, 1, 3, 4] if name == "large" else [*STEPS])
        (info,) = (info for info in trace.tensors if info.sketches)
        for step, row in zip(trace.steps("large").tolist(), rows(trace, info), strict=True):
            assert row.norm2 == pytest.approx(np.square(values("large", step), dtype=np.float64).sum())


def test_processes_have_journals_of_their_own(tmp_path):
    """What each has committed is read while none has finished, and a check knows that they live."""
    path = tmp_path / "run.zarr"
    writers = [
        join_trace(path, run="a", rank=rank, writers=2, attrs={"sketch": {"sketches": ["l2:512"], "mantissa": 6}})[0]
        for rank in (0, 1)
    ]
    for rank, writer in enumerate(writers):
        for step in range(3 + rank):
            for name in SIZES:
                writer.append(step, name, values(name, step), rank=rank)
            writer.commit(step, rank=rank)
    with open_trace(path) as trace:
        for rank in (0, 1):
            assert trace.steps("small", rank=rank).tolist() == [*range(3 + rank)]
            np.testing.assert_array_equal(trace.read("small", 2, rank=rank), values("small", 2))
    assert check_trace(path).live
    writers[0].close()
    writers[1].close()
    assert check_trace(path).clean
    assert not list(path.rglob("journal"))
    with open_trace(path) as trace:
        np.testing.assert_array_equal(trace.read("small", 3, rank=1), values("small", 3))
