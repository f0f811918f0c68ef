"""What a sweep measures when nobody chooses, and how long a sweep will take."""

from __future__ import annotations

import glob
import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from gtrace.sweep.gradients import Gradients, Kind
from gtrace.sweep.jobs import OVERHEAD
from gtrace.sweep.limits import CHUNK
from gtrace.sweep.run import run_sweep
from gtrace.trace import TensorInfo, Trace, open_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.codecs.assignment import TableLike
    from gtrace.sweep.store import SweepResult

#: One or two codecs of each family: fixed and fitted levels, sparsifiers, signs with memory, small floats, bf16.
METHODS = "qsgdinf,nuqsgd,alq,zipml,topk,ef-signsgd,fp:e4m3,bf16"
#: Nominal bits of those that have any.
BITS = (2, 3, 4, 5)
#: Steps at most, in bursts of three: from three consecutive steps gradient noise can be estimated.
STEPS, BURST = 32, 3
#: Tensors, and their elements, that a probe runs on.
_PROBED, _LARGEST = 3, 1 << 17
#: A sweep of fewer values takes seconds, and is not timed before.
_WORTH_TIMING = 1 << 30


def representative_steps(steps: Sequence[int], most: int = STEPS) -> tuple[int, ...]:
    """Steps that represent all of training: bursts of three consecutive steps, the first and the last among them.

    Args:
        steps: captured steps, rising.
        most: limit on steps. If there are fewer bursts, single steps fill up the rest.

    >>> representative_steps(range(100), 8)
    (0, 1, 2, 49, 73, 97, 98, 99)
    """
    if len(steps) <= most:
        return tuple(steps)
    starts: list[int] = []
    for k in range(len(steps) - BURST + 1):
        whole = steps[k + BURST - 1] - steps[k] == BURST - 1
        if whole and (not starts or k >= starts[-1] + BURST):
            starts.append(k)
    # The last burst ends with the last step, if there is room before it.
    last = len(steps) - BURST
    if starts and steps[-1] - steps[last] == BURST - 1 and last > starts[-1]:
        starts = [*(k for k in starts if k + BURST <= last), last]
    bursts = _spread([(steps[k], k) for k in starts], most // BURST)
    chosen = {steps[k + place] for k in bursts for place in range(BURST)}
    if not chosen:
        return tuple(_spread([(step, step) for step in steps], most))
    while len(chosen) < most:
        chosen.add(max(steps, key=lambda step: min(abs(step - other) for other in chosen)))
    return tuple(sorted(chosen))


def _spread(items: Sequence[tuple[int, int]], most: int) -> list[int]:
    """At most ``most`` second entries, spread over the first ones, which ascend."""
    if len(items) <= most:
        return [value for _, value in items]
    found: dict[int, None] = {}
    first, last = items[0][0], items[-1][0]
    for k in range(most):
        wanted = first + (last - first) * k / (most - 1) if most > 1 else (first + last) / 2
        left = [item for item in items if item[1] not in found]
        found[min(left, key=lambda item: abs(item[0] - wanted))[1]] = None
    return sorted(found)


def quick_steps(trace: Trace, globs: Sequence[str] | None = None, kind: Kind | None = None) -> tuple[int, ...]:
    """The steps of a trace that a sweep measures when nobody chooses; arguments as of :class:`Gradients`."""
    return representative_steps(sorted(Gradients(trace, globs, kind, CHUNK).all_steps))


def quick_sweep(trace: Trace | str | os.PathLike[str], **options: Any) -> SweepResult:
    """What ``gtrace sweep TRACE`` measures when nobody chooses; arguments as of :func:`run_sweep`."""
    with ExitStack() as stack:
        opened = stack.enter_context(open_trace(trace)) if isinstance(trace, (str, os.PathLike)) else trace
        steps = quick_steps(opened, options.get("tensors"), options.get("kind"))
    return run_sweep(trace, METHODS, **{"bits": BITS, "steps": steps, "leave_out": True} | options)


def announce(
    trace: Trace,
    codecs: Sequence[TableLike],
    steps: Sequence[int] | None,
    *,
    globs: Sequence[str] | None,
    kind: Kind | None,
    jobs: int | None,
    every: int,
) -> str:
    """What a sweep takes, and what all codecs on all steps would take; of a long sweep a probe is timed.

    Args:
        trace: an open trace.
        codecs: of the sweep.
        steps: of the sweep; None for all.
        globs: of its tensors; None for all.
        kind: of its gradients.
        jobs: threads.
        every: number of configurations that there are.
    """
    gradients = Gradients(trace, globs, kind, CHUNK)
    here = gradients.choose(steps)
    whole = gradients.all_steps
    mine, most = len(codecs) * _values(gradients, here), every * _values(gradients, whole)
    said = f"measures {len(codecs)} configurations on {len(here)} of {len(whole):,} steps"
    more = f"--all: {every} configurations on {len(whole):,} steps"
    if mine > _WORTH_TIMING:
        rate = _rate(trace, gradients, codecs, kind, jobs)
        said, more = (f"{text}, about {_in_words(n / rate)}" for text, n in ((said, mine), (more, most)))
    else:
        said, more = f"{said}, seconds", f"{more}, about {most / mine:.0f} times as long"
    return said if len(codecs) >= every and len(here) == len(whole) else f"{said}; {more}"


def _in_words(seconds: float) -> str:
    """Seconds as a person says them: ``40 s``, ``12 min``, ``3 h``."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1g} s" if seconds < 10 else f"{10 * round(seconds / 10)} s"


def _values(gradients: Gradients, steps: frozenset[int]) -> int:
    """The work of one configuration on these steps, see :class:`gtrace.sweep.jobs.Block`."""
    return sum((info.size + OVERHEAD) * len(steps.intersection(gradients.steps[info.name])) for info in gradients.infos)


def _rate(
    trace: Trace, gradients: Gradients, codecs: Sequence[TableLike], kind: Kind | None, jobs: int | None
) -> float:
    """Values per second, timed on a few tensors in the middle of training."""
    by_size = sorted(gradients.infos, key=lambda info: info.size)
    small = [info for info in by_size if info.size <= _LARGEST] or by_size[:1]
    steps = gradients.steps[small[-1].name]
    middle = max(0, min(len(steps) // 2, len(steps) - BURST))
    burst = steps[middle : middle + BURST]

    def run(infos: Sequence[TensorInfo]) -> int:
        names = [glob.escape(info.name) for info in infos]
        run_sweep(trace, codecs, tensors=names, steps=burst, kind=kind, jobs=jobs, leave_out=True)
        return len(codecs) * len(burst) * sum(info.size + OVERHEAD for info in infos)

    # The first run compiles, or loads what was compiled.
    run(small[:1])
    clock = time.perf_counter()
    values = run(small[-_PROBED:])
    return values / (time.perf_counter() - clock)
