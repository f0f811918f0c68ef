"""Tensors beyond a chunk: expectations from sums of chunks, and what needs all values at once."""

import threading
import time

import numpy as np
import pytest
from helpers_sweep import rows_of
from helpers_trace import write_arrays

import gtrace
from gtrace.errors import TraceError
from gtrace.sweep.engine import Gate
from gtrace.sweep.gradients import Gradients
from gtrace.trace import Trace
from gtrace.trace import format as layout

SIZES = {"large": 10_000, "medium": 3_000, "small": 700}
CODECS = ["qsgd:bits=3,bucket_size=128", "qsgdinf:bits=5,bucket_size=512", "alq:bits=3,bucket_size=256", "fp:e4m3"]
CHUNK = 1024


def values(name, step):
    rng = np.random.default_rng([step, SIZES[name]])
    return (rng.standard_t(4, SIZES[name]) * 0.01).astype(np.float32)


@pytest.fixture(scope="module", params=["memory", "zarr", "h5"])
def trace(request, tmp_path_factory):
    made = {name: {step: values(name, step) for step in range(3)} for name in SIZES}
    if request.param == "memory":
        yield Trace.from_arrays(made)
        return
    path = tmp_path_factory.mktemp("large") / f"run.{request.param}"
    with pytest.MonkeyPatch.context() as patch:
        # Several stored chunks of a row, none of them as long as a chunk of the sweep.
        patch.setattr(layout, "_ELEMENTS", 700)
        patch.setattr(layout, "_CHUNK_BYTES", 2800)
        write_arrays(path, made)
    with gtrace.open_trace(path) as opened:
        yield opened


def test_expectations_from_chunks_are_those_of_the_whole(trace, monkeypatch):
    whole = list(gtrace.run_sweep(trace, CODECS, draws=0, jobs=1).rows())
    read, plain = [], Gradients.reader

    def reader(self, name):
        return lambda step: read.append(name) or plain(self, name)(step)

    monkeypatch.setattr(Gradients, "reader", reader)
    found = list(gtrace.run_sweep(trace, CODECS, draws=0, jobs=1, chunk=CHUNK).rows())
    assert set(read) == {"small"}
    assert len(found) == len(whole) == 3 * 3 * len(CODECS)
    for a, b in zip(found, whole, strict=True):
        for column, value in a.items():
            if isinstance(value, float):
                np.testing.assert_allclose(value, b[column], rtol=1e-12, atol=1e-18, err_msg=column)
            else:
                assert value == b[column], column


def test_what_needs_all_values_has_them_up_to_four_chunks(trace):
    codecs = ["dct:chunk=8:topk", "qsgd:bucket_size=100"]
    whole = gtrace.run_sweep(trace, codecs, tensors=["medium", "small"], jobs=1)
    found = gtrace.run_sweep(trace, codecs, tensors=["medium", "small"], jobs=2, chunk=CHUNK)
    assert rows_of(found) == rows_of(whole)
    assert not found.warnings


def test_nothing_passes_a_large_task_that_waits():
    gate, entered = Gate(10), []

    def enter(size):
        with gate.held(size):
            entered.append(size)

    threads = [threading.Thread(target=enter, args=(size,)) for size in (8, 2)]
    with gate.held(6):
        for count, thread in enumerate(threads, 1):
            thread.start()
            while len(gate._waiting) < count and not entered:
                time.sleep(0.001)
        time.sleep(0.05)
        assert not entered
    for thread in threads:
        thread.join()
    assert sorted(entered) == [2, 8]
    assert gate._free == 10


def test_gate():
    gate = Gate(10)
    with gate.held(6), gate.held(4):
        assert gate._free == 0
    with gate.held(1000):
        assert gate._free == 0
    assert gate._free == 10


def test_what_needs_all_values_of_a_larger_tensor_is_skipped_and_said(trace):
    found = gtrace.run_sweep(trace, [*CODECS, "dct:chunk=8:topk"], tensors=["large"], jobs=1, chunk=CHUNK)
    assert set(found["codec"]) == set(map(str, map(gtrace.codec, CODECS)))
    (line,) = found.warnings
    assert line.startswith("large has more than 4 chunks of 1024 values: without dct:topk, which needs all values")
    only = gtrace.run_sweep(trace, ["qsgd:bucket_size=100,bits=3", CODECS[0]], draws=0, jobs=1, chunk=CHUNK)
    assert {t: list(only["tensor"]).count(t) for t in SIZES} == {"large": 3, "medium": 6, "small": 6}


def test_nonfinite_values_in_a_chunk():
    bad = values("large", 0).copy()
    bad[[5, 9_999]] = np.nan
    trace = Trace.from_arrays({"large": bad})
    skipped = gtrace.run_sweep(trace, CODECS[:1], draws=0, chunk=CHUNK)
    assert list(skipped["note"]) == ["2 non-finite, skipped"]
    rows = [
        next(iter(gtrace.run_sweep(trace, CODECS[:1], draws=0, chunk=c, nonfinite="zero").rows()))
        for c in (CHUNK, 2**24)
    ]
    assert rows[0]["squared_error"] == pytest.approx(rows[1]["squared_error"], rel=1e-12)


def test_a_damaged_gradient_is_noticed_before_its_last_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "_ELEMENTS", 700)
    monkeypatch.setattr(layout, "_CHUNK_BYTES", 2800)
    with gtrace.open_trace(write_arrays(tmp_path / "run.zarr", {"large": values("large", 0)})) as opened:
        stream = next(iter(opened._streams.values()))
        stream.statistic("crc32c")[:] += 1
        pieces = opened.read_chunks("large", 0, CHUNK)
        for _ in range(SIZES["large"] // CHUNK):
            assert next(pieces).size == CHUNK
        with pytest.raises(TraceError, match="checksum mismatch"):
            next(pieces)
