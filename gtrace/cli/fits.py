"""``gtrace info --fit``: which law the magnitudes of gradients follow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from gtrace.cli.console import FEW_ROWS, TensorColumn, name_columns, print_columns, stdout_console
from gtrace.cli.options import pick, print_json
from gtrace.fitting.magnitudes import LAWS
from gtrace.report.analysis.runs import known_mean
from gtrace.report.names import count, literal, number, sparkline
from gtrace.sweep.laws import FormatTrial, LayerFormats, LayerLaws, follow_laws, judge, verdict_sentences
from gtrace.trace.choose import choose_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.trace import TensorInfo, Trace

#: Bits for which the best float format is shown.
_BITS = (4, 5, 6, 7, 8)
#: How early a narrow terminal drops the distance to a law.
_RANKS = {"lognormal": 0, "normal": 2, "half-normal": 5, "laplace": 6, "half-laplace": 4, "loglaplace": 3}


def print_fits(
    trace: Trace, infos: Sequence[TensorInfo], steps: Sequence[int] | None, *, full: bool, as_json: bool
) -> None:
    """Fit laws to the magnitudes of gradients, and print a table with a verdict, or JSON with every step.

    Without ``steps``, at 16 of them.
    """
    chosen = choose_steps(trace, infos, steps)
    layers: list[LayerLaws] = []
    formats: list[LayerFormats | None] = []
    for info in infos:
        trial = FormatTrial(_BITS)
        for layer in follow_laws(trace, [info], chosen, look=trial):
            layers.append(layer)
            formats.append(trial.formats(info))
    verdict = judge(layers)
    if as_json:
        said = {"verdict": verdict_sentences(verdict), "mean_ks": verdict.distances, "nearest": verdict.nearest}
        rows = [_fits_json(layer, found) for layer, found in zip(layers, formats, strict=True)]
        print_json({**pick(trace, "path", "fingerprint"), **said, "tensors": rows})
        return
    console = stdout_console()
    encoding = console.encoding or "utf-8"
    steps_seen = sorted({int(step) for layer in layers for step in layer.steps})
    click.echo(
        f"{literal(trace.path, encoding)}: laws of |g| without zeros, {count(len(layers), 'tensor')}, "
        f"{count(len(steps_seen), 'step')} from {steps_seen[0]} to {steps_seen[-1]}"
    )
    for sentence in verdict_sentences(verdict):
        click.echo(sentence)
    every = len(layers)
    if not full:
        places = sorted(sorted(range(every), key=lambda k: -layers[k].info.size)[:FEW_ROWS])
        layers, formats = [layers[k] for k in places], [formats[k] for k in places]
    means = [layer.mean_distances for layer in layers]
    columns = [
        *name_columns([literal(layer.info.name, encoding) for layer in layers], [layer.info for layer in layers]),
        TensorColumn("non- zero", [f"{float(layer.counts.mean()):.0f}" for layer in layers], 8),
        TensorColumn("nearest law", [layer.best or "-" for layer in layers], 1, right=False),
        *(
            TensorColumn(
                f"KS {name}",
                ["-" if math.isnan(mean[name]) else f"{mean[name]:.3f}" for mean in means],
                _RANKS.get(name, 7),
            )
            for name in LAWS
        ),
        TensorColumn("mu log2", [number(known_mean(layer.mu_log2)) for layer in layers], 3),
        TensorColumn("sigma log2", [number(known_mean(layer.sigma_log2)) for layer in layers], 1),
        TensorColumn(
            "sigma over steps",
            [sparkline(one.sigma_log2.tolist(), encoding=encoding) for one in layers],
            3,
            right=False,
        ),
        *(
            TensorColumn(f"FP{bits} max", [str(found.formats[k].format) if found else "-" for found in formats], 2)
            for k, bits in enumerate(_BITS)
        ),
    ]
    few = {place for place, layer in enumerate(layers) if not layer.judged.any()}
    best = [layer.best for layer in layers]
    print_columns(
        columns,
        console,
        lambda place, heading: "dim" if place in few else "bold green" if heading == f"KS {best[place]}" else "",
    )
    if len(layers) < every:
        click.echo(f"{count(every - len(layers), 'smaller tensor')}: --full shows all.")
    click.echo("\nKS: largest gap between the distribution functions, mean over steps; no p-value, laws are fitted.")
    click.echo("FP: format 1-E-M with the least expected relative error under scale=max; see gtrace plan formats.")


def _fits_json(layer: LayerLaws, found: LayerFormats | None) -> dict[str, Any]:
    numbers = ("zeros", "nonfinite", "mu", "sigma", "mu_log2", "sigma_log2", "best", "ks")
    return {
        **pick(layer.info, "name", "kind", "optimizer", "rank"),
        "best": layer.best,
        "judged": bool(layer.judged.any()),
        "mean_ks": layer.mean_distances,
        "formats": {one.bits: one.format.name for one in found.formats} if found else {},
        "steps": [
            {"step": step, "nonzero": fit.count, **pick(fit, *numbers)}
            for step, fit in zip(layer.steps.tolist(), layer.fits, strict=True)
        ],
    }
