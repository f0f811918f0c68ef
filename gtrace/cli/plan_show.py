"""``gtrace plan show`` and ``gtrace plan diff``: plans that were made before."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gtrace.cli.console import TensorColumn, echo, print_columns, stdout_console, wide_console
from gtrace.cli.options import Command, load_plugins, options, print_json
from gtrace.report.names import literal, number
from gtrace.settings import option

if TYPE_CHECKING:
    from gtrace.planning import Plan

_PLAN = click.Path(path_type=Path)


@dataclass(frozen=True)
class PlanDiffSettings:
    """The options of ``gtrace plan diff``."""

    plugin: tuple[Path, ...] = option((), help="A Python file with codecs of your own that a plan names; it is run.")
    as_json: bool = option(False, names=("--json",), help="Print JSON instead of tables.")


@dataclass(frozen=True)
class PlanShowSettings(PlanDiffSettings):
    """The options of ``gtrace plan show``."""

    full: bool = option(False, help="Print every tensor and note, not only the answer.")


@click.command("show", cls=Command, epilog="Example: gtrace plan show plan.toml")
@click.argument("plan", type=_PLAN)
@options(PlanShowSettings)
def show(settings: PlanShowSettings, plan: Path) -> None:
    """Show what a PLAN chooses, what it costs, and how firm it is."""
    from gtrace.planning import load_plan
    from gtrace.planning.plan import to_plain

    load_plugins(settings.plugin)
    found = load_plan(plan)
    if settings.as_json:
        print_json(to_plain(found))
    else:
        print_plan(found, plan, full=settings.full)


@click.command("diff", cls=Command, epilog="Example: gtrace plan diff plan.toml other.toml")
@click.argument("first", type=_PLAN)
@click.argument("second", type=_PLAN)
@options(PlanDiffSettings)
def diff(settings: PlanDiffSettings, first: Path, second: Path) -> None:
    """Show where two plans differ, tensor by tensor."""
    from gtrace.planning import load_plan
    from gtrace.report.sections.plans import aim, samples, what

    load_plugins(settings.plugin)
    plans = load_plan(first), load_plan(second)
    old, new = ({row.tensor: row for row in plan.tensors} for plan in plans)
    changed = {
        name: (old.get(name), new.get(name))
        for name in dict.fromkeys([*old, *new])
        if name not in old or name not in new or old[name].codec != new[name].codec
    }
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
        print_json({"a": totals[0], "b": totals[1], "changed": rows, "same": len(set(old) & set(new) - set(changed))})
        return
    console = stdout_console()
    for path, plan in zip((first, second), plans, strict=True):
        lost = f"error {number(plan.totals.error)}" if plan.horizon is None else f"worth {samples(plan)} samples"
        said = f"{number(plan.totals.bits)} bits, {lost} ({plan.budget})"
        echo(literal(f"{path}: {said}; minimizes {aim(plan)}", console.encoding or "utf-8"))
    if aim(plans[0]) != aim(plans[1]):
        echo("These numbers don't compare: the plans minimize different things.")
    same = len(set(old) & set(new)) - sum(None not in pair for pair in changed.values())
    if changed:
        pairs = list(changed.values())
        print_columns(
            [
                TensorColumn("tensor", [literal(name) for name in changed], 0, right=False),
                TensorColumn("codec of the first", [_codec(row) for row, _ in pairs], 0, right=False),
                TensorColumn("codec of the second", [_codec(row) for _, row in pairs], 0, right=False),
                TensorColumn("bits of the first", [_bits(row) for row, _ in pairs], 2),
                TensorColumn("bits of the second", [_bits(row) for _, row in pairs], 1),
            ],
            console,
        )
    echo(f"\n{len(changed)} tensors differ, {same} are the same.")
    if plans[0].default != plans[1].default:
        echo(f"Tensors that they do not name: {plans[0].default}, then {plans[1].default}.")


def _codec(row: Any) -> str:
    return "-" if row is None else row.codec


def _bits(row: Any) -> str:
    return "-" if row is None else number(row.bits)


def print_plan(plan: Plan, path: Path, *, full: bool) -> None:
    """A plan on a terminal, the path of its file and what to do with it."""
    from gtrace.report.inputs import Report
    from gtrace.report.render.text import print_report

    after = [str(path), f"next: gtrace train --plan {shlex.quote(str(path))} SCRIPT"]
    print_report(Report(plan.name, plans=(plan,)), wide_console(), full=full, after=after)
