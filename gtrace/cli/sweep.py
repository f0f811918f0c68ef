"""``gtrace sweep``: measure codecs on a trace."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from gtrace.cli.console import echo, work_progress
from gtrace.cli.groups import complete_specs
from gtrace.cli.options import (
    INTEGERS,
    STEPS,
    CodecSettings,
    Command,
    TracePath,
    arguments,
    bucket_sizes,
    fractions,
    load_plugins,
    options,
    print_json,
    words,
)
from gtrace.errors import UsageError
from gtrace.report.names import count
from gtrace.settings import KIND, KINDS, nested, option
from gtrace.units import step_numbers

if TYPE_CHECKING:
    from gtrace.codecs.assignment import TableLike
    from gtrace.sweep import SweepResult
    from gtrace.sweep.gradients import Kind
    from gtrace.training.averages import ExchangePlan

#: of options that only ``--help-all`` shows and :func:`gtrace.run_sweep` takes as they are
_SWEEP: dict[str, Any] = {"advanced": True, "call": ("sweep",)}
#: ranges of parameters under their own names
_RANGES = ("ratio", "sparsity", "amount")
#: numbers of ranks of --exchange
_RANKS = (8, 64)


@dataclass(frozen=True)
class SweepSettings:
    """The options of ``gtrace sweep``; ``call`` marks those that :func:`gtrace.run_sweep` takes as they are."""

    methods: str | None = option(
        None,
        shell_complete=complete_specs,
        help="Codec specs, e.g. qsgd,nuqsgd:p=0.3; or all.  [default: eight, one or two of each family]",
    )
    bits: tuple[int, ...] | None = option(
        None, type=INTEGERS, help="Nominal bits of codecs that have them.  [default: 2-5; with --methods 2-8]"
    )
    everything: bool = option(False, names=("--all",), help="Every codec, 2 to 8 bits, every step.")
    ratio: tuple[float, ...] | None = option(
        None, advanced=True, type=fractions(), help="Part of the values that sparsifiers send, e.g. 0.001-0.1."
    )
    sparsity: tuple[float, ...] | None = option(
        None, advanced=True, type=fractions("0.05"), help="Zeros that pruning aims at, e.g. 0.5-0.95 or 0.8,0.9."
    )
    amount: tuple[float, ...] | None = option(
        None, advanced=True, type=fractions(), help="Samples per value of mcgq, e.g. 0.01-1."
    )
    plans: tuple[Path, ...] = option(
        (),
        metavar="FILE",
        help="A plan, whose rows are called plan:NAME; may be repeated. Without --methods: only plans.",
    )
    codecs: CodecSettings = nested(CodecSettings)
    bucket_size: str | None = option(
        None, advanced=True, help="Values per norm: a range such as 128,8192; none for a tensor."
    )
    norm: str | None = option(None, advanced=True, help="What a bucket is divided by: l2, linf or l1, comma-separated.")
    scope: str | None = option(
        None, advanced=True, help="Buckets over one tensor, or over the whole model: tensor, model."
    )
    draws: int = option(1, **_SWEEP, minimum=0, help="Encodings per tensor and step; 0: closed forms only.")
    tensors: str | None = option(None, help="Only tensors that match one of these globs, comma-separated.")
    kind: Kind | None = option(None, **_SWEEP, **KIND)
    steps: tuple[int, ...] | None = option(
        None,
        **STEPS
        | {"help": "Only these steps, e.g. 0,10,100-200.  [default: 32 of them if nothing is chosen, otherwise all]"},
    )
    refit: str = option(
        "pooled",
        advanced=True,
        help="Data that levels and codes are fitted on: pooled (a decayed mean of the captured steps before), previous "
        "(the one before), each (the step itself), once (the first), or steps.",
    )
    nonfinite: str = option(
        "skip", **_SWEEP, choices=("skip", "zero", "error"), help="What to do with a tensor that holds NaN or infinity."
    )
    optimal: bool = option(
        True,
        **_SWEEP,
        help="With a fitted codec among the methods: set each level codec beside the best levels of the same number.",
    )
    noise: bool = option(
        True,
        **_SWEEP,
        help="Measure what a codec's noise costs over a horizon, on at most four windows of consecutive steps.",
    )
    exchange: str | None = option(
        None,
        help="Measure the average that ranks end with, too: allgather, two-shot, ring, hierarchical:8, shared-scale.",
    )
    ranks: tuple[int, ...] | None = option(
        None, type=INTEGERS, help="Numbers of ranks for --exchange.  [default: 8,64]"
    )
    chunk: int = option(
        2**24,
        **_SWEEP,
        minimum=1,
        maximum=2**30,
        help="Elements held at a time of larger tensors: a power of two, a multiple of the bucket sizes.",
    )
    seed: int = option(0, **_SWEEP, help="Seed of the stochastic rounding.")
    jobs: int | None = option(
        None, call=("sweep",), minimum=1, help="Workers; rows do not depend on it.  [default: all processors]"
    )
    scheduler: str | None = option(
        None,
        **_SWEEP,
        metavar="ADDRESS",
        help="Run on a Dask cluster: tcp://HOST:PORT, a scheduler file, or local:N processes here. Same rows.",
    )
    output: Path | None = option(None, help="Result file.  [default: TRACE.sweep.db]")
    force: bool = option(False, call=("sweep",), help="Start over: replace a result file that is there.")
    as_json: bool = option(False, help="Print a JSON summary instead of text.")


@click.command("sweep", cls=Command)
@click.argument("trace", type=TracePath())
@options(SweepSettings)
def command(settings: SweepSettings, trace: Path | str) -> None:
    """Measure codecs on the gradients of TRACE: error, bits, distance, of every tensor.

    Without options it takes minutes: eight codecs at 2 to 5 bits on 32 steps from all of training. Name methods, bits
    or steps to choose; then every step is measured that --steps does not leave out. A sweep that was interrupted
    continues where it stopped; another selection adds what is missing, and gtrace report shows the last one.

    Codecs that keep memory need bursts of consecutive steps; without any, the default and all leave them out.

    \b
    Examples:
      gtrace sweep digits_cnn.zarr
      gtrace sweep digits_cnn.zarr --methods qsgd,qsgdinf,terngrad --bits 2-8
      gtrace sweep digits_cnn.zarr --all
    """
    from gtrace.sweep.engine import keep_memory
    from gtrace.sweep.quick import announce, quick_steps
    from gtrace.sweep.run import write_sweep
    from gtrace.sweep.store import ResultStore
    from gtrace.trace import open_trace
    from gtrace.trace.remote import stem_of

    load_plugins(settings.codecs.plugin)
    # What is loaded by now stays, so no collection of garbage has to look through it again.
    gc.freeze()
    keep_memory()
    path = settings.output or Path(f"{stem_of(trace)}.sweep.db")
    chosen = _Choice.of(settings)
    codecs = _codecs(settings, chosen)
    exchanges = _exchanges(settings, codecs)
    globs = None if settings.tensors is None else words(settings.tensors, "--tensors")
    with open_trace(trace) as opened:
        steps = quick_steps(opened, globs, settings.kind) if chosen.few_steps else settings.steps
        if chosen.many and not settings.as_json:
            every = _codecs(replace(settings, bits=None), _Choice("all", EVERY_BIT, few_steps=False, many=True))
            said = announce(
                opened, codecs, steps, globs=globs, kind=settings.kind, jobs=settings.jobs, every=len(every)
            )
            echo(f"gtrace: {said}", err=True)
    with work_progress("sweep", quiet=settings.as_json) as progress:
        write_sweep(
            trace,
            codecs,
            tensors=globs,
            steps=steps,
            refit=step_numbers(settings.refit, "--refit") if settings.refit[:1].isdigit() else settings.refit,
            leave_out=chosen.many,
            output=path,
            command=sys.argv,
            work=progress,
            **arguments(settings, "sweep"),
        )
    if exchanges is not None:
        with work_progress("exchanges", quiet=settings.as_json) as progress:
            _exchange(settings, trace, exchanges, globs, path, progress)
    _show(ResultStore.load(path, brief=True).selected, path, settings)


def _exchanges(settings: SweepSettings, codecs: list[TableLike]) -> ExchangePlan | None:
    """What is exchanged, checked before anything is measured; None without ``--exchange``."""
    if settings.exchange is None:
        if settings.ranks:
            raise UsageError("--ranks: is for --exchange; name one, or leave it out.")
        return None
    from gtrace.codecs import Codec
    from gtrace.training.averages import ExchangePlan

    able = tuple(one for one in codecs if isinstance(one, Codec))
    ways = tuple(words(settings.exchange, "--exchange"))
    plan = ExchangePlan(able, ways, settings.ranks or _RANKS, seed=settings.seed)
    if left := [str(one) for one in able if one not in plan.codecs]:
        echo(f"gtrace: --exchange: without {', '.join(left)}: memories, and sums before decoding, do not fit", err=True)
    return plan


def _exchange(
    settings: SweepSettings, trace: Path | str, plan: ExchangePlan, globs: list[str] | None, path: Path, progress: Any
) -> None:
    from rich.console import Console

    from gtrace.report.analysis.details import exchanges_of
    from gtrace.report.sections.checks import exchange_sentence, exchange_table
    from gtrace.report.text import print_tables
    from gtrace.sweep.store import ResultStore
    from gtrace.trace import open_trace
    from gtrace.training.averages import measure_averages

    with open_trace(trace) as opened, ResultStore.reopen(path) as store:
        for row in measure_averages(
            opened, plan, steps=settings.steps, globs=globs, kind=settings.kind, done=store.details(), work=progress
        ):
            store.add([], details=[row])
    if not settings.as_json:
        found = exchanges_of(ResultStore.load(path))
        print_tables([exchange_table(found)], Console(highlight=False), sentences=exchange_sentence(found))


#: nominal bits of methods that are named without bits
EVERY_BIT = tuple(range(2, 9))


class _Choice(NamedTuple):
    """What is swept, from what a user named."""

    #: specs; empty for none beside plans
    methods: str
    bits: tuple[int, ...]
    #: only steps that represent the others
    few_steps: bool
    #: nobody named the codecs one by one
    many: bool

    @classmethod
    def of(cls, settings: SweepSettings) -> _Choice:
        from gtrace.codecs import split_specs
        from gtrace.sweep.quick import BITS, METHODS

        named = settings.methods
        if settings.everything:
            for name in ("methods", "bits", "steps", "plans"):
                if getattr(settings, name):
                    raise UsageError(
                        f"--all measures everything: leave out --{name.removesuffix('s') if name == 'plans' else name}"
                    )
            named = "all"
        narrowing = ("bits", *_RANGES, "bucket_size", "norm", "scope", "steps", "plans")
        chosen = bool(named or any(getattr(settings, name) for name in narrowing))
        if named is None and settings.plans:
            return cls("", settings.bits or EVERY_BIT, few_steps=False, many=False)
        bits = settings.bits or (EVERY_BIT if named else BITS)
        many = named is None or "all" in split_specs(named)
        return cls(named or METHODS, bits, few_steps=not chosen, many=many)


def _codecs(settings: SweepSettings, chosen: _Choice) -> list[TableLike]:
    from gtrace.sweep import expand

    ranges: dict[str, list[Any]] = {"bits": list(chosen.bits)}
    ranges |= {name: list(getattr(settings, name) or ()) for name in _RANGES}
    if settings.bucket_size:
        ranges["bucket_size"] = bucket_sizes(settings.bucket_size)
    for name, text in (("norm", settings.norm), ("scope", settings.scope)):
        if text:
            ranges[name] = words(text)
    found: list[TableLike] = []
    if not chosen.methods:
        asked = {**ranges, "bits": settings.bits, "error_feedback": settings.codecs.error_feedback}
        if given := [name for name, value in asked.items() if value]:
            raise UsageError(f"--{given[0].replace('_', '-')}: is for --methods; a plan names its codecs.")
    else:
        called = {key: f"--{key.replace('_', '-')}" for key in ranges if getattr(settings, key)}
        prefix = "ef:" if settings.codecs.error_feedback else ""
        found += expand(chosen.methods, ranges, prefix=prefix, asked=called)
    if settings.plans:
        from gtrace.planning import load_plan

        found += [load_plan(path).table for path in settings.plans]
    return found


def _show(result: SweepResult, path: Path, settings: SweepSettings) -> None:
    from gtrace.sweep.jobs import LEFT_OUT

    if settings.kind is None:
        for other, left in result.provenance.get("left_out", {}).items():
            echo(f"gtrace: {count(left, 'tensor')} of {KINDS[other]} left out; --kind {other} takes them", err=True)
    for text in result.warnings:
        if not settings.as_json or text.startswith(LEFT_OUT):
            echo(f"gtrace: warning: {text}", err=True)
    codecs, tensors, steps = (set(result[column]) for column in ("codec", "tensor", "step"))
    if settings.as_json:
        seen = {"rows": len(result), "tensors": len(tensors), "steps": len(steps), "codecs": sorted(codecs)}
        about = {name: result.provenance.get(name) for name in ("kind", "left_out")}
        print_json({"output": str(path), **seen, **about, "warnings": list(result.warnings)})
        return
    where = f"{count(len(tensors), 'tensor')} at {count(len(steps), 'step')}"
    echo(f"{len(result)} rows: {count(len(codecs), 'codec')} on {where}")
    echo(f"{path}\nnext: gtrace report {path}")
