"""Scales: norms of buckets, and what methods of one bit or of integer codes use instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gtrace.buckets import bucket_scales, clip_values, whole_scale
from gtrace.codecs.base import parameter
from gtrace.codecs.parts import Scale

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gtrace.codecs.chunked import TensorSums
    from gtrace.types import Norm, State, Tail


@dataclass(frozen=True)
class BucketNorm(Scale):
    """A norm of each bucket of consecutive values, in float32."""

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
        """What is clipped is lost."""
        return self.clip is None

    def clipped(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """The values that norms are taken of, float32[n]."""
        return x if self.clip is None else clip_values(x, self.clip)[0]

    def quantized(self, size: int) -> int:
        """How many of ``size`` values are rounded; the rest is sent as it is."""
        if self.tail == "exact" and self.bucket_size is not None:
            return size - size % self.bucket_size
        return size

    def over(self, size: int) -> int:
        """Values of a bucket."""
        return self.bucket_size or max(1, size)

    def measure(self, x: NDArray[np.float32], state: State) -> NDArray[np.float32]:
        """The norms, float32[buckets]; ``scale`` of the state, if an engine knows the norm of the whole tensor."""
        whole = state.arrays.get("scale")
        return bucket_scales(x, self.norm, self.bucket_size) if whole is None else whole

    def whole(self, sums: TensorSums) -> NDArray[np.float32] | None:
        """The norm of a tensor that is one bucket."""
        if self.bucket_size is not None or self.norm == "none":
            return None
        return whole_scale(self.norm, sums.norm1, sums.energy, sums.largest)

    def head(self, body: memoryview, size: int) -> int:
        """Four bytes a bucket."""
        del body
        return 0 if self.norm == "none" else 4 * -(-size // self.over(size))

    def pack(self, scales: NDArray[np.float32]) -> bytes:
        """Little-endian float32; nothing without a norm."""
        return b"" if self.norm == "none" else super().pack(scales)


@dataclass(frozen=True)
class NoNorm(BucketNorm):
    """Buckets that are divided by 1, and send nothing."""

    norm: Norm = parameter("none", "no scale", choices=("none",))
    bucket_size: int | None = parameter(None, "without meaning here: no scale is taken", optional=True, maximum=0)
