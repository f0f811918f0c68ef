"""Mean and deviation of every bucket of a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.kernels._jit import inline, jit

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: columns of a bucket's row: mean and standard deviation of the signed normalized values, and the scale
MEAN, SIGMA, SCALE = range(3)
_LANES = 64
_BLOCK = 1 << 20


@inline
def _sums(x: NDArray[np.float32], centre: float, lanes: NDArray[np.float64], squares: NDArray[np.float64]) -> None:
    # Fixed lanes keep the order of the additions, and so the sums, independent of the vector width.
    whole = x.size // _LANES
    for b in range(whole):
        xb = x[b * _LANES : b * _LANES + _LANES]
        for k in range(_LANES):
            d = np.float64(xb[k]) - centre
            lanes[k] += d
            squares[k] += d * d
    for k in range(whole * _LANES, x.size):
        d = np.float64(x[k]) - centre
        lanes[k - whole * _LANES] += d
        squares[k - whole * _LANES] += d * d


@jit
def bucket_moments(x: NDArray[np.float32], bucket: int, scales: NDArray[np.float32], out: NDArray[np.float64]) -> None:
    """Mean and standard deviation (n - 1) of x / scale over each bucket of finite values, and scale, into out[b, 3].

    A bucket of one value has deviation 0; one of scale 0 has zeros. The squares are taken about the mean of
    the bucket, which is still in cache then: about 0 they would cancel where the mean is large.
    """
    lanes = np.empty(_LANES)
    squares = np.empty(_LANES)
    for b in range(scales.size):
        xb = x[b * bucket : min(x.size, (b + 1) * bucket)]
        scale = np.float64(scales[b])
        out[b, SCALE] = scale
        out[b, MEAN] = 0.0
        out[b, SIGMA] = 0.0
        if scale == 0.0:
            continue
        mean = 0.0
        for _ in range(2):
            total, square = 0.0, 0.0
            for p in range(0, xb.size, _BLOCK):
                lanes[:] = 0.0
                squares[:] = 0.0
                _sums(xb[p : p + _BLOCK], mean, lanes, squares)
                for k in range(_LANES):
                    total += lanes[k]
                    square += squares[k]
            mean += total / xb.size
        out[b, MEAN] = mean / scale
        if xb.size > 1:
            out[b, SIGMA] = np.sqrt(max(0.0, square - total * total / xb.size) / (xb.size - 1)) / scale
