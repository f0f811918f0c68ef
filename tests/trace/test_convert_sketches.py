"""Traces of sketches made from full ones: what they hold, what is merged, and how large they are."""

import itertools
import math
import os

import numpy as np
import pytest
from helpers_trace import SUFFIXES, gradient, write_arrays

import gtrace
from gtrace.errors import OutputExistsError, TraceError, UsageError
from gtrace.trace import SketchPlan, SketchRow, create_trace, open_trace, sketch_trace
from gtrace.trace.convert import disk_bytes

SIZE = 20_000
PLAN = "l2:512,none"
STEPS = (0, 3, 4, 5, 9)
#: name -> steps at which it is absent
ABSENT = {"large": {4}, "small": {0}}


@pytest.fixture(autouse=True)
def small_sketches(monkeypatch):
    """Wide or narrow bins, the same tensors are sketched: these tests are about what becomes of them."""
    monkeypatch.setattr("gtrace.trace.sketches._WEIGHTED_BYTES", 500)
    monkeypatch.setattr("gtrace.trace.sketches._PLAIN_BYTES", 200)


def write(path, **options):
    attrs = {"model": "Net", "versions": {"torch": "2"}}
    with create_trace(path, attrs=attrs, **options) as writer:
        for step in STEPS:
            for name, size in (("large", SIZE), ("other", 2 * SIZE), ("small", 5)):
                if step not in ABSENT.get(name, ()):
                    about = {"aliases": ["tied"], "module_type": "Linear", "stage": "reduced", "place": [1]}
                    writer.append(step, name, gradient(name, step, size), optimizer=int(name == "other"), **about)
            writer.append(step, "act", gradient("act", step, SIZE + 100 * step), kind="neural", n_total=2 * SIZE)
            writer.append(step, "out", gradient("out", step, 10 + step), kind="neural", module="out")
            writer.commit(step, loss=step / 2, lr=0.1)
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_step_sketched(suffix, tmp_path):
    done = sketch_trace(write(tmp_path / "run.zarr"), tmp_path / f"small{suffix}", sketch=PLAN)
    assert (done.sketched, done.raw, done.plan) == (3, 2, SketchPlan.parse(PLAN))
    assert done.bytes_after == disk_bytes(tmp_path / f"small{suffix}")
    with open_trace(tmp_path / "run.zarr") as full, open_trace(tmp_path / f"small{suffix}") as small:
        assert (small.attrs["model"], small.status) == ("Net", "complete")
        assert [info.name for info in small.tensors] == [info.name for info in full.tensors]
        for old, new in zip(full.tensors, small.tensors, strict=True):
            where = {"kind": old.kind, "optimizer": old.optimizer}
            for field in ("shape", "dtype", "aliases", "module_type", "stage", "attrs", "optimizer", "kind", "rank"):
                assert getattr(new, field) == getattr(old, field), field
            a, b = full.statistics(old.name, **where), small.statistics(new.name, **where)
            for name in ("step", "norm2", "absmax", "zeros", "nonfinite", "n_valid", "n_total"):
                np.testing.assert_array_equal(a[name], b[name])
            for step in full.steps(old.name, **where).tolist():
                values = full.read(old.name, step, **where)
                if new.sketches:
                    found = small.sketch_row(new.name, step, new.sketches, **where)
                    assert found[1:] == SketchRow.of(values, new.sketches)[1:]
                else:
                    np.testing.assert_array_equal(small.read(new.name, step, **where), values)
        for name, numbers in full.scalars().items():
            np.testing.assert_array_equal(small.scalars()[name], numbers)


def test_merged_steps(tmp_path):
    path = write(tmp_path / "run.zarr")
    done = sketch_trace(path, tmp_path / "small.zarr", sketch=SketchPlan.parse(PLAN, 10, 2))
    assert done.plan.merged == 2
    with open_trace(path) as full, open_trace(tmp_path / "small.zarr") as small:
        # Steps 0 and 3, 5 and 9: the tensor is absent at step 4.
        steps = {"large": [0, 5], "other": [0, 4, 9], "small": [3, 4, 5, 9]}
        assert {name: small.steps(name).tolist() for name in steps} == steps
        assert small.statistics("other")["n_valid"].tolist() == [4 * SIZE, 4 * SIZE, 2 * SIZE]
        assert small.statistics("act")["n_total"].tolist() == [4 * SIZE, 4 * SIZE, 2 * SIZE]
        parts = [SketchRow.of(full.read("large", step), SketchPlan.parse(PLAN).specs) for step in (5, 9)]
        found = small.sketch_row("large", 5, SketchPlan.parse(PLAN).specs)
        assert found.norm2 == pytest.approx(parts[0].norm2 + parts[1].norm2, rel=1e-15)
        assert (found.absmax, found.size) == (max(parts[0].absmax, parts[1].absmax), 2 * SIZE)
        whole = parts[0].sketches[0] + parts[1].sketches[0]
        np.testing.assert_array_equal(found.sketches[0].rows, whole.rows)
        np.testing.assert_allclose(found.sketches[0].sums, whole.sums, rtol=1e-12, atol=0)


@pytest.mark.parametrize("merged", [1, 2])
def test_numbers_and_names_stay_and_second_moments_are_left_out(tmp_path, merged):
    path, out = tmp_path / "run.zarr", tmp_path / "small.zarr"
    names = {"large": SIZE, "small": 5}
    with create_trace(path) as writer:
        for step in range(3):
            for name, size in names.items():
                numbers = {"replicas": 4.0 + step, "replicas_norm2": size, "second_moment": math.nan}
                for optimizer in (0, 1):
                    writer.append(step, name, gradient(name, step, size), optimizer=optimizer, numbers=numbers)
                writer.append(step, name, gradient(name, step, size) ** 2, kind="second_moment")
            writer.commit(step)
    sketch_trace(path, out, sketch=SketchPlan.parse(PLAN, 6, merged))
    with open_trace(path) as full, open_trace(out) as small:
        assert {info.kind for info in small.tensors} == {"weight"}
        assert small.streams == full.streams[:2]
        assert [info.name for info in small.tensors] == [*names, *(f"opt1/{name}" for name in names)]
        for name, optimizer in itertools.product(names, (0, 1)):
            here, there = (trace.statistics(name, optimizer=optimizer) for trace in (small, full))
            if name == "large" and merged == 2:
                # Numbers of single steps; the last one is alone.
                assert here["replicas"][1] == there["replicas"][2]
                assert np.isnan(here["replicas"][0])
            else:
                for number in ("replicas", "replicas_norm2", "second_moment"):
                    np.testing.assert_array_equal(here[number], there[number])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_there_stays_until_the_new_trace_is_whole(suffix, tmp_path):
    path, out = write(tmp_path / "run.zarr"), tmp_path / f"small{suffix}"
    sketch_trace(path, out, sketch=PLAN)
    before = open_trace(out).fingerprint
    (chunk, *_) = (path / "rank00000/weight_grad/large").glob("c.*")
    chunk.write_bytes(b"damaged")
    with pytest.raises(TraceError, match="checksum mismatch"):
        sketch_trace(path, out, sketch=PLAN, force=True)
    assert open_trace(out).fingerprint == before
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, out.name])


def test_a_sweep_of_merged_steps_is_that_of_both_together(tmp_path):
    parts = [gradient("large", step, 10_240) for step in (5, 9)]
    both = gtrace.Trace.from_arrays({"large": np.concatenate(parts)})
    write_arrays(tmp_path / "pair.zarr", {"large": dict(enumerate(parts))})
    sketch_trace(tmp_path / "pair.zarr", tmp_path / "one.zarr", sketch=SketchPlan.parse("l2:512", 10, 2))
    spec = ["alq:bits=3,bucket_size=512"]
    a, b = (next(iter(gtrace.run_sweep(one, spec, draws=0).rows())) for one in (both, tmp_path / "one.zarr"))
    for name in ("n", "energy", "mean_abs", "squared_error", "relative_variance", "sparsity", "bits_total"):
        assert math.isclose(a[name], b[name], rel_tol=1e-9), name


def test_globs_places_and_ends(tmp_path):
    path, out = write(tmp_path / "run.zarr"), tmp_path / "small.zarr"
    sketch_trace(path, out, sketch=PLAN, tensors=["oth*"])
    with open_trace(out) as small:
        assert [info.name for info in small.tensors] == ["other"]
    with pytest.raises(UsageError, match="no tensor matches 'larg'; did you mean large"):
        sketch_trace(path, out, tensors=["larg"], force=True)
    with pytest.raises(OutputExistsError):
        sketch_trace(path, out)
    with pytest.raises(UsageError, match="is what is being read"):
        sketch_trace(path, path, force=True)
    with create_trace(tmp_path / "cut.zarr") as writer:
        writer.append(0, "x", np.ones(SIZE))
        writer.close("interrupted")
    seen = []
    sketch_trace(tmp_path / "cut.zarr", out, sketch=PLAN, force=True, progress=lambda *args: seen.append(args))
    assert (seen, open_trace(out).status) == ([(1, 1)], "interrupted")
