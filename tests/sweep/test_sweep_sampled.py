"""Sweeps over samples of blocks: what a sample answers, with which error, and what is left out."""

import re

import numpy as np
import pytest
from helpers_trace import write_arrays

import gtrace
from gtrace.errors import TraceError, UsageError
from gtrace.trace import create_trace
from gtrace.trace.rows import BLOCK, BlockSample, whole_numbers

TOTAL = 40 * BLOCK - 5000


def gradient():
    """Not of one law everywhere."""
    scale = np.exp(0.5 * np.sin(np.arange(TOTAL) / 1e5))
    return (np.random.default_rng(3).normal(size=TOTAL) * scale).astype(np.float32)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder, values = tmp_path_factory.mktemp("sampled"), gradient()
    write_arrays(folder / "whole.zarr", {"w": values})
    with create_trace(folder / "sample.zarr") as writer:
        for k in range(12):
            sample = BlockSample.choose(f"w{k}", TOTAL, 12 * BLOCK)
            about = {"sample": sample.describe(), "shape": [TOTAL]}
            writer.append(0, f"w{k}", sample.take(values), numbers=whole_numbers(values), **about)
    return folder / "whole.zarr", folder / "sample.zarr"


CODECS = ("qsgd:bits=3", "qsgdinf:bits=3,bucket_size=1024", "natural", "alq:bits=3")


def test_estimates_agree_with_the_whole_within_their_sampling_errors(traces):
    whole, sampled = (gtrace.run_sweep(path, CODECS, draws=0, refit="each") for path in traces)
    exact = {row["codec"]: row for row in whole.rows()}
    found = {codec: [] for codec in exact}
    for row in sampled.rows():
        true = exact[row["codec"]]
        assert (row["n"], row["energy"]) == (TOTAL, pytest.approx(true["energy"], rel=1e-12))
        assert row["mean_abs"] == pytest.approx(true["mean_abs"], rel=1e-9)
        assert row["squared_error"] == pytest.approx(row["relative_variance"] * row["energy"])
        assert row["bits_shared"] == pytest.approx(true["bits_shared"], rel=1e-9)
        note = re.fullmatch(r"sample of 12 of 40 blocks; sampling error (?:at least )?([\d.]+)%", row["note"])
        found[row["codec"]].append((row["relative_variance"] / true["relative_variance"] - 1, float(note[1]) / 100))
    for pairs in found.values():
        deviations, claimed = np.array(pairs).T
        # A standard error from 12 groups is itself uncertain.
        assert 0.5 < claimed.mean() / deviations.std() < 2
        assert np.abs(deviations).max() < 5 * claimed.mean()
        assert abs(deviations.mean()) < 3 * deviations.std() / np.sqrt(12)


def test_draws_stand_for_the_whole(traces):
    whole, sampled = (gtrace.run_sweep(path, CODECS[:2], draws=1, tensors=None) for path in traces)
    exact = {(row["codec"], row["draw"]): row for row in whole.rows()}
    for row in sampled.rows():
        true = exact[row["codec"], row["draw"]]
        assert (row["n"], row["squared_error"]) == (TOTAL, pytest.approx(true["squared_error"], rel=0.1))
        assert row["bits_total"] == pytest.approx(true["bits_total"], rel=0.05)


@pytest.mark.parametrize(
    ("codec", "why"),
    [
        ("qsgd:bits=3,bucket_size=5000", "buckets of 5000 do not fit into blocks of 16384"),
        ("qsgd:bits=3,bucket_size=none", "their norm is that of the whole tensor"),
        ("qsgd:bits=3,scope=model", "buckets of the whole model run from tensor to tensor"),
        ("mcgq:bits=3", "they need the whole tensor at once"),
        ("topk", "they need the whole tensor at once"),
        ("prune", "their scale or threshold depends on the whole tensor"),
        ("signsgd", "their scale or threshold depends on the whole tensor"),
        ("fp:bits=4", "their scale or threshold depends on the whole tensor"),
    ],
)
def test_what_a_sample_cannot_answer_is_left_out_with_a_line(codec, why, traces):
    with pytest.raises(UsageError, match=f"nothing is left to do; .*samples of their blocks: without .*: {why}"):
        gtrace.run_sweep(traces[1], [codec])
    result = gtrace.run_sweep(traces[1], [codec, "natural"], draws=0)
    assert set(result["codec"]) == {"natural"}
    assert sum(why in line for line in result.warnings) == 1


def test_few_blocks_say_that_the_error_is_unknown(tmp_path):
    sample, values = BlockSample.choose("w", TOTAL, 3 * BLOCK), gradient()
    about = {"sample": sample.describe(), "shape": [TOTAL]}
    path = write_arrays(tmp_path / "run.zarr", {"w": sample.take(values)}, **about)
    (row,) = gtrace.run_sweep(path, ["natural"], draws=0).rows()
    assert row["note"] == "sample of 3 of 40 blocks; sampling error unknown"
    # Without numbers about the whole its energy is that of the sample, stretched.
    stored = float(np.square(sample.take(values), dtype=np.float64).sum())
    assert row["energy"] == pytest.approx(stored * TOTAL / sample.size)


@pytest.mark.parametrize(
    ("nonfinite", "note"), [("skip", "2 non-finite, skipped"), ("zero", "taken as zero; sample of")]
)
def test_values_that_are_not_finite_count_also_in_blocks_that_are_not_stored(tmp_path, nonfinite, note):
    values, sample = gradient(), BlockSample.choose("w", TOTAL, 12 * BLOCK)
    bad = next(k for k in range(0, TOTAL, BLOCK) if k not in sample.offsets)
    with create_trace(tmp_path / "sample.zarr") as writer:
        for step in range(2):
            about = {"sample": sample.describe(), "shape": [TOTAL]}
            writer.append(step, "w", sample.take(values), numbers=whole_numbers(values), **about)
            values[bad : bad + 2] = np.nan, np.inf
    found = gtrace.run_sweep(tmp_path / "sample.zarr", CODECS[:2], nonfinite=nonfinite)
    assert [row["step"] for row in found.rows() if note in row["note"]] == [1] * 4
    assert np.isfinite(found["squared_error"]).tolist() == [nonfinite == "zero" or step == 0 for step in found["step"]]
    assert found.warnings[0].startswith("NaN or infinity in the gradients of 1 of 1 tensor, at 1 of 2 steps")
    with pytest.raises(TraceError, match="w at step 1: 2 of"):
        gtrace.run_sweep(tmp_path / "sample.zarr", CODECS[:2], nonfinite="error")
