"""``gtrace plan formats``: a float format for every layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from gtrace.cli.console import TensorColumn, name_columns, print_columns, stdout_console
from gtrace.cli.options import STEPS, TENSORS, Command, Integers, TracePath, check_output, options, print_json
from gtrace.settings import option

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gtrace.sweep.formats import LayerFormats
    from gtrace.trace import Trace

#: A layer that loses more than this to zero, or clips more than this, is marked.
_MUCH_FLUSHED, _MUCH_SATURATED = 0.25, 0.01


@dataclass(frozen=True)
class FormatsSettings:
    """The options of ``gtrace plan formats``."""

    bits: tuple[int, ...] = option("4-8", type=Integers(), help="Bits of a format 1-E-M: 3 to 8.")
    scale: str = option(
        "max",
        choices=("max", "mean", "error", "absmax"),
        help="How the power-of-two scale is set: by the largest value that the fitted law expects, by the mean as the "
        "paper's authors, by least error, or by the largest value that there is.",
    )
    tensors: tuple[str, ...] = option((), **TENSORS)
    kind: str | None = option(None, choices=("weight", "neural"), help="Only this kind of gradient.")
    steps: tuple[int, ...] | None = option(
        None, **STEPS | {"help": "Only these steps, as in 0,10,100-200.  [default: 16 of them]"}
    )
    output: Path | None = option(None, names=("-o", "--output"), help="Write the table to this YAML file.")
    force: bool = option(False, help="Overwrite the file.")
    as_json: bool = option(False, names=("--json",), help="Print JSON instead of a table.")


@click.command(
    "formats", cls=Command, epilog="Example: gtrace plan formats run.zarr --bits 4-8 --kind neural -o recipe.yaml"
)
@click.argument("trace", type=TracePath())
@options(FormatsSettings)
def command(settings: FormatsSettings, trace: Path | str) -> None:
    """Choose a float format 1-E-M for every layer of TRACE, and say how firm the choice is.

    Each format is tried on the gradients of several steps. Told are the scale exponent (gradients are multiplied by 2
    to the power of it) and how it drifts, the worst fraction flushed to zero and clipped at the largest number, and the
    margin: how many times the expected error of the best format the second best makes.
    """
    import yaml

    from gtrace.errors import UsageError
    from gtrace.report.render.files import put
    from gtrace.sweep.formats import choose_formats, recipe
    from gtrace.trace import open_trace
    from gtrace.trace.choose import choose_infos, choose_steps

    bits, scale, output = settings.bits, settings.scale, settings.output
    if any(not 3 <= value <= 8 for value in bits):
        raise UsageError(f"--bits: {min(bits)} to {max(bits)}; formats have 3 to 8 bits")
    if output is not None:
        check_output(output, force=settings.force)
    with open_trace(trace) as opened:
        infos = choose_infos(opened, settings.tensors, kind=settings.kind)
        chosen = choose_steps(opened, infos, settings.steps)
        layers = choose_formats(opened, infos, chosen, bits, scale)  # type: ignore[arg-type]
        made_with = {
            "bits": list(bits),
            "steps": sorted(chosen),
            "tensors": list(settings.tensors),
            "kind": settings.kind,
        }
        document = recipe(opened, layers, scale, made_with)  # type: ignore[arg-type]
        if output is not None:
            put(output, yaml.safe_dump(document, sort_keys=False, allow_unicode=True).encode())
        if settings.as_json:
            print_json(document)
        else:
            _show(opened, layers, scale, len(chosen))
    if output is not None:
        click.echo(str(output), err=settings.as_json)


def _show(trace: Trace, layers: Sequence[LayerFormats], scale: str, steps: int) -> None:
    from gtrace.report.names import count, literal, number

    console = stdout_console()
    encoding = console.encoding or "utf-8"
    click.echo(
        f"{literal(trace.path, encoding)}: float formats under scale={scale}, {count(len(layers), 'tensor')}, "
        f"{count(steps, 'step')}"
    )
    rows = [(layer, found) for layer in layers for found in layer.formats]
    if not rows:
        click.echo("Every gradient is zero: any format will do.")
        return
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
        bad = {
            "worst flushed": flushed[place] > _MUCH_FLUSHED,
            "worst saturated": saturated[place] > _MUCH_SATURATED,
        }
        return "bold red" if bad.get(heading) else ""

    print_columns(columns, console, style)
    click.echo("\nRelative error: E |Q(x) - x| / |x| under the fitted lognormal law, mean over steps.")
    click.echo("Scale: the k of 2^k that gradients are multiplied by. Margin: second best error over best, 1 is a tie.")
    worst = max(range(len(rows)), key=flushed.__getitem__)
    if flushed[worst] > _MUCH_FLUSHED:
        layer, found = rows[worst]
        click.echo(
            f"Mind: {literal(layer.info.name, encoding)} at {found.bits} bits loses up to {flushed[worst]:.0%} of its "
            f"non-zero elements to zero under scale={scale}; try another --scale or more bits."
        )
        over = float(layer.overshoot.max())
        if scale == "max" and over >= 1:
            click.echo(f"Its largest element lies up to {over:.1f} octaves below the largest that the law expects.")
