"""Numbers about recorded steps, from what a trace keeps beside the gradients, named as trackers show them."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from gtrace.trace.format import SECOND_MOMENT, Rows, StreamKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from gtrace.trace.reader import Trace


def numbers_of(key: StreamKey, names: Sequence[str], rows: Rows) -> Iterator[tuple[dict[str, float], int]]:
    """The numbers about some recorded steps of a stream that has tensors of these names, by column.

    Yields:
        numbers and their step, nothing for second moments: ``loss``, ``lr``, ``clip_norm``; ``norm``, of the whole
        gradient and by layer, infinite if some values are not finite; ``energy_share``, the part of the squared norm
        that a layer has; with ``--noise`` also ``noise_share``, the variance of the gradient over its squared norm.
        NaN means unknown.
    """
    if key.kind == SECOND_MOMENT:
        return
    kind, optimizer = key.kind if key.kind != "weight" else "", f"opt{key.optimizer}" if key.optimizer else ""
    start = "/".join(filter(None, ("gtrace/capture", kind, optimizer)))
    layers = [name.rpartition(".")[0] or name for name in names]
    energies, variances = _energies(rows), _variances(rows)
    for row, step in enumerate(rows.steps.tolist()):
        numbers = {name: float(rows.scalars[name][row]) for name in ("loss", "lr", "clip_norm")}
        parts: dict[str, float] = defaultdict(float)
        there = np.flatnonzero(rows.statistics["present"][row])
        for column in there.tolist():
            parts[layers[column]] += float(energies[row, column])
        energy = math.fsum(parts.values())
        numbers["norm"] = math.sqrt(energy)
        for layer, part in parts.items():
            numbers[f"norm/{layer}"] = math.sqrt(part)
            numbers[f"energy_share/{layer}"] = part / energy if 0 < energy < math.inf else math.nan
        if variances is not None and 0 < energy < math.inf:
            numbers["noise_share"] = float(variances[row, there].sum()) / energy
        yield {f"{start}/{name}": value for name, value in numbers.items()}, step


def numbers_of_trace(trace: Trace) -> Iterator[tuple[dict[str, float], int]]:
    """:func:`numbers_of` all steps of the first rank, optimizer by optimizer."""
    for key in trace.streams:
        infos = [info for info in trace.tensors if info.stream == key]
        if key.rank or not infos:
            continue
        scalars = trace.scalars(**key._asdict())
        steps = scalars.pop("step")
        table: dict[str, NDArray[np.float64]] = {}
        for column, info in enumerate(infos):
            found = trace.statistics(info.name, **key._asdict())
            rows = np.searchsorted(steps, found.pop("step"))
            if info.merged > 1:
                found["norm2"] = found["norm2"] * info.size / np.maximum(found["n_valid"], 1)
            for name, values in {"present": np.ones(rows.size), **found}.items():
                filled = 0.0 if name in ("present", "nonfinite") else math.nan
                table.setdefault(name, np.full((steps.size, len(infos)), filled))[rows, column] = values
        names = [trace.stored_name(info) for info in infos]
        yield from numbers_of(key, names, Rows(steps, scalars, table))


def _energies(rows: Rows) -> NDArray[np.float64]:
    """Squared norms of the gradients, infinite where a value is not finite; of one stored in part, the whole one's."""
    stored, whole = rows.statistics["norm2"], rows.statistics.get("whole_norm2")
    found = stored if whole is None else np.where(np.isnan(whole), stored, whole)
    return np.where(rows.statistics["nonfinite"] > 0, math.inf, found)


def _variances(rows: Rows) -> NDArray[np.float64] | None:
    """What :func:`gtrace.noise.noise_of_sum` estimates, in numpy alone: training must not load the kernels for it."""
    if "replicas" not in rows.statistics:
        return None
    count, norm2, sum_norm2 = (rows.statistics[f"replicas{what}"] for what in ("", "_norm2", "_sum_norm2"))
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = count / (count - 1) * np.maximum(0.0, norm2 - sum_norm2 / count)
        scale = np.where(sum_norm2 > 0, _energies(rows) / sum_norm2, 1.0)
        return np.where(count >= 2, variance * scale, math.nan)
