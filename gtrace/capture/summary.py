"""The summary of a capture: of this process, and of all processes of a run together."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gtrace.settings import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True)
class CaptureSummary:
    """What a capture recorded.

    Attributes:
        path: the trace; it exists only if ``rows`` is positive.
        torch_seen: the program imported torch.
        steps_seen: optimizer steps that the program took, of all optimizers.
        steps_wanted: number of these that the settings select.
        backward_passes: number of calls of ``backward`` until an optimizer steps, and of those near recorded steps.
        rows: recorded steps.
        optimizers: number of optimizers with recorded steps.
        tensors: distinct weight tensors that were recorded.
        bytes: size of the trace on disk.
        blocked: fraction of the training time that capture took.
        waited: the same in seconds.
        span: seconds from the first optimizer step to the last one.
        skipped_steps: steps that a gradient scaler left out.
        dropped: steps left out because too many waited to be written.
        unwritten: steps that could not be written.
        errors: errors of capture.
        over_budget: recording ended early because the budget was used up.
        complaints: one line for each tensor pattern that matched nothing.
        ranks: processes that recorded.
        fewest_rows: steps of the process that recorded the smallest number, if there are several.
        neural_rows: steps with recorded gradients of module outputs.
        neural_tensors: distinct outputs of modules with recorded gradients.
        changes: distinct tensors of weight updates, outer gradients and momentum buffers, those that were asked for.
        without: what was asked for besides the gradients and not available, one line each.
        lost: exit code of the error that left no trace, for example because another program has taken its place.
        functional: calls of ``torch.autograd.grad``, which leaves gradients nowhere, until an optimizer steps.
        by_hand: the program changes its weights without an optimizer of torch.
        counts: for each process that recorded, the recorded steps of each of its optimizers.
        together: the processes trained together, as the ranks of one process group.
    """

    path: Path
    torch_seen: bool = False
    steps_seen: int = 0
    backward_passes: int = 0
    steps_wanted: int = 0
    rows: int = 0
    optimizers: int = 0
    tensors: int = 0
    bytes: int = 0
    blocked: float = 0.0
    waited: float = 0.0
    span: float = 0.0
    skipped_steps: int = 0
    dropped: int = 0
    unwritten: int = 0
    errors: int = 0
    over_budget: bool = False
    complaints: tuple[str, ...] = ()
    ranks: int = 1
    fewest_rows: int = 0
    neural_rows: int = 0
    neural_tensors: int = 0
    changes: Mapping[str, int] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    lost: int = 0
    functional: int = 0
    by_hand: bool = False
    counts: tuple[tuple[int, ...], ...] = ()
    together: bool = False


def disk_usage(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    total = 0
    for folder, _, files in os.walk(path):
        for file in files:
            # Another process of the run may be moving it into its place.
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, file)).st_size
    return total


def all_parts(path: Path, own: CaptureSummary) -> CaptureSummary:
    """The summary of a trace that several processes wrote; ``own`` if only this process did.

    Steps, tensors and optimizers are those of the process that recorded most; errors are added up.

    Args:
        path: the trace.
        own: the summary of this process.

    Raises:
        TraceError: the trace cannot be read.
    """
    # Not at the top: this module is loaded before the program runs, and the trace reader imports numpy.
    from gtrace.trace import open_trace
    from gtrace.trace.format import SECOND_MOMENT
    from gtrace.trace.shared import parts

    with open_trace(path) as trace:
        counts = {kind: Counter[int]() for kind in (*KINDS, SECOND_MOMENT)}
        each: dict[int, Counter[int]] = {}
        for key in trace.streams:
            size = trace.scalars(**key._asdict())["step"].size
            counts[key.kind][key.rank] += size
            if size and key.kind in KINDS:
                each[key.rank] = each.get(key.rank, Counter()) | Counter({key.optimizer: size})
        tensors, together = trace.tensors, trace.attrs.get("world_size", 1) != 1
    rows = functools.reduce(operator.or_, (counts[kind] for kind in KINDS))
    rows = Counter({rank: count for rank, count in rows.items() if count})
    if not rows or (len(rows) == 1 and own.rows):
        return own
    outcomes = [part["capture"] for part in parts(path) if isinstance(part.get("capture"), dict)]
    blocked, waited, span = max(map(_waiting, outcomes), default=(0.0, 0.0, 0.0))
    most = max(rows, key=lambda rank: rows[rank])
    return dataclasses.replace(
        own,
        torch_seen=True,
        steps_seen=max((int(outcome.get("steps_seen", 0)) for outcome in outcomes), default=0),
        steps_wanted=rows[most],
        rows=rows[most],
        fewest_rows=min(rows.values()),
        ranks=len(rows),
        optimizers=len({info.optimizer for info in tensors if info.rank == most}),
        tensors=sum(info.rank == most and info.kind == "weight" for info in tensors),
        neural_rows=counts["neural"][most],
        neural_tensors=sum(info.rank == most and info.kind == "neural" for info in tensors),
        changes=Counter(info.kind for info in tensors if info.rank == most and info.kind in own.changes),
        bytes=disk_usage(path),
        blocked=blocked,
        waited=waited,
        span=span,
        skipped_steps=max((int(outcome.get("skipped_steps", 0)) for outcome in outcomes), default=0),
        errors=sum(int(outcome.get("errors", 0)) for outcome in outcomes),
        over_budget=any(outcome.get("over_budget") for outcome in outcomes),
        complaints=(),
        counts=tuple(tuple(each[rank].values()) for rank in sorted(rows)),
        together=together,
    )


def _waiting(outcome: Mapping[str, Any]) -> tuple[float, float, float]:
    blocked, waited, span = (float(outcome.get(name, 0.0)) for name in ("blocked", "waited", "span"))
    return blocked, waited, span
