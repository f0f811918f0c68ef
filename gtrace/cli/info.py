"""``gtrace info``: what is in a trace."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from gtrace.cli.console import FEW_ROWS, WHOLE_NAME, TensorColumn, name_columns, print_columns, stdout_console
from gtrace.cli.options import STEPS, TENSORS, Command, TracePath, arguments, options, pick, print_json
from gtrace.errors import UsageError
from gtrace.report.analysis.history import RunHistory, StreamHistory, TensorHistory, energy_shares, run_lines
from gtrace.report.names import count, literal, number, sparkline
from gtrace.settings import KINDS, option
from gtrace.trace import Trace, open_trace
from gtrace.trace.choose import agreement, choose_infos, newest_trace
from gtrace.trace.sketches import sketch_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console


@dataclass(frozen=True)
class _InfoSettings:
    tensors: tuple[str, ...] = option((), **TENSORS)
    kind: str | None = option(
        None,
        call=("infos",),
        choices=(*KINDS, "second_moment"),
        help="Only this kind of gradient; second_moment: Adam's second moments, where these are recorded.",
    )
    optimizer: int | None = option(None, call=("infos",), metavar="N", help="Only tensors that this optimizer steps.")
    rank: int | None = option(None, call=("infos",), metavar="N", help="Only this process of several.")
    fit: bool = option(False, help="Read gradients: which law their magnitudes follow, mu, sigma, float formats.")
    steps: tuple[int, ...] | None = option(
        None, **STEPS | {"help": "With --fit: only these steps, e.g. 0,10,100-200.  [default: 16 of them]"}
    )
    follow: bool = option(False, help="Show a trace that is being written, until its capture ends or Ctrl-C.")
    full: bool = option(False, help="Print every tensor and column, not only the tensors with most energy.")
    as_json: bool = option(False, help="Print JSON instead of a table.")


@click.command("info", cls=Command, epilog="Example: gtrace info run.zarr --tensors '*.weight'")
@click.argument("trace", type=TracePath(), required=False)
@options(_InfoSettings)
def command(settings: _InfoSettings, trace: Path | str | None) -> None:
    """Say what is in TRACE: the run, its tensors, and how the norms of their gradients changed.

    Without TRACE, the newest one in this folder is taken. No gradient is read, so this takes no longer for a large
    trace; --fit reads those of some steps.
    """
    if settings.steps is not None and not settings.fit:
        raise UsageError("--steps: says at which steps laws are fitted; pass --fit with it")
    if not trace:
        trace = newest_trace(Path())
        click.echo(f"taking the newest trace in this folder: {trace}", err=True)
    if settings.follow:
        _follow(settings, trace)
        return
    with open_trace(trace) as opened:
        infos = choose_infos(opened, settings.tensors, **arguments(settings, "infos"))
        if settings.fit:
            from gtrace.cli.fits import print_fits

            print_fits(opened, infos, settings.steps, full=settings.full, as_json=settings.as_json)
            return
        run = RunHistory(opened, infos)
        if settings.as_json:
            print_json(_document(opened, run))
        else:
            show(opened, run, stdout_console(), full=settings.full)


def _follow(settings: _InfoSettings, trace: Path | str) -> None:
    if isinstance(trace, str):
        raise UsageError(f"{trace}: --follow needs a trace on this machine")
    if settings != replace(_InfoSettings(), follow=True):
        raise UsageError("--follow: shows one view and has no other options; leave them out")
    from gtrace.cli.watch import follow

    follow(trace, stdout_console())


def _document(trace: Trace, run: RunHistory) -> dict[str, Any]:
    about = ("name", "aliases", "kind", "optimizer", "rank", "module_type", "shape", "dtype", "size")
    return {
        **pick(trace, "path", "status", "fingerprint"),
        "attrs": dict(trace.attrs),
        "ranks": sorted({stream.key.rank for stream in run.streams}),
        "divergence": run.divergence,
        "agreement": {stage: agreement(trace, stage)._asdict() for stage in ("local", "reduced")},
        "streams": [_stream(stream) for stream in run.streams],
        "tensors": [
            {
                **pick(row.info, *about),
                **{f"elements_{which}": getattr(row, which) for which in ("fewest", "most", "stored")},
                "sketches": [sketch_name(spec) for spec in row.info.sketches],
                "merged_steps": row.info.merged,
                "steps": row.steps.size,
                "first_step": row.steps[0],
                "last_step": row.steps[-1],
                **pick(row, "absmax", "zeros"),
                "nonfinite": row.nonfinite.sum(),
                "norm_first": row.norms[0],
                "norm_last": row.norms[-1],
            }
            for row in run.tensors
        ],
    }


def _stream(stream: StreamHistory) -> dict[str, Any]:
    first, last = (stream.steps[0], stream.steps[-1]) if stream.steps.size else (None, None)
    losses: list[Any] = [loss for _, loss in stream.finite] or [None]
    about = {"steps": stream.steps.size, "first_step": first, "last_step": last}
    return {**stream.key._asdict(), **about, "first_loss": losses[0], "last_loss": losses[-1]}


def show(trace: Trace, run: RunHistory, console: Console, *, full: bool) -> None:
    """Print the run and a table of its tensors; columns that do not fit the console's width are left out.

    If not ``full``, those with most of the gradient's energy, in 25 lines of 80 characters.
    """
    encoding, rows = console.encoding or "utf-8", run.tensors
    for head, text in run_lines(trace, run, encoding, full=full):
        style = "bold red" if head.isupper() else "dim"
        line = Text.assemble((f"{head:<8} " if head else "", style), (literal(text, encoding), "" if head else "bold"))
        console.print(line, soft_wrap=True)
    if not rows:
        return
    ranks = sorted({row.info.rank for row in rows})
    if not full and len(ranks) > 1:
        rows = [row for row in rows if row.info.rank == ranks[0]]
    shares = energy_shares(rows)
    order = sorted(range(len(rows)), key=lambda k: -shares[k])[: None if full else FEW_ROWS]
    shown = rows if full else [rows[k] for k in order]
    bad = {k for k, row in enumerate(shown) if row.nonfinite.any()}
    print_columns(
        _columns(rows, encoding) if full else _few_columns(shown, [shares[k] for k in order], encoding),
        console,
        lambda place, heading: "bold red" if heading == "not finite" and place in bad else "",
        **({} if full else {"name_width": WHOLE_NAME}),
    )
    if len(shown) < len(rows):
        left = 1 - math.fsum(shares[k] for k in order)
        more = f"{count(len(rows) - len(shown), 'more tensor')}, {left:.1%} of the energy; --full shows all."
        console.print(Text(f"Rank {ranks[0]}: {more}" if len(ranks) > 1 else more, style="dim"))
    console.print(
        Text(f"\nnext: gtrace sweep {literal(shlex.quote(trace.path), encoding)}", style="dim"), soft_wrap=True
    )


def _few_columns(rows: Sequence[TensorHistory], shares: Sequence[float], encoding: str) -> list[TensorColumn]:
    infos = [row.info for row in rows]
    broken = any(row.nonfinite.any() for row in rows)
    return [
        *name_columns([literal(info.name, encoding) for info in infos], infos),
        TensorColumn("elements", [f"{info.size:,}" for info in infos], 3),
        TensorColumn("energy", [f"{share:.1%}" for share in shares], 0),
        TensorColumn("norm first", [row.norm_text(0) for row in rows], 5),
        TensorColumn("norm last", [row.norm_text(-1) for row in rows], 4),
        *([TensorColumn("not finite", [f"{row.nonfinite.sum():,}" for row in rows], 1)] if broken else []),
        TensorColumn(
            "norm over steps", [sparkline(row.shown_norms, encoding=encoding) for row in rows], 2, right=False
        ),
    ]


def _columns(rows: Sequence[TensorHistory], encoding: str) -> list[TensorColumn]:
    infos = [row.info for row in rows]
    parts = [row.stored / row.most if row.stored < row.most else 1.0 for row in rows]
    special = [TensorColumn("kept", [f"{part:.1%}" for part in parts], 7)] if min(parts) < 1 else []
    if any(info.sketches for info in infos):
        merged = max(info.merged for info in infos)
        word = "sketch" if merged == 1 else f"sketch of {merged} steps"
        special.append(TensorColumn("stored", [word if info.sketches else "values" for info in infos], 6))
    return [
        *name_columns([literal(info.name, encoding) for info in infos], infos),
        TensorColumn("shape", [row.shape for row in rows], 7),
        *special,
        TensorColumn("dtype", [literal(info.dtype, encoding) for info in infos], 10),
        TensorColumn("steps", [str(row.steps.size) for row in rows], 6),
        TensorColumn("norm first", [row.norm_text(0) for row in rows], 5),
        TensorColumn("norm last", [row.norm_text(-1) for row in rows], 4),
        TensorColumn("largest", [number(row.absmax) for row in rows], 9),
        TensorColumn("zeros", [f"{row.zeros:.1%}" for row in rows], 8),
        TensorColumn("not finite", [f"{row.nonfinite.sum():,}" for row in rows], 2),
        TensorColumn(
            "norm over steps", [sparkline(row.shown_norms, encoding=encoding) for row in rows], 3, right=False
        ),
    ]
