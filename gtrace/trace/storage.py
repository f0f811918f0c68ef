"""The one interface between traces and the backends that hold them: a sink that is written, a source that is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from gtrace.trace.format import StreamKey, TensorSpec


class Record(NamedTuple):
    """What a commit says about one row of a stream.

    Attributes:
        step: the training step.
        scalars: name -> value, for every name in ``format.SCALARS``.
        statistics: name -> one value per tensor that the stream knows so far: those of ``format.statistics_of``, and
            the same of ``format.EXTRAS`` in every record of a stream.
    """

    step: int
    scalars: Mapping[str, float]
    statistics: Mapping[str, NDArray[Any]]


class Sink(Protocol):
    """Where a writer puts rows. Row ``r`` of a stream counts from the call of ``commit`` on, not before."""

    def add_tensor(self, stream: StreamKey, spec: TensorSpec) -> None:
        """Make room for a tensor; its index follows those that the stream has."""

    def write_row(self, stream: StreamKey, spec: TensorSpec, row: int, values: NDArray[Any]) -> None:
        """Take one row, float32 filled up with NaN where it is shorter, or bytes; copied or written on return."""

    def discard(self, stream: StreamKey, row: int, specs: Sequence[TensorSpec]) -> None:
        """Forget what was written of these tensors' rows: they will be absent from it, or written again."""

    def commit(self, stream: StreamKey, row: int, record: Record) -> None:
        """Make the row durable and then, as the last thing, visible."""

    def close(self, attrs: Mapping[str, Any]) -> None:
        """Drop what was not committed and store the trace's final attributes."""


class StreamSource(Protocol):
    """The committed part of one stream, as it was when the trace was opened."""

    @property
    def key(self) -> StreamKey:
        """Which stream this is."""

    @property
    def tensors(self) -> Sequence[TensorSpec]:
        """Its tensors that are present at a committed step, by index."""

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """All its tensors, whether they were committed or not."""

    @property
    def steps(self) -> NDArray[np.int64]:
        """Steps of the committed rows, rising."""

    @property
    def scalars(self) -> Mapping[str, NDArray[np.float64]]:
        """name -> one value per committed row."""

    def scalar(self, name: str) -> NDArray[np.float64]:
        """One of ``format.SCALARS``: (committed rows,)."""

    def statistic(self, name: str) -> NDArray[Any]:
        """One of ``format.STATISTICS``: (committed rows, at least as many columns as the last tensor's index)."""

    def lengths(self, name: str) -> NDArray[Any] | None:
        """One of ``format.LENGTHS`` in the same form, None where the stream has none."""

    def further(self, name: str) -> NDArray[Any] | None:
        """One of ``format.EXTRAS`` in the same form, None where the stream has none."""

    def read_rows(self, spec: TensorSpec, row: int) -> tuple[int, NDArray[Any]]:
        """The rows that come with ``row`` at no further cost: number of the first, (rows, elements).

        Of a sketched tensor that row alone, uint8 (1, the bytes that it has).
        """

    def read_pieces(self, spec: TensorSpec, row: int) -> Iterator[NDArray[np.float32]]:
        """One row, part by part as it is stored; of a tensor that is not sketched."""


class Source(Protocol):
    """A trace that can be read. Safe to use from several threads."""

    @property
    def path(self) -> str:
        """Where it is, for messages."""

    @property
    def attrs(self) -> Mapping[str, Any]:
        """What the trace says about itself."""

    @property
    def streams(self) -> Sequence[StreamSource]:
        """Its streams, in the order of ``StreamKey.order``."""

    def close(self) -> None:
        """Give back what is held open."""
