"""1-bit SGD: every value goes to one of two means of its bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import parameter
from gtrace.codecs.feedback import UNITS, ResidualCodec
from gtrace.codecs.registry import register
from gtrace.coding import open_envelope, seal
from gtrace.errors import PayloadError
from gtrace.kernels import elementwise as _elementwise

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.types import State


@register
@dataclass(frozen=True)
class OneBit(ResidualCodec):
    """Two reconstruction values a bucket, one bit a value, error feedback."""

    name: ClassVar[str] = "onebit"
    summary: ClassVar[str] = "one bit a value, two means a bucket, with error feedback"
    formula: ClassVar[str] = "p = v + e; Q(p_i) = mean of the bucket's p_j >= 0, or of its p_j < 0; e <- p - Q"
    paper: ClassVar[str] = (
        "Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of "
        "Speech DNNs, 2014"
    )
    corrections: ClassVar[tuple[str, ...]] = (
        "the paper's two values belong to a column of a weight matrix; a flat gradient has buckets instead",
        UNITS,
    )
    deterministic: ClassVar[bool] = True

    bucket_size: int | None = parameter(
        512, "consecutive values that share the two means; none for the whole tensor", minimum=1, optional=True
    )

    def send(self, state: State, x: NDArray[np.float32], key: tuple[int, int]) -> bytes:
        """Two float32 a bucket (upper mean, lower mean), then a bit a value, 1 for the lower."""
        del state, key
        bucket = self._bucket(x.size)
        means = np.empty((-(-x.size // bucket), 2), np.float32)
        _elementwise.two_means(x, bucket, means)
        bits = np.packbits(x < 0, bitorder="little")
        return seal(means.astype("<f4").tobytes() + bits.tobytes(), codec=self.name, size=x.size, shared=b"")

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """Undo :meth:`encode`."""
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        bucket = self._bucket(size)
        head = 8 * -(-size // bucket)
        if flags or len(body) != head + -(-size // 8):
            raise PayloadError(f"payload body of {len(body)} bytes is no {size} bits with two means a bucket")
        means = np.frombuffer(body[:head], "<f4").astype(np.float32).reshape(-1, 2)
        if not (np.isfinite(means).all() and (means[:, 0] >= 0).all() and (means[:, 1] <= 0).all()):
            raise PayloadError("payload holds means that are not finite or have the wrong sign")
        bits = np.frombuffer(body[head:], np.uint8)
        if size % 8 and bits[-1] >> (size % 8):
            raise PayloadError("padding after the last bit is not zero")
        out = np.empty(size, np.float32)
        _elementwise.restore(bits, bucket, means, out)
        return out

    def _bucket(self, size: int) -> int:
        return self.bucket_size or max(1, size)
