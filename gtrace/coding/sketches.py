"""Moment sketches as bytes: for traces that store summaries instead of gradients, and for sending them.

Layout, little-endian: a header (``GTS1``, the spec, the counts outside bins), then the bins column by
column, each column's bytes grouped by significance, and deflated. Within a bin the two moments about the lower edge are
stored as float32 shares of the bin's width and of its square; they only locate the mass in its bin, so
their rounding error, 6e-8 of a width, is far below the uncertainty of a bin. At full width (ten bits of
mantissa) they are float64, so a fit that depends on every digit gives the same result as on the sketch itself. Counts
are exact: integers, or float64 if a sketch is a mean of others. Weights (summed squared bucket scales) are left out if
one scale held for all values.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import numpy as np

from gtrace.buckets import MANTISSA
from gtrace.errors import PayloadError, UsageError
from gtrace.sketch import MomentSketch
from gtrace.types import NORMS, STORED_MANTISSA, SummarySpec, Tail

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

MAGIC = b"GTS1"
_TAILS: tuple[Tail, ...] = get_args(Tail)
#: numbers outside of bins, in the order of the header
_COUNTS = ("zeros", "nonfinite", "size", "buckets", "exact", "exact_zeros", "clipped", "dead")
#: magic, norm, tail, mantissa, flags, bucket size, clip, counts, weight of zeros, energy of the exact tail, error of
#: clipping, factor of the weights, bins
_HEADER = struct.Struct("<4s4BQd8Q4dI")
#: the same for a mean of sketches, whose counts are not whole numbers
_MEAN_HEADER = struct.Struct("<4s4BQd8d4dI")
_CLIPPED, _ONE_SCALE, _DOUBLE, _MEAN = 1, 2, 4, 8
_ROUNDING = 1e-9
#: bins that any sketch can have at most, at ten mantissa bits
_MOST_BINS = 300 << MANTISSA


def _kinds(flags: int) -> tuple[DTypeLike, ...]:
    """Types of the columns: distance to the previous bin, count, two shares, and the weighted half if there is one."""
    share = "<f8" if flags & _DOUBLE else "<f4"
    return ("<u4", "<f8" if flags & _MEAN else "<u8", share, share) + (
        () if flags & _ONE_SCALE else ("<f8", share, share)
    )


def pack_sketch(sketch: MomentSketch, mantissa: int = STORED_MANTISSA) -> bytes:
    """A sketch as bytes.

    Args:
        sketch: per tensor, without bucket moments.
        mantissa: coarsen bins to this first; a coarser sketch stays as it is.

    Raises:
        UsageError: a sketch with bucket moments, which grow with the tensor.
    """
    if sketch.bucket_moments is not None:
        raise UsageError("sketch: cannot be stored with moments of every bucket, because their size is not bounded")
    sketch = sketch.coarsen(min(mantissa, sketch.mantissa))
    spec, sums = sketch.spec, sketch.sums
    width = sketch.upper - sketch.lower
    count = sums[:, 0]
    factor = _one_scale(sketch)
    flags = (_CLIPPED if spec.clip is not None else 0) | (_ONE_SCALE if factor is not None else 0)
    flags |= _DOUBLE if sketch.mantissa == MANTISSA else 0
    first, second = sums[:, 1] / (count * width), sums[:, 2] / (count * width * width)
    columns = [np.diff(sketch.rows, prepend=0), count, first, second]
    if factor is None:
        weight = sums[:, 3]
        # Values with a weight that vanishes in float64 have no position within their bin either.
        some = np.where(weight > 0, weight, 1.0)
        columns += [weight, sums[:, 4] / (some * width), sums[:, 5] / (some * width * width)]
    counts = [getattr(sketch, name) for name in _COUNTS]
    mean = any(number % 1 for number in counts) or bool((count % 1).any())
    flags |= _MEAN if mean else 0
    about = NORMS.index(spec.norm), _TAILS.index(spec.tail), sketch.mantissa, flags, spec.bucket_size or 0
    numbers = counts if mean else map(int, counts)
    outside = sketch.zero_weight, sketch.exact_energy, sketch.clip_error, factor or 0.0
    kind = _MEAN_HEADER if mean else _HEADER
    header = kind.pack(MAGIC, *about, spec.clip or 0.0, *numbers, *outside, sketch.rows.size)
    # Bytes of a column are grouped by significance: neighbors are similar and deflate well.
    stored = [column.astype(kind) for column, kind in zip(columns, _kinds(flags), strict=True)]
    planes = [column.view(np.uint8).reshape(-1, column.itemsize).T.tobytes() for column in stored]
    body = header + zlib.compress(b"".join(planes), 6)
    return body + zlib.crc32(body).to_bytes(4, "little")


def most_bytes(spec: SummarySpec, mantissa: int = STORED_MANTISSA) -> int:
    """Upper bound on the size of a packed sketch of this spec, for any data."""
    kinds = _kinds((_ONE_SCALE if spec.norm == "none" else 0) | (_DOUBLE if mantissa == MANTISSA else 0))
    planes = (_MOST_BINS >> (MANTISSA - mantissa)) * sum(np.dtype(kind).itemsize for kind in kinds)
    # zlib's own bound on what deflating adds, with room
    return _HEADER.size + planes + planes // 1000 + 64


def unpack_sketch(data: bytes | memoryview) -> MomentSketch:
    """Undo :func:`pack_sketch`; memory is bounded by the most bins that a sketch can have.

    Raises:
        PayloadError: damaged, truncated, or not written by :func:`pack_sketch`.
    """
    data = memoryview(data)
    if len(data) < _HEADER.size + 4 or bytes(data[:4]) != MAGIC:
        raise PayloadError("not a stored sketch: it does not begin with GTS1, or is too short")
    if zlib.crc32(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise PayloadError("stored sketch: checksum mismatch; damaged or truncated")
    header = _MEAN_HEADER if data[7] & _MEAN else _HEADER
    _, norm, tail, mantissa, flags, bucket, clip, *rest = header.unpack_from(data)
    counts, (zero_weight, exact_energy, clip_error, factor), bins = rest[:8], rest[8:12], rest[12]
    if norm >= len(NORMS) or tail >= len(_TAILS) or mantissa > MANTISSA or bins > _MOST_BINS or flags > 15:
        raise PayloadError("stored sketch: its header says what no sketch has")
    numbers = np.array([zero_weight, exact_energy, clip_error, factor, clip, *counts], np.float64)
    if not (np.isfinite(numbers).all() and (numbers >= 0).all()):
        raise PayloadError("stored sketch: its header holds numbers that no sketch has")
    columns = _columns(data[_HEADER.size : -4], _kinds(flags), bins)
    rows = np.cumsum(columns[0], dtype=np.int64)
    if bins and (rows[0] < 1 or (columns[0][1:] == 0).any() or rows[-1] > _MOST_BINS):
        raise PayloadError("stored sketch: bins that do not rise")
    spec = SummarySpec(NORMS[norm], bucket or None, _TAILS[tail], clip if flags & _CLIPPED else None)
    empty = MomentSketch(
        spec=spec,
        rows=rows.astype(np.int32),
        sums=np.zeros((bins, 6)),
        zero_weight=zero_weight,
        exact_energy=exact_energy,
        clip_error=clip_error,
        mantissa=mantissa,
        **dict(zip(_COUNTS, counts, strict=True)),
    )
    width = empty.upper - empty.lower
    count = columns[1].astype(np.float64)
    weight = factor * count if flags & _ONE_SCALE else columns[4]
    inside = columns[2:4] if flags & _ONE_SCALE else columns[5:7]
    empty.sums[:, :3] = np.stack([count, count * width * columns[2], count * width * width * columns[3]], axis=1)
    empty.sums[:, 3:] = np.stack([weight, weight * width * inside[0], weight * width * width * inside[1]], axis=1)
    good = np.isfinite(empty.sums).all() and (empty.sums >= 0).all()
    if not good or float(count.sum()) + empty.zeros > empty.size * (1 + _ROUNDING):
        raise PayloadError("stored sketch: sums that no sketch has")
    # Without what was computed before there were sums.
    return replace(empty)


def _one_scale(sketch: MomentSketch) -> float | None:
    """The squared scale that all values share, None where buckets have their own."""
    if sketch.norm == "none":
        return 1.0
    count, weight = float(sketch.sums[:, 0].sum()), float(sketch.sums[:, 3].sum())
    if not count:
        return 0.0
    factor = weight / count
    same = np.allclose(sketch.sums[:, 3:], factor * sketch.sums[:, :3], rtol=1e-12, atol=0.0)
    return factor if same else None


def _columns(data: memoryview, kinds: tuple[DTypeLike, ...], bins: int) -> list[NDArray[np.float64]]:
    sizes = [bins * np.dtype(kind).itemsize for kind in kinds]
    inflate = zlib.decompressobj()
    try:
        planes = inflate.decompress(data, sum(sizes) + 1)
    except zlib.error as error:
        raise PayloadError(f"stored sketch: its bins cannot be inflated ({error})") from None
    if len(planes) != sum(sizes) or inflate.unused_data or inflate.unconsumed_tail:
        raise PayloadError("stored sketch: another number of bins than its header says")
    columns, start = [], 0
    for kind, size in zip(kinds, sizes, strict=True):
        raw = np.frombuffer(planes, np.uint8, size, start).reshape(np.dtype(kind).itemsize, bins)
        columns.append(np.ascontiguousarray(raw.T).view(kind).reshape(-1))
        start += size
    return columns
