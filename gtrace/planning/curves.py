"""Rate-distortion points: bits and error of every codec on every tensor, step by step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.codecs import Codec, codec, expected_on_any
from gtrace.errors import UsageError
from gtrace.noise import Dynamics, NoiseCosts, cost, predict
from gtrace.sweep import EXPECTATION, SweepResult
from gtrace.sweep.run import expectations
from gtrace.sweep.schema import nonfinite_line
from gtrace.types import WHOLE_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.sweep.jobs import Block
    from gtrace.trace import Trace

#: the exact codec, which is always among the options
EXACT = "none"


@dataclass(frozen=True, slots=True)
class Curves:
    """Bits and errors of T tensors (or groups of them) at S steps with each of O codecs.

    Attributes:
        tensors: names.
        members: for each, the tensors in it: itself, or those of a group.
        codecs: specs; the last one is exact.
        steps: ascending.
        sizes: int64[T], elements.
        bits: float64[T, S, O], payload and shared bits of all elements together; NaN if unknown.
        error: float64[T, S, O], expected squared error; NaN likewise.
        energy: float64[T, S], the reference of the errors.
    """

    tensors: tuple[str, ...]
    members: tuple[tuple[str, ...], ...]
    codecs: tuple[str, ...]
    steps: tuple[int, ...]
    sizes: NDArray[np.int64]
    bits: NDArray[np.float64]
    error: NDArray[np.float64]
    energy: NDArray[np.float64]

    @property
    def elements(self) -> int:
        """Number of elements of all tensors."""
        return int(self.sizes.sum())

    def means(self, counts: NDArray[np.float64] | None = None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Bits and relative error, float64[T, O] each: means over steps, infinite for a codec that is not an option.

        The errors of all tensors add up to the relative error of the whole gradient, sum error / sum energy over the
        steps. Bits are those of a step with all tensors: the mean over the steps at which a tensor is present. A codec
        is an option for a tensor if it has numbers at every such step.

        Args:
            counts: float64[S], how often each step counts, or float64[R, S] for several ways at once (the results are
                then [R, T, O]); None for once.
        """
        weights = np.ones(len(self.steps)) if counts is None else np.asarray(counts, np.float64)
        seen = np.isfinite(self.energy)
        known = np.isfinite(self.error) & np.isfinite(self.bits)
        option: NDArray[np.bool_] = np.all(known | ~seen[:, :, None], axis=1)
        option &= np.any(seen, axis=1, keepdims=True)
        share = weights / weights.sum(axis=-1, keepdims=True)
        whole = np.nan_to_num(self.energy).sum(axis=0) @ share.T
        bits, error = (
            np.einsum("...s,tso->...to", share, np.nan_to_num(values), optimize=True)
            for values in (self._bits_of_all(), np.where(known, self.error, 0.0))
        )
        error = error / np.where(whole > 0, whole, 1.0)[..., None, None]
        return np.where(option, bits, np.inf), np.where(option, error, np.inf)

    def _bits_of_all(self) -> NDArray[np.float64]:
        """The bits as if all tensors were present at all steps: of an absent one the mean of its other steps."""
        absent = np.isnan(self.energy)[:, :, None]
        usual = np.where(absent, 0.0, self.bits).sum(axis=1, keepdims=True)
        return np.where(absent, usual / np.maximum(1, (~absent).sum(axis=1, keepdims=True)), self.bits)

    def weighted(self, weights: NDArray[np.float64]) -> Curves:
        """The curves with the errors and energies of each tensor, or of each tensor and step, times a weight."""
        by = np.broadcast_to(weights.reshape(len(self.tensors), -1), self.energy.shape)
        return replace(self, error=self.error * by[:, :, None], energy=self.energy * by)

    def priced(self, ratio: NDArray[np.float64]) -> Curves:
        """The curves with predicted costs instead of errors: noise ratios, which add up over tensors.

        A ratio is a mean over the steps, so a tensor's ratio varies between steps as its error does.

        Args:
            ratio: float64[T, O], of every tensor and codec; NaN if it is not known.
        """
        seen = np.isfinite(self.energy)
        mean = np.where(seen[:, :, None], np.nan_to_num(self.error), 0.0).mean(axis=1)
        factor = np.divide(ratio, mean, out=np.where(ratio == 0, 0.0, np.nan), where=mean > 0)
        shared = np.where(seen, 1 / seen.sum(axis=0), np.nan)
        return replace(self, error=self.error * factor[:, None, :], energy=shared)

    def only(self, codecs: Iterable[str]) -> Curves:
        """The curves of these codecs alone."""
        kept = [place for place, spec in enumerate(self.codecs) if spec in set(codecs)]
        names = tuple(self.codecs[place] for place in kept)
        return replace(self, codecs=names, bits=self.bits[:, :, kept], error=self.error[:, :, kept])

    def joined(self, other: Curves) -> Curves:
        """The curves with codecs from a measurement of some tensors at steps of these; the others lack these codecs.

        Steps at which none of those tensors is present may be missing.
        """
        if not set(other.steps) <= set(self.steps):
            return self
        new = tuple(spec for spec in other.codecs if spec not in self.codecs)
        # The exact codec stays last.
        names = (*self.codecs[:-1], *new, self.codecs[-1])
        rows = [self.tensors.index(name) for name in other.tensors]
        places = np.ix_([self.steps.index(step) for step in other.steps], [names.index(spec) for spec in other.codecs])

        def widened(mine: NDArray[np.float64], theirs: NDArray[np.float64]) -> NDArray[np.float64]:
            added = np.full((*mine.shape[:2], len(new)), np.nan)
            whole = np.concatenate([mine[:, :, :-1], added, mine[:, :, -1:]], axis=2)
            for row, values in zip(rows, theirs, strict=True):
                whole[row][places] = values
            return whole

        return replace(self, codecs=names, bits=widened(self.bits, other.bits), error=widened(self.error, other.error))

    def grouped(self, groups: Mapping[str, str]) -> Curves:
        """The curves with one codec for all tensors of a group (tensor -> its group); the others stay on their own."""
        names = [groups.get(name, name) for name in self.tensors]
        rows = {name: [place for place, one in enumerate(names) if one == name] for name in dict.fromkeys(names)}

        def summed(values: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.stack([values[each].sum(axis=0) for each in rows.values()])

        # A tensor that is absent at a step has no error there.
        absent = np.isnan(self.energy)
        bits, error = self._bits_of_all(), np.where(absent[:, :, None], 0.0, self.error)
        nobody = np.stack([absent[each].all(axis=0) for each in rows.values()])
        return replace(
            self,
            tensors=tuple(rows),
            members=tuple(tuple(m for place in each for m in self.members[place]) for each in rows.values()),
            sizes=np.array([self.sizes[each].sum() for each in rows.values()]),
            bits=summed(bits),
            error=summed(error),
            energy=np.where(nobody, np.nan, summed(np.where(absent, 0.0, self.energy))),
        )


@dataclass(frozen=True, slots=True)
class NoiseRatios:
    """What the noise of each codec on each tensor is predicted to cost, over what the gradient's own noise costs."""

    #: float64[T, O], which adds up over tensors; NaN if it is not known
    ratio: NDArray[np.float64]
    #: float64[O], the ends of the interval over the ratio
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    #: spec -> why its ratio is not known, in one clause
    left_out: dict[str, str]


def noise_ratios(curves: Curves, costs: NoiseCosts, dynamics: Dynamics, steps: int, batch: float) -> NoiseRatios:
    """The noise ratios of the curves' tensors and codecs at a horizon.

    A codec is left out if nothing is predicted for it, e.g. if its bias takes more than 2% of a step's progress.

    Args:
        curves: ungrouped.
        costs: what a sweep of the same tensors measured.
        dynamics: of the optimizer.
        steps: the horizon.
        batch: samples of one gradient.

    Raises:
        UsageError: a tensor that was not measured.
    """
    unknown = [name for name in curves.tensors if name not in costs.tensors]
    if unknown:
        raise UsageError(f"plan: the sweep did not measure what noise in {unknown[0]} costs; sweep it again")
    rows = [costs.tensors.index(name) for name in curves.tensors]
    ratio = np.full((len(curves.tensors), len(curves.codecs)), np.nan)
    ratio[:, -1] = 0.0
    low, high = np.ones((2, len(curves.codecs)))
    left_out = {}
    by_tensor = cost(costs, dynamics, steps, batch)
    for place, spec in enumerate(curves.codecs[:-1]):
        if spec not in costs.codecs:
            left_out[spec] = "its noise was not measured"
            continue
        at = costs.codecs.index(spec)
        found = predict(costs, at, dynamics, steps, batch=batch)
        if not found.known:
            left_out[spec] = found.why
            continue
        # The codec's ratio, split between the tensors as their costs.
        total = by_tensor[at].sum()
        ratio[:, place] = np.maximum(0.0, by_tensor[at, rows]) * (found.ratio / total if total > 0 else 0.0)
        if found.ratio > 0:
            low[place], high[place] = found.low / found.ratio, found.high / found.ratio
    return NoiseRatios(ratio, low, high, left_out)


def measure(
    trace: Trace,
    codecs: Sequence[Codec],
    *,
    steps: Sequence[int] | None = None,
    tensors: Sequence[str] | None = None,
    **settings: Any,
) -> tuple[Curves, list[str]]:
    """The curves of a trace from closed forms: nothing is encoded. The second result is a list of warnings.

    Codecs that rotate and then know their error, whatever the values are, need no look at the trace at all.

    Args:
        trace: with values or sketches.
        codecs: the options.
        steps: only these.
        tensors: globs of those that are planned.
        settings: see :func:`gtrace.sweep.run.expectations`.

    Raises:
        UsageError: a codec without closed forms, or one over the whole model; an unknown tensor or step.
        TraceError: the trace cannot be read.
    """
    rotated = [item for item in codecs if expected_on_any(item, 1) is not None]
    # Something must look at the energies.
    codecs = [item for item in codecs if item not in rotated] or [codec(EXACT)]
    needed = {**_COLUMNS, "note": object}
    # Without any rows, the columns are empty.
    parts: list[Mapping[str, Any]] = [dict.fromkeys(needed, ())]

    def sink(block: Block) -> None:
        rows = [(row, [row["codec"]]) for row in block.rows]
        tables = [(one.columns, [identity["codec"] for identity in one.identities]) for one in block.tables]
        for columns, specs in (*rows, *tables):
            parts.append({name: specs if name == "codec" else columns.get(name) for name in needed})

    warnings = expectations(trace, codecs, sink, steps=steps, tensors=tensors, **settings)
    columns = {
        name: np.concatenate([np.broadcast_to(np.array(part.get(name), kind), len(part["codec"])) for part in parts])
        for name, kind in needed.items()
    }
    curves = _filled([str(item) for item in codecs], columns, [info.name for info in trace.tensors])
    noted = zip(*(columns[name].tolist() for name in ("tensor", "step", "note")), strict=True)
    return curves.joined(_on_any(curves, rotated)), [*warnings, *nonfinite_line(noted)]


def _on_any(curves: Curves, codecs: Sequence[Codec]) -> Curves:
    """The curves of codecs whose error is a known part of the energy."""
    each = [[expected_on_any(item, size) for item in codecs] for size in curves.sizes.tolist()]
    found = np.array([[(one.bits_payload, one.squared_error) for one in row if one] for row in each])
    bits, error = found.reshape(len(curves.tensors), 1, len(codecs), 2).transpose(3, 0, 1, 2)
    cost = np.where(np.isfinite(curves.energy)[:, :, None], bits * curves.sizes[:, None, None], np.nan)
    lost = error * curves.energy[:, :, None]
    return replace(
        curves,
        codecs=(*map(str, codecs), EXACT),
        bits=np.concatenate([cost, curves.bits[:, :, -1:]], axis=2),
        error=np.concatenate([lost, curves.error[:, :, -1:]], axis=2),
    )


def curves_of(result: SweepResult) -> Curves:
    """The curves of a sweep: expectations, or means over draws if there are none.

    Args:
        result: a sweep of single tensors.

    Raises:
        UsageError: it has no rows of single tensors.
    """
    specs = [spec for spec in dict.fromkeys(result["codec"].tolist()) if not spec.startswith("plan:")]
    keep = np.isin(result["codec"], specs) & (result["tensor"] != WHOLE_MODEL)
    columns = {name: result[name][keep] for name in _COLUMNS}
    expected = result["draw"][keep] == EXPECTATION
    places: dict[tuple[str, int, str], int] = {}
    names = zip(*(columns[name].tolist() for name in ("tensor", "step", "codec")), strict=True)
    cell = np.array([places.setdefault(one, len(places)) for one in names], np.int64)
    # Measured bits and expected error, as in a report.
    for name, wanted in (("bits_total", ~expected), ("squared_error", expected)):
        used = wanted | (np.bincount(cell, wanted) == 0)[cell]
        columns[name] = (np.bincount(cell[used], columns[name][used]) / np.bincount(cell[used]))[cell]
    return _filled(specs, columns)


#: what curves need of rows
_COLUMNS = {"tensor": object, "step": int, "codec": object} | dict.fromkeys(
    ("n", "energy", "squared_error", "bits_total"), float
)


def _filled(specs: Sequence[str], columns: Mapping[str, NDArray[Any]], order: Sequence[str] = ()) -> Curves:
    """The curves of rows in columns: tensors in this order, or as they come. Rows without energy were skipped."""
    there = np.isfinite(columns["energy"])
    tensor, step, codec, n, energy, lost, bits = (columns[name][there] for name in _COLUMNS)
    names = dict.fromkeys(tensor.tolist())
    if not names:
        raise UsageError("plan: there are no finite gradients of single tensors to plan for")
    tensors = tuple(dict.fromkeys([*(name for name in order if name in names), *names]))
    steps = tuple(sorted(set(step.tolist())))
    codecs = (*(one for one in specs if one != EXACT), EXACT)
    t, s, c = (
        np.array([*map({one: place for place, one in enumerate(every)}.__getitem__, values.tolist())])
        for every, values in ((tensors, tensor), (steps, step), (codecs, codec))
    )
    found = np.full((2, len(tensors), len(steps), len(codecs)), np.nan)
    found[:, t, s, -1] = 32.0 * n, np.zeros(len(n))
    found[:, t, s, c] = bits * n, lost
    power = np.full(found.shape[1:3], np.nan)
    power[t, s] = energy
    sizes = np.zeros(len(tensors), np.int64)
    np.maximum.at(sizes, t, n.astype(np.int64))
    return Curves(tensors, tuple((name,) for name in tensors), codecs, steps, sizes, found[0], found[1], power)
