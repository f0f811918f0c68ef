"""A codec against every built-in one, on standard traces and by a fixed protocol, as a paper on it needs."""

from gtrace.workflows.bench.run import FULL, QUICK, BenchResult, Duel, Protocol, duel, run_bench
from gtrace.workflows.bench.tables import bench_json, bench_lines, bench_tables

__all__ = [
    "FULL",
    "QUICK",
    "BenchResult",
    "Duel",
    "Protocol",
    "bench_json",
    "bench_lines",
    "bench_tables",
    "duel",
    "run_bench",
]
