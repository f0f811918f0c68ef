"""How long steps, backward passes and collectives take, from clocks that training does not wait for."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel

from gtrace.torch_hooks.steps import Patch, backward_in_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    Mark: TypeAlias = "tuple[float, float] | torch.cuda.Event"
    #: a call of a collective: how its name begins, whether outside of backward passes, its start and its end
    Collective: TypeAlias = tuple[str, bool, tuple[Mark, Mark]]
    #: the collectives of a step: their seconds, those outside of backward passes, and whether training waited
    Exchange: TypeAlias = tuple[float, float, bool]

#: steps before the clock runs: the first ones allocate and compile
_WARM_UP = 2
#: each of the first steps is timed, and every 127th later: a prime, because recorded steps are often multiples
_ALL, _SOME = 64, 127
#: steps that are kept, and steps that wait for a GPU
_KEPT, _WAITING = 512, 64
#: timed steps that are read together
_TOGETHER = 16
#: collectives of a step that are kept; after more, e.g. in a long evaluation, nothing is said of that step
_MOST = 4096
#: DistributedDataParallel times its first ten iterations and every hundredth; it is asked at few steps
_ASKED = (5, 12)
_EVERY = 256
#: modules through whose ``dist`` FullyShardedDataParallel and fully_shard call their collectives
_CALLERS = tuple(
    f"torch.distributed.fsdp.{name}" for name in ("_runtime_utils", "_flat_param", "_fully_shard._fsdp_collectives")
)
#: how the names of these collectives begin, in all versions of torch
_GATHER, _SCATTER, _REDUCE = "all_gather", "reduce_scatter", "all_reduce"


def _exchange_of(collectives: Sequence[Collective] | None) -> Exchange | None:
    """None if there are none, or not all of them are known: what is scattered was gathered before."""
    kinds = {kind for kind, _, _ in collectives or ()}
    if not collectives or (_GATHER in kinds) is not (_SCATTER in kinds):
        return None
    taken = [_between(*marks) for _, _, marks in collectives]
    known = [seconds for seconds in taken if seconds is not None]
    beside = sum(seconds for (_, outside, _), seconds in zip(collectives, known, strict=False) if outside)
    # On a GPU they run beside other work.
    waited = all(isinstance(mark, tuple) for _, _, marks in collectives for mark in marks)
    return (sum(known), beside, waited) if len(known) == len(taken) else None


class _TimedCollectives:
    """``torch.distributed`` as modules that shard models see it: its collectives are timed, all else is the same."""

    def __init__(self, original: object, timed: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        self._original = original
        self._timed = timed

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._original, name)
        kind = next((kind for kind in (_GATHER, _SCATTER, _REDUCE) if name.startswith(kind)), None)
        return found if kind is None else self._timed(kind, found)


class StepClock:
    """Times the steps of the first optimizer of a process.

    A mark is a pair of the clock's time and the seconds that capture took so far, which do not count; once a GPU
    is in use, an event on its stream, which is read when it has passed. ``waited`` says the seconds that training
    waited for capture so far.
    """

    def __init__(
        self,
        waited: Callable[[], float],
        guarded: Callable[..., None] = lambda function, *arguments: function(*arguments),
    ) -> None:
        self._waited = waited
        self._guarded = guarded
        self._seen = 0
        #: the next step that it has to see
        self.due: float = 0
        self._start: Mark | None = None
        #: whether the time from the last step to the next one is taken
        self.runs = False
        self._recorded = False
        self._backward: list[Mark] = []
        self._open: Mark | None = None
        #: from one step to the next: whether the first was recorded; start, end, and the starts and ends of backward
        #: passes; collectives of sharded models, None if there are too many, or one goes on after its call
        self._intervals: deque[tuple[bool, Sequence[Mark], Sequence[Collective] | None]] = deque(maxlen=_WAITING)
        #: recorded -> seconds of steps, of their backward passes, and from the last of these to the step
        self._found: dict[bool, deque[tuple[float, float, float]]] = {
            recorded: deque(maxlen=_KEPT) for recorded in (False, True)
        }
        #: DistributedDataParallel's own times, in seconds
        self.exchange: dict[str, float] = {}
        #: likewise, of collectives of sharded models
        self._exchanges: dict[bool, deque[Exchange]] = {recorded: deque(maxlen=_KEPT) for recorded in (False, True)}
        self._collectives: list[Collective] | None = []
        self._begun: tuple[str, bool, bool, Mark] | None = None
        self._patches: list[Patch] = []

    def backward_begins(self) -> None:
        """A call of ``backward``; one inside of another does not count."""
        if self._start is not None and backward_in_progress() < 0:
            self._open = self._mark()

    def backward_ends(self) -> None:
        """The call returned."""
        if self._open is not None and backward_in_progress() < 0:
            self._backward += [self._open, self._mark()]
            self._open = None

    def step(self, step: int, *, recorded: bool, models: Callable[[], Iterable[nn.Module]]) -> None:
        """A step begins. Those before ``due`` may be left out."""
        if step < self.due:
            return
        self._seen = step + 1
        timed = _WARM_UP <= self._seen <= _ALL or self._seen % _SOME == 0
        now = self._mark() if timed or self._start is not None else None
        if self._start is not None and now is not None:
            self._intervals.append((self._recorded, (self._start, now, *self._backward), self._collectives))
        self._start, self._recorded, self._backward, self._open = now if timed else None, recorded, [], None
        self._collectives = []
        self.runs = timed
        if timed:
            self._watch_collectives()
        else:
            self.stop()
        # Not at each step: Python code that has not run for a while is slow.
        if not timed or len(self._intervals) >= _TOGETHER:
            self._read()
        if self._seen in _ASKED or self._seen % _EVERY == 0:
            self._ask(models())
        busy = timed or self._intervals or self._seen < _ALL
        self.due = self._seen if busy else self._seen + min(-(step + 2) % _SOME, -(step + 2) % _EVERY)

    def describe(self) -> dict[str, Any]:
        """What is known, the fields of :class:`gtrace.trace.facts.StepTimes`."""
        self._read()
        recorded = not self._found[False]
        found = self._found[recorded]
        if not found:
            return {}
        step, backward, after = (statistics.median(column) for column in zip(*found, strict=True))
        about = {"step": step, "steps": len(found), "recorded": recorded}
        if backward > 0:
            about |= {"backward": backward, "after_backward": after}
        if self.exchange or not self._exchanges[recorded]:
            return about | self.exchange
        seconds, outside, waited = zip(*self._exchanges[recorded], strict=True)
        communication = statistics.median(seconds)
        about |= {"communication": communication, "outside_backward": statistics.median(outside)}
        return about | ({"exposed": communication} if all(waited) else {})

    def stop(self) -> None:
        """Leave collectives alone."""
        for patch in self._patches:
            patch.use(False)
        self._patches = []

    def _watch_collectives(self) -> None:
        if self._patches or _CALLERS[0] not in sys.modules:
            return
        for module in map(sys.modules.get, _CALLERS):
            if (original := getattr(module, "dist", None)) is not None:
                self._patches.append(Patch(module, "dist", original, _TimedCollectives(original, self._timed)))
                self._patches[-1].use(True)

    def _timed(self, kind: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: object, **kwargs: object) -> object:
            self._guarded(self._collective_begins, kind, (*args, *kwargs.values()))
            result = collective(*args, **kwargs)
            self._guarded(self._collective_ends, result)
            return result

        return timed

    def _collective_begins(self, kind: str, arguments: Iterable[object]) -> None:
        on_gpu = any(isinstance(one, torch.Tensor) and one.is_cuda for one in arguments)
        self._begun = kind, self._open is None, on_gpu, self._mark(on_gpu)

    def _collective_ends(self, result: object) -> None:
        if self._begun is None or self._collectives is None:
            return
        kind, outside, on_gpu, start = self._begun
        if result is not None or len(self._collectives) == _MOST:
            self._collectives = None
        else:
            self._collectives.append((kind, outside, (start, self._mark(on_gpu))))
        self._begun = None

    def _mark(self, on_gpu: bool = True) -> Mark:
        in_use = on_gpu and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not in_use or torch.cuda.is_current_stream_capturing():
            return time.perf_counter(), self._waited()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _read(self) -> None:
        while self._intervals:
            recorded, (start, end, *passes), collectives = self._intervals[0]
            # All others have passed when these have: streams of their own may be behind.
            lasts = end, *(marks[1] for _, _, marks in collectives or ())
            if not all(isinstance(mark, tuple) or mark.query() for mark in lasts):  # type: ignore[no-untyped-call]
                return
            self._intervals.popleft()
            spans = [(start, end), (passes[-1] if passes else end, end), *zip(passes[::2], passes[1::2], strict=True)]
            step, after, *backward = (_between(*span) for span in spans)
            if step is not None and after is not None and None not in backward:
                self._found[recorded].append((step, sum(filter(None, backward)), after))
                if (exchange := _exchange_of(collectives)) is not None:
                    self._exchanges[recorded].append(exchange)

    def _ask(self, models: Iterable[nn.Module]) -> None:
        for wrapper in models:
            if not isinstance(wrapper, DistributedDataParallel) or wrapper.process_group.size() == 1:
                continue
            found = wrapper._get_ddp_logging_data()  # type: ignore[no-untyped-call]
            taken = [found.get(f"avg_backward_{name}_time", 0) / 1e9 for name in ("comm", "compute_comm_overlap")]
            if taken[0] > 0:
                self.exchange = {"communication": taken[0], "exposed": max(0.0, taken[0] - taken[1])}


def _between(first: Mark, last: Mark) -> float | None:
    """Seconds between two marks; None if they are of different clocks, or of different devices."""
    if isinstance(first, tuple) and isinstance(last, tuple):
        return last[0] - first[0] - (last[1] - first[1])
    if isinstance(first, tuple) or isinstance(last, tuple) or first.device != last.device:
        return None
    return float(first.elapsed_time(last)) / 1e3
