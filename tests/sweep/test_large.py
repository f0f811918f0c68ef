"""Tensors beyond a chunk: expectations from sums of chunks, and what needs all values at once."""

import numpy as np
import pytest
from helpers_sweep import rows_of
from helpers_trace import write_arrays

import gtrace
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
    found = list(gtrace.run_sweep(trace, CODECS, draws=0, jobs=2, chunk=CHUNK).rows())
    assert set(read) == {"small"}
    assert len(found) == len(whole) == 3 * 3 * len(CODECS)
    for a, b in zip(found, whole, strict=True):
        for column, value in a.items():
            if isinstance(value, float):
                np.testing.assert_allclose(value, b[column], rtol=1e-12, atol=1e-18, err_msg=column)
            else:
                assert value == b[column], column


def test_what_needs_all_values_has_them_up_to_four_chunks(trace):
    codecs = ["topk:ratio=0.1", "ef:qsgd:bucket_size=128", "qsgd:bucket_size=100", "randomk:ratio=0.1"]
    whole = gtrace.run_sweep(trace, codecs, tensors=["medium", "small"], jobs=1)
    found = gtrace.run_sweep(trace, codecs, tensors=["medium", "small"], jobs=2, chunk=CHUNK)
    assert rows_of(found) == rows_of(whole)
    assert not found.warnings
