"""What the processes of one run recorded together."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

from gtrace.capture.session import CaptureSummary, disk_usage
from gtrace.trace import open_trace
from gtrace.trace.format import KINDS
from gtrace.trace.shared import parts

if TYPE_CHECKING:
    from collections.abc import Mapping
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
        counts = {kind: Counter[int]() for kind in KINDS}
        for key in trace.streams:
            counts[key.kind][key.rank] += trace.scalars(**key._asdict())["step"].size
        tensors = trace.tensors
    rows = counts["weight"] | counts["neural"]
    rows = Counter({rank: count for rank, count in rows.items() if count})
    if not rows or (len(rows) == 1 and own.rows):
        return own
    told = [part["capture"] for part in parts(path) if isinstance(part.get("capture"), dict)]
    blocked, waited, span = max(map(_waiting, told), default=(0.0, 0.0, 0.0))
    most = max(rows, key=lambda rank: rows[rank])
    return dataclasses.replace(
        own,
        torch_seen=True,
        steps_seen=max((int(outcome.get("steps_seen", 0)) for outcome in told), default=0),
        steps_wanted=rows[most],
        rows=rows[most],
        fewest_rows=min(rows.values()),
        ranks=len(rows),
        optimizers=len({info.optimizer for info in tensors if info.rank == most}),
        tensors=sum(info.rank == most and info.kind == "weight" for info in tensors),
        neural_rows=counts["neural"][most],
        neural_tensors=sum(info.rank == most and info.kind == "neural" for info in tensors),
        bytes=disk_usage(path),
        blocked=blocked,
        waited=waited,
        span=span,
        skipped_steps=max((int(outcome.get("skipped_steps", 0)) for outcome in told), default=0),
        errors=sum(int(outcome.get("errors", 0)) for outcome in told),
        over_budget=any(outcome.get("over_budget") for outcome in told),
        complaints=(),
    )


def _waiting(outcome: Mapping[str, Any]) -> tuple[float, float, float]:
    blocked, waited, span = (float(outcome.get(name, 0.0)) for name in ("blocked", "waited", "span"))
    return blocked, waited, span
