"""How long a user waits for an answer: whole processes, against a bare interpreter."""

import statistics
import subprocess
import sys
import time

import pytest


def median_wall(*command, repeats=7):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@pytest.mark.parametrize("args", [("--help",), ("sweep", "--help"), ("codecs",)])
def test_startup(benchmark, args):
    bare = median_wall(sys.executable, "-c", "pass")
    command = (sys.executable, "-m", "gtrace", *args)
    seconds = median_wall(*command)
    benchmark.extra_info.update(seconds=round(seconds, 3), interpreters=round(seconds / bare, 1))
    print(f"\ngtrace {' '.join(args)}: {benchmark.extra_info}")
    benchmark.pedantic(lambda: median_wall(*command, repeats=1), rounds=3, iterations=1)
