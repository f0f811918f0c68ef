"""Flat gradients, numpy arrays or tensors of a device: the operations that exchanges need on both.

A tensor stays on its device if the codec works there (:mod:`gtrace.training.device`); everything else is numpy's.
"""

from __future__ import annotations

import importlib
import sys
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from gtrace.buckets import as_values
from gtrace.codecs.link import on_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from gtrace.codecs import Codec

    #: float32[n] of the host or of a device
    Vector: TypeAlias = NDArray[np.float32] | torch.Tensor


def flat(values: Any, codec: Codec) -> Vector:
    """Real numbers of any shape as float32[n]: on their device if the codec works there, else on the host."""
    # The owner of a tensor has imported torch; simulated workers do not need it.
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(values, torch.Tensor):
        return as_values(values)
    return engine().flat(values, codec)


def engine() -> Any:
    """:mod:`gtrace.training.device`, the engine of links for tensors; only called when torch is already imported."""
    return importlib.import_module("gtrace.training.device")


def place_of(values: Vector) -> torch.device | None:
    """The device of a tensor; None is the host."""
    return None if isinstance(values, np.ndarray) else values.device


def placed(values: NDArray[np.float32], place: torch.device | None) -> Vector:
    """The values on a device; None is the host."""
    if place is None:
        return values
    return sys.modules["torch"].from_numpy(values).to(place)


def _module(values: Vector) -> Any:
    return np if isinstance(values, np.ndarray) else sys.modules["torch"]


def count_nonfinite(values: Vector) -> int:
    """Number of NaN or infinite values."""
    module = _module(values)
    return len(values) - int(module.count_nonzero(module.isfinite(values)))


def zero_nonfinite(values: Vector) -> Vector:
    """A copy with zeros instead of NaN and infinity."""
    module = _module(values)
    return module.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def count_zeros(values: Vector) -> int:
    """Number of values that are exactly zero."""
    module = _module(values)
    return len(values) - int(module.count_nonzero(values))


def error_of(exact: Vector, decoded: Vector) -> tuple[float, float]:
    """||exact||^2 and ||decoded - exact||^2, summed in float64."""
    wide: Any = exact.astype(np.float64) if isinstance(exact, np.ndarray) else exact.double()
    energy = float(wide @ wide)
    wide -= decoded
    return energy, float(wide @ wide)


def plain_mean(vectors: Sequence[Vector]) -> Vector:
    """The mean, summed in float64 in order; NaN and infinity stay."""
    module = _module(vectors[0])
    if module is np:
        return np.asarray(np.mean(vectors, axis=0, dtype=np.float64), np.float32)
    total = module.zeros_like(vectors[0], dtype=module.float64)
    for values in vectors:
        total += values
    # On CUDA, division by a number of the host would multiply by its reciprocal.
    return total.div_(total.new_full((), len(vectors))).float()


def aggregate(codec: Codec, decoded: Sequence[Vector]) -> Vector:
    """The codec's aggregate of several decoded gradients."""
    arrays = [one for one in decoded if isinstance(one, np.ndarray)]
    return codec.aggregate(arrays) if arrays else plain_mean(decoded)


def concatenated(vectors: Sequence[Vector]) -> Vector:
    """All vectors concatenated; on the host unless all are on one device."""
    places = {place_of(one) for one in vectors}
    if len(places) > 1:
        vectors = [on_host(one) for one in vectors]
    return _module(vectors[0]).concatenate(list(vectors))


def cut(whole: Vector, sizes: Sequence[int]) -> list[Vector]:
    """Undo :func:`concatenated`."""
    stops = accumulate(sizes)
    return [whole[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]
