"""What the processes of one run recorded together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from gtrace.capture.session import CaptureSummary, disk_usage
from gtrace.trace import open_trace
from gtrace.trace.shared import parts

if TYPE_CHECKING:
    from pathlib import Path


def all_parts(path: Path, own: CaptureSummary) -> CaptureSummary:
    """The summary of a trace that several processes wrote; ``own`` where no other process than this one did.

    Steps, tensors and optimizers are those of the process that recorded most; errors add up.

    Args:
        path: the trace.
        own: what this process recorded.

    Raises:
        TraceError: the trace cannot be read.
    """
    with open_trace(path) as trace:
        rows: dict[int, int] = {}
        for key in trace.streams:
            if key.kind == "weight":
                rows[key.rank] = rows.get(key.rank, 0) + trace.scalars(**key._asdict())["step"].size
        names = {(info.rank, info.optimizer, info.name) for info in trace.tensors if info.kind == "weight"}
    rows = {rank: count for rank, count in rows.items() if count}
    if not rows or (len(rows) == 1 and own.rows):
        return own
    told = [part["capture"] for part in parts(path) if isinstance(part.get("capture"), dict)]
    most = max(rows, key=lambda rank: rows[rank])
    return dataclasses.replace(
        own,
        torch_seen=True,
        steps_seen=max((int(outcome.get("steps_seen", 0)) for outcome in told), default=0),
        steps_wanted=rows[most],
        rows=rows[most],
        fewest_rows=min(rows.values()),
        ranks=len(rows),
        optimizers=len({optimizer for rank, optimizer, _ in names if rank == most}),
        tensors=sum(rank == most for rank, _, _ in names),
        bytes=disk_usage(path),
        blocked=max((float(outcome.get("blocked", 0.0)) for outcome in told), default=0.0),
        skipped_steps=max((int(outcome.get("skipped_steps", 0)) for outcome in told), default=0),
        errors=sum(int(outcome.get("errors", 0)) for outcome in told),
        over_budget=any(outcome.get("over_budget") for outcome in told),
        complaints=(),
    )
