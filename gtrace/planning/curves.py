"""Rate-distortion points: bits and error of every codec on every tensor, step by step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import UsageError
from gtrace.sweep import EXPECTATION
from gtrace.sweep.run import expectations
from gtrace.types import WHOLE_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.codecs import Codec
    from gtrace.sweep import SweepResult
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
        steps. A codec is an option for a tensor if it has numbers at every step at which the tensor is present.

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
            np.einsum("...s,tso->...to", share, np.where(known, values, 0.0), optimize=True)
            for values in (self.bits, self.error)
        )
        error = error / np.where(whole > 0, whole, 1.0)[..., None, None]
        return np.where(option, bits, np.inf), np.where(option, error, np.inf)

    def weighted(self, weights: NDArray[np.float64]) -> Curves:
        """The curves with the errors and energies of each tensor, or of each tensor and step, times a weight."""
        by = np.broadcast_to(weights.reshape(len(self.tensors), -1), self.energy.shape)
        return replace(self, error=self.error * by[:, :, None], energy=self.energy * by)

    def relative(self) -> Curves:
        """The curves with every tensor's errors relative to its own energy at the step, weighted by its elements.

        This is the view of an optimizer that ignores a tensor's scale, such as Adam, whose step of a
        coordinate is its gradient over the root of its mean square.
        """
        with np.errstate(divide="ignore"):
            weights = np.where(self.energy > 0, self.sizes[:, None] / self.energy, 0.0)
        return self.weighted(weights)

    def only(self, codecs: Iterable[str]) -> Curves:
        """The curves of these codecs alone."""
        kept = [place for place, spec in enumerate(self.codecs) if spec in set(codecs)]
        names = tuple(self.codecs[place] for place in kept)
        return replace(self, codecs=names, bits=self.bits[:, :, kept], error=self.error[:, :, kept])

    def joined(self, other: Curves) -> Curves:
        """The curves with codecs from another measurement of some of the tensors; the other tensors lack these codecs.

        Args:
            other: curves of the same steps.
        """
        if other.steps != self.steps:
            return self
        new = tuple(spec for spec in other.codecs if spec not in self.codecs)
        # The exact codec stays last.
        names = (*self.codecs[:-1], *new, self.codecs[-1])
        rows = [self.tensors.index(name) for name in other.tensors]
        columns = [names.index(spec) for spec in other.codecs]

        def widened(mine: NDArray[np.float64], theirs: NDArray[np.float64]) -> NDArray[np.float64]:
            added = np.full((*mine.shape[:2], len(new)), np.nan)
            whole = np.concatenate([mine[:, :, :-1], added, mine[:, :, -1:]], axis=2)
            for row, values in zip(rows, theirs, strict=True):
                whole[row][:, columns] = values
            return whole

        return replace(self, codecs=names, bits=widened(self.bits, other.bits), error=widened(self.error, other.error))

    def grouped(self, groups: Mapping[str, str]) -> Curves:
        """The curves with one codec for all tensors of a group.

        Args:
            groups: tensor -> its group; the others stay on their own.
        """
        names = [groups.get(name, name) for name in self.tensors]
        rows = {name: [place for place, one in enumerate(names) if one == name] for name in dict.fromkeys(names)}

        def summed(values: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.stack([values[each].sum(axis=0) for each in rows.values()])

        # A tensor that is absent at a step has no bits and no error there.
        absent = np.isnan(self.energy)
        bits, error = (np.where(absent[:, :, None], 0.0, values) for values in (self.bits, self.error))
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


def measure(
    trace: Trace,
    codecs: Sequence[Codec],
    *,
    steps: Sequence[int] | None = None,
    tensors: Sequence[str] | None = None,
    **settings: Any,
) -> tuple[Curves, list[str]]:
    """The curves of a trace from closed forms: nothing is encoded. The second result is a list of warnings.

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
    table = _Filled([str(item) for item in codecs])
    warnings: list[str] = []

    def sink(block: Block) -> None:
        warnings.extend(block.warnings)
        for found in block.tables:
            specs = [identity["codec"] for identity in found.identities]
            table.add(found.columns["tensor"], found.columns["step"], specs, found.columns)
        for row in block.rows:
            table.add(row["tensor"], row["step"], [row["codec"]], row)

    warnings[:0] = expectations(trace, codecs, sink, steps=steps, tensors=tensors, **settings)
    return table.curves([info.name for info in trace.tensors]), warnings


def curves_of(result: SweepResult) -> Curves:
    """The curves of a sweep: expectations, or means over draws if there are none.

    Args:
        result: a sweep of single tensors.

    Raises:
        UsageError: it has no rows of single tensors.
    """
    specs = [spec for spec in dict.fromkeys(result["codec"].tolist()) if not spec.startswith("plan:")]
    table = _Filled(specs)
    wanted = ("n", "energy", "bits_total", "squared_error")
    cells: dict[tuple[str, int, str], dict[bool, list[dict[str, float]]]] = {}
    for tensor, step, spec, draw, *numbers in zip(
        *(result[name].tolist() for name in ("tensor", "step", "codec", "draw", *wanted)), strict=True
    ):
        if tensor != WHOLE_MODEL and not spec.startswith("plan:"):
            kind = cells.setdefault((tensor, step, spec), {})
            kind.setdefault(draw == EXPECTATION, []).append(dict(zip(wanted, numbers, strict=True)))
    for (tensor, step, spec), rows in cells.items():
        # Measured bits and expected error, as in a report.
        drawn, expected = rows.get(False, []), rows.get(True, [])
        bits = np.mean([row["bits_total"] for row in drawn or expected])
        lost = np.mean([row["squared_error"] for row in expected or drawn])
        table.add(tensor, step, [spec], {**(expected or drawn)[0], "bits_total": bits, "squared_error": lost})
    return table.curves()


class _Filled:
    """Collects rows until their tensors and steps are known."""

    def __init__(self, specs: Sequence[str]) -> None:
        self._specs = [spec for spec in specs if spec != EXACT] + [EXACT]
        self._places = {spec: place for place, spec in enumerate(self._specs)}
        self._cells: dict[tuple[str, int], tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        self._energy: dict[tuple[str, int], tuple[float, int]] = {}

    def add(self, tensor: str, step: int, specs: Sequence[str], row: Mapping[str, Any]) -> None:
        """Add the numbers of codecs on a tensor at a step; a row without numbers was skipped."""
        size, energy = int(row["n"]), row.get("energy")
        if energy is None or not np.isfinite(energy):
            return
        lost = np.asarray(row.get("squared_error"), np.float64)
        self._energy[tensor, step] = float(energy), size
        if (tensor, step) not in self._cells:
            self._cells[tensor, step] = np.full(len(self._specs), np.nan), np.full(len(self._specs), np.nan)
            for cell, exact in zip(self._cells[tensor, step], (32.0 * size, 0.0), strict=True):
                cell[-1] = exact
        at = [self._places[spec] for spec in specs]
        bits, error = self._cells[tensor, step]
        bits[at], error[at] = np.multiply(row["bits_total"], size), lost

    def curves(self, order: Sequence[str] = ()) -> Curves:
        """The curves of all added numbers.

        Args:
            order: order of the tensors; by default the order in which they were added.

        Raises:
            UsageError: nothing was added.
        """
        there = dict.fromkeys(tensor for tensor, _ in self._cells)
        if not there:
            raise UsageError("plan: there are no finite gradients of single tensors to plan for")
        tensors = tuple(dict.fromkeys([*(name for name in order if name in there), *there]))
        steps = tuple(sorted({step for _, step in self._cells}))
        shape = (len(tensors), len(steps), len(self._specs))
        bits, error, energy = np.full(shape, np.nan), np.full(shape, np.nan), np.full(shape[:2], np.nan)
        sizes = np.zeros(len(tensors), np.int64)
        row, column = ({name: place for place, name in enumerate(names)} for names in (tensors, steps))
        for (tensor, step), cell in self._cells.items():
            t, s = row[tensor], column[step]
            bits[t, s], error[t, s] = cell
            energy[t, s], size = self._energy[tensor, step]
            sizes[t] = max(sizes[t], size)
        members = tuple((name,) for name in tensors)
        return Curves(tensors, members, tuple(self._specs), steps, sizes, bits, error, energy)
