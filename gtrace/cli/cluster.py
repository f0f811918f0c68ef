"""The option that says between which machines gradients travel, and what codecs save there."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtrace.cli.console import wide_console
from gtrace.errors import TraceError, UsageError
from gtrace.settings import option

if TYPE_CHECKING:
    from gtrace.costs import Cluster
    from gtrace.report.analysis.savings import Savings


#: where a cluster may be written down: file -> the tables that its key is in
_FILES = {"gtrace.toml": (), "pyproject.toml": ("tool", "gtrace")}


@dataclass(frozen=True)
class ClusterSettings:
    """The machines between which gradients travel."""

    cluster: str | None = option(
        None,
        metavar="CLUSTER",
        help="Ranks x link speed, then the compute time of a step: 8x25Gbit/s,180ms. More parts: backward=120ms, "
        "latency=20us, bucket=25MiB, codec=2Gvalues/s.  [default: cluster in gtrace.toml or pyproject.toml here]",
    )


def chosen_cluster(text: str | None, *, timed: bool = False) -> Cluster | None:
    """The cluster of ``--cluster``, else the one written down in the current folder; None without either.

    If it must be ``timed``, the option needs the compute time of a step; one written down without it counts as none.
    """
    from gtrace.costs import parse_cluster

    if text is None:
        place, written = _written_down()
        found = None if written is None else parse_cluster(written, place)
        return None if found is None or (timed and found.step_time is None) else found
    cluster = parse_cluster(text)
    if timed and cluster.step_time is None:
        raise UsageError(f"--cluster: '{text}' needs the compute time of a step here, e.g. {text},180ms.")
    return cluster


def _written_down() -> tuple[str, str | None]:
    """The cluster of ``gtrace.toml``, or of ``[tool.gtrace]`` in ``pyproject.toml``, behind its place for messages."""
    for file, tables in _FILES.items():
        path = Path(file)
        if not path.is_file():
            continue
        try:
            found: Any = tomllib.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise TraceError(f"{file}: cannot be read as TOML ({error}).") from None
        for table in tables:
            found = found.get(table) or {}
        text = found.get("cluster") if isinstance(found, dict) else None
        if text is not None:
            return f"{file}: cluster", str(text)
    return "", None


def savings_of_log(path: Path, cluster: Cluster | None) -> Savings | None:
    """What the codecs of a run log save; None without a cluster, or where nothing travels between ranks."""
    if cluster is None:
        return None
    from gtrace.report.analysis.runs import analyze_runs
    from gtrace.report.analysis.savings import savings_of_runs
    from gtrace.runlog import read_runlog

    return savings_of_runs(analyze_runs(read_runlog(path), path.name), cluster)


def print_savings(savings: Savings | None, *, err: bool = False) -> None:
    """The section of a report on what codecs save, on a terminal."""
    if savings is None:
        return
    from gtrace.report.sections.savings import savings_section
    from gtrace.report.text import print_sections

    print_sections([savings_section(savings)], wide_console(err=err))
