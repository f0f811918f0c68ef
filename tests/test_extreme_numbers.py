"""Numbers that break float32 sums, encoders and compilers: extreme tensors, 10^8 values, no compilation."""

import hashlib
import json
import math
import os
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from helpers_variants import VARIANTS
from hypothesis import given, settings
from hypothesis import strategies as st

import gtrace
from gtrace.metrics import Histogram, RunningComparison
from gtrace.testing import check_round_trip, fitted
from gtrace.trace.rows import row_statistics, whole_numbers
from gtrace.types import Key

TINY, HUGE = float(np.finfo(np.float32).smallest_subnormal), float(np.finfo(np.float32).max)
PARTS = st.tuples(
    st.sampled_from([0.0, TINY, 77 * TINY, 1.1754944e-38, 1e-30, 1e-7, 1.0, 3.5, 1e19, 1e30, 1e38, HUGE]),
    st.sampled_from(["same", "alternating", "one"]),
    st.integers(1, 90),
)


def tensor(parts):
    """Runs of one magnitude: all of one sign, with alternating signs, or a single one among zeros."""
    out = []
    for magnitude, how, count in parts:
        run = np.full(count, np.float32(magnitude))
        if how == "alternating":
            run[1::2] *= -1
        elif how == "one":
            run[: count - 1] = 0
        out.append(run)
    return np.concatenate(out)


@pytest.mark.parametrize("spec", VARIANTS)
@settings(max_examples=5, database=None)
@given(st.lists(PARTS, min_size=1, max_size=4))
def test_every_codec_survives_extreme_tensors(spec, parts):
    check_round_trip(gtrace.codec(spec), repr(parts), tensor(parts))


def test_sums_over_a_hundred_million_values_keep_their_digits():
    """Sums in float32 stall at 2^24 ones and lose every small value beside a large one; each of these would show it."""
    size, times = 1 << 20, 96
    rng = np.random.default_rng(0)
    values = rng.choice(np.array([1.0, -1.0, 0.1, 1e-4], np.float32), size)
    values[::4096] = 3000.0
    decoded = (values * np.float32(1.001)).astype(np.float32)
    wide = values.astype(np.float64)
    energy, norm1 = math.fsum(wide * wide), math.fsum(np.abs(wide))
    off = decoded.astype(np.float64) - wide
    error, distance = math.fsum(off * off), math.fsum(np.abs(np.sort(decoded).astype(float) - np.sort(wide)))
    exact = Histogram()
    running = RunningComparison(exact, times * energy, times * norm1)
    one = gtrace.MomentSketch.of(values, norm="none")
    whole = one
    for k in range(times):
        exact.add(values)
        running.add(values, decoded)
        whole = whole + one if k else one
    found, doubt = running.finish()
    assert found.squared_error == pytest.approx(times * error, rel=1e-12)
    assert found.relative_variance == pytest.approx(error / energy, rel=1e-12)
    assert found.mean_abs_error == pytest.approx(math.fsum(np.abs(off)) / size, rel=1e-12)
    assert found.w1 == pytest.approx(distance / size, rel=1e-9, abs=doubt)
    assert whole.size == times * size
    assert whole.sums[:, 0].sum() == times * size
    assert whole.energy == pytest.approx(times * energy, rel=1e-11)
    assert float(whole.lower @ whole.sums[:, 0] + whole.sums[:, 1].sum()) == pytest.approx(times * norm1, rel=1e-11)


def test_sums_of_one_tensor_keep_their_digits():
    """Ones beyond 2^24, and a large value before many small ones: in float32 both would end too low by a tenth."""
    values = np.full((1 << 24) + (1 << 21), np.float32(1.0))
    values[0] = 2.0**12
    energy = float(values.size - 1 + 2**24)
    told = row_statistics(values)
    assert told.norm2 == pytest.approx(energy, rel=1e-12)
    assert whole_numbers(values)["whole_norm2"] == pytest.approx(energy, rel=1e-12)
    assert whole_numbers(values)["whole_norm1"] == values.size - 1 + 2**12
    reference = gtrace.metrics.Reference(values)
    assert (reference.energy, reference.norm1) == (energy, values.size - 1 + 2**12)
    assert gtrace.codec("none").aggregate([values, values])[0] == 2.0**12


def digests():
    """A digest of what every codec sends and of what arrives."""
    values = (np.random.default_rng(3).standard_t(3, 54) * 2.0 ** np.arange(-80, 80, 3)).astype(np.float32)
    found = {}
    for spec in VARIANTS:
        codec = gtrace.codec(spec)
        state, _ = fitted(codec, values)
        shared, payload = codec.shared(state), codec.encode(state, values, Key.derive(1, tensor="digest"))
        decoded = codec.decode(shared, payload, values.size)
        digest = hashlib.blake2b(shared + payload + decoded.tobytes(), digest_size=8)
        found[spec] = f"{digest.hexdigest()} {zlib.crc32(payload)}"
    return found


def test_bytes_are_the_same_without_compilation():
    """Kernels run as plain Python, where integers do not wrap: a product that relies on wrapping would show."""
    program = (
        "import json, sys; import test_extreme_numbers as t; "
        "from numba.core import config; assert config.DISABLE_JIT; print(json.dumps(t.digests()))"
    )
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join([*sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, cwd=Path(__file__).parent
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == digests()
