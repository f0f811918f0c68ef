"""Reading in the order of a sweep: chunks are decoded once, memory is bounded, threads do not disturb each other."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers_trace import SHAPES, SUFFIXES, gradient, opened, present, write_trace

from gtrace.errors import UsageError
from gtrace.trace import Trace, create_trace, open_trace, reader
from gtrace.trace.rows import checksum_bytes, row_statistics

STEPS = range(140)


@pytest.fixture(scope="module", params=SUFFIXES)
def path(request, tmp_path_factory):
    """140 steps: three chunks of the bias, five of the matrix."""
    return write_trace(tmp_path_factory.mktemp("long") / f"run{request.param}", STEPS)


def count_decodes(trace, monkeypatch):
    """A list that grows by (tensor, row) whenever a chunk is decoded."""
    decoded = []
    for stream in trace._streams.values():
        read_rows = stream.read_rows

        def counted(spec, row, read_rows=read_rows):
            decoded.append((spec.name, row))
            return read_rows(spec, row)

        monkeypatch.setattr(stream, "read_rows", counted)
    return decoded


def test_steps_in_order_decode_each_chunk_once(path, monkeypatch):
    with open_trace(path) as trace:
        decoded = count_decodes(trace, monkeypatch)
        for step in STEPS:
            np.testing.assert_array_equal(trace.read("fc.bias", step), gradient("fc.bias", step))
        assert [row for _, row in decoded] == [0, 64, 128]
        # Chunks that were read are kept, and two tensors in turns do not drive each other out.
        decoded.clear()
        for step in present("fc.weight", STEPS):
            trace.read("fc.weight", step)[:] = 0
            trace.read("fc.bias", step)[:] = 0
            np.testing.assert_array_equal(trace.read("fc.weight", step), gradient("fc.weight", step).ravel())
        assert [name for name, _ in decoded] == ["fc.weight"] * 3


def test_the_cache_is_bounded(path, monkeypatch):
    monkeypatch.setattr(reader, "_CACHE_BYTES", 64 * 7 * 4)
    with open_trace(path) as trace:
        decoded = count_decodes(trace, monkeypatch)
        for step in (3, 4, 5):
            for name in ("fc.bias", "fc.weight"):
                np.testing.assert_array_equal(trace.read(name, step), gradient(name, step).ravel())
                assert sum(kept.rows.nbytes for kept in trace._cache.values()) == trace._cached <= 64 * 7 * 4
        assert [name for name, _ in decoded].count("fc.weight") == 3


def test_threads_read_the_same_trace(path):
    rng = np.random.default_rng(2)
    wanted = [(name, int(step)) for name in SHAPES for step in rng.permutation(present(name, STEPS))[:60]]
    rng.shuffle(wanted)
    start = threading.Barrier(4)
    with open_trace(path) as trace:

        def work(part):
            start.wait()
            return [
                np.array_equal(trace.read(name, int(step)), gradient(name, int(step)).ravel())
                for name, step in wanted[part::4]
            ]

        with ThreadPoolExecutor(4) as pool:
            assert all(all(found) for found in pool.map(work, range(4)))


@pytest.mark.parametrize("backend", [*SUFFIXES, "memory"])
def test_answers_are_the_callers_own(backend, tmp_path):
    with opened(backend, tmp_path) as trace:
        for answer in (trace.scalars, lambda: trace.statistics("fc.bias"), lambda: {"steps": trace.steps("fc.bias")}):
            before = {name: values.copy() for name, values in answer().items()}
            for values in answer().values():
                values[:] = 77
            for name, values in answer().items():
                np.testing.assert_array_equal(values, before[name])


def test_statistics_over_many_blocks():
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(2**21 + 77) * np.exp(rng.standard_normal(2**21 + 77))).astype(np.float32)
    values[rng.integers(0, values.size, 1000)] = 0
    found = row_statistics(values)
    exact = values.astype(np.float64)
    assert abs(found.norm2 - np.sum(exact**2, dtype=np.longdouble)) < 1e-12 * found.norm2
    assert (found.absmax, found.zeros) == (np.abs(exact).max(), np.count_nonzero(values == 0))
    assert found.nonfinite == 0
    values[[5, 2**20, 2**21 + 1]] = [np.nan, np.inf, -np.inf]
    found = row_statistics(values)
    finite = exact[np.isfinite(values)]
    assert abs(found.norm2 - np.sum(finite**2, dtype=np.longdouble)) < 1e-12 * found.norm2
    assert (found.nonfinite, found.absmax) == (3, np.abs(finite).max())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (0.0, 0.0, 0, 0)),
        ([np.nan, np.inf], (0.0, 0.0, 0, 2)),
        ([-3.0, 0.0, -0.0], (9.0, 3.0, 2, 0)),
        ([1e-45], (float(np.float32(1e-45)) ** 2, float(np.float32(1e-45)), 0, 0)),
    ],
)
def test_statistics_of_odd_rows(values, expected):
    assert row_statistics(np.array(values, np.float32))[:4] == expected


def test_checksums_are_castagnoli():
    """The check value of the CRC catalogue."""
    assert checksum_bytes(b"123456789") == 0xE3069283


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_chunks_are_the_pieces_of_a_gradient(tmp_path, suffix):
    rows = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)
    writer = create_trace(tmp_path / f"run{suffix}")
    for step, row in enumerate(rows):
        writer.append(step, "w", row)
        writer.commit(step)
    with pytest.raises(UsageError, match="cannot be"):
        next(Trace.from_arrays({"w": rows[0]}).read_chunks("w", 0, 0))
    # First while it is being written, then from chunks, then in memory.
    for trace in (open_trace(tmp_path / f"run{suffix}"), None, Trace.from_arrays({"w": dict(enumerate(rows))})):
        if trace is None:
            writer.close()
            trace = open_trace(tmp_path / f"run{suffix}")
        for chunk in (64, 999, 1000, 4096):
            for step, row in enumerate(rows):
                pieces = list(trace.read_chunks("w", step, chunk))
                assert np.array_equal(np.concatenate(pieces), row)
                assert [piece.size for piece in pieces[:-1]] == [chunk] * (len(pieces) - 1)
