"""Tensors that a trace stores as moment sketches instead of values: which sketches, and the bytes of a row.

A row is ``_HEAD`` (magic, number of sketches, sum of magnitudes), the length of each sketch as uint32, and the
sketches one after the other (``gtrace.coding.sketches``), in the order that the tensor's attributes name.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtrace.errors import PayloadError, TraceError, UsageError, suggest
from gtrace.trace.rows import row_statistics
from gtrace.types import NORMS, STORED_MANTISSA, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.sketch import MomentSketch
    from gtrace.trace.format import TensorSpec


#: the sketches that all codecs with closed forms need at their default parameters
DEFAULT_SKETCHES = "l2:8192,linf:8192,none"

_MAGIC = b"GTR1"
_HEAD = struct.Struct("<4sId")
_LENGTH = np.dtype("<u4")
_MOST_SKETCHES = 32
_MOST_MANTISSA = 10

# Bytes of a sketch at six bits of mantissa, with and without weights of its own. Gradients take a half to two thirds
# of this; a lognormal law with a sigma of 4 (35 octaves) as much at 100,000 values and a quarter more at a million.
_WEIGHTED_BYTES, _PLAIN_BYTES = 48 * 1024, 16 * 1024


@dataclass(frozen=True)
class SketchPlan:
    """The sketches that a trace stores of its large tensors.

    Attributes:
        specs: norm and bucket size of each.
        mantissa: bits that distinguish bins within an octave.
        merged: number of consecutive recorded steps in a row.
    """

    specs: tuple[SummarySpec, ...]
    mantissa: int = STORED_MANTISSA
    merged: int = 1

    def __post_init__(self) -> None:
        if not self.specs or len(self.specs) > _MOST_SKETCHES:
            raise UsageError(f"sketches: {len(self.specs)} per tensor; name 1 to {_MOST_SKETCHES}")
        if len(set(self.specs)) != len(self.specs):
            raise UsageError("sketches: one is named twice")
        if not 0 <= self.mantissa <= _MOST_MANTISSA:
            raise UsageError(f"sketches: {self.mantissa} mantissa bits; choose 0 to {_MOST_MANTISSA}")
        if self.merged < 1:
            raise UsageError(f"sketches: cannot merge {self.merged} steps; give 1 or more")

    @classmethod
    def parse(cls, text: str, mantissa: int = STORED_MANTISSA, merged: int = 1) -> SketchPlan:
        """Read a list of sketches: norm and bucket size, e.g. ``l2:8192,linf:none,none``.

        ``l2`` alone means one bucket, the whole tensor; ``none`` means the plain magnitudes.

        Raises:
            UsageError: an unknown norm, no bucket size, or numbers out of range.
        """
        return cls(tuple(_parse_name(part.strip()) for part in text.split(",")), mantissa, merged)

    @classmethod
    def read(cls, value: object) -> SketchPlan:
        """Undo :meth:`describe`.

        Raises:
            UsageError: it is not a plan.
        """
        found = value if isinstance(value, dict) else {}
        names, mantissa, merged = found.get("sketches"), found.get("mantissa"), found.get("merged", 1)
        fewer = found.get("fewer", {})
        texts = isinstance(names, list) and all(isinstance(name, str) for name in names)
        whole = isinstance(fewer, dict) and all(type(count) is int for count in fewer.values())
        if not texts or not whole or type(mantissa) is not int or type(merged) is not int:
            raise UsageError("not a description of stored sketches")
        assert isinstance(names, list)
        if not all(step.isascii() and step.isdigit() and 0 < fewer[step] < merged for step in fewer):
            raise UsageError("the numbers of merged steps are not valid")
        return cls(tuple(_parse_name(name) for name in names), mantissa, merged)

    def describe(self, fewer: Mapping[int, int] | None = None) -> dict[str, Any]:
        """The plan as JSON values.

        Args:
            fewer: step -> number of steps in its row, if it is not ``merged``.
        """
        plain: dict[str, Any] = {"sketches": [sketch_name(spec) for spec in self.specs], "mantissa": self.mantissa}
        if self.merged > 1:
            plain["merged"] = self.merged
        return plain | ({"fewer": {str(step): count for step, count in fewer.items()}} if fewer else {})

    def stored_bytes(self, size: int) -> int:
        """Estimated bytes of a row of a tensor of ``size`` values: sketches, or values if those are smaller."""
        return min(4 * size, self._sketch_bytes(size))

    def covers(self, size: int) -> bool:
        """Whether tensors of ``size`` values are sketched: only if their values take more room.

        It depends on the size alone, so it is the same at every step, in every process and for all gradients.
        """
        return self._sketch_bytes(size) < 4 * size

    def _sketch_bytes(self, size: int) -> int:
        plain = sum(spec.norm == "none" or (spec.bucket_size or size) >= size for spec in self.specs)
        total = plain * _PLAIN_BYTES + (len(self.specs) - plain) * _WEIGHTED_BYTES
        # At full width the sums within bins are also stored in full precision.
        precision = 2 if self.mantissa == _MOST_MANTISSA else 1
        return math.ceil(total * precision * 2.0 ** (self.mantissa - STORED_MANTISSA))

    def row_width(self) -> int:
        """Upper bound on the bytes of a row of these sketches."""
        from gtrace.coding.sketches import most_bytes

        head = _HEAD.size + _LENGTH.itemsize * len(self.specs)
        return head + sum(most_bytes(spec, self.mantissa) for spec in self.specs)


class SketchRow(NamedTuple):
    """The stored data of one tensor at one step, or at several merged ones.

    Attributes:
        sketches: one per spec of the plan, in its order.
        norm1: sum of the magnitudes of the finite values.
        norm2: sum of their squares.
        absmax: the largest of the magnitudes.
        zeros: values that are 0.
        nonfinite: values that are NaN or infinite.
        size: number of summarized values, non-finite ones included.
    """

    sketches: tuple[MomentSketch, ...]
    norm1: float
    norm2: float
    absmax: float
    zeros: int
    nonfinite: int
    size: int

    @classmethod
    def of(cls, values: NDArray[np.float32], specs: Sequence[SummarySpec]) -> SketchRow:
        """Summarize contiguous float32[n]: one pass for each spec, and one for the other numbers."""
        from gtrace.kernels.norms import power_sum
        from gtrace.sketch import MomentSketch

        numbers = row_statistics(values)
        finite = values[np.isfinite(values)] if numbers.nonfinite else values
        sketches = tuple(MomentSketch.from_spec(values, spec) for spec in specs)
        norm1 = float(power_sum(finite, 1))
        return cls(sketches, norm1, numbers.norm2, numbers.absmax, numbers.zeros, numbers.nonfinite, values.size)

    def merge(self, other: SketchRow) -> SketchRow:
        """The row of both inputs together.

        Raises:
            UsageError: they hold different sketches.
        """
        return SketchRow(
            tuple(mine + theirs for mine, theirs in zip(self.sketches, other.sketches, strict=True)),
            self.norm1 + other.norm1,
            self.norm2 + other.norm2,
            max(self.absmax, other.absmax),
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
            self.size + other.size,
        )

    def pack(self, mantissa: int) -> NDArray[np.uint8]:
        """The row as bytes, without the numbers that a trace stores for every row."""
        from gtrace.coding.sketches import pack_sketch

        packed = [pack_sketch(sketch, mantissa) for sketch in self.sketches]
        lengths = np.array([len(data) for data in packed], _LENGTH)
        head = _HEAD.pack(_MAGIC, len(packed), self.norm1)
        return np.frombuffer(b"".join((head, lengths.tobytes(), *packed)), np.uint8)

    def statistics(self) -> dict[str, float]:
        """The row's numbers in the trace's tables."""
        return {"norm2": self.norm2, "absmax": self.absmax, "zeros": self.zeros, "nonfinite": self.nonfinite}


def sketch_name(spec: SummarySpec) -> str:
    """Norm and bucket size as text.

    >>> [sketch_name(spec) for spec in SketchPlan.parse("l2:8192,linf,none").specs]
    ['l2:8192', 'linf:none', 'none']
    """
    if spec.norm == "none":
        return "none"
    return f"{spec.norm}:{spec.bucket_size or 'none'}"


@functools.cache
def _parse_name(text: str) -> SummarySpec:
    norm, _, bucket = text.partition(":")
    if norm not in NORMS:
        raise UsageError(f"sketch '{text[:40]}': unknown norm; {suggest(norm[:40], NORMS)}; write l2:8192 or none")
    if bucket in ("", "none"):
        return SummarySpec(norm, None)
    if norm == "none":
        raise UsageError(f"sketch '{text[:40]}': without a norm there are no buckets; write none")
    if not (bucket.isascii() and bucket.isdigit() and len(bucket) < 16 and int(bucket)):
        raise UsageError(f"sketch '{text[:40]}': the bucket size must be a positive number; write {norm}:8192")
    return SummarySpec(norm, int(bucket))


def values_of(attrs: Mapping[str, Any], steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of values in the rows of a sketched tensor if no table holds it: int64, one per step."""
    plan = attrs["sketch"]
    counts = np.full(steps.size, plan.get("merged", 1), np.int64)
    for step, count in plan.get("fewer", {}).items():
        counts[steps == int(step)] = count
    counts *= math.prod(attrs["shape"])
    return counts


def stored_bytes(part: Callable[[int], NDArray[np.uint8]], spec: TensorSpec, about: str) -> NDArray[np.uint8]:
    """A row of a sketched tensor; ``part`` reads its k-th chunk, ``about`` names tensor and step in messages.

    Raises:
        TraceError: its first bytes are wrong, or it is longer than the tensor's rows can be.
    """
    data, parts = bytearray(), 0
    while len(data) < (needed := _needed(data, about)):
        if needed > spec.size:
            raise TraceError(f"{about}: sketches of {needed} bytes in a row of {spec.size}; the trace is damaged")
        data += part(parts).tobytes()
        parts += 1
    return np.frombuffer(data[:needed], np.uint8)


def _needed(data: bytearray, about: str) -> int:
    """Bytes of the row, as its first bytes declare."""
    if len(data) < _HEAD.size:
        return _HEAD.size
    count: int
    magic, count, _ = _HEAD.unpack_from(data)
    if magic != _MAGIC or not 0 < count <= _MOST_SKETCHES:
        raise TraceError(f"{about}: the stored bytes are not a row of sketches; the trace is damaged")
    head = _HEAD.size + count * _LENGTH.itemsize
    if len(data) < head:
        return head
    return head + int(np.frombuffer(data, _LENGTH, count, _HEAD.size).astype(np.int64).sum())


def unpack_row(
    data: NDArray[np.uint8], attrs: Mapping[str, Any], wanted: Sequence[SummarySpec], size: int, about: str
) -> tuple[float, tuple[MomentSketch, ...]]:
    """Sum of magnitudes, and the wanted sketches of those stored, of a row from :func:`stored_bytes`.

    ``attrs`` are the tensor's, and the row summarizes ``size`` values.

    Raises:
        TraceError: they are damaged, or differ from the tensor's attributes.
    """
    from gtrace.coding.sketches import unpack_sketch

    plan = SketchPlan.read(attrs["sketch"])
    row = data.tobytes()
    _, count, norm1 = _HEAD.unpack_from(row)
    if count != len(plan.specs) or not (math.isfinite(norm1) and norm1 >= 0):
        raise TraceError(f"{about}: holds other sketches than the tensor's metadata say; the trace is damaged")
    head = _HEAD.size + count * _LENGTH.itemsize
    ends = head + np.cumsum(np.frombuffer(data, _LENGTH, count, _HEAD.size).astype(np.int64))
    found = []
    for spec in wanted:
        place = plan.specs.index(spec)
        start = int(ends[place - 1]) if place else head
        try:
            sketch = unpack_sketch(memoryview(row)[start : int(ends[place])])
        except PayloadError as error:
            raise TraceError(f"{about}: {error}; the trace is damaged") from None
        if sketch.spec != spec or sketch.size + sketch.nonfinite != size:
            raise TraceError(f"{about}: a sketch has another number of values than the trace; the trace is damaged")
        found.append(sketch)
    return norm1, tuple(found)
