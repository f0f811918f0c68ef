"""How long steps and backward passes take, from clocks that training does not wait for."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel

from gtrace.torch_hooks.steps import backward_in_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

    Mark: TypeAlias = "tuple[float, float] | torch.cuda.Event"

#: steps before the clock runs: the first ones allocate and compile
_WARM_UP = 2
#: each of the first steps is timed, and every 127th later: a prime, because recorded steps are often multiples
_ALL, _SOME = 64, 127
#: steps that are kept, and steps that wait for a GPU
_KEPT, _WAITING = 512, 64
#: DistributedDataParallel times its first ten iterations and every hundredth; it is asked at few steps
_ASKED = (5, 12)
_EVERY = 256


class _Interval(NamedTuple):
    """From one step to the next.

    Attributes:
        recorded: the step at its start was recorded.
        marks: its start, its end, and in between the starts and ends of backward passes.
    """

    recorded: bool
    marks: Sequence[Mark]

    @property
    def last(self) -> Mark:
        return self.marks[1]


class StepClock:
    """Times the steps of the first optimizer of a process.

    A mark is a pair of the clock's time and the seconds that capture took so far, which do not count; once a GPU
    is in use, an event on its stream, which is read when it has passed.

    Args:
        waited: seconds that training waited for capture so far.
    """

    def __init__(self, waited: Callable[[], float]) -> None:
        self._waited = waited
        self._seen = 0
        self._start: Mark | None = None
        #: whether the time from the last step to the next one is taken
        self.runs = False
        self._recorded = False
        self._backward: list[Mark] = []
        self._open: Mark | None = None
        self._intervals: deque[_Interval] = deque(maxlen=_WAITING)
        #: recorded -> seconds of steps, of their backward passes, and from the last of these to the step
        self._found: dict[bool, deque[tuple[float, float, float]]] = {
            recorded: deque(maxlen=_KEPT) for recorded in (False, True)
        }
        #: DistributedDataParallel's own times, in seconds
        self.exchange: dict[str, float] = {}

    def backward_begins(self) -> None:
        """A call of ``backward``; one inside of another does not count."""
        if self._start is not None and backward_in_progress() < 0:
            self._open = self._mark()

    def backward_ends(self) -> None:
        """The call returned."""
        if self._open is not None and backward_in_progress() < 0:
            self._backward += [self._open, self._mark()]
            self._open = None

    def due(self, step: int) -> int:
        """The first step from this one on at which :meth:`step` has something to do."""
        if self.runs or self._intervals or step < _ALL:
            return step
        return step + min(-(step + 1) % _SOME, -(step + 1) % _EVERY)

    def step(self, step: int, *, recorded: bool, models: Callable[[], Iterable[nn.Module]]) -> None:
        """A step begins. None that is :meth:`due` may be left out.

        Args:
            step: its number.
            recorded: whether it is recorded.
            models: the live modules.
        """
        if self.due(step) > step:
            return
        self._seen = step + 1
        timed = _WARM_UP <= self._seen <= _ALL or self._seen % _SOME == 0
        now = self._mark() if timed or self._start is not None else None
        if self._start is not None and now is not None:
            self._intervals.append(_Interval(self._recorded, (self._start, now, *self._backward)))
        self._start, self._recorded, self._backward, self._open = now if timed else None, recorded, [], None
        self.runs = timed
        while self._intervals and _has_passed(self._intervals[0].last):
            self._read(self._intervals.popleft())
        if self._seen in _ASKED or self._seen % _EVERY == 0:
            self._ask(models())

    def describe(self) -> dict[str, Any]:
        """What is known, the fields of :class:`gtrace.trace.facts.StepTimes`."""
        recorded = not self._found[False]
        found = self._found[recorded]
        if not found:
            return {}
        step, backward, after = (statistics.median(column) for column in zip(*found, strict=True))
        about = {"step": step, "steps": len(found), "recorded": recorded}
        if backward > 0:
            about |= {"backward": backward, "after_backward": after}
        return about | self.exchange

    def _mark(self) -> Mark:
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not in_use or torch.cuda.is_current_stream_capturing():
            return time.perf_counter(), self._waited()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _read(self, interval: _Interval) -> None:
        start, end, *passes = interval.marks
        spans = [(start, end), (passes[-1] if passes else end, end), *zip(passes[::2], passes[1::2], strict=True)]
        step, after, *backward = (_between(*span) for span in spans)
        if step is not None and after is not None and None not in backward:
            self._found[interval.recorded].append((step, sum(filter(None, backward)), after))

    def _ask(self, models: Iterable[nn.Module]) -> None:
        for wrapper in _wrappers(models):
            found = wrapper._get_ddp_logging_data()
            taken = [found.get(f"avg_backward_{name}_time", 0) / 1e9 for name in ("comm", "compute_comm_overlap")]
            if taken[0] > 0:
                self.exchange = {"communication": taken[0], "exposed": max(0.0, taken[0] - taken[1])}


def _wrappers(models: Iterable[nn.Module]) -> Iterator[Any]:
    return (one for one in models if isinstance(one, DistributedDataParallel) and one.process_group.size() > 1)


def _has_passed(mark: Mark) -> bool:
    return isinstance(mark, tuple) or bool(mark.query())  # type: ignore[no-untyped-call]


def _between(first: Mark, last: Mark) -> float | None:
    """Seconds between two marks; None if they are of different clocks, or of different devices."""
    if isinstance(first, tuple) and isinstance(last, tuple):
        return last[0] - first[0] - (last[1] - first[1])
    if isinstance(first, tuple) or isinstance(last, tuple) or first.device != last.device:
        return None
    return float(first.elapsed_time(last)) / 1e3
