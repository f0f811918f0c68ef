"""What ``gtrace plan`` minimizes, and within what budget."""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gtrace.cli.cluster import ClusterSettings, chosen_cluster
from gtrace.cli.options import HorizonSettings, refuse
from gtrace.errors import UsageError, suggest
from gtrace.planning.toml import load
from gtrace.report.names import listed
from gtrace.settings import nested, option
from gtrace.units import parse_bits, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from gtrace.costs import Cluster
    from gtrace.planning import Budget, Curves, Plan
    from gtrace.planning.curves import NoiseRatios
    from gtrace.report.analysis.safety import Outlook


_KINDS = ("budget", "ratio", "max_error", "step_time")
#: bisections of the bits, and how often a plan may take longer than bits spread evenly would
_HALVINGS, _TRIES = 50, 6
#: seconds that cost nothing
_INSTANT = 1e-12


@dataclass(frozen=True)
class BudgetSettings:
    """How much a plan may spend, said in one of four ways; ``only`` marks what refines ``--step-time``."""

    budget: str | None = option(
        None,
        names=("--max-bits",),
        formerly="--budget",
        metavar="BITS",
        help="At most this many measured bits per value, e.g. 3: payload, norms and shared bytes.",
    )
    ratio: float | None = option(None, advanced=True, metavar="N", help="N times smaller than float32.")
    max_error: float | None = option(None, metavar="E", help="The fewest bits within this relative error: 0.1.")
    step_time: str | None = option(
        None,
        metavar="TIME",
        help="The least error of which a step on --cluster, exchange included, takes no longer than this, e.g. 50ms.",
    )
    cluster: ClusterSettings = nested(ClusterSettings)
    exchange: Literal["allgather", "two-shot"] = option(
        "allgather",
        advanced=True,
        only="step_time",
        choices=("allgather", "two-shot"),
        help="For --step-time: how payloads travel.",
    )


def parse_budget(settings: BudgetSettings) -> Budget | TimeLimit:
    """What a plan may spend."""
    given = [name for name in _KINDS if getattr(settings, name) is not None]
    if len(given) != 1:
        raise UsageError(
            "plan: give one limit: --max-bits 3, --ratio 12, --max-error 0.1 or --step-time 50ms"
            + (", not several." if given else ".")
        )
    if given == ["step_time"]:
        return TimeLimit.parse(settings)
    refuse(settings, "step_time", "is for --step-time")
    if settings.cluster.cluster is not None:
        raise UsageError("--cluster: is for --step-time; give --step-time, e.g. 50ms.")
    from gtrace.planning import Budget

    for name in ("ratio", "max_error"):
        value = getattr(settings, name)
        if value is not None:
            said = f"--{name.replace('_', '-')} {value:g}"
            if not 0 < value < float("inf"):
                raise UsageError(f"{said}: must be more than 0.")
            return Budget("bits", 32 / value, said) if name == "ratio" else Budget("error", value, said)
    bits = parse_bits(settings.budget or "", "--max-bits")
    return Budget("bits", bits, f"--max-bits {bits:g}")


@dataclass(frozen=True)
class TimeLimit:
    """A budget of time: how it was said, and the seconds of a step on machines that exchange its gradients."""

    said: str
    limit: float
    cluster: Cluster
    exchange: Literal["allgather", "two-shot"]

    @classmethod
    def parse(cls, settings: BudgetSettings) -> TimeLimit:
        """Read ``--step-time`` and what refines it."""
        said = f"--step-time {settings.step_time}"
        limit = parse_seconds(settings.step_time or "", "--step-time")
        cluster = chosen_cluster(settings.cluster.cluster)
        if cluster is None:
            raise UsageError(f"{said}: needs the machines, e.g. --cluster 8x25Gbit/s,{limit / 2 * 1e3:g}ms.")
        return cls(said, limit, cluster, settings.exchange)

    def timed(self, attrs: Mapping[str, Any]) -> tuple[TimeLimit, str]:
        """The limit with the compute time in a trace's attributes unless the cluster has one, and a line about it."""
        from gtrace.trace.facts import StepTimes

        cluster, line = StepTimes.of(attrs).applied(self.cluster)
        computing = cluster.step_time or 0.0
        if computing >= self.limit:
            raise UsageError(f"{self.said}: computing alone takes {computing:g} s ({cluster}); allow more.")
        # A cluster always computes something.
        return replace(self, cluster=replace(cluster, step_time=computing or _INSTANT)), line

    def budget(self, sizes: NDArray[np.int64]) -> Budget:
        """The bits per value that take as long if all tensors have the same."""
        from gtrace.planning import Budget

        def seconds(bits: float) -> float:
            return self._time(sizes, np.full(len(sizes), bits))

        low, high = 0.0, 32.0
        if seconds(high) <= self.limit:
            low = high
        elif seconds(1e-6) > self.limit:
            raise UsageError(f"{self.said}: without any bits a step takes {seconds(1e-6):.3g} s there; allow more.")
        for _ in range(_HALVINGS if low < high else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if seconds(middle) <= self.limit else (low, middle)
        return Budget("bits", low, self.said)

    def seconds(self, plan: Plan) -> float:
        return self._time([row.elements for row in plan.tensors], [row.bits for row in plan.tensors])

    def _time(self, sizes: ArrayLike, bits: ArrayLike) -> float:
        from gtrace.costs import step_seconds

        return step_seconds(sizes, bits, self.cluster, self.exchange)

    def tightened(self, budget: Budget, plan: Plan, tries: int) -> Budget | None:
        """A smaller budget if a plan's own bits take longer than the time allows; None if they do not.

        Bits that are spread unevenly can leave less of the exchange to hide behind the backward pass.
        """
        taken = self.seconds(plan)
        if taken <= self.limit * (1 + 1e-9):
            return None
        if tries == _TRIES:
            raise UsageError(f"{self.said}: plans take {taken:.3g} s there; allow a little more.")
        # Of what is over the time, the exchange alone can be less.
        exchanged = max(taken - self.cluster.computing, _INSTANT)
        return replace(budget, value=budget.value * max(0.5, 0.999 * (1 - (taken - self.limit) / exchanged)))


@dataclass(frozen=True)
class GoalSettings:
    """What a plan minimizes."""

    objective: Literal["cost", "error"] | None = option(
        None,
        choices=("cost", "error"),
        help="What to minimize: cost, the loss that noise adds by the end of training, or error.  "
        "[default: cost if the sweep measured it]",
    )
    noise: HorizonSettings = nested(HorizonSettings)
    weights: tuple[str, ...] = option(
        (),
        advanced=True,
        names=("--weight",),
        call=("provenance",),
        metavar="GLOB=NUMBER|FILE",
        help="How much the error of some tensors counts, the first that fits; or a TOML or JSON file of NAME = number.",
    )


@dataclass(frozen=True)
class Goal:
    """What a plan minimizes, decided: ``cost`` or ``error``; and what a user must know, a line each."""

    objective: str
    notes: tuple[str, ...] = ()
    #: what codecs cost over how many steps; None for the error
    ratios: NoiseRatios | None = None
    horizon: int = 0
    #: samples of one gradient
    batch: float = math.nan

    def forecast(self, plan: Plan, curves: Curves) -> Plan:
        """The plan with what it is predicted to cost."""
        from gtrace.planning.plan import PlanForecast

        if self.ratios is None:
            return plan
        rows = [(row.error, curves.codecs.index(row.codec)) for row in plan.tensors]
        low, high = (sum(error * ends[k] for error, k in rows) for ends in (self.ratios.low, self.ratios.high))
        size = [self.batch / (1 + ratio) for ratio in (plan.totals.error, high, low)]
        return replace(plan, horizon=PlanForecast(self.horizon, self.batch, *size))


def choose_goal(settings: GoalSettings, curves: Curves, outlook: Outlook, *, error: bool) -> Goal:
    """Decide what a plan minimizes: what is asked for, else predicted cost if it is known; error for that budget."""
    named = "--horizon" if settings.noise.horizon is not None else "--objective cost"
    asked = settings.objective == "cost" or settings.noise.horizon is not None
    own = "--max-error" if error else "--weight" if settings.weights else "--objective error"
    if settings.objective == "error" or own != "--objective error":
        if asked:
            raise UsageError(f"{named}: is for predicted cost, and {own} is for error; leave one out.")
        return Goal("error")
    goal = _by_cost(curves, outlook)
    if isinstance(goal, Goal):
        return goal
    if asked:
        raise UsageError(f"{named}: predicted costs are not known: {goal}.")
    return Goal("error", (f"minimizes error, because predicted costs are not known: {goal}.",))


def _by_cost(curves: Curves, outlook: Outlook) -> Goal | str:
    """The goal of predicted cost, or why it can't be."""
    from gtrace.planning import noise_ratios

    if outlook.costs is None or outlook.dynamics is None:
        return outlook.why
    ratios = noise_ratios(curves, outlook.costs, outlook.dynamics, outlook.horizon, outlook.costs.batch)
    out = list(ratios.left_out)
    why = listed(dict.fromkeys(ratios.left_out.values()), 2)
    if len(out) == len(curves.codecs) - 1:
        return f"{listed(out, 2)}: {why}"
    notes = (
        [f"leaves out {listed(out, 2)}, whose cost is not known ({why}); --objective error has them."] if out else []
    )
    if outlook.assumed:
        notes.append(f"assumes that {outlook.horizon:,} steps of training are left; give --horizon.")
    return Goal("cost", tuple(notes), ratios, outlook.horizon, outlook.batch)


def weigh(curves: Curves, weights: Sequence[str]) -> Curves:
    """Curves whose errors are weighted."""
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
        raise UsageError(f"--weight {text}: write GLOB=NUMBER, e.g. fc*=2, or name a file of NAME = number")
    found = load(path, "a file of weights", 'write "name" = number, a line each')
    return [(name, _weight(value, f"{path}: {name[:80]}")) for name, value in _flat(found)]


def _flat(table: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """Names with values; ``fc.weight = 2`` without quotes is a table in TOML."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inside}", one) for inside, one in _flat(value))
        else:
            yield name, value


def _weight(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise UsageError(f"{where}: a weight is a positive number, e.g. fc*=2")
    return number
