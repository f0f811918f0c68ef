"""What a trace demands: of files that somebody else may have written, and of what callers hand to a writer."""

from __future__ import annotations

import functools
import json
import math
import os
import time
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from gtrace.errors import TraceError, UsageError, printable, suggest
from gtrace.trace.format import EXTRAS, FORMAT, SCALARS, SKETCH, VERSION, TensorSpec
from gtrace.trace.rows import BlockSample
from gtrace.trace.sketches import SketchPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from gtrace.trace.format import StreamSource


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def parse_json(text: str | bytes, where: str) -> object:
    """A JSON value; NaN and infinities, which JSON does not have, are refused.

    Raises:
        TraceError: it is none, or is nested too deep.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else printable(str(error))
        raise TraceError(f"{where}: bad JSON ({reason}); damaged or foreign") from None


def check_root(path: str, attrs: Mapping[str, Any]) -> None:
    """Check that a store is a trace of a version that is read.

    Raises:
        TraceError: it is something else, or a newer gtrace wrote it.
    """
    if attrs.get("format") != FORMAT:
        raise TraceError(f"{path}: not a gtrace trace; `gtrace capture SCRIPT` makes one, `gtrace import` from arrays")
    version = attrs.get("version")
    if type(version) is not int or version < 1:
        raise TraceError(f"{path}: version {printable(str(version)[:40])} of the trace format is none; damaged")
    if version > VERSION:
        raise TraceError(
            f"{path}: written by a newer gtrace (trace format {version}; this one reads {VERSION}); upgrade"
        )


def attribute_fault(attrs: Mapping[str, Any], size: int) -> str | None:
    """What is wrong with the attributes of a tensor of which ``size`` elements are stored, None when nothing is."""
    if SKETCH in attrs:
        try:
            SketchPlan.read(attrs[SKETCH])
        except UsageError as error:
            return f"attribute '{SKETCH}': {error}"
    shape = attrs.get("shape")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        return "attribute 'shape' is no list of lengths"
    try:
        sample = BlockSample.read(attrs.get("sample"))
    except ValueError as error:
        return f"attribute 'sample': {error}"
    if sample is not None and (SKETCH in attrs or (sample.size, sample.total) != (size, math.prod(shape))):
        return f"attribute 'sample': not one of {size} elements of a tensor of shape {shape}"
    if SKETCH not in attrs and attrs.get("sample") is None and math.prod(shape) != size:
        return f"{size} elements of a tensor of shape {shape}, without attribute 'sample'"
    aliases = attrs.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        return "attribute 'aliases' is no list of names"
    for key in ("dtype", "module_type", "stage"):
        if not isinstance(attrs.get(key, ""), str):
            return f"attribute '{key}' is no text"
    if not isinstance(attrs.get("sample", {}), dict):
        return "attribute 'sample' is no object"
    return None


def tensor_spec(where: str, entry: str, attrs: Mapping[str, Any], size: int, chunks: tuple[int, ...]) -> TensorSpec:
    """The description of a stored tensor from its attributes.

    Raises:
        TraceError: an attribute is missing or not of its type.
    """
    name, index = attrs.get("name"), attrs.get("index")
    if not isinstance(name, str) or not name:
        raise TraceError(f"{where}: attribute 'name' is no text; damaged or foreign")
    if type(index) is not int or index < 0:
        raise TraceError(f"{where}: attribute 'index' is no column number; damaged or foreign")
    fault = attribute_fault(attrs, size)
    if fault is not None:
        raise TraceError(f"{where}: {fault}; damaged or foreign")
    return TensorSpec(index, name, entry, size, chunks[0], chunks[1], attrs)


def refuse(error: TraceError) -> None:
    """What a reader does about damage unless it is told otherwise: it raises the error."""
    raise error


def check_indices(where: str, found: list[TensorSpec], tolerate: Callable[[TraceError], None]) -> None:
    """Check that tensors are numbered 0, 1, ... and no two have one name; drop those that contradict others.

    Args:
        where: the stream, for messages.
        found: its tensors.
        tolerate: is told that two share an index or a name, or that the metadata of one is gone; it may raise.
    """
    found.sort(key=lambda spec: spec.index)
    for what in ("name", "index"):
        seen: set[str | int] = set()
        for spec in list(found):
            if getattr(spec, what) in seen:
                found.remove(spec)
                tolerate(TraceError(f"{where}: two tensors have one {what}; damaged or foreign"))
            seen.add(getattr(spec, what))
    for expected, spec in enumerate(found):
        if spec.index != expected:
            tolerate(TraceError(f"{where}: the metadata of tensor number {expected} is missing; the trace is damaged"))
            break


def known_columns(stream: StreamSource, tolerate: Callable[[TraceError], None]) -> NDArray[Any]:
    """The statistic ``present`` of a stream; empty where it is damaged and ``tolerate`` bears that."""
    try:
        return stream.statistic("present")
    except TraceError as error:
        tolerate(error)
        return np.empty((0, 0), np.uint8)


def present_tensors(
    where: str, found: Sequence[TensorSpec], present: NDArray[Any], tolerate: Callable[[TraceError], None]
) -> tuple[TensorSpec, ...]:
    """Those tensors that are present at a committed step, by their index.

    Args:
        where: the stream, for messages.
        found: the tensors whose metadata is there.
        present: (committed rows, number of tensors found, or one more where the array has it).
        tolerate: is told that the commit record knows one whose metadata is gone; it may raise.
    """
    by_index = {spec.index: spec for spec in found}
    committed = np.flatnonzero(present.any(axis=0)).tolist() if present.size else []
    last = max(by_index, default=-1) + 1
    if last in committed:
        tolerate(TraceError(f"{where}: the metadata of tensor number {last} is missing; the trace is damaged"))
    return tuple(by_index[index] for index in committed if index in by_index)


def committed_steps(
    where: str, stored: NDArray[Any], rows: int | None, tolerate: Callable[[TraceError], None]
) -> NDArray[np.int64]:
    """The steps of the committed rows: those before the first -1, at most so many.

    Args:
        where: the stream, for messages.
        stored: steps by row.
        rows: how many the array has; None for all.
        tolerate: is told that they do not rise; if it does not raise, they end there.
    """
    unused = np.flatnonzero(stored < 0)
    steps = stored[: unused[0]] if unused.size else stored
    steps = np.ascontiguousarray(steps[:rows], np.int64)
    falls = np.flatnonzero(np.diff(steps) <= 0)
    if falls.size:
        tolerate(TraceError(f"{where}: steps do not rise; the trace is damaged"))
        steps = steps[: falls[0] + 1]
    return steps


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
