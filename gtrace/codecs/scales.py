"""Scales: norms of buckets, and the scales of methods with one bit or integer codes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gtrace.buckets import NORM_CODES, TensorSums, bucket_scales, clip_limit, clipped
from gtrace.codecs.base import check_finite, parameter
from gtrace.codecs.parts import FLOAT32_MAX, Scale, Scaled
from gtrace.errors import PayloadError
from gtrace.kernels import elementwise as _elementwise
from gtrace.kernels.norms import power_sum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gtrace.codecs.parts import Arrays, Values
    from gtrace.types import Norm, State, Tail


@dataclass(frozen=True)
class BucketNorm(Scale):
    """A norm of each bucket of consecutive values, in float32."""

    per = "bucket_size"
    width = 4

    norm: Norm = parameter("l2", "what a bucket is divided by", choices=("l2", "linf", "l1"))
    bucket_size: int | None = parameter(
        8192, "consecutive values that share a norm; none for the whole tensor", minimum=1, optional=True
    )
    tail: Tail = parameter(
        "quantized", "a short last bucket: its own norm, or sent in float32", choices=("quantized", "exact")
    )
    clip: float | None = parameter(None, "clip at this many standard deviations before the norm is taken", minimum=0.0)

    @property
    def unbiased(self) -> bool:
        return self.clip is None

    @property
    def part_multiple(self) -> int | None:
        return self.bucket_size or 1

    @property
    def checks(self) -> bool:
        return self.clip is None

    @property
    def shares(self) -> bool:
        return self.clip is None and self.tail == "quantized"

    def cut(self, x: Values, state: State, *, late: bool = False) -> Scaled:
        """Clip if asked for; with ``tail=exact`` a short last bucket becomes the tail."""
        limit: Any = state.arrays.get("limit")
        x = clipped(x, clip_limit([x], self.clip) if limit is None else limit)
        split = self.quantized(x.size)
        x, tail, bucket = x[:split], x[split:], self.over(split)
        if not late or "scale" in state.arrays:
            return Scaled(x, self.scales(x, state), bucket, tail)
        check_finite(tail, split)
        return Scaled(x, np.empty(-(-split // bucket), np.float32), bucket, tail, NORM_CODES[self.norm])

    def quantized(self, size: int) -> int:
        if self.tail == "exact" and self.bucket_size is not None:
            return size - size % self.bucket_size
        return size

    def measure(self, x: Values) -> Values:
        return bucket_scales(x, self.norm, self.bucket_size)

    def whole(self, size: int, parts: Callable[[], Iterator[Values]], sums: Callable[[], TensorSums]) -> Arrays:
        limit = clip_limit(parts(), self.clip)
        found: Arrays = {} if limit is None else {"limit": np.asarray(limit)}
        if self.bucket_size is not None:
            return found
        whole = sums() if limit is None else TensorSums.of(clipped(x, limit) for x in parts())
        return {**found, "scale": whole.norm(self.norm)}


@dataclass(frozen=True)
class NoNorm(BucketNorm):
    """Buckets with the divisor 1; nothing is sent."""

    absent = np.ones(1, np.float32)
    width = 0

    norm: Norm = parameter("none", "no scale", choices=("none",))
    bucket_size: int | None = parameter(None, "not used here: there is no scale", choices=("none",))

    def pack(self, scales: Values) -> bytes:
        return b""


@dataclass(frozen=True)
class BlockMax(Scale):
    """The largest magnitude of each block, in float32."""

    per = "block_size"
    width = 4

    block_size: int | None = parameter(
        2048, "consecutive values that share a scale; none for the whole tensor", minimum=1, optional=True
    )

    def measure(self, x: Values) -> Values:
        return bucket_scales(x, "linf", self.over(x.size))


@dataclass(frozen=True)
class Range(Scale):
    """The least and the greatest value of a tensor, in float32."""

    whole_tensor = True

    def measure(self, x: Values) -> Values:
        return np.array([x.min(), x.max()] if x.size else [0.0, 0.0], np.float32)

    def whole(self, size: int, parts: Callable[[], Iterator[Values]], sums: Callable[[], TensorSums]) -> Arrays:
        found = sums()
        return {"scale": np.array([found.least, found.greatest], np.float32)}

    def head(self, body: memoryview, size: int) -> int:
        return 8

    def read(self, data: memoryview) -> Values:
        low, high = np.frombuffer(data, "<f4").astype(np.float32)
        if not (np.isfinite(low) and np.isfinite(high) and low <= high):
            raise PayloadError(f"payload holds a range from {low:g} to {high:g}")
        return np.array([low, high], np.float32)


@dataclass(frozen=True)
class Magnitude(Scale):
    """One magnitude for all signs of a tensor, in float32; the mean has the least error."""

    scale: Literal["mean", "energy", "rms", "none"] = parameter(
        "mean",
        "what a sign is multiplied by: the mean magnitude, ||v||_2^2 / ||v||_1 (unbiased under rotations), "
        "||v||_2 / sqrt(n) (1-bit Adam's), or 1",
        choices=("mean", "energy", "rms", "none"),
    )

    @property
    def whole_tensor(self) -> bool:
        return self.scale != "none"

    def magnitude(self, norm1: float, energy: float, size: float) -> float:
        """The scale of a tensor that is not zero, rounded to float32."""
        if self.scale == "none":
            return 1.0
        # Rounding could exceed the largest magnitude, and so the range of float32.
        value = {"mean": norm1 / size, "energy": energy / norm1, "rms": math.sqrt(energy / size)}[self.scale]
        return float(np.float32(min(value, float(FLOAT32_MAX))))

    def measure(self, x: Values) -> Values:
        if not x.any():
            return np.empty(0, np.float32)
        sums = (0.0, 0.0) if self.scale == "none" else (float(power_sum(x, 1)), float(power_sum(x, 2)))
        return np.array([self.magnitude(*sums, x.size)], np.float32)

    def whole(self, size: int, parts: Callable[[], Iterator[Values]], sums: Callable[[], TensorSums]) -> Arrays:
        _, norm1, energy, *_ = sums()
        return {"scale": np.array([self.magnitude(norm1, energy, size)], np.float32)} if energy else {}

    def head(self, body: memoryview, size: int) -> int:
        return 4 if len(body) and size and self.scale != "none" else 0

    def pack(self, scales: Values) -> bytes:
        return b"" if self.scale == "none" else super().pack(scales)


@dataclass(frozen=True)
class TwoMeans(Scale):
    """The mean of a bucket's values from 0 up, and the mean of those below, in float32."""

    per = "bucket_size"
    width = 8

    bucket_size: int | None = parameter(
        512, "consecutive values that share the two means; none for the whole tensor", minimum=1, optional=True
    )

    def measure(self, x: Values) -> Values:
        bucket = self.over(x.size)
        means = np.empty((-(-x.size // bucket), 2), np.float32)
        _elementwise.two_means(x, bucket, means)
        return means

    def read(self, data: memoryview) -> Values:
        means = np.frombuffer(data, "<f4").astype(np.float32).reshape(-1, 2)
        if not (np.isfinite(means).all() and (means[:, 0] >= 0).all() and (means[:, 1] <= 0).all()):
            raise PayloadError("payload holds means that are not finite or have the wrong sign")
        return means
