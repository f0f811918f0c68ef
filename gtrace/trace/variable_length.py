"""Rows whose number of elements changes from step to step: their width, what is cut off, and what a reader checks.

Gradients with respect to activations grow with the batch, and the last batch of an epoch is smaller.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import TraceError, UsageError
from gtrace.trace.blocks import BlockSample
from gtrace.trace.names import printable
from gtrace.trace.sketched import values_of
from gtrace.types import Key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from gtrace.trace.format import TensorSpec
    from gtrace.trace.storage import StreamSource

#: Seed of the samples that a writer draws.
SEED = 0
#: The attribute ``sample`` of a ragged tensor.
SAMPLE: Mapping[str, Any] = {"kind": "stretches", "seed": SEED}

#: Index arrays that are kept for the next step.
_KEPT_SAMPLES = 8


def default_capacity(first: int) -> int:
    """Elements of a row for a tensor that appears with ``first`` elements: a quarter more, and at least one.

    A first batch is a full one as a rule; the quarter is for texts of different lengths.

    >>> default_capacity(1000), default_capacity(0)
    (1250, 1)
    """
    return max(first + first // 4, 1)


@functools.lru_cache(maxsize=_KEPT_SAMPLES)
def sample_indices(total: int, count: int, seed: int = SEED) -> NDArray[np.int64]:
    """Which ``count`` of ``total`` elements a sample holds: one of each of ``count`` stretches of equal length.

    Stretch i covers the elements ``i * total // count`` up to ``(i + 1) * total // count``; the i-th output of a
    Philox generator with the key, as a uniform number of 53 bits, chooses one of them. So no element comes
    twice, order is kept, and the cost does not depend on ``total``.

    Args:
        total: elements of the gradient, at least ``count``.
        count: elements of the sample.
        seed: of the key; the same arguments always give the same elements.

    Returns:
        int64[count], rising, read-only.
    """
    key = Key.derive(seed, tensor="", role="sample")
    # Numpy's own Philox and not the kernels' hash: this runs while a model trains, which must not wait for a compiler.
    words = np.random.Philox(key=np.array(key, np.uint64)).random_raw(count)
    uniforms = (words >> np.uint64(11)) * 2.0**-53
    edges = np.arange(count + 1, dtype=np.int64) * total // max(count, 1)
    indices = edges[:-1] + (uniforms * np.diff(edges)).astype(np.int64)
    indices.flags.writeable = False
    return indices


def cut(values: NDArray[np.float32], capacity: int) -> NDArray[np.float32]:
    """The values, or a sample of them where they are more than the capacity."""
    return values if values.size <= capacity else values[sample_indices(values.size, capacity)]


def room(name: str, kind: str, size: int, n_total: int | None, capacity: int | None) -> tuple[int, int]:
    """Width of the row of a tensor that appears with ``size`` elements, and how many its gradient had.

    Raises:
        UsageError: weight gradients have one size, or the numbers contradict each other.
    """
    if kind != "neural" and n_total is None and capacity is None:
        return size, size
    # Not before it is needed: this is called for every gradient.
    what = f"tensor '{printable(name)}'"
    if kind != "neural":
        raise UsageError(f"{what}: n_total and capacity are for kind 'neural'; others always have one size")
    if n_total is not None and not size <= n_total < 2**63:
        raise UsageError(f"{what}: n_total is {n_total}, but {size} elements were given")
    if capacity is not None and capacity < 1:
        raise UsageError(f"{what}: a capacity of {capacity} elements holds nothing; give at least 1")
    return default_capacity(size) if capacity is None else int(capacity), size if n_total is None else int(n_total)


def lengths(stream: StreamSource, spec: TensorSpec, rows: NDArray[Any] | slice) -> dict[str, NDArray[np.int64]]:
    """``n_valid`` and ``n_total`` of a tensor at some rows at which it is present; its size where nothing was stored.

    Raises:
        TraceError: they are negative, or there are more valid elements than a row has or than there were.
    """
    stored = {name: stream.lengths(name) for name in ("n_valid", "n_total")}
    if any(table is not None and table.shape[1] <= spec.index for table in stored.values()):
        raise TraceError(f"tensor '{printable(spec.name)}': its numbers of elements are missing; the trace is damaged")
    count = stream.steps[rows].size
    whole = values_of(spec.attrs, stream.steps[rows]) if spec.sketched else np.full(count, spec.size, np.int64)
    found = {
        name: whole.copy() if table is None else table[rows, spec.index].astype(np.int64)
        for name, table in stored.items()
    }
    valid, total = found["n_valid"], found["n_total"]
    if stored["n_total"] is None:
        sample = BlockSample.read(spec.attrs.get("sample"))
        total[:] = valid if sample is None else sample.total
    most = np.iinfo(np.int64).max if spec.sketched else spec.size
    wrong = np.flatnonzero((valid < 0) | (valid > most) | (valid > total))
    if wrong.size:
        row = wrong[0]
        raise TraceError(
            f"tensor '{printable(spec.name)}', step {stream.steps[rows][row]}: {valid[row]} valid elements of "
            f"{total[row]} in a row of {spec.size}; the trace is damaged"
        )
    return found
