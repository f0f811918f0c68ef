"""``gtrace plan``: which codec and how many bits each tensor gets under a budget, and what that minimizes."""

from __future__ import annotations

import itertools
import math
import re
import shlex
import sys
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import numpy as np

from gtrace import __version__
from gtrace.cli.console import TensorColumn, echo, print_columns, stdout_console, wide_console
from gtrace.cli.groups import CommandWithCommands, complete_specs
from gtrace.cli.options import (
    INTEGERS,
    PLUGIN,
    STEPS,
    ClusterSettings,
    Command,
    HorizonSettings,
    TracePath,
    arguments,
    bucket_sizes,
    fractions,
    is_sweep,
    load_plugins,
    options,
    print_json,
    refuse,
    words,
)
from gtrace.errors import UsageError, check_output, suggest
from gtrace.planning.toml import check_suffix, load
from gtrace.report.names import listed, literal, number
from gtrace.settings import KIND, nested, option
from gtrace.trace.choose import choose_infos, choose_steps, matching
from gtrace.units import parse_bits, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from gtrace.codecs import Codec
    from gtrace.costs import Cluster
    from gtrace.planning import Budget, Curves, Plan
    from gtrace.planning.curves import NoiseRatios
    from gtrace.report.analysis.safety import Outlook
    from gtrace.sweep import SweepResult


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
        cluster = settings.cluster.chosen()
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
    outlook: Outlook | None = None

    def forecast(self, plan: Plan, curves: Curves) -> Plan:
        """The plan with what it is predicted to cost."""
        from gtrace.planning.plan import PlanForecast

        if self.ratios is None or (found := self.outlook) is None:
            return plan
        rows = [(row.error, curves.codecs.index(row.codec)) for row in plan.tensors]
        low, high = (sum(error * ends[k] for error, k in rows) for ends in (self.ratios.low, self.ratios.high))
        size, least, most = (found.batch / (1 + ratio) for ratio in (plan.totals.error, high, low))
        shorter = found.shorter({row.tensor: row.codec for row in plan.tensors})
        return replace(plan, horizon=PlanForecast(found.horizon, found.batch, size, least, most, shorter))


def choose_goal(settings: GoalSettings, curves: Curves, outlook: Outlook, *, error: bool) -> Goal:
    """Decide what a plan minimizes: what is asked for, else predicted cost if it is known; error for that budget."""
    named = "--horizon" if settings.noise.horizon is not None else "--objective cost"
    asked = settings.objective == "cost" or settings.noise.horizon is not None
    own = "--max-error" if error else "--weight" if settings.weights else "--objective error"
    if settings.objective == "error" or own != "--objective error":
        if asked:
            raise UsageError(f"{named}: is for predicted cost, and {own} is for error; leave one out.")
        return Goal("error")
    goal, why = _by_cost(curves, outlook)
    if asked and goal is None:
        raise UsageError(f"{named}: predicted costs are not known: {why}.")
    return goal or Goal("error", (f"minimizes error, because predicted costs are not known: {why}.",))


def _by_cost(curves: Curves, outlook: Outlook) -> tuple[Goal | None, str]:
    """The goal of predicted cost; without it, why it can't be."""
    from gtrace.planning import noise_ratios

    if outlook.costs is None or outlook.dynamics is None:
        return None, outlook.why
    ratios = noise_ratios(curves, outlook.costs, outlook.dynamics, outlook.horizon, outlook.costs.batch)
    out = list(ratios.left_out)
    why = listed(dict.fromkeys(ratios.left_out.values()), 2)
    if len(out) == len(curves.codecs) - 1:
        return None, f"{listed(out, 2)}: {why}"
    notes = []
    if out:
        notes.append(f"leaves out {listed(out, 2)}, whose cost is not known ({why}); --objective error has them.")
    if outlook.assumed:
        notes.append(f"assumes that {outlook.horizon:,} steps of training are left; give --horizon.")
    return Goal("cost", tuple(notes), ratios, outlook), ""


def weigh(curves: Curves, weights: Sequence[str]) -> Curves:
    """Curves whose errors are weighted."""
    pairs = [pair for text in weights for pair in _pairs(text)]
    if not pairs:
        return curves
    found = dict.fromkeys(curves.tensors, 1.0)
    # The first pattern that fits counts.
    for pattern, by in reversed(pairs):
        found |= dict.fromkeys(matching(curves.tensors, [pattern], option="--weight"), by)
    return curves.weighted(np.array([*found.values()]))


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


#: coordinate-wise codecs with fixed levels are judged together, so that all of them take no longer than a few; what
#: eden loses is known beforehand, and it is the choice for tensors that a rotation helps
METHODS = "qsgdinf,nuqsgd,eden"
BUCKETS = "128,1024,8192"
BITS = tuple(range(2, 9))
#: parameter -> the option with its range
_RANGES = {"bits": "--bits", "bucket_size": "--bucket-size", "sparsity": "--sparsity", "ratio": "--keep"}
#: steps of a trace that are looked at, spread over all of them
MOST_STEPS = 32

#: of options that only ``--help-all`` shows and a plan's provenance says
_MADE: dict[str, Any] = {"advanced": True, "call": ("provenance",)}
#: the trace's attributes among what is known about the curves
_ATTRS = "trace_attrs"


@dataclass(frozen=True)
class PlanSettings:
    """The options of ``gtrace plan``.

    ``call`` marks what :func:`gtrace.planning.measure` takes (``measure``), and what a plan says of how it was made
    (``provenance``).
    """

    budget: BudgetSettings = nested(BudgetSettings)
    methods: str | None = option(
        None,
        call=("provenance",),
        shell_complete=complete_specs,
        help=f"Codecs to choose from; none (exact) always is one.  [default: {METHODS}; of a sweep all that it has]",
    )
    bits: tuple[int, ...] = option("2-8", call=("provenance",), type=INTEGERS, help="Nominal bits of codecs with bits.")
    bucket_size: str = option(BUCKETS, **_MADE, help="Values per norm of codecs that have buckets: 128,8192.")
    per_bit: int = option(
        4,
        **_MADE,
        minimum=1,
        metavar="N",
        help="Uniform grids from one number of bits to the next, of qsgd and qsgdinf.",
    )
    formats: str | None = option(
        None, **_MADE, metavar="NAMES", help="Float formats to choose from, e.g. e2m1,e3m2,e2m3,e4m3; or all."
    )
    sparsity: tuple[float, ...] | None = option(
        None, **_MADE, type=fractions("0.05"), help="Zeros that prune aims at, per tensor, e.g. 0.5-0.95."
    )
    keep: tuple[float, ...] | None = option(
        None, **_MADE, type=fractions(), help="Part of the values that sparsifiers send, per tensor, e.g. 0.001-0.1."
    )
    goal: GoalSettings = nested(GoalSettings)
    groups: tuple[str, ...] = option(
        (), **_MADE, metavar="NAME=GLOB", help="One codec for these tensors: NAME=GLOB[,GLOB]."
    )
    uniform: bool = option(False, advanced=True, help="The best single codec within the budget instead.")
    tensors: str | None = option(None, **_MADE, help="Only tensors that match one of these globs, comma-separated.")
    kind: str | None = option(None, advanced=True, call=("measure",), **KIND)
    steps: tuple[int, ...] | None = option(
        None, advanced=True, **STEPS | {"help": f"Only these steps, e.g. 0,100-200.  [default: {MOST_STEPS} of them]"}
    )
    refit: str = option(
        "pooled",
        advanced=True,
        call=("measure", "provenance"),
        choices=("pooled", "previous", "each", "once"),
        help="Data that levels and codes are fitted on.",
    )
    seed: int = option(0, advanced=True, help="Seed of the resampling of steps.")
    jobs: int | None = option(
        None, advanced=True, call=("measure",), minimum=1, help="Workers.  [default: all processors]"
    )
    plugin: tuple[Path, ...] = option((), advanced=True, **PLUGIN)
    output: Path | None = option(None, help="A .toml or .json file.  [default: TRACE.plan.toml]")
    full: bool = option(False, help="Print every tensor and note, not only the answer.")
    force: bool = option(False, help="Overwrite the file.")
    as_json: bool = option(False, help="Print the plan as JSON instead of tables.")


@click.command("plan", cls=CommandWithCommands, epilog="Afterwards: gtrace train --plan plan.toml train.py")
@click.argument("trace", type=TracePath(sweeps=True))
@options(PlanSettings)
def command(settings: PlanSettings, trace: Path | str) -> None:
    """Choose a codec for every tensor of TRACE: the least loss or error within a budget, or bits within an error.

    TRACE is a sweep (.sweep.db), whose codecs are the choice: a plan from a sweep minimizes what the noise of codecs is
    predicted to cost by the end of training. Or it is a trace, whose sketches hold every tensor's curve of error
    against bits; such a plan minimizes error.

    \b
    Examples:
      gtrace plan digits_cnn.zarr --max-bits 3
      gtrace plan digits_cnn.zarr --max-error 0.1 --methods alq,qsgdinf --bits 2-6
      gtrace plan digits_cnn.zarr --step-time 50ms --cluster 8x1Gbit/s,40ms
      gtrace plan digits_cnn.sweep.db --ratio 12 -o plan.toml
      gtrace plan digits_cnn.zarr --max-bits 4 --methods fp --formats e2m1,e3m2,e2m3,e4m3
    """
    from gtrace.planning import Budget, make_plan, save_plan
    from gtrace.report.analysis.tensors import OTHERS, assign
    from gtrace.trace.remote import stem_of

    load_plugins(settings.plugin)
    asked = parse_budget(settings.budget)
    stem = stem_of(trace).removesuffix(".sweep")
    path = settings.output or Path(f"{stem}.plan.toml")
    check_suffix(path)
    check_output(path, trace, force=settings.force)
    curves, outlook, about, warnings = _curves(trace, settings)
    attrs = about.pop(_ATTRS)
    if isinstance(asked, TimeLimit):
        asked, line = asked.timed(attrs)
        warnings += [line] if line else []
    goal = choose_goal(settings.goal, curves, outlook, error=isinstance(asked, Budget) and asked.kind == "error")
    for text in [*warnings, *goal.notes]:
        echo(f"gtrace: {text}", err=True)
    # All tensors that no group has are one more.
    groups = {name: group for name, group in assign(curves.tensors, settings.groups).items() if group != OTHERS}
    budget = asked.budget(curves.sizes) if isinstance(asked, TimeLimit) else asked
    if not settings.uniform and "trace" in about:
        curves = _refined(trace, curves, settings, budget, groups)
    curves = weigh(curves, settings.goal.weights) if goal.ratios is None else curves.priced(goal.ratios.ratio)
    for tries in itertools.count():
        plan = make_plan(
            curves,
            budget,
            # Without what every plan's file is called.
            name=re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem.removesuffix(".plan")) or "plan",
            provenance={**about, **_provenance(settings, curves)},
            objective=goal.objective,
            groups=groups,
            one_for_all=settings.uniform,
            seed=settings.seed,
        )
        smaller = asked.tightened(budget, plan, tries) if isinstance(asked, TimeLimit) else None
        if smaller is None:
            break
        budget = smaller
    plan = goal.forecast(plan, curves)
    if isinstance(asked, TimeLimit):
        plan.provenance["step_seconds"] = asked.seconds(plan)
    save_plan(plan, path, force=settings.force)
    print_plan(plan, path, full=settings.full, as_json=settings.as_json)


def _curves(trace: Path | str, settings: PlanSettings) -> tuple[Curves, Outlook, dict[str, Any], list[str]]:
    """What the codecs do to every tensor, what costs of noise are predicted from, and where that comes from."""
    from gtrace.planning import curves_of, measure
    from gtrace.report.analysis.safety import Outlook, outlook_on

    if isinstance(trace, Path) and is_sweep(trace):
        from gtrace.sweep import ResultStore

        result = ResultStore.load(trace).selected
        provenance = {
            "sweep": str(trace),
            "trace_fingerprint": result.provenance.get("trace_fingerprint", ""),
            _ATTRS: result.provenance.get("trace_attrs", {}),
        }
        noise = settings.goal.noise
        outlook = outlook_on(result, np.unique(result["step"]), noise.batch, noise.horizon)
        return curves_of(_chosen_rows(result, settings)), outlook, provenance, []
    from gtrace.trace import open_trace

    codecs = _codecs(settings)
    with open_trace(trace) as opened:
        steps = choose_steps(opened, choose_infos(opened, kind=settings.kind), settings.steps, MOST_STEPS)
        globs = None if settings.tensors is None else words(settings.tensors, "--tensors")
        curves, warnings = measure(opened, codecs, steps=sorted(steps), tensors=globs, **arguments(settings, "measure"))
        outlook = Outlook(f"a sweep measures them: gtrace sweep {trace}")
        about = {"trace": str(trace), "trace_fingerprint": opened.fingerprint, _ATTRS: opened.attrs}
        return curves, outlook, about, [f"warning: {text}" for text in warnings]


def _chosen_rows(result: SweepResult, settings: PlanSettings) -> SweepResult:
    from gtrace.codecs import codec, split_specs

    for name in ("formats", "sparsity", "keep", "kind"):
        if getattr(settings, name) is not None:
            raise UsageError(f"--{name} is for a trace; a sweep has the codecs that it was made with")
    keep = np.ones(len(result), np.bool_)
    if settings.methods is not None:
        wanted = split_specs(settings.methods)
        specs = {spec: str(codec(spec)) for spec in wanted}
        known = set(result["codec"].tolist()) | set(result["method"].tolist())
        for spec, whole in specs.items():
            if spec not in known and whole not in known:
                raise UsageError(f"--methods: the sweep has no {spec}; {suggest(spec, known)}")
        keep &= np.isin(result["method"], wanted) | np.isin(result["codec"], [*wanted, *specs.values()])
    if settings.tensors is not None:
        names = list(dict.fromkeys(result["tensor"].tolist()))
        keep &= np.isin(result["tensor"], [*matching(names, words(settings.tensors, "--tensors"))])
    if settings.steps is not None:
        keep &= np.isin(result["step"], settings.steps)
    if not keep.any():
        raise UsageError("plan: nothing of the sweep is left by --methods, --tensors and --steps")
    return replace(result, columns={name: column[keep] for name, column in result.columns.items()})


def _refined(
    trace: Path | str, curves: Curves, settings: PlanSettings, budget: Budget, groups: Mapping[str, str]
) -> Curves:
    """The curves with finer options where the choice misses its lower bound by too much."""
    from gtrace.planning import measure
    from gtrace.planning.make import ROUNDS, WORTH_REFINING, choose, finer
    from gtrace.trace import open_trace

    if settings.per_bit == 1:
        return curves
    with open_trace(trace) as opened:
        for _ in range(ROUNDS):
            units, choice = choose(weigh(curves, settings.goal.weights), budget, groups)
            added = {} if choice is None or choice.gap < WORTH_REFINING else finer(units, choice.options)
            for tensors, codecs in added.items():
                # What was said about sketches that are missing has been said.
                names = [escape(name) for name in tensors]
                found, _ = measure(opened, codecs, steps=curves.steps, tensors=names, **arguments(settings, "measure"))
                curves = curves.joined(found)
            if not added:
                break
    return curves


def _codecs(settings: PlanSettings) -> list[Codec]:
    """The options to choose from, each once; exact is added by the curves."""
    from gtrace.codecs import codec, split_specs
    from gtrace.sweep.run import expand

    specs = split_specs(settings.methods or METHODS)
    if settings.formats:
        specs += [f"fp:{name}" for name in words(settings.formats)]
    ranges: dict[str, Sequence[Any]] = {
        "bits": settings.bits,
        "bucket_size": bucket_sizes(settings.bucket_size),
        "sparsity": settings.sparsity or (),
        "ratio": settings.keep or (),
    }
    given = {**ranges, "bits": settings.bits != BITS, "bucket_size": settings.bucket_size != BUCKETS}
    found: dict[str, Codec] = {}
    for made in expand(specs, ranges, asked={name: said for name, said in _RANGES.items() if given[name]}):
        between = [codec(str(made), steps=steps) for steps in _steps(made, settings.per_bit)]
        found.update((str(one), one) for one in (*between, made))
    found.pop("none", None)
    return list(found.values())


def _steps(made: Codec, per_bit: int) -> list[int]:
    """Steps of the uniform grids that lie between a codec's bits and one bit less."""
    given = made.parameters
    if not {"steps", "bits", "zero"} <= set(given) or given["steps"] is not None or not given["zero"]:
        return []
    most = (1 << given["bits"] - 1) - 1
    between = {round(most * 2 ** (-k / per_bit)) for k in range(1, per_bit)}
    return [steps for steps in sorted(between) if most // 2 < steps < most]


def _provenance(settings: PlanSettings, curves: Curves) -> dict[str, Any]:
    every = arguments(settings, "provenance") | arguments(settings.goal, "provenance")
    given = {name: value for name, value in every.items() if value not in (None, ())}
    steps = {"count": len(curves.steps), "first": curves.steps[0], "last": curves.steps[-1]}
    command = shlex.join(["gtrace", *sys.argv[1:]])
    return {"command": command, "gtrace": __version__, "steps": steps, "codecs": len(curves.codecs), **given}


_PLAN = click.Path(path_type=Path)


@dataclass(frozen=True)
class _PlanDiffSettings:
    plugin: tuple[Path, ...] = option((), help="A Python file with codecs of your own that a plan names; it is run.")
    as_json: bool = option(False, help="Print JSON instead of tables.")


@dataclass(frozen=True)
class _PlanShowSettings(_PlanDiffSettings):
    full: bool = option(False, help="Print every tensor and note, not only the answer.")


@click.command("show", cls=Command, epilog="Example: gtrace plan show plan.toml")
@click.argument("plan", type=_PLAN)
@options(_PlanShowSettings)
def show(settings: _PlanShowSettings, plan: Path) -> None:
    """Show what a PLAN chooses, what it costs, and how firm it is."""
    from gtrace.planning import load_plan

    load_plugins(settings.plugin)
    print_plan(load_plan(plan), plan, full=settings.full, as_json=settings.as_json)


@click.command("diff", cls=Command, epilog="Example: gtrace plan diff plan.toml other.toml")
@click.argument("first", type=_PLAN)
@click.argument("second", type=_PLAN)
@options(_PlanDiffSettings)
def diff(settings: _PlanDiffSettings, first: Path, second: Path) -> None:
    """Show where two plans differ, tensor by tensor."""
    from gtrace.planning import load_plan
    from gtrace.report.sections.plans import aim, samples, what

    load_plugins(settings.plugin)
    plans = load_plan(first), load_plan(second)
    old, new = ({row.tensor: row for row in plan.tensors} for plan in plans)
    both = {name: (old.get(name), new.get(name)) for name in dict.fromkeys([*old, *new])}
    changed = {name: (a, b) for name, (a, b) in both.items() if a is None or b is None or a.codec != b.codec}
    if settings.as_json:
        totals = [
            {"plan": str(path), "bits": plan.totals.bits, what(plan): plan.totals.error}
            | {"default": plan.default, "objective": aim(plan)}
            for path, plan in zip((first, second), plans, strict=True)
        ]
        rows = [
            {"tensor": name, **{key: row and {"codec": row.codec, "bits": row.bits} for key, row in zip("ab", pair)}}  # noqa: B905
            for name, pair in changed.items()
        ]
        print_json({"a": totals[0], "b": totals[1], "changed": rows, "same": len(both) - len(changed)})
        return
    console = stdout_console()
    for path, plan in zip((first, second), plans, strict=True):
        lost = f"error {number(plan.totals.error)}" if plan.horizon is None else f"worth {samples(plan)} samples"
        said = f"{number(plan.totals.bits)} bits, {lost} ({plan.budget})"
        echo(literal(f"{path}: {said}; minimizes {aim(plan)}", console.encoding or "utf-8"))
    if aim(plans[0]) != aim(plans[1]):
        echo("These numbers don't compare: the plans minimize different things.")
    if changed:
        shown = [
            [("-", "-") if row is None else (row.codec, number(row.bits)) for row in pair] for pair in changed.values()
        ]
        print_columns(
            [
                TensorColumn("tensor", [literal(name) for name in changed], 0, right=False),
                TensorColumn("codec of the first", [codec for (codec, _), _ in shown], 0, right=False),
                TensorColumn("codec of the second", [codec for _, (codec, _) in shown], 0, right=False),
                TensorColumn("bits of the first", [bits for (_, bits), _ in shown], 2),
                TensorColumn("bits of the second", [bits for _, (_, bits) in shown], 1),
            ],
            console,
        )
    echo(f"\n{len(changed)} tensors differ, {len(both) - len(changed)} are the same.")
    if plans[0].default != plans[1].default:
        echo(f"Tensors that they do not name: {plans[0].default}, then {plans[1].default}.")


def print_plan(plan: Plan, path: Path, *, full: bool, as_json: bool) -> None:
    """A plan on a terminal, the path of its file and what to do with it; or the plan as JSON."""
    from gtrace.planning.plan import to_plain

    if as_json:
        print_json(to_plain(plan))
        return
    from gtrace.report.inputs import Report
    from gtrace.report.text import print_report

    after = [str(path), f"next: gtrace train --plan {shlex.quote(str(path))} SCRIPT"]
    print_report(Report(plan.name, plans=(plan,)), wide_console(), full=full, after=after)
