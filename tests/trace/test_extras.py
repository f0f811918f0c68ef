"""Numbers about gradients that only some traces have, and samples of whole blocks."""

import numpy as np
import pytest
from helpers_trace import SUFFIXES

from gtrace.errors import TraceError, UsageError
from gtrace.trace import create_trace, open_trace
from gtrace.trace.check import check_trace, repair_trace
from gtrace.trace.convert import pack_trace
from gtrace.trace.rows import BLOCK, BlockSample, whole_numbers

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


def check(trace, steps=70):
    numbers = trace.statistics("big")
    for step in range(0, steps, 9):
        assert numbers["whole_norm2"][step] == pytest.approx(np.square(values(step), dtype=np.float64).sum())
    assert np.isnan(numbers["second_moment"]).all()
    moments = trace.statistics("small")["second_moment"]
    np.testing.assert_array_equal(moments, [step if step % 2 else np.nan for step in range(steps)])
    assert "replicas" not in numbers
    assert trace.statistics("late")["second_moment"].tolist() == [7.0]


@pytest.mark.parametrize(("suffix", "target"), [SUFFIXES, SUFFIXES[::-1]])
def test_written_read_and_packed(suffix, target, tmp_path):
    path = write(tmp_path / f"run{suffix}")
    assert check_trace(path).clean
    with open_trace(path) as trace:
        check(trace)
    with open_trace(pack_trace(path, tmp_path / f"out{target}")) as trace:
        check(trace)


def test_they_are_in_the_journal_and_survive_a_repair(tmp_path):
    path = tmp_path / "run.zarr"
    writer = create_trace(path)
    for step in range(3):
        writer.append(step, "w", values(step, 5), numbers={"second_moment": step})
        writer.commit(step)
    with open_trace(path) as trace:
        assert trace.statistics("w")["second_moment"].tolist() == [0, 1, 2]
    writer.close()
    assert (path / "rank00000" / "weight_grad" / "loss").is_dir()
    (path / "rank00000" / "weight_grad" / "x.partial").write_text("left by a killed writer")
    assert repair_trace(path).changed
    with open_trace(path) as trace:
        assert trace.statistics("w")["second_moment"].tolist() == [0, 1, 2]


def test_wrong_numbers(tmp_path):
    with create_trace(tmp_path / "run.zarr") as writer:
        with pytest.raises(UsageError, match=r"unknown number 'second_momemt'; .*second_moment"):
            writer.append(0, "w", [1.0], numbers={"second_momemt": 1})
        writer.append(0, "w", [1.0])
        writer.commit(0)
        with pytest.raises(UsageError, match="first step of its stream had no 'replicas'"):
            writer.append(1, "w", [1.0], numbers={"replicas": 2})


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": [1, BLOCK]},
        {"offsets": [BLOCK, 0]},
        {"offsets": []},
        {"offsets": [0, 4 * BLOCK]},
        {"total": TOTAL + 1},
        {"block": 0},
        {"block": "16384"},
    ],
)
def test_samples_that_contradict_themselves(change, tmp_path):
    sample = BlockSample((0, BLOCK), TOTAL)
    told = sample.describe() | change
    with create_trace(tmp_path / "run.zarr") as writer, pytest.raises((UsageError, TraceError), match="'sample'"):
        writer.append(0, "w", sample.take(values(0)), sample=told, shape=[TOTAL])


def test_blocks_are_drawn_once_and_evenly():
    sample = BlockSample.choose("w", 1_000_000, 100_000)
    assert (sample.kept, sample.blocks) == (7, 62)
    assert sample == BlockSample.choose("w", 1_000_000, 100_000)
    assert sample != BlockSample.choose("v", 1_000_000, 100_000)
    assert BlockSample.choose("w", 4 * BLOCK, 3 * BLOCK + 1) is None
    assert BlockSample.read(sample.describe()) == sample
    counts = np.zeros(10)
    for k in range(2000):
        counts[[o // BLOCK for o in BlockSample.choose(f"w{k}", 10 * BLOCK, 3 * BLOCK).offsets]] += 1
    # Binomial(2000, 0.3): five standard deviations are 102.
    assert np.abs(counts - 600).max() < 102
