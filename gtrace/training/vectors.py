"""Flat gradients, numpy arrays or tensors of a device: the operations that exchanges need on both.

A tensor stays on its device if the codec works there (:mod:`gtrace.training.device`); everything else is numpy's.
"""

from __future__ import annotations

import importlib
import sys
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
    vector: Vector = engine().flat(values, codec)
    return vector


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
    moved: torch.Tensor = sys.modules["torch"].from_numpy(values).to(place)
    return moved


def count_nonfinite(values: Vector) -> int:
    """Number of NaN or infinite values."""
    if isinstance(values, np.ndarray):
        return values.size - int(np.count_nonzero(np.isfinite(values)))
    return values.numel() - int(values.isfinite().count_nonzero())


def zero_nonfinite(values: Vector) -> Vector:
    """A copy with zeros instead of NaN and infinity."""
    if isinstance(values, np.ndarray):
        return np.where(np.isfinite(values), values, np.float32(0))
    return values.nan_to_num(0.0, 0.0, 0.0)


def count_zeros(values: Vector) -> int:
    """Number of values that are exactly zero."""
    if isinstance(values, np.ndarray):
        return values.size - int(np.count_nonzero(values))
    return values.numel() - int(values.count_nonzero())


def error_of(exact: Vector, decoded: Vector) -> tuple[float, float]:
    """||exact||^2 and ||decoded - exact||^2, summed in float64."""
    wide: Any = exact.astype(np.float64) if isinstance(exact, np.ndarray) else exact.double()
    energy = float(wide @ wide)
    wide -= decoded
    return energy, float(wide @ wide)


def plain_mean(vectors: Sequence[Vector]) -> Vector:
    """The mean, summed in float64 in order; NaN and infinity stay."""
    if isinstance(vectors[0], np.ndarray):
        total: NDArray[np.float64] = np.mean(vectors, axis=0, dtype=np.float64)
        return total.astype(np.float32)
    mean: Vector = engine().mean([one for one in vectors if not isinstance(one, np.ndarray)])
    return mean


def aggregate(codec: Codec, decoded: Sequence[Vector]) -> Vector:
    """The codec's aggregate of several decoded gradients."""
    arrays = [one for one in decoded if isinstance(one, np.ndarray)]
    return codec.aggregate(arrays) if arrays else plain_mean(decoded)


def concatenated(vectors: Sequence[Vector]) -> Vector:
    """All vectors concatenated; on the host unless all are on one device."""
    places = {place_of(one) for one in vectors}
    if len(places) == 1 and None not in places:
        whole: Vector = sys.modules["torch"].cat(list(vectors))
        return whole
    return np.concatenate([on_host(one) for one in vectors])


def cut(whole: Vector, sizes: Sequence[int]) -> list[Vector]:
    """Undo :func:`concatenated`."""
    if isinstance(whole, np.ndarray):
        return list(np.split(whole, np.cumsum(sizes)[:-1]))
    return list(sys.modules["torch"].split(whole, list(sizes)))
