"""Small values that all layers share: keys of random numbers, specs of summaries, expectations, rows of data frames."""

from __future__ import annotations

import hashlib
import importlib
import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from gtrace.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray


Norm: TypeAlias = Literal["l2", "linf", "l1", "none"]
Tail: TypeAlias = Literal["quantized", "exact"]
Scope: TypeAlias = Literal["tensor", "model"]
Role: TypeAlias = Literal["up", "down", "sample", "noise"]

NORMS: tuple[Norm, ...] = ("l2", "linf", "l1", "none")

#: default mantissa bits of stored sketches: 64 bins per octave
STORED_MANTISSA = 6

#: The tensor name of rows whose codec ran over the whole model's concatenated gradient.
WHOLE_MODEL = "*"


class Key(NamedTuple):
    """Two 64-bit words that name one stream of random numbers.

    Element ``i`` of a stream is a hash of the key and ``i``, so the same bytes come out for any number of
    threads, any chunking and any order.

    The codec is not part of the key: at one seed, draw, worker, step and tensor every codec gets the same random
    numbers. Codecs are then compared on the same luck, but their errors in one draw are not independent.
    """

    high: int
    low: int

    @classmethod
    def derive(cls, seed: int, *, tensor: str, step: int = 0, draw: int = 0, worker: int = 0, role: Role = "up") -> Key:
        """The key of one encoding: a 128-bit BLAKE2b digest of everything that distinguishes it from others.

        >>> Key.derive(0, tensor="fc.weight", worker=0) == Key.derive(0, tensor="fc.weight", worker=1)
        False
        """
        text = "\0".join((str(int(seed)), str(int(draw)), str(int(worker)), role, str(int(step)), tensor))
        return cls.hashed(text.encode())

    @classmethod
    def hashed(cls, data: bytes, purpose: bytes = b"") -> Key:
        """The key that a 128-bit BLAKE2b digest of some bytes gives; another one for each purpose."""
        digest = hashlib.blake2b(data, digest_size=16, person=purpose).digest()
        return cls(int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little"))


class SummarySpec(NamedTuple):
    """Which summary of a tensor a codec wants; codecs with equal specs share one sketch."""

    norm: Norm
    bucket_size: int | None
    tail: Tail = "quantized"
    clip: float | None = None
    scope: Scope = "tensor"
    bucket_moments: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """A codec's state for one tensor from step to step: plain arrays, which can be stored anywhere.

    Attributes:
        size: number of elements of the tensor.
        arrays: name -> array, as the codec's own documentation says; never changed in place.
        shape: the parameter's true shape; None if it is not known, or if the values are not one parameter's.

    Raises:
        ValueError: the shape has another number of elements.
    """

    size: int
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.shape is None:
            return
        object.__setattr__(self, "shape", tuple(int(length) for length in self.shape))
        if math.prod(self.shape) != self.size:
            raise ValueError(f"codec state: shape {self.shape} does not have {self.size} elements")

    def with_arrays(self, **arrays: NDArray[Any]) -> State:
        """A copy with these arrays set."""
        return State(self.size, {**self.arrays, **arrays}, self.shape)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """The state as plain arrays (for a checkpoint, npz or a state dict)."""
        shape = {} if self.shape is None else {"shape": np.asarray(self.shape, dtype=np.int64)}
        return {"size": np.asarray(self.size, dtype=np.int64), **shape, **self.arrays}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any]) -> State:
        """Undo :meth:`to_arrays`; array-likes of other libraries, of the same types and any byte order, are accepted.

        Raises:
            ValueError: there is no entry ``size``.
        """
        if "size" not in arrays:
            raise ValueError("codec state: no entry 'size'; pass what State.to_arrays() returned")
        plain = {name: np.asarray(value) for name, value in arrays.items() if name not in ("size", "shape")}
        rest = {name: array.astype(array.dtype.newbyteorder("="), copy=False) for name, array in plain.items()}
        shape = tuple(np.asarray(arrays["shape"]).tolist()) if "shape" in arrays else None
        return cls(int(np.asarray(arrays["size"])), rest, shape)


@dataclass(frozen=True, slots=True)
class Expectation:
    """Closed forms for one encoding, averaged over the randomness of rounding.

    Attributes:
        squared_error: E ||Q(g) - g||^2, in squared gradient units.
        bias: ||E Q(g) - g||, in gradient units; 0 for an unbiased codec.
        sparsity: expected fraction of decoded values that are exactly zero.
        bits_fixed: bits per coordinate with fixed-width symbols, norms included.
        bits_entropy: bits per coordinate at the entropy of the symbols, norms included.
        bits_huffman: bits per coordinate with a Huffman code made for these symbols, its lengths and norms included.
        bits_payload: expected length of the codec's own payload with its chosen coder, bits per coordinate,
            norms included and the envelope not; NaN without a closed form.
        bits_norms: the part of each of these that norms take.
        probabilities: probability of each symbol, ascending from the most negative value to the most positive one.
        error_bound: largest possible error of squared_error, because a level is inside a bin of the sketch.
        model_error: the squared error that a parametric law promised for the levels fitted to it; NaN without one.
        saturated: expected fraction of the non-zero values that are clipped at the top; NaN for a codec without one.
        flushed: expected fraction of the non-zero values that are rounded to zero; NaN where nobody asks.
    """

    squared_error: float
    bias: float = 0.0
    sparsity: float = 0.0
    bits_fixed: float = float("nan")
    bits_entropy: float = float("nan")
    bits_huffman: float = float("nan")
    bits_payload: float = float("nan")
    bits_norms: float = 0.0
    probabilities: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    error_bound: float = 0.0
    model_error: float = float("nan")
    saturated: float = float("nan")
    flushed: float = float("nan")


#: in the order in which they are tried; one that the program has imported comes first
_LIBRARIES = ("pandas", "polars")


class Tabular:
    """A value with rows; :meth:`frame_columns` gives them."""

    __slots__ = ()

    def frame_columns(self) -> Mapping[str, Sequence[Any] | NDArray[Any]]:
        """Name -> values of each column of :meth:`to_dataframe`, all of one length; None or NaN for missing ones."""
        raise NotImplementedError

    def to_dataframe(self) -> Any:
        """A data frame of pandas or polars: of the one that the program has imported, or else that is installed.

        gtrace depends on neither. With both, ``polars.DataFrame(value)`` and ``pandas.DataFrame.from_arrow(value)``
        choose; they need pyarrow.

        Raises:
            UsageError: neither is installed.
        """
        columns = _plain(self.frame_columns())
        for library in sorted(_LIBRARIES, key=lambda name: name not in sys.modules):
            try:
                return importlib.import_module(library).DataFrame(columns)
            except ImportError:
                continue
        raise UsageError("to_dataframe: needs pandas or polars, and neither is installed: pip install pandas")

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The rows as an Arrow stream, which polars, pandas 3, DuckDB and others read.

        Raises:
            UsageError: pyarrow is not installed.
        """
        try:
            import pyarrow  # type: ignore[import-untyped]
        except ImportError:
            raise UsageError(
                "Arrow tables need pyarrow, which is not installed: pip install 'gradtrace[parquet]'"
            ) from None
        return pyarrow.table(_plain(self.frame_columns())).__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str:
        # What shows a value is the report, which is above it.
        notebook = importlib.import_module("gtrace.report.html")
        return notebook.to_notebook(self)


def _plain(columns: Mapping[str, Sequence[Any] | NDArray[Any]]) -> dict[str, Any]:
    """Columns of objects as lists: polars would keep an array of them as Python objects."""
    return {
        name: values.tolist() if isinstance(values, np.ndarray) and values.dtype == object else values
        for name, values in columns.items()
    }
