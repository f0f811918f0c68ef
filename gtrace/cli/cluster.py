"""The options that say between which machines gradients travel, and what is made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gtrace.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gtrace.cli.options import F
    from gtrace.costs import Cluster, Network
    from gtrace.report.analysis.savings import Savings

#: options of a cluster -> how each is written, by what is missing first
CLUSTER = {
    "ranks": "--ranks 8",
    "network": "--network 25Gbit/s",
    "step_time": "--step-time 180ms",
    "latency": "--latency 20us",
    "backward_time": "--backward-time 120ms",
    "bucket_mb": "--bucket-mb 25",
    "codec_rate": "--codec-rate 2Gelem/s",
}
_NEEDED = ("ranks", "network", "step_time")


def cluster_options(function: F) -> F:
    """``--ranks``, ``--network``, ``--step-time`` and what refines them; :func:`chosen_cluster` reads them."""
    for option in (
        click.option(
            "--codec-rate",
            metavar="RATE",
            help="Elements that a rank encodes or decodes per second, where you measured it on that device, as in "
            "2Gelem/s.  [default: no time of coding counts]",
        ),
        click.option(
            "--bucket-mb",
            type=float,
            metavar="MIB",
            help="DistributedDataParallel's bucket_cap_mb there.  [default: 25, the first bucket 1]",
        ),
        click.option(
            "--backward-time",
            metavar="TIME",
            help="The part of --step-time in which gradients appear.  [default: two thirds]",
        ),
        click.option(
            "--step-time",
            metavar="TIME",
            help="For what codecs save: computing of one rank's step without any exchange, as in 180ms.",
        ),
        click.option("--latency", metavar="TIME", help="Of a message there, as in 20us.  [default: 0s]"),
        click.option("--network", metavar="RATE", help="Speed of each rank's link, as in 25Gbit/s."),
        click.option(
            "--ranks",
            type=int,
            metavar="N",
            help="Workers that train together: for what codecs save, and in a report for the error of their average.",
        ),
    ):
        function = option(function)
    return function


def simulation_options(function: F) -> F:
    """``--topology`` and ``--compute-time`` of simulated steps; :func:`simulated_network` reads them."""
    function = click.option(
        "--compute-time",
        metavar="TIME",
        help="For a task: computing and coding of a simulated step, as in 5s, in the place of measured times.  "
        "[default: measured; 5s with --policy mqgrad]",
    )(function)
    return click.option(
        "--topology",
        type=click.Choice(["ring", "allgather", "ps"]),
        default="ring",
        show_default=True,
        help="For a task: how gradients travel in simulated steps: ring (all-reduce of exact ones, all-gather of "
        "payloads), all-gather, or a parameter server.",
    )(function)


def chosen_cluster(options: Mapping[str, Any], ranks: int | None = None) -> Cluster | None:
    """What the options of :func:`cluster_options` say; None where none of them is given.

    Args:
        options: of the command.
        ranks: where ``--ranks`` does not say; a ``--network`` alone is then meant for something else.

    Raises:
        UsageError: one of the three that are needed is missing, or something cannot be read.
    """
    given = {name: options[name] for name in CLUSTER if options[name] is not None}
    if not given or (ranks is not None and given.keys() <= {"network", "latency"}):
        return None
    if ranks is not None:
        given.setdefault("ranks", ranks)
    missing = [CLUSTER[name] for name in _NEEDED if name not in given]
    if missing:
        first = next(CLUSTER[name] for name in CLUSTER if options[name] is not None).split()[0]
        raise UsageError(f"{first}: what codecs save needs {' and '.join(missing)}, too")
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


def simulated_network(options: Mapping[str, Any]) -> Network | None:
    """The network whose time a task simulates; None where ``--network`` is not given.

    Raises:
        UsageError: something else is given without it, or cannot be read.
    """
    from gtrace.costs import Network

    if options["network"] is None:
        if options["latency"] is not None or options["topology"] != "ring" or options["compute_time"] is not None:
            raise UsageError(
                "--latency, --topology and --compute-time are of a --network; give its speed, as in --network 1Gbit/s"
            )
        return None
    return Network.parse(options["network"], options["latency"] or "0s", options["topology"], options["compute_time"])


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
    from gtrace.cli.report import wide_console
    from gtrace.report.render.text import print_sections
    from gtrace.report.sections.savings import savings_section

    print_sections([savings_section(savings)], wide_console(err=err))
