"""The budget of ``gtrace plan``, as one of several options says it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from gtrace.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gtrace.cli.options import F
    from gtrace.costs import Cluster
    from gtrace.planning import Budget, Curves, Plan

_BITS = re.compile(r"^\s*([0-9.eE+-]+?)\s*(?:b|bit|bits)?\s*$")
_KINDS = ("budget", "ratio", "max_error", "step_time")
#: what a --step-time needs or may have beside it, with the values that mean "not given"
_OF_TIME = {"network": None, "ranks": 4, "latency": "0s", "compute_time": "0s", "exchange": "allgather"}
#: bisections of the bits, and how often a plan may take longer than bits spread evenly would
_HALVINGS, _TRIES = 50, 6


def budget_options(function: F) -> F:
    """The options that :func:`chosen_budget` reads."""
    for option in (
        click.option(
            "--exchange",
            type=click.Choice(["allgather", "two-shot"]),
            default="allgather",
            show_default=True,
            help="For --step-time: how payloads travel.",
        ),
        click.option(
            "--compute-time",
            metavar="TIME",
            default="0s",
            show_default=True,
            help="For --step-time: the part of it that computing takes; two thirds of that hide the exchange.",
        ),
        click.option(
            "--latency", metavar="TIME", default="0s", show_default=True, help="For --step-time: of a message."
        ),
        click.option("--ranks", type=int, default=4, show_default=True, metavar="N", help="For --step-time: machines."),
        click.option("--network", metavar="RATE", help="For --step-time: speed of each rank's link, as in 1Gbit/s."),
        click.option(
            "--step-time",
            metavar="TIME",
            help="The least error of which a step, exchange included, takes no longer, as in 50ms; with --network.",
        ),
        click.option("--max-error", type=float, metavar="E", help="The fewest bits within this relative error: 0.1."),
        click.option("--ratio", type=float, metavar="N", help="N times smaller than float32."),
        click.option(
            "--budget", metavar="BITS", help="Measured bits per value, as in 3bits: payload, norms and shared bytes."
        ),
    ):
        function = option(function)
    return function


def check_budget(options: Mapping[str, Any]) -> None:
    """Say what is wrong with the options before a trace is read.

    Raises:
        UsageError: no budget, several, or one that is no positive number.
    """
    given = [name for name in _KINDS if options[name] is not None]
    if len(given) != 1:
        raise UsageError(
            "plan: give one budget: --budget 3bits, --ratio 12, --max-error 0.1 or --step-time 50ms"
            + (", not several" if given else "")
        )
    if given == ["step_time"]:
        _cluster(options)
        return
    for name, default in _OF_TIME.items():
        if options[name] != default:
            raise UsageError(f"--{name.replace('_', '-')} is for --step-time")
    _plain(options)


def chosen_budget(options: Mapping[str, Any], curves: Curves) -> Budget:
    """The budget; of a time, the bits per value that take as long where all tensors have the same.

    Raises:
        UsageError: a time in which not even the computing, or no bits at all, fit.
    """
    return _plain(options) if options["step_time"] is None else _timed(options, curves)


def _plain(options: Mapping[str, Any]) -> Budget:
    from gtrace.planning import Budget

    for name in ("ratio", "max_error"):
        value = options[name]
        if value is not None:
            said = f"--{name.replace('_', '-')} {value:g}"
            if not 0 < value < float("inf"):
                raise UsageError(f"{said}: a budget is a positive number")
            return Budget("bits", 32 / value, said) if name == "ratio" else Budget("error", value, said)
    text = options["budget"]
    match = _BITS.match(text)
    try:
        bits = float(match[1]) if match else float("nan")
    except ValueError:
        bits = float("nan")
    if not 0 < bits < float("inf"):
        raise UsageError(f"--budget {text}: is no number of bits; write --budget 3bits, or use --ratio or --max-error")
    return Budget("bits", bits, f"--budget {bits:g}bits")


def _cluster(options: Mapping[str, Any]) -> tuple[Cluster, float]:
    """Whose exchange it is, and the seconds that a step may take."""
    from gtrace.costs import Cluster, Network
    from gtrace.units import parse_seconds

    if options["network"] is None:
        raise UsageError(f"--step-time {options['step_time']}: over which links? give --network, as in 1Gbit/s")
    limit = parse_seconds(options["step_time"], "step-time")
    computing = parse_seconds(options["compute_time"], "compute-time")
    if not 0 <= computing < limit:
        raise UsageError(
            f"--step-time {options['step_time']}: computing alone takes {options['compute_time']}; allow more"
        )
    network = Network.parse(options["network"], options["latency"])
    # A cluster always computes something.
    return Cluster(network, options["ranks"], max(computing, 1e-9)), limit


def _timed(options: Mapping[str, Any], curves: Curves) -> Budget:
    from gtrace.costs import step_seconds
    from gtrace.planning import Budget

    cluster, limit = _cluster(options)

    def seconds(bits: float) -> float:
        return step_seconds(curves.sizes, np.full(len(curves.sizes), bits), cluster, options["exchange"])

    low, high = 0.0, 32.0
    if seconds(high) <= limit:
        low = high
    elif seconds(1e-6) > limit:
        raise UsageError(
            f"--step-time {options['step_time']}: without any bits a step takes {seconds(1e-6):.3g} s there; allow more"
        )
    for _ in range(_HALVINGS if low < high else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) <= limit else (low, middle)
    return Budget("bits", low, f"--step-time {options['step_time']}")


def tightened(options: Mapping[str, Any], budget: Budget, plan: Plan, tries: int) -> Budget | None:
    """A smaller budget where a plan's own bits take longer than the time allows; None where they do not.

    Bits that are spread unevenly can leave less of the exchange to hide behind the backward pass.

    Raises:
        UsageError: however small, it takes longer.
    """
    if options["step_time"] is None:
        return None
    cluster, limit = _cluster(options)
    taken = plan_seconds(options, plan)
    if taken <= limit * (1 + 1e-9):
        return None
    if tries == _TRIES:
        raise UsageError(f"--step-time {options['step_time']}: plans take {taken:.3g} s there; allow a little more")
    # Of what is over the time, the exchange alone can be less.
    exchanged = max(taken - cluster.step_time, 1e-12)
    return replace(budget, value=budget.value * max(0.5, 0.999 * (1 - (taken - limit) / exchanged)))


def plan_seconds(options: Mapping[str, Any], plan: Plan) -> float:
    """Seconds of a step with a plan."""
    from gtrace.costs import step_seconds

    cluster, _ = _cluster(options)
    sizes, bits = [row.elements for row in plan.tensors], [row.bits for row in plan.tensors]
    return step_seconds(sizes, bits, cluster, options["exchange"])
