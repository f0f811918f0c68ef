"""``gtrace trace check``: whether everything in a trace is right, and a repair of what is not."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gtrace.cli.console import echo
from gtrace.cli.options import JSON, Command, TracePath, options, pick, print_json
from gtrace.errors import EXIT_INPUT, EXIT_OK, printable
from gtrace.settings import option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.trace.check import CheckReport, Fault, Repair

_MOST_LINES = 100


@dataclass(frozen=True)
class CheckSettings:
    """The options of ``gtrace trace check``."""

    repair: bool = option(
        False, help="Make a damaged or interrupted trace usable; a damaged one is kept as NAME.damaged."
    )
    as_json: bool = option(False, **JSON)


@click.command("check", cls=Command, epilog="Example: gtrace trace check run.zarr --repair")
@click.argument("trace", type=TracePath())
@options(CheckSettings)
def command(settings: CheckSettings, trace: Path | str) -> int:
    """Read every committed gradient of TRACE and verify it: checksums, presence, statistics, metadata.

    Every fault is reported. The exit code is 0 if there is none, and 3 otherwise; after a repair it is 0. A repair
    keeps all gradients that are right; those that are damaged are absent in the new trace.
    """
    from gtrace.trace.check import check_trace, repair_trace

    repair = repair_trace(trace) if settings.repair else None
    report = check_trace(trace) if repair is None else repair.report
    if settings.as_json:
        print_json(_document(report, repair))
    else:
        _show(report, repair)
    return EXIT_OK if repair is not None or not report.faults else EXIT_INPUT


def _document(report: CheckReport, repair: Repair | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "trace": str(report.path),
        **pick(report, "status", "unfinished", "steps", "gradients", "wrong"),
        "being_written": report.live,
        "leftovers": [str(path) for path in report.leftovers],
        "faults": [fault._asdict() for fault in report.faults],
    }
    if repair is not None:
        document["repaired"] = repair.changed
        document["backup"] = None if repair.backup is None else str(repair.backup)
    return document


def _show(report: CheckReport, repair: Repair | None) -> None:
    lines = list(_lines(report.faults))
    for line in lines[:_MOST_LINES]:
        echo(line)
    if len(lines) > _MOST_LINES:
        echo(f"... and {len(lines) - _MOST_LINES} more lines; --json has all")
    echo(f"{report.path}: {_summary(report)}")
    if repair is None:
        if not report.clean and isinstance(report.path, Path):
            echo(f"next: gtrace trace check {report.path} --repair")
    elif not repair.changed:
        echo("nothing to repair")
    else:
        kept = "" if repair.backup is None else f"; the damaged trace is kept as {repair.backup}"
        echo(f"repaired: {report.gradients - report.wrong} gradients are in {report.path}{kept}")


def _summary(report: CheckReport) -> str:
    parts = [f"{report.steps} steps", f"{report.gradients - report.wrong} of {report.gradients} gradients are right"]
    if report.faults:
        parts.append(f"{len(report.faults)} faults")
    if report.live:
        parts.append("being written")
    elif report.unfinished or report.status == "writing":
        parts.append("its writer was killed")
    if report.leftovers:
        parts.append(f"{len(report.leftovers)} leftovers of killed writers")
    return ", ".join(parts)


def _lines(faults: Sequence[Fault]) -> list[str]:
    """One line for each fault, and one for all steps of a tensor that share a chunk, whose messages are alike."""
    lines = []

    def cause(fault: Fault) -> tuple[str, str | None, str]:
        return fault.stream, fault.tensor, fault.what.replace(f"step {fault.step}", "")

    for (stream, tensor, _), group in groupby(faults, key=cause):
        alike = list(group)
        if tensor is None:
            lines += [fault.what for fault in alike]
        elif len(alike) == 1:
            lines.append(f"{stream}, tensor '{printable(tensor)}', step {alike[0].step}: {alike[0].what}")
        else:
            steps = f"{len(alike)} steps from {alike[0].step} to {alike[-1].step}"
            lines.append(f"{stream}, tensor '{printable(tensor)}', {steps}: {alike[0].what}")
    return lines
