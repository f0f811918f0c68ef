"""What ``gtrace plan`` minimizes, and within what budget."""

from __future__ import annotations

import fnmatch
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gtrace.cli.options import refuse
from gtrace.errors import TraceError, UsageError, suggest
from gtrace.settings import option

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from gtrace.costs import Cluster
    from gtrace.planning import Budget, Curves, Plan


_BITS = re.compile(r"^\s*([0-9.eE+-]+?)\s*(?:b|bit|bits)?\s*$")
_KINDS = ("budget", "ratio", "max_error", "step_time")
#: bisections of the bits, and how often a plan may take longer than bits spread evenly would
_HALVINGS, _TRIES = 50, 6


@dataclass(frozen=True)
class BudgetSettings:
    """How much a plan may spend, said in one of four ways; ``only`` marks what refines ``--step-time``."""

    budget: str | None = option(
        None, metavar="BITS", help="Measured bits per value, as in 3bits: payload, norms and shared bytes."
    )
    ratio: float | None = option(None, metavar="N", help="N times smaller than float32.")
    max_error: float | None = option(None, metavar="E", help="The fewest bits within this relative error: 0.1.")
    step_time: str | None = option(
        None,
        metavar="TIME",
        help="The least error of which a step, exchange included, takes no longer, as in 50ms; with --network.",
    )
    network: str | None = option(
        None, only="step_time", metavar="RATE", help="For --step-time: speed of each rank's link, as in 1Gbit/s."
    )
    ranks: int = option(4, only="step_time", metavar="N", help="For --step-time: machines.")
    latency: str = option("0s", only="step_time", metavar="TIME", help="For --step-time: of a message.")
    compute_time: str = option(
        "0s",
        only="step_time",
        metavar="TIME",
        help="For --step-time: the part of it that computing takes; two thirds of that hide the exchange.",
    )
    exchange: Literal["allgather", "two-shot"] = option(
        "allgather",
        only="step_time",
        choices=("allgather", "two-shot"),
        help="For --step-time: how payloads travel.",
    )


def parse_budget(settings: BudgetSettings) -> Budget | TimeLimit:
    """What a plan may spend.

    Raises:
        UsageError: no budget, several, or one that cannot be read.
    """
    given = [name for name in _KINDS if getattr(settings, name) is not None]
    if len(given) != 1:
        raise UsageError(
            "plan: give one budget: --budget 3bits, --ratio 12, --max-error 0.1 or --step-time 50ms"
            + (", not several" if given else "")
        )
    if given == ["step_time"]:
        return TimeLimit.parse(settings)
    refuse(settings, "step_time", "is for --step-time")
    from gtrace.planning import Budget

    for name in ("ratio", "max_error"):
        value = getattr(settings, name)
        if value is not None:
            said = f"--{name.replace('_', '-')} {value:g}"
            if not 0 < value < float("inf"):
                raise UsageError(f"{said}: a budget is a positive number")
            return Budget("bits", 32 / value, said) if name == "ratio" else Budget("error", value, said)
    text = settings.budget or ""
    match = _BITS.match(text)
    try:
        bits = float(match[1]) if match else float("nan")
    except ValueError:
        bits = float("nan")
    if not 0 < bits < float("inf"):
        raise UsageError(f"--budget {text}: is no number of bits; write --budget 3bits, or use --ratio or --max-error")
    return Budget("bits", bits, f"--budget {bits:g}bits")


@dataclass(frozen=True)
class TimeLimit:
    """A budget of time: what a step may take on machines that exchange its gradients.

    Attributes:
        said: how it was given.
        limit: seconds of a step.
        cluster: the machines.
        exchange: how payloads travel.
    """

    said: str
    limit: float
    cluster: Cluster
    exchange: Literal["allgather", "two-shot"]

    @classmethod
    def parse(cls, settings: BudgetSettings) -> TimeLimit:
        """Read ``--step-time`` and what refines it."""
        from gtrace.costs import Cluster, Network
        from gtrace.units import parse_seconds

        said = f"--step-time {settings.step_time}"
        if settings.network is None:
            raise UsageError(f"{said}: over which links? give --network, as in 1Gbit/s")
        limit = parse_seconds(settings.step_time or "", "step-time")
        computing = parse_seconds(settings.compute_time, "compute-time")
        if not 0 <= computing < limit:
            raise UsageError(f"{said}: computing alone takes {settings.compute_time}; allow more")
        network = Network.parse(settings.network, settings.latency)
        # A cluster always computes something.
        return cls(said, limit, Cluster(network, settings.ranks, max(computing, 1e-9)), settings.exchange)

    def budget(self, sizes: NDArray[np.int64]) -> Budget:
        """The bits per value that take as long if all tensors have the same.

        Raises:
            UsageError: no bits at all fit.
        """
        from gtrace.costs import step_seconds
        from gtrace.planning import Budget

        def seconds(bits: float) -> float:
            return step_seconds(sizes, np.full(len(sizes), bits), self.cluster, self.exchange)

        low, high = 0.0, 32.0
        if seconds(high) <= self.limit:
            low = high
        elif seconds(1e-6) > self.limit:
            raise UsageError(f"{self.said}: without any bits a step takes {seconds(1e-6):.3g} s there; allow more")
        for _ in range(_HALVINGS if low < high else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if seconds(middle) <= self.limit else (low, middle)
        return Budget("bits", low, self.said)

    def seconds(self, plan: Plan) -> float:
        """Seconds of a step with a plan."""
        from gtrace.costs import step_seconds

        sizes, bits = [row.elements for row in plan.tensors], [row.bits for row in plan.tensors]
        return step_seconds(sizes, bits, self.cluster, self.exchange)

    def tightened(self, budget: Budget, plan: Plan, tries: int) -> Budget | None:
        """A smaller budget if a plan's own bits take longer than the time allows; None if they do not.

        Bits that are spread unevenly can leave less of the exchange to hide behind the backward pass.

        Raises:
            UsageError: however small, it takes longer.
        """
        taken = self.seconds(plan)
        if taken <= self.limit * (1 + 1e-9):
            return None
        if tries == _TRIES:
            raise UsageError(f"{self.said}: plans take {taken:.3g} s there; allow a little more")
        # Of what is over the time, the exchange alone can be less.
        exchanged = max(taken - self.cluster.step_time, 1e-12)
        return replace(budget, value=budget.value * max(0.5, 0.999 * (1 - (taken - self.limit) / exchanged)))


_MOST_BYTES = 4 << 20


def weigh(curves: Curves, objective: str, weights: Sequence[str]) -> Curves:
    """Curves whose errors are what is to be minimized.

    Raises:
        UsageError: a weight that cannot be read or fits no tensor.
        TraceError: a file of weights that cannot be read.
    """
    if objective == "relative":
        curves = curves.relative()
    pairs = [pair for text in weights for pair in _pairs(text)]
    if not pairs:
        return curves
    for pattern, _ in pairs:
        if not fnmatch.filter(curves.tensors, pattern):
            raise UsageError(f"--weight: no tensor matches '{pattern}'; {suggest(pattern, curves.tensors)}")
    found = [next((by for glob, by in pairs if fnmatch.fnmatchcase(name, glob)), 1.0) for name in curves.tensors]
    return curves.weighted(np.array(found))


def _pairs(text: str) -> Iterable[tuple[str, float]]:
    pattern, separator, number = text.rpartition("=")
    if separator:
        return [(pattern, _weight(number, f"--weight {text}"))]
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"--weight {text}: write GLOB=NUMBER, as in fc*=2, or name a file of name: number")
    if path.stat().st_size > _MOST_BYTES:
        raise TraceError(f"{path}: has more than {_MOST_BYTES >> 20} MB; weights are name: number")
    import yaml

    try:
        # JSON is YAML.
        found = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise TraceError(f"{path}: is neither YAML nor JSON ({' '.join(str(error).split())[:100]})") from None
    if not isinstance(found, dict):
        raise TraceError(f"{path}: holds no weights; write name: number, a line each")
    return [(str(name), _weight(value, f"{path}: {str(name)[:80]}")) for name, value in found.items()]


def _weight(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise UsageError(f"{where}: a weight is a positive number, as in fc*=2")
    return number
