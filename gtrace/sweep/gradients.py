"""A trace as a sweep reads it: single tensors and the whole model, whole or chunk by chunk."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np

from gtrace.buckets import BlockSums, RunningTensorSums
from gtrace.errors import TraceError, UsageError, suggest
from gtrace.kernels.compare import add_values, weighted_sums
from gtrace.kernels.noise import THREE, three_sums
from gtrace.kernels.norms import BLOCK, count_nonfinite, power_sum
from gtrace.metrics import update_weights
from gtrace.noise import Noise, added, noise_of_sums
from gtrace.settings import KINDS
from gtrace.sketch import MomentSketch, PartialSketch
from gtrace.sweep.gradient_noise import Yardstick
from gtrace.sweep.jobs import Totals
from gtrace.sweep.limits import spec_in_chunks
from gtrace.trace.choose import matching, steps_of, wanted_steps
from gtrace.trace.format import SECOND_MOMENT, VALUES
from gtrace.trace.reader import LARGEST_KEPT
from gtrace.trace.rows import rechunk
from gtrace.types import WHOLE_MODEL, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from gtrace.trace import TensorInfo, Trace


Kind: TypeAlias = Literal["weight", "neural", "update", "outer", "momentum"]
#: values whose squares are added up together in the energy of a sum
_PIECE = 1 << 17
#: sketches that one pass makes of a window's steps, some megabytes each until they are finished
_TABLES = 16


class SecondMoments:
    """Adam's running means of squared gradients of one tensor, before each step.

    Args:
        trace: the trace that holds them.
        info: the gradient.

    Attributes:
        steps: steps with known second moments -> the optimizer's step count, NaN if it is unknown.
    """

    def __init__(self, trace: Trace, info: TensorInfo) -> None:
        self._trace, self._place = trace, info.stream._replace(kind=SECOND_MOMENT)._asdict()
        self._name = info.name
        self.steps: dict[int, float] = {}
        for found in trace.tensors:
            names = (info.name, info.name.removeprefix(f"opt{info.optimizer}/"))
            own = found.stream._asdict() == self._place and found.name in names
            if own and found.size == info.size and not found.sketches:
                self._name, self._attrs = found.name, found.attrs
                numbers = trace.statistics(found.name, **self._place)
                unknown = np.full(numbers["step"].size, math.nan)
                counts = numbers.get("optimizer_step", unknown).tolist()
                self.steps = dict(zip(numbers["step"].tolist(), counts, strict=True))
                return

    def weights(self, step: int, values: NDArray[np.float32]) -> NDArray[np.float64]:
        """1 / d^2 of each element of the step's gradient, finite float32[n]; see :func:`update_weights`."""
        return self._of(step, values, self._trace.read(self._name, step, **self._place))

    def pieces(self, step: int, chunk: int, values: Iterator[NDArray[np.float32]]) -> Iterator[NDArray[np.float64]]:
        """The same, ``chunk`` elements at a time."""
        moments = self._trace.read_chunks(self._name, step, chunk, **self._place)
        for part, found in zip(values, moments, strict=True):
            yield self._of(step, part, found)

    def _of(self, step: int, values: NDArray[np.float32], moments: NDArray[np.float32]) -> NDArray[np.float64]:
        decay, eps = self._number("decay", 1.0, 1.0), self._number("eps", 0.0, math.inf)
        return update_weights(values, moments, decay, eps, self.steps[step])

    def _number(self, name: str, default: float, most: float) -> float:
        value = self._attrs.get(name, default)
        if isinstance(value, (int, float)) and 0.0 <= value <= most:
            return float(value)
        raise TraceError(f"{self._trace.path}: {name} of the second moments of {self._name} is not a valid number")


def _choose_kind(trace: Trace, kind: Kind | None) -> Kind:
    there = {info.kind for info in trace.tensors}
    kinds = [known for known in KINDS if known in there]
    if kind is None:
        return cast("Kind", kinds[0] if kinds else "weight")
    if kind not in KINDS:
        raise UsageError(f"--kind: '{kind}' is unknown; {suggest(kind, KINDS)}")
    if kinds and kind not in kinds:
        raise UsageError(f"--kind: the trace has no {KINDS[kind]}, only {' and '.join(map(KINDS.__getitem__, kinds))}")
    return kind


def _choose_tensors(trace: Trace, globs: Sequence[str] | None, kind: Kind) -> list[TensorInfo]:
    # A parameter in several streams (ranks) is swept once, in the first of them.
    infos = list({info.name: info for info in reversed(trace.tensors) if info.kind == kind}.values())[::-1]
    if not globs:
        return infos
    chosen = matching([info.name for info in infos], globs)
    return [info for info in infos if info.name in chosen]


class Gradients:
    """A trace as the engine reads it: its tensors, and ``*``, all of them concatenated in the trace's order.

    Args:
        trace: it may hold several streams, one per optimizer; each tensor is read from its own.
        globs: only tensors whose name matches one of these; None for all.
        kind: only this kind; None for the first of :data:`gtrace.settings.KINDS` that the trace has.
        chunk: elements that are summarized at a time.

    Attributes:
        elements: size of each tensor of this kind, chosen or not, in the trace's order.
        moments: Adam's second moments of the tensors that have them in the trace.
        large: the tensors whose values a trace does not keep from one reading to the next; so is the whole model.

    Raises:
        UsageError: a glob matches nothing, the trace has no gradients of this kind, or a tensor is called ``*``.
    """

    def __init__(self, trace: Trace, globs: Sequence[str] | None, kind: Kind | None, chunk: int) -> None:
        self._trace = trace
        self._chunk = chunk
        self.kind: Kind = _choose_kind(trace, kind)
        self.infos = _choose_tensors(trace, globs, self.kind)
        if any(info.name == WHOLE_MODEL for info in self.infos):
            raise UsageError("--tensors: a sweep calls the whole model '*'; leave out the tensor of this name: '[!*]*'")
        self.elements = {info.name: info.size for info in _choose_tensors(trace, None, self.kind)}
        others = {(info.kind, info.name) for info in trace.tensors if info.kind != self.kind}
        self.left_out = dict(Counter(other for other, _ in sorted(others) if other != SECOND_MOMENT))
        self.steps = {info.name: tuple(steps_of(trace, info).tolist()) for info in self.infos}
        self._streams = {info.name: info.stream._asdict() for info in self.infos}
        self._sketched = {info.name: bool(info.sketches) for info in self.infos}
        self._sizes = {info.name: info.size for info in self.infos}
        #: (tensor, step) -> what a pass over a window found
        self._ahead: dict[tuple[str, int], tuple[Totals, int, dict[SummarySpec, MomentSketch]]] = {}
        self.large = {info.name for info in self.infos if VALUES.itemsize * info.size > LARGEST_KEPT} | {WHOLE_MODEL}
        # They are the divisors of gradients, not of what an optimizer made of them.
        recorded = self.kind == "weight" and any(info.kind == SECOND_MOMENT for info in trace.tensors)
        moments = {info.name: SecondMoments(trace, info) for info in self.infos if recorded}
        self.moments = {name: found for name, found in moments.items() if found.steps}
        self._present = {name: frozenset(steps) for name, steps in self.steps.items()}
        self.yardstick = Yardstick(trace, self.infos, chunk)

    def size(self, name: str) -> int:
        """The largest size of a tensor, or of the whole model, over its steps."""
        return sum(self._sizes.values()) if name == WHOLE_MODEL else self._sizes[name]

    @property
    def all_steps(self) -> frozenset[int]:
        """Steps at which any of the tensors is present."""
        return frozenset[int]().union(*self._present.values())

    def choose(self, steps: Sequence[int] | None) -> frozenset[int]:
        """Those of ``steps`` that the trace has; all of its steps for None.

        Raises:
            UsageError: it has none of them.
            TraceError: it has no steps at all.
        """
        return wanted_steps(self._trace, self.all_steps, steps)

    def reader(self, name: str) -> Callable[[int], NDArray[np.float32]]:
        """A function that reads a tensor at a step, or the whole model's gradient; not to be written."""
        if name != WHOLE_MODEL:
            return partial(self._trace.read, name, copy=False, **self._streams[name])
        readers = {part: self.reader(part) for part in self._present}

        def read(step: int) -> NDArray[np.float32]:
            parts = [readers[part](step) for part in self._parts(step)]
            return np.concatenate(parts) if parts else np.empty(0, np.float32)

        return read

    def sketch(self, name: str, step: int, spec: SummarySpec) -> MomentSketch:
        """The sketch of a tensor, or of the whole model: stored, summed from stored ones, or made from values.

        Non-finite values are taken as zero.
        """
        own = spec._replace(scope="tensor")
        if name == WHOLE_MODEL:
            return replace(
                reduce(operator.add, [self.sketch(part, step, own) for part in self._parts(step)]), spec=spec
            )
        if self._sketched[name]:
            sketch = self._trace.sketch_row(name, step, [own], **self._streams[name]).sketches[0]
            bad = sketch.nonfinite
            return replace(sketch, spec=spec, zeros=sketch.zeros + bad, size=sketch.size + bad, nonfinite=0)
        if self._sizes[name] > self._chunk and spec_in_chunks(spec, self._chunk):
            return self.scan(name, step, [spec])[2][spec]
        values = self.reader(name)(step)
        finite = np.isfinite(values)
        return MomentSketch.from_spec(values if finite.all() else np.where(finite, values, np.float32(0)), spec)

    def scan(
        self, name: str, step: int, specs: Sequence[SummarySpec]
    ) -> tuple[Totals, int, dict[SummarySpec, MomentSketch]]:
        """Totals, number of non-finite values, and sketches, in one pass that holds one chunk of values at a time.

        The sketches are sums over chunks, see :func:`gtrace.sweep.limits.spec_in_chunks`. Non-finite values count as
        zero. Clipping and norms of the whole tensor need passes of their own before the sketches.
        """
        ahead = self._ahead.get((name, step))
        if ahead is not None and ahead[2].keys() >= set(specs):
            return ahead
        found = _Scan(self._partial(name, step, specs))
        for piece in self._pieces(name, step, self.piece(spec.bucket_size for spec in specs)):
            found.add(piece)
        return found.finish()

    def ahead(self, name: str, step: int) -> Totals | None:
        """The totals of a step that :meth:`energy_of_sum` read ahead, if all its values are finite."""
        totals, bad, _ = self._ahead.get((name, step), (None, 0, {}))
        return None if bad else totals

    def forget(self, name: str) -> None:
        """Drop what was read ahead of a tensor."""
        for key in [key for key in list(self._ahead) if key[0] == name]:
            self._ahead.pop(key, None)

    def _partial(self, name: str, step: int, specs: Sequence[SummarySpec]) -> dict[SummarySpec, PartialSketch]:
        return PartialSketch.each(specs, lambda: self.chunks(name, step, self.piece()))

    def piece(self, multiples: Iterable[int | None] = ()) -> int:
        """How many values to take at a time: a multiple of these, at most a chunk, and few enough for a cache."""
        whole = math.lcm(*(multiple or 1 for multiple in multiples))
        return whole * max(1, min(BLOCK, self._chunk) // whole)

    def chunks(self, name: str, step: int, size: int) -> Iterator[NDArray[np.float32]]:
        """Values of a tensor or the whole model, ``size`` at a time; non-finite ones become zero."""
        for piece in self._pieces(name, step, size):
            yield np.where(np.isfinite(piece), piece, np.float32(0)) if count_nonfinite(piece) else piece

    def _weighing(self, name: str, step: int) -> list[tuple[str, SecondMoments]] | None:
        """The tensors of ``name`` with their second moments; None if some of these are unknown at a step."""
        parts = self._parts(step) if name == WHOLE_MODEL else [name]
        known = all(part in self.moments and step in self.moments[part].steps for part in parts)
        return [(part, self.moments[part]) for part in parts] if known else None

    def update_weights(self, name: str, step: int, values: NDArray[np.float32]) -> NDArray[np.float64] | None:
        """How much each element of :meth:`read` (finite) moves Adam's update; None if that is unknown."""
        parts = self._weighing(name, step)
        if parts is None:
            return None
        found, start = np.empty(values.size), 0
        for part, moments in parts:
            stop = start + self._sizes[part]
            found[start:stop] = moments.weights(step, values[start:stop])
            start = stop
        return found

    def weighted_chunks(
        self, name: str, step: int, size: int
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float64] | None]]:
        """Each chunk of :meth:`chunks` with its :meth:`update_weights`."""
        parts = self._weighing(name, step)
        if parts is None:
            return zip(self.chunks(name, step, size), itertools.repeat(None))
        weights = (
            piece for part, moments in parts for piece in moments.pieces(step, size, self.chunks(part, step, size))
        )
        return zip(self.chunks(name, step, size), rechunk(weights, size), strict=True)

    def weigh(
        self, name: str, step: int, specs: Sequence[SummarySpec]
    ) -> tuple[float, dict[SummarySpec, MomentSketch]] | None:
        """sum w g^2 and weighted sketches, in one pass over chunks like :meth:`scan`; None without weights."""
        if self._weighing(name, step) is None:
            return None
        sketches = self._partial(name, step, specs)
        total = BlockSums(weighted_sums, 2)
        for values, weights in self.weighted_chunks(name, step, self.piece(spec.bucket_size for spec in specs)):
            assert weights is not None
            total.add(values, values, weights)
            for sketch in sketches.values():
                sketch.add(values, weights)
        return float(total.finish()[1]), {spec: sketch.finish() for spec, sketch in sketches.items()}

    def have_sum(self, name: str, steps: Sequence[int]) -> bool:
        """Whether gradients at several steps can be added: those of the whole model if they are of the same tensors."""
        return name != WHOLE_MODEL or len({tuple(self._parts(step)) for step in steps}) == 1

    def energy_of_sum(
        self, name: str, steps: Sequence[int], *, zero: bool, specs: Sequence[SummarySpec] | None = None
    ) -> float | None:
        """||sum of a tensor's gradients at several steps||^2, a small piece of each in memory at a time.

        The same pass over a large tensor estimates the noise at these steps, for :meth:`noise`.

        Args:
            name: a tensor, or ``*`` for the whole model.
            steps: steps at which it is present.
            zero: take non-finite values as zero.
            specs: the sketches of these steps that :meth:`scan` will be asked for, if it will be.

        Returns:
            None if some of the model's tensors are absent at some steps, or if ``zero`` is off and some values are not
            finite.
        """
        if not self.have_sum(name, steps):
            return None
        fits = specs is not None and all(
            BLOCK % spec.bucket_size == 0 if spec.bucket_size else spec.norm == "none" for spec in specs
        )
        if not fits or len(specs or ()) * len(steps) > _TABLES:
            specs = None
        scans = {step: _Scan(self._partial(name, step, specs or ())) for step in steps}
        sums = {middle: np.zeros(THREE) for middle in self.yardstick.middles(name, steps) if name in self.large}
        around = sorted({*steps, *(middle + off for middle in sums for off in (-1, 1))})
        energy = 0.0
        for pieces in zip(*(self._pieces(name, step, BLOCK) for step in around), strict=True):
            at = dict(zip(around, pieces, strict=True))
            for middle, found in sums.items():
                three_sums(at[middle - 1], at[middle], at[middle + 1], found)
            total = np.zeros(pieces[0].size)
            for step, scan in scans.items():
                add_values(scan.add(at[step]), total)
            energy = energy_in_pieces(total, energy)
        if sums:
            self.yardstick.learn(name, {middle: noise_of_sums(found) for middle, found in sums.items()})
        if specs is not None:
            self.forget(name)
            self._ahead.update(((name, step), scan.finish()) for step, scan in scans.items())
        return energy if zero or not any(scan.bad for scan in scans.values()) else None

    def _pieces(self, name: str, step: int, chunk: int) -> Iterator[NDArray[np.float32]]:
        if name != WHOLE_MODEL:
            return self._trace.read_chunks(name, step, chunk, **self._streams[name])
        return rechunk((piece for part in self._parts(step) for piece in self._pieces(part, step, chunk)), chunk)

    def totals(self, name: str, step: int) -> tuple[Totals, int]:
        """Size, energy and mean magnitude, and the number of non-finite values."""
        if name != WHOLE_MODEL and not self._sketched[name]:
            return self.scan(name, step, [])[:2]
        if name != WHOLE_MODEL:
            row = self._trace.sketch_row(name, step, [], **self._streams[name])
            return Totals(row.size, row.norm2, row.norm1 / max(1, row.size)), row.nonfinite
        found = [self.totals(part, step) for part in self._parts(step)]
        size, energy = sum(t.size for t, _ in found), math.fsum(t.energy for t, _ in found)
        mean = math.fsum(t.mean_abs * t.size for t, _ in found) / max(1, size)
        return Totals(size, energy, mean), sum(bad for _, bad in found)

    def whole(self, name: str, step: int) -> Totals:
        """Totals of a tensor that is stored as a sample of blocks; exact if the capture measured them."""
        numbers = self._trace.statistics(name, **self._streams[name])
        place = int(np.searchsorted(numbers["step"], step))
        size, stored = int(numbers["n_total"][place]), int(numbers["n_valid"][place])
        unknown = np.full(numbers["step"].size, math.nan)
        norm1, norm2 = (float(numbers.get(what, unknown)[place]) for what in ("whole_norm1", "whole_norm2"))
        found = self.totals(name, step)[0]
        return Totals(
            size,
            found.energy * size / stored if math.isnan(norm2) else norm2,
            found.mean_abs if math.isnan(norm1) else norm1 / size,
        )

    def bad_in_whole(self, name: str, step: int) -> int:
        """Non-finite values in all of a tensor that is stored as a sample of blocks; 0 if the capture did not count."""
        numbers = self._trace.statistics(name, **self._streams[name])
        counts = numbers.get("whole_nonfinite", np.zeros(numbers["step"].size))
        return int(np.nan_to_num(counts[np.searchsorted(numbers["step"], step)]))

    def noise(self, name: str) -> Callable[[int], Noise | None] | None:
        """A function that estimates the gradient noise of a tensor, or of the whole model, at a step.

        It returns None where the noise is unknown; None instead of it: the noise is unknown at all steps.
        """
        if name != WHOLE_MODEL or not self.yardstick.known:
            return self.yardstick.way(name)
        ways = {part: self.yardstick.way(part) for part in self._present}
        return lambda step: added([None if (way := ways[part]) is None else way(step) for part in self._parts(step)])

    def _parts(self, step: int) -> list[str]:
        """The tensors that are present at a step."""
        return [part for part, steps in self._present.items() if step in steps]


def energy_in_pieces(total: NDArray[np.float64], energy: float = 0.0) -> float:
    """``energy`` + ||total||^2, float64[n], piece after piece in the order of the values."""
    for start in range(0, total.size, _PIECE):
        energy += float(power_sum(total[start : start + _PIECE], 2))
    return energy


class _Scan:
    """Totals, the number of non-finite values and sketches of a tensor that arrives in parts."""

    def __init__(self, sketches: dict[SummarySpec, PartialSketch]) -> None:
        self._sketches, self._sums = sketches, RunningTensorSums()
        self.bad = 0

    def add(self, piece: NDArray[np.float32]) -> NDArray[np.float32]:
        """Add the next part; returns it with zero for values that are not finite."""
        missing = int(count_nonfinite(piece))
        values = np.where(np.isfinite(piece), piece, np.float32(0)) if missing else piece
        self.bad += missing
        self._sums.add(values)
        for sketch in self._sketches.values():
            sketch.add(values)
        return values

    def finish(self) -> tuple[Totals, int, dict[SummarySpec, MomentSketch]]:
        """See :meth:`Gradients.scan`."""
        found = self._sums.finish()
        totals = Totals(found.size, found.energy, found.norm1 / max(1, found.size), found)
        return totals, self.bad, {spec: sketch.finish() for spec, sketch in self._sketches.items()}
