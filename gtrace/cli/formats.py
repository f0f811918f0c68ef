"""``gtrace plan formats``: a float format for every layer."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from gtrace.cli.console import FEW_ROWS, TensorColumn, echo, name_columns, print_columns, stdout_console
from gtrace.cli.options import INTEGERS, STEPS, TENSORS, Command, TracePath, options, pick, print_json
from gtrace.errors import UsageError, check_output
from gtrace.report.names import count, literal, number, percent
from gtrace.settings import KIND, option

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gtrace.sweep.laws import LayerFormat, LayerFormats
    from gtrace.trace import Trace

#: A layer that loses more than this to zero, or clips more than this, is marked.
_MUCH_FLUSHED, _MUCH_SATURATED = 0.25, 0.01


@dataclass(frozen=True)
class _FormatsSettings:
    bits: tuple[int, ...] = option("4-8", type=INTEGERS, help="Bits of a format 1-E-M: 3 to 8.")
    scale: str = option(
        "max",
        choices=("max", "mean", "error", "absmax"),
        help="How the power-of-two scale is set: by the largest value that the fitted law expects, by the mean as the "
        "paper's authors, by least error, or by the largest value that there is.",
    )
    tensors: tuple[str, ...] = option((), **TENSORS)
    kind: str | None = option(None, **KIND | {"help": "Only this kind of gradient."})
    steps: tuple[int, ...] | None = option(
        None, **STEPS | {"help": "Only these steps, e.g. 0,10,100-200.  [default: 16 of them]"}
    )
    output: Path | None = option(None, help="Write the table to this TOML file.")
    full: bool = option(False, help="Print every tensor with scales, errors and margins.")
    force: bool = option(False, help="Overwrite the file.")
    as_json: bool = option(False, help="Print JSON instead of a table.")


@click.command(
    "formats", cls=Command, epilog="Example: gtrace plan formats run.zarr --bits 4-8 --kind neural -o recipe.toml"
)
@click.argument("trace", type=TracePath())
@options(_FormatsSettings)
def command(settings: _FormatsSettings, trace: Path | str) -> None:
    """Choose a float format 1-E-M for every layer of TRACE, and say how firm the choice is.

    Each format is tried on the gradients of several steps. --full prints the scale exponent (gradients are multiplied
    by 2 to its power) and how it drifts, the worst fraction flushed to zero and clipped at the largest number, and the
    margin: the expected error of the second best format over that of the best.
    """
    from gtrace.planning.toml import check_suffix, dump
    from gtrace.report.files import put
    from gtrace.sweep.laws import choose_formats, recipe
    from gtrace.trace import open_trace
    from gtrace.trace.choose import choose_infos, choose_steps

    bits, scale, output = settings.bits, settings.scale, settings.output
    if any(not 3 <= value <= 8 for value in bits):
        raise UsageError(f"--bits: {min(bits)} to {max(bits)}; formats have 3 to 8 bits")
    if output is not None:
        check_suffix(output)
        check_output(output, trace, force=settings.force)
    with open_trace(trace) as opened:
        infos = choose_infos(opened, settings.tensors, kind=settings.kind)
        chosen = choose_steps(opened, infos, settings.steps)
        layers = choose_formats(opened, infos, chosen, bits, scale)  # type: ignore[arg-type]
        made_with = {"bits": bits, "steps": sorted(chosen), **pick(settings, "tensors", "kind")}
        document = recipe(opened, layers, scale, made_with)  # type: ignore[arg-type]
        if output is not None:
            put(output, dump(document).encode())
        if settings.as_json:
            print_json(document)
        else:
            path = literal(opened.path, stdout_console().encoding or "utf-8")
            seen = f"{count(len(layers), 'tensor')}, {count(len(chosen), 'step')}"
            click.echo(f"{path}: float formats under scale={scale}, {seen}")
            if any(layer.formats for layer in layers):
                (_show if settings.full else _show_few)(opened, layers, scale)
            else:
                click.echo("Every gradient is zero: any format will do.")
    if output is not None:
        echo(output, err=settings.as_json)


def _show_few(trace: Trace, layers: Sequence[LayerFormats], scale: str) -> None:
    """The format that most tensors take at the most bits, the largest tensors, and all others in one row."""
    console = stdout_console()
    encoding = console.encoding or "utf-8"
    known = sorted((layer for layer in layers if layer.formats), key=lambda layer: -layer.info.size)

    def usual(layers: Sequence[LayerFormats], k: int) -> tuple[str, int]:
        return Counter(str(layer.formats[k].format) for layer in layers).most_common(1)[0]

    bits = [found.bits for found in known[0].formats]
    name, taken = usual(known, -1)
    errors = [layer.formats[-1].error for layer in known if str(layer.formats[-1].format) == name]
    click.echo(
        f"At {bits[-1]} bits, {name} is best for {taken} of {count(len(known), 'tensor')}: relative error "
        f"{min(errors):.1%} to {max(errors):.1%}."
    )
    few = known if len(known) <= FEW_ROWS else known[: FEW_ROWS - 1]
    rest = known[len(few) :]
    names = [literal(layer.info.name, encoding) for layer in few] + ([f"{len(rest)} other tensors"] if rest else [])
    columns = [TensorColumn("tensor", names, 0, right=False)]
    for k, one in enumerate(bits):
        cells = [str(layer.formats[k].format) for layer in few]
        if rest:
            name, taken = usual(rest, k)
            cells.append(f"{name} ({taken})" if taken < len(rest) else name)
        columns.append(TensorColumn(f"{one} bits", cells, len(bits) - k))
    worst = [max(float(found.flushed.max()) for found in layer.formats) for layer in known]
    lost = worst[: len(few)] + ([max(worst[len(few) :])] if rest else [])
    columns.append(TensorColumn("worst flushed", [percent(value) for value in lost], 1))
    print_columns(columns, console, lambda k, h: "bold red" if h == "worst flushed" and lost[k] > _MUCH_FLUSHED else "")
    click.echo("1-E-M: sign, exponent and mantissa bits. Worst flushed: part that becomes zero at the fewest bits.")
    _mind([(layer, found) for layer in known for found in layer.formats], scale, encoding)
    click.echo(
        f"\nnext: gtrace sweep {literal(shlex.quote(trace.path), encoding)} --methods fp --bits {bits[0]}-{bits[-1]}"
    )


def _mind(rows: Sequence[tuple[LayerFormats, LayerFormat]], scale: str, encoding: str) -> None:
    """The tensor that loses most, if that is much."""
    layer, found = max(rows, key=lambda row: float(row[1].flushed.max()))
    worst = float(found.flushed.max())
    if worst <= _MUCH_FLUSHED:
        return
    click.echo(
        f"Mind: {literal(layer.info.name, encoding)} at {found.bits} bits loses up to {worst:.0%} of its "
        f"non-zero elements to zero under scale={scale}; try another --scale or more bits."
    )
    over = float(layer.overshoot.max())
    if scale == "max" and over >= 1:
        click.echo(f"Its largest element lies up to {over:.1f} octaves below the largest that the law expects.")


def _show(trace: Trace, layers: Sequence[LayerFormats], scale: str) -> None:
    console = stdout_console()
    encoding = console.encoding or "utf-8"
    rows = [(layer, found) for layer in layers for found in layer.formats]
    names = [literal(layer.info.name, encoding) if found is layer.formats[0] else "" for layer, found in rows]
    sigmas = [f"{number(float(s.min()))} to {number(float(s.max()))}" for s in (layer.sigma_log2 for layer, _ in rows)]
    exponents = [found.scale_exponents for _, found in rows]
    saturated = [float(found.saturated.max()) for _, found in rows]
    flushed = [float(found.flushed.max()) for _, found in rows]
    columns = [
        *name_columns(names, [layer.info for layer, _ in rows]),
        TensorColumn("sigma log2", [s if name else "" for s, name in zip(sigmas, names, strict=True)], 3),
        TensorColumn("bits", [str(found.bits) for _, found in rows], 0),
        TensorColumn("format", [str(found.format) for _, found in rows], 0),
        TensorColumn("relative error", [f"{found.error:.1%}" for _, found in rows], 2),
        TensorColumn("scale first", [str(k[0]) for k in exponents], 3),
        TensorColumn("scale last", [str(k[-1]) for k in exponents], 3),
        TensorColumn("scale range", [f"{k.min()} to {k.max()}" for k in exponents], 2),
        TensorColumn("worst flushed", [f"{value:.1%}" for value in flushed], 1),
        TensorColumn("worst saturated", [f"{value:.2%}" for value in saturated], 1),
        TensorColumn("second best", [str(found.second) if found.second else "-" for _, found in rows], 2),
        TensorColumn("margin", ["-" if math.isnan(f.margin) else f"{f.margin:.2f}" for _, f in rows], 1),
    ]

    def style(place: int, heading: str) -> str:
        bad = {"worst flushed": flushed[place] > _MUCH_FLUSHED, "worst saturated": saturated[place] > _MUCH_SATURATED}
        return "bold red" if bad.get(heading) else ""

    print_columns(columns, console, style)
    click.echo("\nRelative error: E |Q(x) - x| / |x| under the fitted lognormal law, mean over steps.")
    click.echo("Scale: the k of 2^k that gradients are multiplied by. Margin: second best error over best, 1 is a tie.")
    _mind(rows, scale, encoding)
