"""``gtrace plan``: which codec and how many bits each tensor gets under a budget."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gtrace.cli.completion import complete_specs
from gtrace.cli.options import Fractions, Integers, TracePath, load_plugins, parse_range, print_json
from gtrace.cli.plan_budget import budget_options, check_budget, chosen_budget, plan_seconds, tightened
from gtrace.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gtrace.codecs import Codec
    from gtrace.planning import Budget, Curves

#: coordinate-wise codecs with fixed levels are judged together, so that all of them take no longer than a few
METHODS = "qsgdinf,nuqsgd"
BUCKETS = "128,1024,8192"
#: steps of a trace that are looked at, spread over all of them
MOST_STEPS = 32


class PlanCommand(click.Command):
    """``gtrace plan TRACE``, and the words that may stand in the place of a trace."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> click.Context:
        if args and args[0] in ("show", "diff"):
            from gtrace.cli.plan_show import diff, show

            chosen = {"show": show, "diff": diff}[args[0]]
            return chosen.make_context(f"{info_name} {args[0]}", args[1:], *rest, **extra)
        return super().make_context(info_name, args, *rest, **extra)


@click.command(
    "plan",
    cls=PlanCommand,
    epilog="\b\nAfterwards:\n  gtrace plan show plan.yaml\n  gtrace plan diff plan.yaml other.yaml\n"
    "  gtrace train --plan plan.yaml train.py\n  gtrace report plan.yaml",
)
@click.argument("trace", type=TracePath())
@budget_options
@click.option(
    "--methods",
    default=None,
    shell_complete=complete_specs,
    help=f"Codecs to choose from; none (exact) always is one.  [default: {METHODS}; of a sweep all that it has]",
)
@click.option("--bits", type=Integers(), default="2-8", show_default=True, help="Nominal bits of codecs with bits.")
@click.option(
    "--bucket-size", default=BUCKETS, show_default=True, help="Values per norm of codecs that have buckets: 128,8192."
)
@click.option(
    "--per-bit",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    metavar="N",
    help="Uniform grids from one number of bits to the next, of qsgd and qsgdinf.",
)
@click.option("--formats", metavar="NAMES", help="Float formats to choose from, as in e2m1,e3m2,e2m3,e4m3; or all.")
@click.option("--sparsity", type=Fractions("0.05"), help="Zeros that prune aims at, per tensor, as in 0.5-0.95.")
@click.option("--keep", type=Fractions(), help="Part of the values that sparsifiers send, per tensor, as in 0.001-0.1.")
@click.option(
    "--objective",
    type=click.Choice(["squared", "relative"]),
    default="squared",
    show_default=True,
    help="Error of the whole gradient, or of each tensor in units of its own energy.",
)
@click.option(
    "--weight",
    "weights",
    multiple=True,
    metavar="GLOB=NUMBER|FILE",
    help="How much the error of some tensors counts, the first that fits; or a YAML or JSON file of name: number.",
)
@click.option(
    "--group", "groups", multiple=True, metavar="NAME=GLOB", help="One codec for these tensors: NAME=GLOB[,GLOB]."
)
@click.option("--uniform", is_flag=True, help="The best single codec within the budget instead.")
@click.option("--tensors", default=None, help="Only tensors that match one of these globs, comma-separated.")
@click.option("--kind", type=click.Choice(["weight", "neural"]), default=None, help="Gradients of weights or outputs.")
@click.option("--steps", default=None, help=f"Only these steps, as in 0,100-200.  [default: {MOST_STEPS} of them]")
@click.option(
    "--refit",
    type=click.Choice(["pooled", "previous", "each", "once"]),
    default="pooled",
    show_default=True,
    help="Data that levels and codes are fitted on.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the resampled steps.")
@click.option("--jobs", type=click.IntRange(min=1), default=None, help="Threads.  [default: all processors]")
@click.option(
    "--plugin",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    help="A Python file with codecs of your own; it is run.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="A .yaml or .json file.  [default: TRACE.plan.yaml]"
)
@click.option("--force", is_flag=True, help="Overwrite the file.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON instead of tables.")
def command(**options: Any) -> None:
    """Choose a codec for every tensor of TRACE: the least error within a budget, or the fewest bits within an error.

    TRACE is a trace, whose sketches hold every tensor's curve of error against bits, or a sweep (.sweep.db), whose
    codecs are then the choice. Codecs without closed forms need such a sweep.

    \b
    Examples:
      gtrace plan digits_cnn.zarr --budget 3bits
      gtrace plan digits_cnn.zarr --max-error 0.1 --methods alq,qsgdinf --bits 2-6
      gtrace plan digits_cnn.zarr --step-time 50ms --network 1Gbit/s --ranks 8 --compute-time 40ms
      gtrace plan digits_cnn.sweep.db --ratio 12 -o plan.yaml
      gtrace plan digits_cnn.zarr --budget 4bits --methods fp --formats e2m1,e3m2,e2m3,e4m3
    """
    run(**options)


def run(*, trace: Path | str, output: Path | None, force: bool, as_json: bool, **options: Any) -> None:
    """The command without its options' parsing."""
    from gtrace.cli.options import check_output
    from gtrace.cli.plan_weights import weigh
    from gtrace.planning import make_plan, save_plan
    from gtrace.trace.io.remote import stem_of

    load_plugins(options["plugin"])
    check_budget(options)
    stem = stem_of(trace).removesuffix(".sweep")
    path = output or Path(f"{stem}.plan.yaml")
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise UsageError(f"{path}: a plan is a .yaml or .json file; choose such a name for -o")
    check_output(path, force=force)
    curves, provenance, warnings = _curves(trace, options)
    for text in warnings:
        click.echo(f"gtrace: warning: {text}", err=True)
    groups = _groups(curves.tensors, options["groups"])
    budget = chosen_budget(options, curves)
    if not options["uniform"] and "trace" in provenance:
        curves = _refined(trace, curves, options, budget, groups)
    curves = weigh(curves, options["objective"], options["weights"])
    for tries in itertools.count():
        plan = make_plan(
            curves,
            budget,
            name=_name(path),
            provenance={**provenance, **_settings(options, curves)},
            objective=options["objective"],
            groups=groups,
            one_for_all=options["uniform"],
            seed=options["seed"],
        )
        smaller = tightened(options, budget, plan, tries)
        if smaller is None:
            break
        budget = smaller
    if options["step_time"] is not None:
        plan.provenance["step_seconds"] = plan_seconds(options, plan)
    save_plan(plan, path, force=force)
    from gtrace.cli.plan_show import print_plan
    from gtrace.planning.plan import to_plain

    if as_json:
        print_json(to_plain(plan))
    else:
        print_plan(plan)
        click.echo(
            f"\n{path}\nnext: gtrace train --plan {shlex.quote(str(path))} --task digits-cnn, or your own SCRIPT"
        )


def _curves(trace: Path | str, options: Mapping[str, Any]) -> tuple[Curves, dict[str, Any], list[str]]:
    """What the codecs make of every tensor, and where that comes from."""
    from gtrace.planning import curves_of, measure

    if isinstance(trace, Path) and trace.name.endswith(".sweep.db"):
        from gtrace.cli.plan_weights import chosen_rows
        from gtrace.sweep import ResultStore

        result = ResultStore.load(trace)
        provenance = {"sweep": str(trace), "trace_fingerprint": result.provenance.get("trace_fingerprint", "")}
        return curves_of(chosen_rows(result, options)), provenance, []
    from gtrace.trace import open_trace
    from gtrace.trace.choose import choose_infos, choose_steps

    codecs = _codecs(options)
    with open_trace(trace) as opened:
        wanted = None if options["steps"] is None else [int(v) for v in parse_range(options["steps"], "--steps")]
        steps = choose_steps(opened, choose_infos(opened), wanted, MOST_STEPS)
        curves, warnings = measure(
            opened, codecs, steps=sorted(steps), tensors=_split(options["tensors"]), **_measuring(options)
        )
        return curves, {"trace": str(trace), "trace_fingerprint": opened.fingerprint}, warnings


def _measuring(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("kind", "refit", "jobs")}


def _refined(
    trace: Path | str, curves: Curves, options: Mapping[str, Any], budget: Budget, groups: Mapping[str, str]
) -> Curves:
    """The curves with finer options where the choice misses its lower bound by too much."""
    from gtrace.cli.plan_weights import weigh
    from gtrace.planning import measure
    from gtrace.planning.make import ROUNDS, WORTH_REFINING, choose, finer
    from gtrace.trace import open_trace

    if options["per_bit"] == 1:
        return curves
    with open_trace(trace) as opened:
        for _ in range(ROUNDS):
            units, choice = choose(weigh(curves, options["objective"], options["weights"]), budget, groups)
            added = {} if choice is None or choice.gap < WORTH_REFINING else finer(units, choice.options)
            for tensors, codecs in added.items():
                # What was said about sketches that are missing has been said.
                found, _ = measure(opened, codecs, steps=curves.steps, tensors=tensors, **_measuring(options))
                curves = curves.joined(found)
            if not added:
                break
    return curves


def _codecs(options: Mapping[str, Any]) -> list[Codec]:
    """The options to choose from, each once; exact is added by the curves."""
    from gtrace.codecs import codec_class, parse_spec, split_specs
    from gtrace.sweep import expand

    specs = split_specs(options["methods"] or METHODS)
    if options["formats"]:
        specs += [f"fp:{name}" for name in _split(options["formats"]) or ()]
    ranges: dict[str, list[Any]] = {"bits": list(options["bits"])}
    found: dict[str, Codec] = {}
    for spec in specs:
        known = set(codec_class(parse_spec(spec).name).__dataclass_fields__) if spec != "all" else set()
        own = dict(ranges)
        if "bucket_size" in known:
            own["bucket_size"] = _buckets(options["bucket_size"])
        for name, given in (("sparsity", options["sparsity"]), ("ratio", options["keep"])):
            if given and name in known:
                own[name] = list(given)
        for made in expand([spec], own):
            found.update((str(one), one) for one in _grids(made, options["per_bit"]))
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


def _buckets(text: str) -> list[int | None]:
    return [
        None if part.strip() == "none" else int(value)
        for part in text.split(",")
        for value in ([0] if part.strip() == "none" else parse_range(part, "--bucket-size"))
    ]


def _split(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _groups(tensors: tuple[str, ...], groups: tuple[str, ...]) -> dict[str, str]:
    """Tensor -> its group, of those that have one."""
    if not groups:
        return {}
    from gtrace.report.analysis.groups import OTHERS, assign

    return {tensor: group for tensor, group in assign(tensors, groups).items() if group != OTHERS}


def _settings(options: Mapping[str, Any], curves: Curves) -> dict[str, Any]:
    from gtrace import __version__

    kept = (
        "methods",
        "bits",
        "bucket_size",
        "per_bit",
        "formats",
        "sparsity",
        "keep",
        "weights",
        "groups",
        "tensors",
        "refit",
    )
    settings = {name: options[name] for name in kept if options[name] not in (None, ())}
    steps = {"count": len(curves.steps), "first": curves.steps[0], "last": curves.steps[-1]}
    command = shlex.join(["gtrace", *sys.argv[1:]])
    return {"command": command, "gtrace": __version__, "steps": steps, "codecs": len(curves.codecs), **settings}


def _name(path: Path) -> str:
    """A plan's name: that of its file, without what every plan's file is called."""
    stem = path.name.removesuffix(path.suffix)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem.removesuffix(".plan")) or "plan"
