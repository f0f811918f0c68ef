"""``gtrace plan``: which codec and how many bits each tensor gets under a budget."""

from __future__ import annotations

import fnmatch
import itertools
import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from gtrace import __version__
from gtrace.cli.console import TensorColumn, echo, print_columns, stdout_console, wide_console
from gtrace.cli.groups import CommandWithCommands, complete_specs
from gtrace.cli.options import (
    INTEGERS,
    PLUGIN,
    STEPS,
    Command,
    TracePath,
    arguments,
    bucket_sizes,
    check_output,
    fractions,
    load_plugins,
    options,
    print_json,
    words,
)
from gtrace.cli.plan_goal import BudgetSettings, GoalSettings, TimeLimit, choose_goal, parse_budget, weigh
from gtrace.errors import UsageError, suggest
from gtrace.planning.toml import check_suffix
from gtrace.report.names import literal, number
from gtrace.settings import KIND, nested, option

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gtrace.codecs import Codec
    from gtrace.planning import Budget, Curves, Plan
    from gtrace.report.analysis.safety import Outlook
    from gtrace.sweep import SweepResult


#: coordinate-wise codecs with fixed levels are judged together, so that all of them take no longer than a few; what
#: eden loses is known beforehand, and it is the choice for tensors that a rotation helps
METHODS = "qsgdinf,nuqsgd,eden"
BUCKETS = "128,1024,8192"
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
        (), **_MADE, names=("--group",), metavar="NAME=GLOB", help="One codec for these tensors: NAME=GLOB[,GLOB]."
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
    output: Path | None = option(
        None, names=("-o", "--output"), help="A .toml or .json file.  [default: TRACE.plan.toml]"
    )
    full: bool = option(False, help="Print every tensor and note, not only the answer.")
    force: bool = option(False, help="Overwrite the file.")
    as_json: bool = option(False, names=("--json",), help="Print the plan as JSON instead of tables.")


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
    from gtrace.trace.remote import stem_of

    load_plugins(settings.plugin)
    asked = parse_budget(settings.budget)
    stem = stem_of(trace).removesuffix(".sweep")
    path = settings.output or Path(f"{stem}.plan.toml")
    check_suffix(path)
    check_output(path, force=settings.force)
    curves, outlook, about, warnings = _curves(trace, settings)
    attrs = about.pop(_ATTRS)
    if isinstance(asked, TimeLimit):
        asked, line = asked.timed(attrs)
        warnings += [line] if line else []
    goal = choose_goal(settings.goal, curves, outlook, error=isinstance(asked, Budget) and asked.kind == "error")
    for text in [*warnings, *goal.notes]:
        echo(f"gtrace: {text}", err=True)
    groups = _groups(curves.tensors, settings.groups)
    budget = asked.budget(curves.sizes) if isinstance(asked, TimeLimit) else asked
    if not settings.uniform and "trace" in about:
        curves = _refined(trace, curves, settings, budget, groups)
    curves = weigh(curves, settings.goal.weights) if goal.ratios is None else curves.priced(goal.ratios.ratio)
    for tries in itertools.count():
        plan = make_plan(
            curves,
            budget,
            # What every plan's file is called is no part of the name.
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
    from gtrace.report.analysis.safety import Outlook
    from gtrace.report.analysis.sweep import outlook_on

    if isinstance(trace, Path) and trace.name.endswith(".sweep.db"):
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
    from gtrace.trace.choose import choose_infos, choose_steps

    codecs = _codecs(settings)
    with open_trace(trace) as opened:
        steps = choose_steps(opened, choose_infos(opened, kind=settings.kind), settings.steps, MOST_STEPS)
        globs = None if settings.tensors is None else words(settings.tensors)
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
        names, chosen = dict.fromkeys(result["tensor"].tolist()), []
        for glob in words(settings.tensors):
            if not (found := fnmatch.filter(names, glob)):
                raise UsageError(f"--tensors: no tensor matches '{glob}'; {suggest(glob, names)}")
            chosen += found
        keep &= np.isin(result["tensor"], chosen)
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
                found, _ = measure(
                    opened, codecs, steps=curves.steps, tensors=tensors, **arguments(settings, "measure")
                )
                curves = curves.joined(found)
            if not added:
                break
    return curves


def _codecs(settings: PlanSettings) -> list[Codec]:
    """The options to choose from, each once; exact is added by the curves."""
    from gtrace.codecs import codec_class, parse_spec, split_specs
    from gtrace.sweep import expand

    specs = split_specs(settings.methods or METHODS)
    if settings.formats:
        specs += [f"fp:{name}" for name in words(settings.formats)]
    ranges: dict[str, list[Any]] = {"bits": list(settings.bits)}
    found: dict[str, Codec] = {}
    given = {"bucket_size": bucket_sizes(settings.bucket_size), "sparsity": settings.sparsity, "ratio": settings.keep}
    for spec in specs:
        known = codec_class(parse_spec(spec).name).__dataclass_fields__ if spec != "all" else {}
        own = {name: list(values) for name, values in given.items() if values and name in known}
        for made in expand([spec], ranges | own):
            found.update((str(one), one) for one in _grids(made, settings.per_bit))
    found.pop("none", None)
    return list(found.values())


def _grids(made: Codec, per_bit: int) -> list[Codec]:
    """A codec; one of a uniform grid with those that lie between its bits and one bit less."""
    given = made.parameters
    if not {"steps", "bits", "zero"} <= set(given) or given["steps"] is not None or not given["zero"]:
        return [made]
    most = (1 << given["bits"] - 1) - 1
    between = {round(most * 2 ** (-k / per_bit)) for k in range(1, per_bit)}
    return [*(replace(made, steps=steps) for steps in sorted(between) if most // 2 < steps < most), made]  # type: ignore[call-arg]


def _groups(tensors: tuple[str, ...], groups: tuple[str, ...]) -> dict[str, str]:
    if not groups:
        return {}
    from gtrace.report.analysis.tensors import OTHERS, assign

    return {tensor: group for tensor, group in assign(tensors, groups).items() if group != OTHERS}


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
    as_json: bool = option(False, names=("--json",), help="Print JSON instead of tables.")


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
    totals = [
        {
            "plan": str(path),
            "bits": plan.totals.bits,
            what(plan): plan.totals.error,
            "default": plan.default,
            "objective": aim(plan),
        }
        for path, plan in zip((first, second), plans, strict=True)
    ]
    if settings.as_json:
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
