"""The soak in short: a writer holds no more after thousands of steps than after the first few hundred."""

import pytest
from helpers_installed import benchmark
from helpers_trace import SUFFIXES


@pytest.fixture(scope="module")
def soak():
    return benchmark("soak")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_memory_and_descriptors_stay(suffix, soak, tmp_path):
    steps = 4000 if suffix == ".zarr" else 1500
    path = tmp_path / f"run{suffix}"
    # The first trace of a process loads libraries.
    soak.soak(tmp_path / f"warm{suffix}", 20)
    _, before = soak.held()
    readings = soak.soak(path, steps)
    soak.verify(path, steps)
    # What the first fifth takes for the first time is no growth: caches, compiled code, chunk buffers.
    settled = readings[len(readings) // 5 :]
    assert len({descriptors for _, _, descriptors, _ in readings}) == 1
    assert settled[-1][1] - settled[0][1] < 3_000_000
    assert soak.held()[1] == before
    told = soak.outcome(suffix, steps, readings)
    assert told["steps"] == steps
    assert told["growth_bytes_per_step"] < 1000
