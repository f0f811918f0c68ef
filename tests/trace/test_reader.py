"""Reading in the order of a sweep: chunks are decoded once, memory is bounded, threads do not disturb each other."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers_trace import SHAPES, SUFFIXES, gradient, present, write_trace

from gtrace.errors import TraceError, UsageError
from gtrace.trace import OptimizerFacts, Trace, create_trace, open_trace, reader
from gtrace.trace.check import check_trace
from gtrace.trace.convert import pack_trace
from gtrace.trace.rows import BLOCK, BlockSample, checksum_bytes, row_statistics, whole_numbers

STEPS = range(140)


@pytest.fixture(scope="module", params=SUFFIXES)
def path(request, tmp_path_factory):
    """140 steps: three chunks of the bias, five of the matrix."""
    return write_trace(tmp_path_factory.mktemp("long") / f"run{request.param}", STEPS)


def test_steps_in_order_decode_each_chunk_once(path, monkeypatch):
    decoded = []
    with open_trace(path) as trace:
        for stream in trace._streams.values():

            def counted(spec, row, read_rows=stream.read_rows):
                decoded.append((spec.name, row))
                return read_rows(spec, row)

            monkeypatch.setattr(stream, "read_rows", counted)
        for step in STEPS:
            np.testing.assert_array_equal(trace.read("fc.bias", step), gradient("fc.bias", step))
        # Chunks that were read are kept, and two tensors in turns do not drive each other out.
        for step in present("fc.weight", STEPS):
            trace.read("fc.weight", step)[:] = 0
            trace.read("fc.bias", step)[:] = 0
            np.testing.assert_array_equal(trace.read("fc.weight", step), gradient("fc.weight", step).ravel())
    assert [row for name, row in decoded if name == "fc.bias"] == [0, 64, 128]
    assert [name for name, _ in decoded].count("fc.weight") == 3


def test_the_cache_is_bounded(path, monkeypatch):
    monkeypatch.setattr(reader, "_CACHE_BYTES", 64 * 7 * 4)
    with open_trace(path) as trace:
        for step in (3, 4, 5):
            for name in ("fc.bias", "fc.weight"):
                np.testing.assert_array_equal(trace.read(name, step), gradient(name, step).ravel())
                assert sum(kept.rows.nbytes for kept in trace._cache.values()) == trace._cached <= 64 * 7 * 4


def test_threads_read_the_same_trace(path):
    wanted = [(name, step) for name in SHAPES for step in present(name, STEPS)[:60]]
    random.Random(2).shuffle(wanted)
    with open_trace(path) as trace, ThreadPoolExecutor(4) as pool:
        for (name, step), found in zip(wanted, pool.map(lambda one: trace.read(*one), wanted), strict=True):
            np.testing.assert_array_equal(found, gradient(name, step).ravel())


def test_statistics_over_many_blocks():
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(2**21 + 77) * np.exp(rng.standard_normal(2**21 + 77))).astype(np.float32)
    values[rng.integers(0, values.size, 1000)] = 0
    values[[5, 2**20, 2**21 + 1]] = [np.nan, np.inf, -np.inf]
    found = row_statistics(values)
    finite = values[np.isfinite(values)].astype(np.float64)
    assert abs(found.norm2 - np.sum(finite**2, dtype=np.longdouble)) < 1e-12 * found.norm2
    assert (found.nonfinite, found.absmax, found.zeros) == (3, np.abs(finite).max(), np.count_nonzero(finite == 0))
    assert row_statistics(np.array([], np.float32))[:4] == (0.0, 0.0, 0, 0)


def test_checksums_are_castagnoli():
    """The check value of the CRC catalogue."""
    assert checksum_bytes(b"123456789") == 0xE3069283


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_chunks_are_the_pieces_of_a_gradient(tmp_path, suffix):
    rows = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)

    def check(trace):
        for chunk in (64, 1000, 4096):
            for step, row in enumerate(rows):
                pieces = list(trace.read_chunks("w", step, chunk))
                assert np.array_equal(np.concatenate(pieces), row)
                assert [piece.size for piece in pieces[:-1]] == [chunk] * (len(pieces) - 1)

    with create_trace(tmp_path / f"run{suffix}") as writer:
        for step, row in enumerate(rows):
            writer.append(step, "w", row)
            writer.commit(step)
        check(open_trace(tmp_path / f"run{suffix}"))
    check(open_trace(tmp_path / f"run{suffix}"))
    check(Trace.from_arrays({"w": dict(enumerate(rows))}))
    with pytest.raises(UsageError, match="cannot be"):
        next(Trace.from_arrays({"w": rows[0]}).read_chunks("w", 0, 0))


TOTAL = 3 * BLOCK + 10


def values(step, size=TOTAL):
    return np.random.default_rng(step).normal(size=size).astype(np.float32)


def write(path, steps=70):
    sample = BlockSample.choose("big", TOTAL, BLOCK)
    with create_trace(path) as writer:
        for step in range(steps):
            about = {"sample": sample.describe(), "shape": [TOTAL]}
            writer.append(step, "big", sample.take(values(step)), numbers=whole_numbers(values(step)), **about)
            writer.append(step, "small", values(step, 5), numbers={"second_moment": step} if step % 2 else {})
            if step == 0:
                writer.append(0, "late", values(0, 2), numbers={"second_moment": 7.0})
    return path


@pytest.mark.parametrize(("suffix", "target"), [SUFFIXES, SUFFIXES[::-1]])
def test_further_numbers_are_written_read_and_packed(suffix, target, tmp_path):
    path = write(tmp_path / f"run{suffix}")
    assert check_trace(path).clean
    for place in (path, pack_trace(path, tmp_path / f"out{target}")):
        with open_trace(place) as trace:
            numbers = trace.statistics("big")
            for step in range(0, 70, 9):
                assert numbers["whole_norm2"][step] == pytest.approx(np.square(values(step), dtype=np.float64).sum())
            assert np.isnan(numbers["second_moment"]).all()
            moments = trace.statistics("small")["second_moment"]
            np.testing.assert_array_equal(moments, [step if step % 2 else np.nan for step in range(70)])
            assert "replicas" not in numbers
            assert trace.statistics("late")["second_moment"].tolist() == [7.0]


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": [1, BLOCK]},
        {"offsets": [0, 4 * BLOCK]},
        {"total": TOTAL + 1},
        {"block": "16384"},
    ],
)
def test_samples_that_contradict_themselves(change, tmp_path):
    sample = BlockSample((0, BLOCK), TOTAL)
    told = sample.describe() | change
    with create_trace(tmp_path / "run.zarr") as writer, pytest.raises((UsageError, TraceError), match="'sample'"):
        writer.append(0, "w", sample.take(values(0)), sample=told, shape=[TOTAL])


@pytest.mark.parametrize(
    "optimizers",
    [
        None,
        [],
        {"0": 3},
        {
            "0": {"kind": 7, "momentum": 1.5, "nesterov": 1, "weight_decay": float("nan"), "betas": [0.9, "x"]}
            | {"eps": -1, "planned_steps": True, "batch_size": 0, "varies": 3, "lr_ratio": "1", "length": 3}
        },
    ],
)
def test_what_is_not_a_fact_is_unknown(optimizers):
    assert OptimizerFacts.of({"optimizers": optimizers}) == OptimizerFacts()
