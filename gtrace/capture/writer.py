"""The thread that writes rows of gradients while training goes on.

Importing this imports neither torch nor numpy: the program may set them up first.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import queue
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from gtrace.capture.options import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.capture.buffers import RowBuffer
    from gtrace.capture.layout import Slot
    from gtrace.capture.neural import NeuralRow
    from gtrace.trace import TraceWriter
    from gtrace.trace.rows import BlockSample


#: seconds after which rows are written that are too few to be written together
_PAUSE = 0.5
#: seconds from a signal that ends the program until the steps that still wait are dropped
_GRACE = 1.5
#: seconds between two looks at the writer's thread
_LOOK = 0.05

#: Loggers of the libraries that read and write traces: at level DEBUG each logs its imports and calls.
_LOGGERS = ("numcodecs", "h5py._conv")
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


@dataclass(slots=True)
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

    def goes_with(self, later: Row) -> bool:
        """Whether a later row of the stream can be written with this one."""
        slab = self.buffer.slab
        same = slab is not None and later.buffer.slab is slab and later.slots is self.slots
        return same and self.numbers.keys() == later.numbers.keys()


class _Ahead(NamedTuple):
    """A call that makes memory for later rows; those that have arrived wait on."""

    call: Callable[[], None]


def _wake() -> None:
    """Nothing but the end of the thread's pause."""


class AsyncWriter:
    """Writes rows in order, many small ones together, and closes the trace: one thread does all work on files.

    Other threads only wait for it, and never longer than ``PATIENCE`` without progress, so neither Ctrl-C nor a disk
    that does not answer can catch one of them in the middle of a write.

    Args:
        open_trace: creates the trace and returns it with the rank to write under; called in the thread, with the
            first row, and again with the next one if a lock could not be had in time.
        on_error: called with each exception; the thread continues with the next row.
        most: elements to keep of a weight's gradient, in whole blocks; None for all.
        on_row: called in the thread when a row is in the trace, with the bytes that it takes there.
        values: the trace keeps the values of all gradients, so rows can be written together.
    """

    def __init__(
        self,
        open_trace: Callable[[], tuple[TraceWriter, int]],
        on_error: Callable[[Exception], None],
        most: int | None = None,
        on_row: Callable[[Row, float], None] = lambda _row, _stored: None,
        *,
        values: bool = True,
    ) -> None:
        self._most = most
        self._values = values and most is None
        self._on_row = on_row
        self._samples: dict[tuple[str, int], BlockSample | None] = {}
        self._open_trace = open_trace
        self._on_error = on_error
        self._rows: queue.SimpleQueue[Row] = queue.SimpleQueue()
        #: calls for the thread, each after the rows that came before it; None ends it
        self._queue: queue.SimpleQueue[Callable[[], None] | _Ahead | None] = queue.SimpleQueue()
        #: rows that the thread has, and has not written yet
        self._taken = 0
        #: rows that wait for others to be written with
        self._kept: list[Row] = []
        #: streams with a row
        self._begun: set[tuple[str, int]] = set()
        self._trace: TraceWriter | None = None
        #: Steps that could not be written.
        self.unwritten = Gaps()
        self._rank = 0
        self._described: set[tuple[str, int, str]] = set()
        #: rows that are safely in the trace, by kind
        self.rows = Counter[str]()
        #: the same by kind and optimizer
        self.streams = defaultdict[str, Counter[int]](Counter)
        #: held while the thread works on files
        self.busy = threading.Lock()
        #: why no row can be written any more: there is no trace, or it is gone
        self.lost: Exception | None = None
        self._progress = 0
        self._until = math.inf
        self._dropping = False
        # A daemon, so that a disk that never answers cannot keep the interpreter; otherwise close() ends it.
        self._thread = threading.Thread(target=self._run, name="gtrace-writer", daemon=True)
        #: a program may train in several threads
        self._starting = threading.Lock()

    def submit(self, row: Row) -> None:
        """Queue a row; its buffer returns to its pool when it is written.

        The thread begins with it at once if it is the first of its optimizer or its slab is full. Otherwise it sleeps
        on: to be woken, and to share the interpreter, would cost a small training more than the work itself.
        """
        if self._thread.ident is None:
            with self._starting:
                if self._thread.ident is None:
                    # Not earlier: most forked children never train. And not after the row: this waits until the thread
                    # waits.
                    self._thread.start()
        self._rows.put(row)
        if row.buffer.last or (row.kind, row.stream) not in self._begun:
            self._begun.add((row.kind, row.stream))
            self._queue.put(_wake)
        elif (ahead := row.buffer.ahead) is not None:
            self._queue.put(_Ahead(ahead))

    @property
    def waiting(self) -> int:
        """Estimated number of queued rows that are not written yet."""
        return self._rows.qsize() + self._taken

    @property
    def stored(self) -> int:
        """Bytes of gradients, or of their sketches, that are in the trace."""
        return 0 if self._trace is None else self._trace.stored

    def drain(self) -> None:
        """Wait until all queued rows are written; call it when none can follow."""
        if self._thread.ident is None:
            return
        done = threading.Event()
        self._queue.put(done.set)
        self._wait(done.wait)

    def close(self, status: Literal["complete", "interrupted"], facts: Callable[[], Mapping[str, object]]) -> None:
        """Finish the trace, if there is one, with attributes, and end the thread. Comes after :meth:`drain`.

        A trace that lacks a step is ``interrupted``, whatever ``status`` says. ``facts`` gives the attributes, in the
        thread, when the last row is written.
        """
        if self._thread.ident is None:
            return
        self._queue.put(lambda: self._close(status, facts))
        self._queue.put(None)

        def ended(seconds: float) -> bool:
            self._thread.join(seconds)
            return not self._thread.is_alive()

        self._wait(ended)

    def hurry(self) -> None:
        """Drop what is not written in 1.5 seconds."""
        self._until = min(self._until, time.monotonic() + _GRACE)

    def drop(self) -> None:
        """Write no further row; what :meth:`close` may leave for later stays undone."""
        self._dropping = True

    def _wait(self, ended: Callable[[float], bool]) -> None:
        progress, since = self._progress, time.monotonic()
        while not ended(_LOOK):
            now = time.monotonic()
            if now > self._until:
                self.drop()
            if self._progress != progress:
                progress, since = self._progress, now
            elif now - since > (PATIENCE if math.isinf(self._until) else _GRACE):
                self._on_error(TimeoutError("the disk does not answer; the trace stays as it is"))
                return

    def _beat(self) -> bool:
        """Count progress; whether there is time for what can be done later."""
        self._progress += 1
        return not self._dropping

    @quiet_logs()
    def _run(self) -> None:
        job: Callable[[], None] | _Ahead | None = _wake
        while job is not None:
            try:
                job = self._queue.get(timeout=_PAUSE)
            except queue.Empty:
                job = _wake
            with self.busy:
                if isinstance(job, _Ahead):
                    try:
                        job.call()
                    except Exception as error:  # noqa: BLE001 - an error of capture must not stop training
                        self._on_error(error)
                    continue
                for runs in self._runs():
                    for run in runs:
                        newest = run is runs[-1]
                        self._write_run(run, wait=newest and job is _wake, last=newest and job is not _wake)
                if job is not None:
                    job()

    def _runs(self) -> list[list[list[Row]]]:
        """The rows that have arrived: for each stream, those together that can be written together."""
        streams: dict[object, list[list[Row]]] = {}
        rows, self._kept = self._kept + [self._rows.get() for _ in range(self._rows.qsize())], []
        self._taken = len(rows)
        for row in rows:
            runs = streams.setdefault((row.kind, row.stream), [])
            if runs and self._values and runs[-1][-1].goes_with(row):
                runs[-1].append(row)
            else:
                runs.append([row])
        return list(streams.values())

    def _write_run(self, run: list[Row], *, wait: bool, last: bool) -> None:
        """Write rows; with ``wait``, those that came just now and are too few wait for others to be written with.

        With ``last``, no others can follow.
        """
        together = True
        latest = time.time() - _PAUSE if wait else math.inf
        while run:
            done, written, before = 1, False, self.stored
            try:
                if self.lost is not None or self._dropping:
                    self.unwritten.add(run[0].stream, run[0].step)
                elif together and (most := self._together(run, last=last)) > 1:
                    done = self._write_several(run[:most], last=last)
                    written = True
                elif together and most == 1 and self._may_wait(run[0], latest):
                    self._kept += run
                    return
                else:
                    self._write(run[0])
                    written = True
            except Exception as error:  # noqa: BLE001 - an error of capture must not stop training
                # One by one, so that as many as possible are written.
                together = False
                self._give_up(run[0], error)
            self._progress += 1
            self._taken -= done
            for row in run[:done]:
                row.buffer.release()
                if written:
                    self.rows[row.kind] += 1
                    self.streams[row.kind][row.stream] += 1
                    self._on_row(row, (self.stored - before) / done)
            run = run[done:]

    def _may_wait(self, row: Row, latest: float) -> bool:
        """Whether a row came later than ``latest``, and its slab has room for as many as can be written together."""
        known = (row.kind, row.stream, row.slots[0].name) in self._described
        return known and self._values and row.scalars["time"] > latest and row.buffer.several

    def _together(self, run: Sequence[Row], *, last: bool) -> int:
        """How many of these rows can be written together: 1 if the trace does not have all their tensors yet."""
        kind, stream = run[0].kind, run[0].stream
        known = all((kind, stream, slot.name) in self._described for slot in run[0].slots)
        if not known or self._trace is None:
            return 1
        return self._trace.together(len(run), kind, stream, self._rank, last=last)

    def _write_several(self, run: Sequence[Row], *, last: bool) -> int:
        import numpy as np

        assert self._trace is not None
        buffers = [cast("RowBuffer", row.buffer) for row in run]
        for buffer in buffers:
            buffer.wait()
        slab = buffers[0].slab
        values: NDArray[Any] = slab.values(buffers)
        if any(row.grad_scale != 1.0 for row in run):
            values = values / np.array([row.grad_scale for row in run], np.float32)[:, None]
        names = {name for row in run for name in row.scalars}
        return self._trace.extend(
            [row.step for row in run],
            {slot.name: values[:, slab.parts[slot.index]] for slot in run[0].slots},
            {name: [row.scalars.get(name, math.nan) for row in run] for name in names},
            {
                slot.name: {what: [row.numbers[slot.index][what] for row in run] for what in run[0].numbers[slot.index]}
                for slot in run[0].slots
                if slot.index in run[0].numbers
            },
            kind=run[0].kind,
            optimizer=run[0].stream,
            rank=self._rank,
            last=last,
        )

    def _close(self, status: Literal["complete", "interrupted"], facts: Callable[[], Mapping[str, object]]) -> None:
        try:
            if self._trace is None and self.unwritten.count and self.lost is None:
                # It must say which steps it lacks.
                self._trace, _ = self._open_trace()
            if self._trace is not None and self.lost is None:
                self._trace.set_attrs(**facts())
                self._trace.close("interrupted" if self.unwritten.count else status, self._beat)
        except Exception as error:  # noqa: BLE001 - the program is done; its exit code must survive this
            self._note(error)
            self._on_error(error)

    def _note(self, error: Exception) -> None:
        """Whether nothing can be written any more: there is no trace, or it is gone; a lock or room may come later."""
        cause = error.__cause__
        later = isinstance(cause, TimeoutError) or getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if isinstance(cause, FileNotFoundError) or (self._trace is None and not later):
            self.lost = self.lost or error

    def _give_up(self, row: Row, error: Exception) -> None:
        """Leave out the whole row: a part of it would look like a step with other tensors absent."""
        self.unwritten.add(row.stream, row.step)
        self._note(error)
        self._on_error(error)
        try:
            if self._trace is not None:
                self._trace.discard()
        except Exception as second:  # noqa: BLE001 - as above
            self._on_error(second)

    def _write(self, row: Row) -> None:
        if self._trace is None:
            self._trace, self._rank = self._open_trace()
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
            self._described.add((row.kind, row.stream, slot.name))
            self._progress += 1
        self._trace.commit(row.step, **{**place, **row.scalars})

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
        if (row.kind, row.stream, slot.name) in self._described:
            return {}
        about: dict[str, Any] = {"dtype": slot.dtype, "aliases": list(slot.aliases)}
        return about | dict(slot.attrs) | ({"module_type": slot.module_type} if slot.module_type else {})
