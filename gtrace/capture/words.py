"""What a capture says at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gtrace.errors import size_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gtrace.capture.summary import CaptureSummary

#: Seconds of training below which its share that capture took is shown in milliseconds, too.
_SHORT = 1.0


def result_text(summary: CaptureSummary, path: Path, rank: int | None = None) -> str:
    """One line, without its end, about what a capture recorded, or why it recorded nothing.

    Args:
        summary: the capture's.
        path: the trace, as the user wrote it.
        rank: of this process, if the others' steps are not in the summary.
    """
    if not summary.rows:
        return f"nothing was captured{f' on rank {rank}' if rank else ''}: {_why_nothing(summary)}"
    parts = [
        _tensors(summary),
        size_text(summary.bytes),
        _waited(summary),
    ]
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
        parts.append(f"{summary.errors} error{'s' * (summary.errors != 1)}")
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
