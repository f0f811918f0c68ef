"""The contract's table, after its benchmarks have run."""

from __future__ import annotations

import datetime
import platform
import sys
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def pytest_terminal_summary(terminalreporter):
    contract = sys.modules.get("bench_contract") or sys.modules.get("benchmarks.bench_contract")
    lines = getattr(contract, "LINES", [])
    if not lines:
        return
    width = max(len(line.name) for line in lines)
    terminalreporter.section("speed contract")
    for line in lines:
        terminalreporter.write_line(
            f"{line.name:{width}} {line.ratio:8.2f} {line.unit:17} {allowed(line):13} {line.verdict:5}{line.detail:>12}"
        )
    missed = sum(line.verdict == "miss" for line in lines)
    kept = sum(line.verdict == "pass" for line in lines)
    terminalreporter.write_line(f"{kept} lines of the contract pass, {missed} miss")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "contract.md").write_text(_markdown(lines))


def allowed(line):
    """What the contract asks for, in words."""
    if line.limit is None:
        return ""
    return f"{'at least' if line.faster_is_more else 'at most'} {line.limit:g}"


def _markdown(lines):
    rows = [
        f"| {line.name.strip()} | {line.ratio:.2f} {line.unit} | {allowed(line)} | {line.verdict} | {line.detail} |"
        for line in lines
    ]
    head = ["# Speed contract, measured", "", _machine(), "", "| what | ratio | contract | | rate |"]
    return "\n".join([*head, "|---|---|---|---|---|", *rows, ""])


def _machine():
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    load = Path("/proc/loadavg").read_text().split()[0]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("numpy", "numba", "torch"))
    return (
        f"{datetime.datetime.now(tz=datetime.UTC).date()}, one core of {model}, load {load} at the end, "
        f"Python {platform.python_version()}, {versions}."
    )
