"""Codecs with memory need consecutive steps: refused, left out of ``all``, or replayed burst by burst."""

import pytest
from helpers_sweep import rows_of, stop_sweep, write_trace

import gtrace
from gtrace.errors import UsageError
from gtrace.sweep.store import ResultStore
from gtrace.trace import Trace

MEMORY = ["ef:topk:ratio=0.1", "mem-sgd:ratio=0.1"]


@pytest.fixture(scope="module")
def gaps(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("gaps") / "gaps.zarr", steps=(0, 10, 20))


def test_memory_without_consecutive_steps_is_refused(gaps, tmp_path):
    out = tmp_path / "out.db"
    with pytest.raises(UsageError, match=r"ef:topk:ratio=0.1, mem-sgd:ratio=0.1 keep memory .*--steps 1000\+50"):
        gtrace.run_sweep(gaps, ["qsgd:bits=3", *MEMORY], output=out)
    assert not out.exists()
    # A burst that is not swept does not help.
    mixed = write_trace(tmp_path / "mixed.zarr", steps=(0, 1, 10))
    with pytest.raises(UsageError, match="keeps memory"):
        gtrace.run_sweep(mixed, MEMORY[:1], steps=[10])
    found = gtrace.run_sweep(mixed, MEMORY[:1], steps=[1, 10])
    assert set(found["step"]) == {1, 10}
    assert all("open loop" in note for note in found["note"])


def test_memory_is_left_out_where_asked(gaps):
    found = gtrace.run_sweep(gaps, ["qsgd:bits=3", *MEMORY], tensors=["fc.bias"], leave_out=True)
    assert set(found["codec"]) == {"qsgd:bits=3"}
    assert found.provenance["left_out_codecs"] == MEMORY
    assert len(found.warnings) == 1
    assert found.warnings[0].startswith("left out: ef:topk:ratio=0.1, mem-sgd")
    with pytest.raises(UsageError, match="keep memory"):
        gtrace.run_sweep(gaps, MEMORY, leave_out=True)


#: every kind of memory: residuals, momentum, momentum beside residuals, and both around stateless codecs
STATEFUL = [
    *("ef:topk:ratio=0.1", "mem-sgd:ratio=0.1", "signum", "dgc:ratio=0.1", "adacomp", "onebit", "ef-signsgd"),
    *("dropping", "momentum:qsgd:bits=3,bucket_size=64", "ef:alq:bits=3,bucket_size=64"),
]


def test_a_sweep_that_ends_within_a_burst_resumes_with_the_same_rows(tmp_path):
    path = write_trace(tmp_path / "run.zarr", steps=(0, 1, 2, 7, 8), tensors=(("a", 300), ("b", 40)))
    whole = rows_of(gtrace.run_sweep(path, STATEFUL, draws=2, jobs=1))

    for count in (2, 7):
        out = tmp_path / f"{count}.db"
        stop_sweep(count, path, STATEFUL, draws=2, jobs=1, output=out)
        left = len(ResultStore.load(out))
        assert 0 < left < len(whole)
        assert rows_of(gtrace.run_sweep(path, STATEFUL, draws=2, jobs=2, output=out)) == whole


def test_each_burst_begins_afresh_and_goes_on_in_order(tmp_path):
    tensors = (("a", 300),)
    path = write_trace(tmp_path / "run.zarr", steps=(0, 1, 2, 7, 8), tensors=tensors)
    with gtrace.open_trace(path) as trace:
        arrays = {step: trace.read("a", step) for step in (7, 8)}
        single = {step: trace.read("a", step) for step in (1, 2)}
    # Fitted levels come from the step before, whichever burst it is in.
    specs = [spec for spec in STATEFUL if "alq" not in spec]
    found = gtrace.run_sweep(path, specs, jobs=1)
    alone = gtrace.run_sweep(Trace.from_arrays({"a": arrays}), specs, jobs=1)
    errors = [
        {(row["codec"], row["step"]): row["squared_error"] for row in result.rows() if row["step"] in (7, 8)}
        for result in (found, alone)
    ]
    assert errors[0] == errors[1]
    # Step 2 remembers step 0: without it, errors are others.
    short = gtrace.run_sweep(Trace.from_arrays({"a": single}), specs, jobs=1)
    errors = [
        {row["codec"]: row["squared_error"] for row in result.rows() if row["step"] == 2} for result in (found, short)
    ]
    assert all(errors[0][spec] != errors[1][spec] for spec in errors[0])
