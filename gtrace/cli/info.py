"""``gtrace info``: what is in a trace."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from gtrace.cli.console import (
    FEW_ROWS,
    WHOLE_NAME,
    TensorColumn,
    name_columns,
    print_columns,
    stdout_console,
)
from gtrace.cli.options import STEPS, TENSORS, Command, TracePath, arguments, options, pick, print_json
from gtrace.errors import UsageError
from gtrace.report.names import count, literal, number, sparkline
from gtrace.settings import KINDS, option

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console

    from gtrace.sweep.formats import LayerFormats
    from gtrace.sweep.laws import LayerLaws
    from gtrace.trace import TensorInfo, Trace

#: Bits for which the best float format is shown.
BITS = (4, 5, 6, 7, 8)
#: Blocks of a line over steps.
_SPARK_WIDTH = 16
#: Streams that are shown without --full.
_FEW_STREAMS = 3
#: How early a narrow terminal drops the distance to a law.
_RANKS = {"lognormal": 0, "normal": 2, "half-normal": 5, "laplace": 6, "half-laplace": 4, "loglaplace": 3}


@dataclass(frozen=True)
class InfoSettings:
    """The options of ``gtrace info``."""

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
    full: bool = option(False, help="Print every tensor and column, not only the tensors with most energy.")
    as_json: bool = option(False, names=("--json",), help="Print JSON instead of a table.")


@click.command("info", cls=Command, epilog="Example: gtrace info run.zarr --tensors '*.weight'")
@click.argument("trace", type=TracePath())
@options(InfoSettings)
def command(settings: InfoSettings, trace: Path | str) -> None:
    """Say what is in TRACE: the run, its tensors, and how the norms of their gradients changed.

    No gradient is read, so this takes no longer for a large trace; --fit reads those of some steps.
    """
    from gtrace.trace import open_trace
    from gtrace.trace.choose import choose_infos

    if settings.steps is not None and not settings.fit:
        raise UsageError("--steps: says at which steps laws are fitted; pass --fit with it")
    with open_trace(trace) as opened:
        infos = choose_infos(opened, settings.tensors, **arguments(settings, "infos"))
        if settings.fit:
            _print_fits(opened, infos, settings)
            return
        rows = [_row(opened, info) for info in infos]
        if settings.as_json:
            print_json(_document(opened, rows))
        else:
            show(opened, rows, stdout_console(), full=settings.full)


@dataclass(frozen=True, slots=True)
class TensorHistory:
    """One tensor and its gradients over time, in numbers that the trace keeps beside them."""

    info: TensorInfo
    steps: int
    first_step: int
    last_step: int
    norms: list[float]
    absmax: float
    zeros: float
    nonfinite: int
    #: Fewest and most elements that the gradients had, and that were stored of one.
    fewest: int
    most: int
    stored: int

    @property
    def shape(self) -> str:
        """Shape as text; of a neural gradient with the range of its first axis, which is the batch as a rule."""
        shape = self.info.shape
        if self.info.kind == "neural" and shape and self.fewest != self.most:
            rest = max(math.prod(shape[1:]), 1)
            whole = self.fewest % rest == self.most % rest == 0
            batches = f"{self.fewest // rest}-{self.most // rest}" if whole else "?"
            return "x".join((batches, *map(str, shape[1:])))
        return "x".join(map(str, shape)) or "scalar"


def _row(trace: Trace, info: TensorInfo) -> TensorHistory:
    import numpy as np

    numbers = trace.statistics(info.name, kind=info.kind, optimizer=info.optimizer, rank=info.rank)
    steps = numbers["step"]
    stored, total = numbers["n_valid"], numbers["n_total"]
    merged = info.merged > 1
    # Of merged steps the root mean square of their norms is shown.
    energies = numbers["norm2"] * (info.size / np.maximum(stored, 1) if merged else 1.0)
    largest = numbers["absmax"]
    if "whole_norm2" in numbers:
        energies = np.where(np.isnan(numbers["whole_norm2"]), energies, numbers["whole_norm2"])
        largest = np.fmax(largest, numbers["whole_absmax"])
    return TensorHistory(
        info=info,
        steps=len(steps),
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        norms=[math.sqrt(value) for value in energies.tolist()],
        absmax=float(largest.max()),
        zeros=float(numbers["zeros"].sum()) / max(int(stored.sum()), 1),
        nonfinite=int(numbers["nonfinite"].sum()),
        fewest=info.size if merged else int(total.min()),
        most=info.size if merged else int(total.max()),
        stored=info.size if merged else int(stored.max()),
    )


class StreamHistory(NamedTuple):
    """Steps and losses of one (rank, kind, optimizer)."""

    rank: int
    kind: str
    optimizer: int
    steps: int
    first_step: int | None
    last_step: int | None
    first_loss: float | None
    last_loss: float | None


def _streams(trace: Trace) -> list[StreamHistory]:
    out = []
    for key in trace.streams:
        numbers = trace.scalars(**key._asdict())
        steps = numbers["step"].tolist()
        losses = [loss for loss in numbers["loss"].tolist() if math.isfinite(loss)]
        first, last = (steps[0], steps[-1]) if steps else (None, None)
        from_loss, to_loss = (losses[0], losses[-1]) if losses else (None, None)
        out.append(StreamHistory(*key, len(steps), first, last, from_loss, to_loss))
    return out


def _document(trace: Trace, rows: Sequence[TensorHistory]) -> dict[str, Any]:
    """Everything as JSON values."""
    from gtrace.trace.choose import agreement
    from gtrace.trace.sketches import sketch_name

    streams = _streams(trace)
    return {
        **pick(trace, "path", "status", "fingerprint"),
        "attrs": dict(trace.attrs),
        "ranks": sorted({stream.rank for stream in streams}),
        "agreement": {stage: agreement(trace, stage)._asdict() for stage in ("local", "reduced")},
        "streams": [stream._asdict() for stream in streams],
        "tensors": [
            {
                **pick(
                    row.info, "name", "aliases", "kind", "optimizer", "rank", "module_type", "shape", "dtype", "size"
                ),
                "elements_fewest": row.fewest,
                "elements_most": row.most,
                "elements_stored": row.stored,
                "sketches": [sketch_name(spec) for spec in row.info.sketches],
                "merged_steps": row.info.merged,
                **pick(row, "steps", "first_step", "last_step", "absmax", "zeros", "nonfinite"),
                "norm_first": row.norms[0],
                "norm_last": row.norms[-1],
            }
            for row in rows
        ],
    }


def show(trace: Trace, rows: Sequence[TensorHistory], console: Console, *, full: bool) -> None:
    """Print the run and a table of its tensors; columns that do not fit the console's width are left out.

    Args:
        trace: an open trace.
        rows: its tensors.
        console: where to.
        full: every tensor and stream; otherwise those with most of the gradient's energy, in 25 lines of 80 characters.
    """
    from rich.text import Text

    encoding = console.encoding or "utf-8"
    lines = _lines(trace, rows, full=full)
    for head, text in lines:
        line = Text.assemble((f"{head:<8} " if head else "", "dim"), (literal(text, encoding), "" if head else "bold"))
        console.print(line, soft_wrap=True)
    if not rows:
        return
    ranks = sorted({row.info.rank for row in rows})
    if not full and len(ranks) > 1:
        rows = [row for row in rows if row.info.rank == ranks[0]]
    shares = _energy_shares(rows)
    order = sorted(range(len(rows)), key=lambda k: -shares[k])[: None if full else FEW_ROWS]
    shown = rows if full else [rows[k] for k in order]
    bad = {k for k, row in enumerate(shown) if row.nonfinite}
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


def _energy_shares(rows: Sequence[TensorHistory]) -> list[float]:
    """Each tensor's part of the squared norms of all gradients of its kind, over the recorded steps."""
    energies = [math.fsum(norm * norm for norm in row.norms) for row in rows]
    totals: dict[str, float] = {}
    for row, energy in zip(rows, energies, strict=True):
        totals[row.info.kind] = totals.get(row.info.kind, 0.0) + energy
    return [
        energy / totals[row.info.kind] if totals[row.info.kind] else 0.0
        for row, energy in zip(rows, energies, strict=True)
    ]


def _few_columns(rows: Sequence[TensorHistory], shares: Sequence[float], encoding: str) -> list[TensorColumn]:
    infos = [row.info for row in rows]
    broken = any(row.nonfinite for row in rows)
    return [
        *name_columns([literal(info.name, encoding) for info in infos], infos),
        TensorColumn("elements", [f"{info.size:,}" for info in infos], 3),
        TensorColumn("energy", [f"{share:.1%}" for share in shares], 0),
        TensorColumn("norm first", [number(row.norms[0]) for row in rows], 5),
        TensorColumn("norm last", [number(row.norms[-1]) for row in rows], 4),
        *([TensorColumn("not finite", [str(row.nonfinite) for row in rows], 1)] if broken else []),
        TensorColumn("norm over steps", [sparkline(row.norms, _SPARK_WIDTH, encoding) for row in rows], 2, right=False),
    ]


#: A loss that ends this many times above its first value has diverged.
_DIVERGED = 2.0


def _troubles(trace: Trace, rows: Sequence[TensorHistory]) -> list[tuple[str, str]]:
    """What is wrong with the run itself: a loss that is not finite or grew, gradients that are not finite."""
    said = []
    for key in trace.streams:
        numbers = trace.scalars(**key._asdict())
        losses = list(zip(numbers["step"].tolist(), numbers["loss"].tolist(), strict=True))
        known = [loss for _, loss in losses if math.isfinite(loss)]
        # NaN also means that no loss was captured: only behind a finite one it is the loss itself.
        first = next((k for k, (_, loss) in enumerate(losses) if math.isfinite(loss)), len(losses))
        broken = next((step for step, loss in losses[first:] if not math.isfinite(loss)), None)
        if broken is not None and not any(math.isfinite(loss) for step, loss in losses if step > broken):
            said.append(f"the loss is not finite from step {broken:,} on")
        elif len(known) > 1 and known[-1] > _DIVERGED * abs(known[0]):
            said.append(f"the loss rises from {number(known[0])} to {number(known[-1])}")
    bad = [row for row in rows if row.nonfinite]
    if bad:
        values = count(sum(row.nonfinite for row in bad), "gradient value is", "gradient values are")
        said.append(f"{values} not finite, in {count(len(bad), 'tensor')}")
    return [("DIVERGED" if "loss" in text else "broken", text) for text in dict.fromkeys(said)]


def _noise(trace: Trace, rows: Sequence[TensorHistory]) -> str:
    """Whether gradient noise can be estimated, from the table of contents alone."""
    infos = [row.info for row in rows if row.info.kind == "weight"]
    for info in infos:
        statistics = trace.statistics(info.name, kind=info.kind, optimizer=info.optimizer, rank=info.rank)
        if "replicas" in statistics and (statistics["replicas"] >= 2).any():
            return "can be estimated, from micro-batches"
    if len({info.rank for info in infos if info.stage == "local"}) > 1:
        return "can be estimated, from the gradients of several ranks"
    for info in infos:
        steps = trace.steps(info.name, kind=info.kind, optimizer=info.optimizer, rank=info.rank).tolist()
        if not info.sketches and any(c - a == 2 for a, c in zip(steps, steps[2:], strict=False)):
            return "can be estimated, from three consecutive steps"
    return "unknown: capture again with --noise, or with bursts such as --steps 100+10"


def _trainings(trace: Trace) -> list[str]:
    """How the optimizers of the first rank update weights, as far as the trace says."""
    said = []
    for rank, kind, optimizer in trace.streams:
        facts = trace.optimizer_facts(optimizer)
        if kind != "weight" or rank != trace.streams[0].rank or facts.kind is None:
            continue
        rates = [f"{lr:.3g}" for lr in trace.scalars(rank=rank, kind=kind, optimizer=optimizer)["lr"] if lr == lr]
        parts = [facts.kind]
        if rates:
            parts.append(f"lr {rates[0]}" + (f" to {rates[-1]}" if rates[-1] != rates[0] else ""))
        if facts.momentum:
            parts.append(f"{'Nesterov ' if facts.nesterov else ''}momentum {facts.momentum:g}")
        if facts.betas is not None:
            parts.append(f"betas {facts.betas[0]:g} and {facts.betas[1]:g}")
        infos = [info for info in trace.tensors if (info.rank, info.kind, info.optimizer) == (rank, kind, optimizer)]
        decays = Counter(facts.of_tensor(info.attrs).weight_decay for info in infos)
        for decay, tensors in decays.items():
            if decay:
                some = "" if len(decays) == 1 else f" on {tensors} of {count(len(infos), 'tensor')}"
                parts.append(f"weight decay {decay:g}{some}")
        groups = [", ".join(parts)]
        if facts.batch_size is not None:
            groups.append(f"batch {'about ' * ('batch_size' in facts.varies)}{facts.batch_size:g}")
        if facts.length is not None:
            groups.append(f"{count(facts.length, 'step')} {'taken' if facts.planned_steps is None else 'planned'}")
        said.append("; ".join(groups))
    return said


def _lines(trace: Trace, rows: Sequence[TensorHistory], *, full: bool) -> list[tuple[str, str]]:
    from gtrace.trace.times import StepTimes

    streams = _streams(trace)
    attrs = trace.attrs
    elements = sum(row.stored for row in rows)
    status = "complete" if trace.status == "complete" else "interrupted, or still being written"
    lines = [("", f"{trace.path}: {status}, {count(len(rows), 'tensor')}, {count(elements, 'element')}")]
    lines += _troubles(trace, rows)
    argv = attrs.get("argv")
    if isinstance(argv, list) and argv:
        lines.append(("script", shlex.join(str(word) for word in argv)))
    if isinstance(attrs.get("model"), str):
        lines.append(("model", attrs["model"]))
    lines.append(("ranks", "; ".join([str(len({stream.rank for stream in streams})), *_agreements(trace)])))
    some = streams if full else streams[:_FEW_STREAMS]
    for stream in some:
        text = f"{stream.steps}, {stream.first_step} to {stream.last_step}" if stream.steps else "none"
        if stream.first_loss is not None and stream.last_loss is not None:
            text += f", loss {number(stream.first_loss)} to {number(stream.last_loss)}"
        if len(streams) > 1:
            what = KINDS.get(stream.kind, "second moments")
            text += f" ({what}, optimizer {stream.optimizer}, rank {stream.rank})"
        lines.append(("steps", text))
    if len(some) < len(streams):
        lines.append(("", f"{len(streams) - len(some)} more streams; --full shows all"))
    lines += [("training", text) for text in _trainings(trace)[: None if full else _FEW_STREAMS]]
    if times := str(StepTimes.of(attrs)):
        lines.append(("time", times))
    sketched = next((row.info for row in rows if row.info.sketches), None)
    if sketched is not None:
        from gtrace.trace.sketches import sketch_name

        names = ", ".join(sketch_name(spec) for spec in sketched.sketches)
        large = count(sum(bool(row.info.sketches) for row in rows), "tensor")
        lines.append(("sketch", f"{names} of {large}; no values, so sweeps give expectations only"))
    cut = [row.info for row in rows if (row.info.sample or {}).get("kind") == "blocks"]
    if cut:
        lines.append(("sample", f"whole blocks of {count(len(cut), 'tensor')}; their norms are those of all elements"))
    capture = attrs.get("capture")
    errors = capture.get("errors") if isinstance(capture, dict) else None
    if isinstance(errors, int) and errors > 0:
        lines.append(("errors", f"{errors} while capturing; gradients may be missing"))
    if any(row.info.kind == "weight" for row in rows):
        lines.append(("noise", _noise(trace, rows)))
    return lines


def _agreements(trace: Trace) -> list[str]:
    from gtrace.errors import printable
    from gtrace.trace.choose import agreement, part_of

    said = []
    cut = {(info.kind, info.optimizer, info.name) for info in trace.tensors if part_of(info)}
    if cut:
        said.append(f"each holds its part of {count(len(cut), 'tensor')}")
    for stage in ("local", "reduced"):
        compared, equal, step, tensor = agreement(trace, stage)
        if not compared:
            continue
        share = f"{compared - equal} of {compared}"
        if equal == compared:
            same = ": they saw the same data" if stage == "local" else ""
            said.append(f"{stage} gradients are the same on all{same}")
        elif stage == "local":
            said.append(f"local gradients differ ({share}), as on different data")
        else:
            where = f"first at step {step}: {printable(str(tensor))}"
            said.append(f"reduced gradients differ ({share}, {where}); the ranks have drifted apart")
    return said


def _stored_as(rows: Sequence[TensorHistory]) -> list[TensorColumn]:
    """A word for what is stored, where that is not values everywhere."""
    merged = max(row.info.merged for row in rows)
    word = "sketch" if merged == 1 else f"sketch of {merged} steps"
    return (
        [TensorColumn("stored", [word if row.info.sketches else "values" for row in rows], 6)]
        if any(row.info.sketches for row in rows)
        else []
    )


def _columns(rows: Sequence[TensorHistory], encoding: str) -> list[TensorColumn]:
    infos = [row.info for row in rows]
    parts = [row.stored / row.most if row.stored < row.most else 1.0 for row in rows]
    sampled = [TensorColumn("kept", [f"{part:.1%}" for part in parts], 7)] if min(parts) < 1 else []
    return [
        *name_columns([literal(info.name, encoding) for info in infos], infos),
        TensorColumn("shape", [row.shape for row in rows], 7),
        *sampled,
        *_stored_as(rows),
        TensorColumn("dtype", [literal(info.dtype, encoding) for info in infos], 10),
        TensorColumn("steps", [str(row.steps) for row in rows], 6),
        TensorColumn("norm first", [number(row.norms[0]) for row in rows], 5),
        TensorColumn("norm last", [number(row.norms[-1]) for row in rows], 4),
        TensorColumn("largest", [number(row.absmax) for row in rows], 9),
        TensorColumn("zeros", [f"{row.zeros:.1%}" for row in rows], 8),
        TensorColumn("not finite", [str(row.nonfinite) for row in rows], 2),
        TensorColumn("norm over steps", [sparkline(row.norms, _SPARK_WIDTH, encoding) for row in rows], 3, right=False),
    ]


def _print_fits(trace: Trace, infos: Sequence[TensorInfo], settings: InfoSettings) -> None:
    """Fit, and print a table with a verdict, or JSON with every step."""
    from gtrace.fitting.magnitudes import LAWS
    from gtrace.sweep.formats import FormatTrial
    from gtrace.sweep.laws import follow_laws, judge, verdict_sentences
    from gtrace.trace.choose import choose_steps

    chosen = choose_steps(trace, infos, settings.steps)
    layers: list[LayerLaws] = []
    formats: list[LayerFormats | None] = []
    for info in infos:
        trial = FormatTrial(BITS)
        for layer in follow_laws(trace, [info], chosen, look=trial):
            layers.append(layer)
            formats.append(trial.formats(info))
    verdict = judge(layers)
    if settings.as_json:
        rows = [_fits_json(layer, found) for layer, found in zip(layers, formats, strict=True)]
        print_json(
            {
                "path": trace.path,
                "fingerprint": trace.fingerprint,
                "verdict": verdict_sentences(verdict),
                "mean_ks": verdict.distances,
                "nearest": verdict.nearest,
                "tensors": rows,
            }
        )
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
    if not settings.full:
        places = sorted(sorted(range(every), key=lambda k: -layers[k].info.size)[:FEW_ROWS])
        layers, formats = [layers[k] for k in places], [formats[k] for k in places]
    means = [layer.mean_distances for layer in layers]
    columns = [
        *name_columns([literal(layer.info.name, encoding) for layer in layers], [layer.info for layer in layers]),
        TensorColumn("non- zero", [f"{float(layer.counts.mean()):.0f}" for layer in layers], 8),
        TensorColumn("nearest law", [layer.best or "-" for layer in layers], 1, right=False),
        *(TensorColumn(f"KS {name}", [_three(mean[name]) for mean in means], _RANKS.get(name, 7)) for name in LAWS),
        TensorColumn("mu log2", [number(_mean(layer.mu_log2)) for layer in layers], 3),
        TensorColumn("sigma log2", [number(_mean(layer.sigma_log2)) for layer in layers], 1),
        TensorColumn("sigma over steps", [_spark(layer.sigma_log2, encoding) for layer in layers], 3, right=False),
        *(
            TensorColumn(f"FP{bits} max", [str(found.formats[k].format) if found else "-" for found in formats], 2)
            for k, bits in enumerate(BITS)
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


def _three(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _finite(values: NDArray[np.float64]) -> list[float]:
    return [value for value in values.tolist() if math.isfinite(value)]


def _mean(values: NDArray[np.float64]) -> float:
    known = _finite(values)
    return sum(known) / len(known) if known else math.nan


def _spark(values: NDArray[np.float64], encoding: str) -> str:
    return sparkline(values.tolist(), _SPARK_WIDTH, encoding)
