"""A trace as a sweep reads it: tensors and the whole model, whole or chunk by chunk."""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from gtrace.buckets import bucket_scales, whole_scale
from gtrace.codecs import TensorSums
from gtrace.errors import UsageError, suggest
from gtrace.kernels.norms import count_nonfinite, power_sum
from gtrace.metrics import Blocks
from gtrace.sketch import MomentSketch, PartialSketch
from gtrace.sweep.large import spec_in_chunks
from gtrace.sweep.replay import Totals
from gtrace.sweep.sampled import Whole
from gtrace.sweep.sketched import total
from gtrace.trace.pieces import rechunk
from gtrace.types import WHOLE_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from gtrace.trace import TensorInfo, Trace
    from gtrace.types import SummarySpec

Kind: TypeAlias = Literal["weight", "neural"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def _choose_kind(trace: Trace, kind: Kind | None) -> Kind:
    kinds = {info.kind for info in trace.tensors}
    if kind is None:
        return "neural" if kinds == {"neural"} else "weight"
    if kind not in KINDS:
        raise UsageError(f"--kind: '{kind}' is unknown; {suggest(kind, KINDS)}")
    if kinds and kind not in kinds:
        raise UsageError(f"--kind: the trace holds no {kind} gradients, only {' and '.join(sorted(kinds))} ones")
    return kind


def _choose_tensors(trace: Trace, globs: Sequence[str] | None, kind: Kind) -> list[TensorInfo]:
    # The same parameter in several streams (ranks) is swept once, in the first of them.
    infos = list({info.name: info for info in reversed(trace.tensors) if info.kind == kind}.values())[::-1]
    if not globs:
        return infos
    names = [info.name for info in infos]
    for glob in globs:
        if not fnmatch.filter(names, glob):
            raise UsageError(f"--tensors: no tensor matches '{glob}'; {suggest(glob, names)}")
    return [info for info in infos if any(fnmatch.fnmatchcase(info.name, glob) for glob in globs)]


class Gradients:
    """A trace as the engine reads it: its tensors, and under ``*`` all of them end to end, in the trace's order.

    Args:
        trace: it may hold several streams, one per optimizer; each tensor is read from its own.
        globs: only tensors whose name matches one of these; None for all.
        kind: only gradients of this kind; None for those of weights where there are any.
        chunk: elements that are summarized at a time.

    Attributes:
        elements: of each tensor of this kind, whether it was chosen or not, in the trace's order.

    Raises:
        UsageError: a glob that matches nothing, or a kind that is not there.
    """

    def __init__(self, trace: Trace, globs: Sequence[str] | None, kind: Kind | None, chunk: int) -> None:
        self._trace = trace
        self._chunk = chunk
        self.kind: Kind = _choose_kind(trace, kind)
        self.infos = _choose_tensors(trace, globs, self.kind)
        self.elements = {info.name: info.size for info in _choose_tensors(trace, None, self.kind)}
        others = {(info.kind, info.name) for info in trace.tensors if info.kind != self.kind}
        self.left_out = dict(Counter(other for other, _ in sorted(others)))
        self.steps = {info.name: tuple(trace.steps(info.name, **_stream(info)).tolist()) for info in self.infos}
        self._streams = {info.name: _stream(info) for info in self.infos}
        self._sketched = {info.name: bool(info.sketches) for info in self.infos}
        self._sizes = {info.name: info.size for info in self.infos}
        self._present = {name: frozenset(steps) for name, steps in self.steps.items()}

    def size(self, name: str) -> int:
        """The most elements that a tensor, or the whole model, has at a step."""
        return sum(self._sizes.values()) if name == WHOLE_MODEL else self._sizes[name]

    @property
    def all_steps(self) -> frozenset[int]:
        """Steps at which any of the tensors is present."""
        return frozenset[int]().union(*self._present.values())

    def choose(self, steps: Sequence[int] | None) -> frozenset[int]:
        """Those of the steps that are there; all of them for None.

        Raises:
            UsageError: none is.
        """
        there = self.all_steps
        chosen = there if steps is None else there.intersection(steps)
        if steps is not None and not chosen:
            span = f"it has {len(there)} steps from {min(there)} to {max(there)}" if there else "it has no steps"
            raise UsageError(f"--steps: none of these steps is in the trace; {span}")
        return chosen

    def read(self, name: str, step: int) -> NDArray[np.float32]:
        """A tensor at a step, or the whole model's gradient."""
        if name != WHOLE_MODEL:
            return self._trace.read(name, step, **self._streams[name])
        parts = [self.read(part, step) for part in self._parts(step)]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def sketch(self, name: str, step: int, spec: SummarySpec) -> MomentSketch:
        """The sketch of a tensor, or of the whole model: stored, a sum of stored ones, or of the values.

        Non-finite values are taken as zero.
        """
        own = spec._replace(scope="tensor")
        if name == WHOLE_MODEL:
            return replace(total([self.sketch(part, step, own) for part in self._parts(step)]), spec=spec)
        if self._sketched[name]:
            sketch = self._trace.sketch_row(name, step, [own], **self._streams[name]).sketches[0]
            bad = sketch.nonfinite
            return replace(sketch, spec=spec, zeros=sketch.zeros + bad, size=sketch.size + bad, nonfinite=0)
        if self._sizes[name] > self._chunk and spec_in_chunks(spec, self._chunk):
            return self.scan(name, step, [spec])[2][0]
        values = self.read(name, step)
        finite = np.isfinite(values)
        return MomentSketch.from_spec(values if finite.all() else np.where(finite, values, np.float32(0)), spec)

    def scan(self, name: str, step: int, specs: Sequence[SummarySpec]) -> tuple[Totals, int, list[MomentSketch]]:
        """Totals, how many values are not finite, and sketches, in one pass that holds one chunk of values at a time.

        The sketches are sums over chunks: what ``large.in_chunks`` admits. Non-finite values are taken as zero. Norms
        of the whole tensor take a pass before the one over its bins.
        """
        sums = self._sums(name, step) if any(_one_bucket(spec) for spec in specs) else None
        scales = [whole_scale(spec.norm, *sums[1:]) if sums and _one_bucket(spec) else None for spec in specs]
        sketches = [PartialSketch(spec, scale) for spec, scale in zip(specs, scales, strict=True)]
        running, bad = _Sums(), 0
        for piece in self._pieces(name, step):
            missing = int(count_nonfinite(piece))
            values = np.where(np.isfinite(piece), piece, np.float32(0)) if missing else piece
            bad += missing
            running.add(values)
            for sketch in sketches:
                sketch.add(values)
        found = running.finish()
        return (
            Totals(found.size, found.energy, found.norm1 / max(1, found.size), found),
            bad,
            [s.finish() for s in sketches],
        )

    def _sums(self, name: str, step: int) -> TensorSums:
        running = _Sums()
        for values in self.chunks(name, step):
            running.add(values)
        return running.finish()

    def chunks(self, name: str, step: int) -> Iterator[NDArray[np.float32]]:
        """A tensor's values, or the whole model's, a chunk at a time, non-finite ones taken as zero."""
        for piece in self._pieces(name, step):
            yield np.where(np.isfinite(piece), piece, np.float32(0)) if count_nonfinite(piece) else piece

    def _pieces(self, name: str, step: int) -> Iterator[NDArray[np.float32]]:
        if name != WHOLE_MODEL:
            return self._trace.read_chunks(name, step, self._chunk, **self._streams[name])
        return rechunk((piece for part in self._parts(step) for piece in self._pieces(part, step)), self._chunk)

    def totals(self, name: str, step: int) -> tuple[Totals, int]:
        """Size, energy and mean magnitude, and how many values are not finite."""
        if name != WHOLE_MODEL and not self._sketched[name]:
            return self.scan(name, step, [])[:2]
        if name != WHOLE_MODEL:
            row = self._trace.sketch_row(name, step, [], **self._streams[name])
            return Totals(row.size, row.norm2, row.norm1 / max(1, row.size)), row.nonfinite
        found = [self.totals(part, step) for part in self._parts(step)]
        size, energy = sum(t.size for t, _ in found), math.fsum(t.energy for t, _ in found)
        mean = math.fsum(t.mean_abs * t.size for t, _ in found) / max(1, size)
        return Totals(size, energy, mean), sum(bad for _, bad in found)

    def whole(self, name: str, step: int) -> Whole:
        """What is known of a tensor of which a sample of blocks is stored, exactly where the capture found it out."""
        numbers = self._trace.statistics(name, **self._streams[name])
        place = int(np.searchsorted(numbers["step"], step))
        size, stored = int(numbers["n_total"][place]), int(numbers["n_valid"][place])
        unknown = np.full(numbers["step"].size, math.nan)
        norm1, norm2 = (float(numbers.get(what, unknown)[place]) for what in ("whole_norm1", "whole_norm2"))
        found = self.totals(name, step)[0]
        return Whole(
            size,
            found.energy * size / stored if math.isnan(norm2) else norm2,
            found.mean_abs if math.isnan(norm1) else norm1 / size,
        )

    def _parts(self, step: int) -> list[str]:
        """The tensors that are present at a step."""
        return [part for part, steps in self._present.items() if step in steps]


class _Sums:
    """Sums over values that arrive in parts, the same as over all of them at once."""

    def __init__(self) -> None:
        self._blocks = Blocks(1)
        self._size, self._norm1, self._energy, self._largest = 0, 0.0, 0.0, 0.0

    def add(self, values: NDArray[np.float32]) -> None:
        """The next part, finite float32[n]."""
        self._size += values.size
        for (block,) in self._blocks.add(values):
            self._block(block)

    def _block(self, block: NDArray[np.float32]) -> None:
        self._norm1 += float(power_sum(block, 1))
        self._energy += float(power_sum(block, 2))
        self._largest = max(self._largest, float(bucket_scales(block, "linf", None)[0]))

    def finish(self) -> TensorSums:
        """What they come to."""
        for (block,) in self._blocks.rest():
            self._block(block)
        return TensorSums(self._size, self._norm1, self._energy, self._largest)


def _one_bucket(spec: SummarySpec) -> bool:
    return spec.bucket_size is None and spec.norm != "none"


def _stream(info: TensorInfo) -> dict[str, Any]:
    return {"kind": info.kind, "optimizer": info.optimizer, "rank": info.rank}
