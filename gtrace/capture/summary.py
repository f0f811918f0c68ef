"""The summary of a capture, of this process and of all processes of a run together; and what is said at its end."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gtrace.errors import size_text
from gtrace.settings import KINDS
from gtrace.trace.files import disk_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


#: Seconds of training below which its share that capture took is shown in milliseconds, too.
_SHORT = 1.0


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


def all_parts(path: Path, own: CaptureSummary) -> CaptureSummary:
    """The summary of a trace that several processes wrote; ``own`` if only this process did.

    Steps, tensors and optimizers are those of the process that recorded most; errors are added up.

    Raises:
        TraceError: the trace cannot be read.
    """
    # Not at the top: this module is loaded before the program runs, and the trace reader imports numpy.
    from gtrace.trace import open_trace
    from gtrace.trace.shared import parts

    with open_trace(path) as trace:
        counts = defaultdict[str, Counter[int]](Counter)
        each: dict[int, Counter[int]] = {}
        for key in trace.streams:
            size = trace.scalars(**key._asdict())["step"].size
            counts[key.kind][key.rank] += size
            if size and key.kind in KINDS:
                each[key.rank] = each.get(key.rank, Counter()) | Counter({key.optimizer: size})
        tensors, together = trace.tensors, trace.attrs.get("world_size", 1) != 1
    rows = functools.reduce(operator.or_, (counts[kind] for kind in KINDS))  # positive counts alone
    if not rows or (len(rows) == 1 and own.rows):
        return own
    outcomes = [part["capture"] for part in parts(path) if isinstance(part.get("capture"), dict)]
    names = ("blocked", "waited", "span", "steps_seen", "skipped_steps", "errors", "over_budget")
    found = {name: [float(outcome.get(name, 0)) for outcome in outcomes] or [0.0] for name in names}
    blocked, waited, span = max(zip(found["blocked"], found["waited"], found["span"], strict=True))
    most = max(rows, key=lambda rank: rows[rank])
    return dataclasses.replace(
        own,
        torch_seen=True,
        steps_seen=int(max(found["steps_seen"])),
        steps_wanted=rows[most],
        rows=rows[most],
        fewest_rows=min(rows.values()),
        ranks=len(rows),
        optimizers=len({info.optimizer for info in tensors if info.rank == most}),
        tensors=sum(info.rank == most and info.kind == "weight" for info in tensors),
        neural_rows=counts["neural"][most],
        neural_tensors=sum(info.rank == most and info.kind == "neural" for info in tensors),
        changes=Counter(info.kind for info in tensors if info.rank == most and info.kind in own.changes),
        bytes=disk_bytes(path),
        blocked=blocked,
        waited=waited,
        span=span,
        skipped_steps=int(max(found["skipped_steps"])),
        errors=int(sum(found["errors"])),
        over_budget=any(found["over_budget"]),
        complaints=(),
        counts=tuple(tuple(each[rank].values()) for rank in sorted(rows)),
        together=together,
    )


def result_text(summary: CaptureSummary, path: Path, rank: int | None = None) -> str:
    """One line, without its end, about what a capture recorded at ``path``, or why it recorded nothing.

    ``rank`` is that of this process, if the others' steps are not in the summary.
    """
    if not summary.rows:
        return f"nothing was captured{f' on rank {rank}' if rank else ''}: {_why_nothing(summary)}"
    parts = [_tensors(summary), size_text(summary.bytes), _waited(summary)]
    if summary.skipped_steps:
        parts.append(f"{_counted(summary.skipped_steps)} skipped by the gradient scaler")
    if summary.over_budget:
        parts.append("stopped at the budget")
    if summary.dropped:
        parts.append(f"{_counted(summary.dropped)} dropped")
    if summary.unwritten:
        parts.append(f"{_counted(summary.unwritten)} could not be written")
    if summary.by_hand:
        parts.append("without an optimizer")
    parts += summary.without
    if summary.errors:
        parts.append(_counted(summary.errors, "error"))
    return f"{_steps(summary)} captured{_where(summary, rank)} in {path} ({', '.join(parts)})"


def _steps(summary: CaptureSummary) -> str:
    """Recorded steps of an optimizer, and of how many optimizers, whichever process they belong to."""
    counts = summary.counts or ((summary.rows,),)
    each = span_text([steps for process in counts for steps in process])
    optimizers = span_text([len(process) for process in counts])
    seen, odd = divmod(summary.steps_seen, len(counts[0])) if len({len(process) for process in counts}) == 1 else (0, 1)
    single = optimizers == "1" or " " not in each
    of = f" of {seen}" if seen and single and not odd and each != str(seen) else ""
    steps = "step" if each == "1" and not of else "steps"
    return f"{each}{of} {steps}" + (f" of each of {optimizers} optimizers" if optimizers != "1" else "")


def span_text(counts: Sequence[int]) -> str:
    """The smallest and the largest of some numbers.

    >>> span_text([3, 6, 3]), span_text([3, 3])
    ('3 to 6', '3')
    """
    low, high = min(counts), max(counts)
    return str(high) if low == high else f"{low} to {high}"


def _where(summary: CaptureSummary, rank: int | None) -> str:
    if summary.ranks > 1:
        return f" on each of {summary.ranks} ranks" if summary.together else f" in each of {summary.ranks} processes"
    return "" if rank is None else f" on rank {rank}"


def _waited(summary: CaptureSummary) -> str:
    """How long training waited; of a short run the share says little, since the first step takes longest."""
    if summary.span >= _SHORT:
        return f"training waited {summary.blocked:.1%} of its time"
    milliseconds = 1e3 * summary.waited
    return f"training waited {milliseconds:.{int(milliseconds < 10)}f} ms ({summary.blocked:.0%})"


def _counted(number: int, what: str = "step", more: str = "s") -> str:
    return f"{number} {what}{more * (number != 1)}"


def _tensors(summary: CaptureSummary) -> str:
    found = [f"{summary.tensors} weight"] if summary.tensors else []
    if summary.neural_rows:
        few = f" at {summary.neural_rows} steps" if summary.neural_rows != summary.rows else ""
        found.append(f"{summary.neural_tensors} neural{few}")
    found += [f"{tensors} {kind}" for kind, tensors in summary.changes.items() if tensors]
    if len(found) == 1 and summary.tensors:
        return f"{summary.tensors} tensor{'s' * (summary.tensors != 1)}"
    return f"{' and '.join(found)} tensors"


def _why_nothing(summary: CaptureSummary) -> str:
    if summary.errors:
        return "see the warnings above"
    if not summary.torch_seen:
        return "it never imported torch"
    if not summary.steps_seen:
        return _why_no_step(summary)
    if summary.over_budget:
        return "a single step is larger than the budget; give a larger --budget or fewer --tensors"
    if summary.without:
        return "; ".join(summary.without)
    if not summary.steps_wanted:
        return f"the script took {_counted(summary.steps_seen)}, and --steps or --every asked for others"
    return f"its {summary.steps_seen} optimizer steps had no gradient of a tensor that was to be recorded"


def _why_no_step(summary: CaptureSummary) -> str:
    passes, calls = summary.backward_passes, summary.functional
    taken = "it took no step of a torch optimizer"
    if calls and not passes:
        return (
            f"its gradients come from torch.autograd.grad or torch.func.grad ({_counted(calls, 'call')}), which leave "
            "nothing in p.grad; add `import gtrace` and, in each step, "
            "`gtrace.record_gradients({name: gradient, ...}, loss=loss)`"
        )
    if not passes:
        return taken
    return (
        f"{taken}, and no weight that a backward pass reached changed ({_counted(passes, 'backward pass', 'es')}); "
        "with other optimizers, call `gtrace.record_gradients({name: gradient, ...}, loss=loss)` in each step"
    )
