"""The thread that writes rows of gradients while training goes on.

Importing this imports neither torch nor numpy: the program may set them up first.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.capture.buffers import RowBuffer
    from gtrace.capture.layout import Slot
    from gtrace.capture.neural import NeuralRow
    from gtrace.trace import TraceWriter
    from gtrace.trace.rows import BlockSample


#: Loggers of the libraries that read and write traces: at level DEBUG each logs its imports and calls.
_LOGGERS = ("numcodecs", "zarr.core.sync", "asyncio", "h5py._conv")
_quiet: dict[int, int] = {}


def _not_ours(record: logging.LogRecord) -> bool:
    return record.thread not in _quiet


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Inside the block, messages of those libraries in this thread reach no handler.

    So a program that logs at level DEBUG, for example to its standard output, prints the same as without a capture.
    """
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_not_ours)  # once, however often it is added
    thread = threading.get_ident()
    _quiet[thread] = _quiet.get(thread, 0) + 1
    try:
        yield
    finally:
        _quiet[thread] -= 1
        if not _quiet[thread]:
            del _quiet[thread]


class Gaps:
    """Left-out steps by optimizer, in runs of consecutive ones. Only one thread adds."""

    def __init__(self) -> None:
        self._runs: dict[int, list[list[int]]] = {}
        #: Steps so far, of all optimizers.
        self.count = 0

    def add(self, stream: int, step: int) -> None:
        """Record a step; those of one optimizer ascend. A second call for another kind of gradient changes nothing."""
        runs = self._runs.setdefault(stream, [])
        if runs and runs[-1][1] == step:
            return
        if runs and runs[-1][1] == step - 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
        self.count += 1

    def describe(self) -> dict[str, str]:
        """optimizer -> its steps, in the format of the option ``--steps``.

        >>> gaps = Gaps()
        >>> for step in (3, 4, 5, 9):
        ...     gaps.add(0, step)
        >>> gaps.describe()
        {'0': '3-5,9'}
        """
        return {
            str(stream): ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
            for stream, runs in sorted(self._runs.items())
        }


@dataclass(frozen=True, slots=True)
class Row:
    """One step of one optimizer: some tensors of a buffer, and the numbers of a commit.

    ``grad_scale`` is their divisor. ``numbers`` are further ones about the tensors, by slot index.
    """

    stream: int
    step: int
    slots: Sequence[Slot]
    buffer: RowBuffer | NeuralRow
    grad_scale: float
    scalars: Mapping[str, float]
    kind: str = "weight"
    numbers: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


class AsyncWriter:
    """Writes rows in the order in which they arrive.

    Args:
        open_trace: creates the trace and returns it with the rank to write under; called in the thread, with the
            first row.
        on_error: called in the thread with each exception; the thread continues with the next row.
        most: elements to keep of a weight's gradient, in whole blocks; None for all.
        on_row: called in the thread when a row is in the trace.
    """

    def __init__(
        self,
        open_trace: Callable[[], tuple[TraceWriter, int]],
        on_error: Callable[[Exception], None],
        most: int | None = None,
        on_row: Callable[[Row], None] = lambda _row: None,
    ) -> None:
        self._most = most
        self._on_row = on_row
        self._samples: dict[tuple[str, int], BlockSample | None] = {}
        self._open_trace = open_trace
        self._on_error = on_error
        self._queue: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._trace: TraceWriter | None = None
        #: Steps that could not be written.
        self.unwritten = Gaps()
        self._rank = 0
        self._described: set[tuple[str, int, str]] = set()
        #: rows that are safely in the trace, by kind
        self.rows = Counter[str]()
        #: the same by kind and optimizer
        self.streams = defaultdict[str, Counter[int]](Counter)
        #: the trace could not be created, so no row can be written
        self.failed = False
        # A daemon: if a second Ctrl-C ends the wait in close(), the interpreter must not wait for it again.
        #: held while a row is written
        self.busy = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="gtrace-writer", daemon=True)

    def submit(self, row: Row) -> None:
        """Queue a row; its buffer returns to its pool when it is written."""
        self._queue.put(row)
        if self._thread.ident is None:
            self._thread.start()  # not earlier: most forked children never train

    @property
    def waiting(self) -> int:
        """Estimated number of queued rows that are not written yet."""
        return self._queue.qsize()

    @property
    def stored(self) -> int:
        """Bytes of gradients, or of their sketches, that are in the trace."""
        return 0 if self._trace is None else self._trace.stored

    def drain(self) -> None:
        """Wait until all queued rows are written; call it when none can follow."""
        if self._thread.ident is not None:
            self._queue.put(None)
            self._thread.join()

    def close(self, status: Literal["complete", "interrupted"], attrs: Mapping[str, object]) -> None:
        """Set attributes of the trace and finish it, if there is one. Call it after :meth:`drain`."""
        if self._trace is not None:
            self._trace.set_attrs(**attrs)
            self._trace.close(status)

    def _run(self) -> None:
        with quiet_logs():
            self._write_all()

    def _write_all(self) -> None:
        while (row := self._queue.get()) is not None:
            written = False
            self.busy.acquire()
            try:
                if self.failed:
                    self.unwritten.add(row.stream, row.step)
                else:
                    self._write(row)
                    written = True
            except Exception as error:  # noqa: BLE001 - an error of capture must not stop training
                self._give_up(row, error)
            finally:
                self.busy.release()
                row.buffer.release()
            if written:
                self._on_row(row)

    def _give_up(self, row: Row, error: Exception) -> None:
        """Leave out the whole row: a part of it would look like a step with other tensors absent."""
        self.unwritten.add(row.stream, row.step)
        self._on_error(error)
        try:
            if self._trace is not None:
                self._trace.discard()
        except Exception as second:  # noqa: BLE001 - as above
            self._on_error(second)

    def _write(self, row: Row) -> None:
        if self._trace is None:
            try:
                self._trace, self._rank = self._open_trace()
            finally:
                self.failed = self._trace is None
        row.buffer.wait()
        place: dict[str, Any] = {"kind": row.kind, "optimizer": row.stream, "rank": self._rank}
        for slot in row.slots:
            gradient = row.buffer.targets[slot.index].numpy()
            if row.grad_scale != 1.0:
                gradient /= row.grad_scale
            numbers = dict(row.numbers.get(slot.index, {}))
            about = {**self._description(row, slot), **slot.numbers}
            if row.kind != "neural" and self._most is not None:
                gradient = self._cut(slot, gradient, self._most, about, numbers)
            self._trace.append(row.step, slot.name, gradient, numbers=numbers, **place, **about)
        self._trace.commit(row.step, **{**place, **row.scalars})
        self.rows[row.kind] += 1
        self.streams[row.kind][row.stream] += 1

    def _cut(
        self, slot: Slot, gradient: NDArray[Any], most: int, about: dict[str, Any], numbers: dict[str, float]
    ) -> NDArray[Any]:
        """The stored blocks of a weight's gradient; adds numbers about the whole gradient."""
        from gtrace.trace.rows import UNKNOWN, BlockSample, whole_numbers

        numbers |= UNKNOWN
        key = slot.name, gradient.size
        if key not in self._samples:
            self._samples[key] = BlockSample.choose(*key, most)
        sample = self._samples[key]
        if sample is None:
            return gradient
        flat = gradient.reshape(-1)
        about |= {"sample": sample.describe(), "shape": list(slot.shape)}
        numbers |= whole_numbers(flat)
        return sample.take(flat)

    def _description(self, row: Row, slot: Slot) -> dict[str, Any]:
        """The attributes of a tensor at its first appearance."""
        key = row.kind, row.stream, slot.name
        if key in self._described:
            return {}
        self._described.add(key)
        about: dict[str, Any] = {"dtype": slot.dtype, "aliases": list(slot.aliases)}
        return about | dict(slot.attrs) | ({"module_type": slot.module_type} if slot.module_type else {})
