"""Options about the machines between which gradients travel, and what codecs save there."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from gtrace.cli.console import wide_console
from gtrace.errors import UsageError
from gtrace.settings import option

if TYPE_CHECKING:
    from pathlib import Path

    from gtrace.costs import Cluster
    from gtrace.report.analysis.savings import Savings


@dataclass(frozen=True)
class ClusterSettings:
    """The machines between which gradients travel; ``example`` is how each is written."""

    ranks: int | None = option(
        None,
        metavar="N",
        example="--ranks 8",
        help="Workers that train together: for what codecs save, and in a report for the error of their average.",
    )
    network: str | None = option(
        None,
        metavar="RATE",
        example="--network 25Gbit/s",
        help="Speed of each rank's link, as in 25Gbit/s.",
    )
    latency: str | None = option(
        None, metavar="TIME", example="--latency 20us", help="Of a message there, as in 20us.  [default: 0s]"
    )
    step_time: str | None = option(
        None,
        metavar="TIME",
        example="--step-time 180ms",
        help="For what codecs save: computing of one rank's step without any exchange, as in 180ms.",
    )
    backward_time: str | None = option(
        None,
        metavar="TIME",
        example="--backward-time 120ms",
        help="The part of --step-time in which gradients appear.  [default: two thirds]",
    )
    bucket_mb: float | None = option(
        None,
        metavar="MIB",
        example="--bucket-mb 25",
        help="DistributedDataParallel's bucket_cap_mb there.  [default: 25, the first bucket 1]",
    )
    codec_rate: str | None = option(
        None,
        metavar="RATE",
        example="--codec-rate 2Gelem/s",
        help="Elements that a rank encodes or decodes per second, where you measured it on that device, as in "
        "2Gelem/s.  [default: no time of coding counts]",
    )

    @property
    def given(self) -> dict[str, Any]:
        """Those that a user gave, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


#: what a cluster cannot do without
_NEEDED = ("ranks", "network", "step_time")


def chosen_cluster(settings: ClusterSettings, ranks: int | None = None) -> Cluster | None:
    """The cluster that the settings describe; None if none of them is given.

    Args:
        settings: of the command.
        ranks: if ``--ranks`` is not given; a ``--network`` alone is then meant for something else.

    Raises:
        UsageError: one of the three that are needed is missing, or something cannot be read.
    """
    given = settings.given
    if not given or (ranks is not None and given.keys() <= {"network", "latency"}):
        return None
    examples = {field.name: field.metadata["example"] for field in fields(ClusterSettings)}
    first = min(given, key=(*_NEEDED, *examples).index)
    if ranks is not None:
        given.setdefault("ranks", ranks)
    missing = [examples[name] for name in _NEEDED if name not in given]
    if missing:
        raise UsageError(f"{examples[first].split()[0]}: what codecs save needs {' and '.join(missing)}, too")
    from gtrace.costs import Cluster, Network
    from gtrace.units import parse_elements, parse_seconds

    backward, rate = given.get("backward_time"), given.get("codec_rate")
    return Cluster(
        network=Network.parse(given["network"], given.get("latency", "0s")),
        ranks=given["ranks"],
        step_time=parse_seconds(given["step_time"], "step-time"),
        backward_time=None if backward is None else parse_seconds(backward, "backward-time"),
        bucket_mb=given.get("bucket_mb"),
        codec_rate=None if rate is None else parse_elements(rate, "codec-rate"),
    )


def savings_of_log(path: Path, cluster: Cluster | None) -> Savings | None:
    """What the codecs of a run log save; None without a cluster, or where nothing travels between ranks."""
    if cluster is None:
        return None
    from gtrace.report.analysis.run_logs import analyze_runs
    from gtrace.report.analysis.savings import savings_of_runs
    from gtrace.runlog import read_runlog

    return savings_of_runs(analyze_runs(read_runlog(path), path.name), cluster)


def print_savings(savings: Savings | None, *, err: bool = False) -> None:
    """The section of a report on what codecs save, on a terminal."""
    if savings is None:
        return
    from gtrace.report.render.text import print_sections
    from gtrace.report.sections.savings import savings_section

    print_sections([savings_section(savings)], wide_console(err=err))
