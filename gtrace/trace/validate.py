"""What callers hand to a writer, as a trace can hold it."""

from __future__ import annotations

import functools
import json
import math
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import UsageError, suggest
from gtrace.trace.format import EXTRAS, SCALARS
from gtrace.trace.names import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray


def _from_numpy(value: object) -> object:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


def attributes(given: Mapping[str, object], what: str) -> dict[str, Any]:
    """The attributes as they will be read back.

    Raises:
        UsageError: JSON has no word for one of them.
    """
    out = {}
    for key, value in given.items():
        if not key or not key.isprintable():
            raise UsageError(f"{what}: attribute name {key!r} is no printable text")
        try:
            out[key] = json.loads(json.dumps(value, allow_nan=False, default=_from_numpy))
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"{what}: attribute '{key}' cannot be stored ({error}); use text, finite numbers, lists, objects"
            ) from None
    return out


def float32_values(array: ArrayLike, name: str) -> tuple[NDArray[np.float32], list[int], str]:
    """Flat float32 values, the shape and the type that they came with.

    Raises:
        UsageError: no real numbers.
    """
    array, kind = _of_torch(array)
    try:
        given = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"tensor '{printable(name)}': numpy cannot take it ({error}); pass an array") from error
    if given.dtype.kind not in "fiub":
        raise UsageError(f"tensor '{printable(name)}': {given.dtype} values; a trace takes real numbers")
    if given.dtype == np.float32:
        values = np.ascontiguousarray(given).reshape(-1)
    else:
        # A float64 beyond float32 becomes infinite here, and is counted as such.
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.ascontiguousarray(given, np.float32).reshape(-1)
    return values, list(given.shape), kind or _dtype_name(given.dtype)


def _of_torch(array: Any) -> tuple[Any, str]:
    """A tensor of torch as numpy can take it, and its type; anything else as it is. Nothing here needs torch."""
    if not (hasattr(array, "detach") and hasattr(array, "to_dense")):
        return array, ""
    tensor, kind = array.detach().to_dense().cpu(), str(array.dtype).removeprefix("torch.")
    # numpy has no bfloat16 and no 8-bit floats, and all of their values are values of float32.
    return (tensor.float() if "float" in kind and kind not in ("float32", "float64") else tensor), kind


@functools.cache
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name


def extras_of(given: Mapping[str, float], name: str) -> dict[str, float]:
    """Further numbers about a gradient.

    Raises:
        UsageError: there is no such number.
    """
    for what in given:
        if what not in EXTRAS:
            raise UsageError(f"tensor '{printable(name)}': no number '{what}' of a gradient; {suggest(what, EXTRAS)}")
    return {what: float(value) for what, value in given.items()}


def scalars_of(given: Mapping[str, float | None]) -> dict[str, float]:
    """Every number about a step, NaN where it is not given; the time now.

    Raises:
        UsageError: a step has no such number.
    """
    numbers = dict.fromkeys(SCALARS, math.nan) | {"time": time.time()}
    for name, value in given.items():
        if name not in numbers:
            raise UsageError(f"commit: no number '{name}' of a step; {suggest(name, SCALARS)}")
        if value is not None:
            numbers[name] = float(value)
    return numbers
