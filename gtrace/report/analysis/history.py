"""What the committed rows of a trace say about a run; no gradient is read."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.capture.summary import span_text
from gtrace.errors import printable
from gtrace.report.names import count, number, sparkline
from gtrace.settings import KINDS
from gtrace.trace.choose import agreement, part_of, steps_of
from gtrace.trace.facts import StepTimes
from gtrace.trace.journal import being_written
from gtrace.trace.remote import place_of
from gtrace.trace.sketches import sketch_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gtrace.kernels import Floats, Ints
    from gtrace.trace import TensorInfo, Trace
    from gtrace.trace.format import StreamKey

#: the status of a trace to which a living process adds steps
WRITING = "still being written"
#: streams that are shown unless all are asked for
_FEW_STREAMS = 3
#: a loss that ends this many times above its first value has diverged
_GREW = 2.0


@dataclass(frozen=True, slots=True)
class TensorHistory:
    """One tensor and its gradients over time.

    Attributes:
        steps: int64[S], those at which it is present.
        norms: float64[S], of the finite values; of merged steps the root mean square of their norms.
        nonfinite: int64[S], number of other values.
        absmax: largest finite magnitude.
        zeros: part of the stored values.
        fewest: elements of the smallest gradient.
        most: elements of the largest one.
        stored: elements that are stored of one.
    """

    info: TensorInfo
    steps: Ints
    norms: Floats
    nonfinite: Ints
    absmax: float
    zeros: float
    fewest: int
    most: int
    stored: int

    @classmethod
    def of(cls, trace: Trace, info: TensorInfo) -> TensorHistory:
        """Read the numbers that a trace keeps beside a tensor's gradients."""
        numbers = trace.statistics(info.name, kind=info.kind, optimizer=info.optimizer, rank=info.rank)
        stored, total = numbers["n_valid"], numbers["n_total"]
        merged = info.merged > 1
        energies = numbers["norm2"] * (info.size / np.maximum(stored, 1) if merged else 1.0)
        largest = numbers["absmax"]
        if "whole_norm2" in numbers:
            energies = np.where(np.isnan(numbers["whole_norm2"]), energies, numbers["whole_norm2"])
            largest = np.fmax(largest, numbers["whole_absmax"])
        return cls(
            info=info,
            steps=numbers["step"],
            norms=np.sqrt(energies),
            nonfinite=numbers["nonfinite"],
            absmax=float(largest.max()),
            zeros=float(numbers["zeros"].sum()) / max(int(stored.sum()), 1),
            fewest=info.size if merged else int(total.min()),
            most=info.size if merged else int(total.max()),
            stored=info.size if merged else int(stored.max()),
        )

    @property
    def shown_norms(self) -> list[float]:
        """The norms, infinite where some values are not finite."""
        shown: list[float] = np.where(self.nonfinite > 0, np.inf, self.norms).tolist()
        return shown

    def norm_text(self, place: int) -> str:
        """A norm in words, by its place."""
        return "NaN" if self.nonfinite[place] else number(self.norms[place])

    @property
    def shape(self) -> str:
        """Shape as text; of a neural gradient with the range of its first axis, which is the batch as a rule."""
        shape = self.info.shape
        if self.info.kind == "neural" and shape and self.fewest != self.most:
            rest = max(math.prod(shape[1:]), 1)
            whole = self.fewest % rest == self.most % rest == 0
            batches = f"{self.fewest // rest}-{self.most // rest}" if whole else "?"
            return "x".join((batches, *map(str, shape[1:])))
        return "x".join(map(str, shape)) or "scalar"


@dataclass(frozen=True)
class StreamHistory:
    """Steps and losses of one (rank, kind, optimizer).

    Attributes:
        steps: int64[S].
        losses: float64[S]; NaN if unknown. Where a loss was finite once and never again, the rest is infinite.
        times: float64[S], seconds since 1970; NaN if unknown.
    """

    key: StreamKey
    steps: Ints
    losses: Floats
    times: Floats

    @classmethod
    def of(cls, trace: Trace, key: StreamKey) -> StreamHistory:
        """Read the numbers about the steps of a stream."""
        numbers = trace.scalars(**key._asdict())
        losses = numbers["loss"]
        known = np.flatnonzero(np.isfinite(losses))
        end = known[-1] + 1 if known.size else losses.size
        # NaN also means that no loss was captured: only behind a finite one it is the loss itself.
        losses[:end] = np.where(np.isfinite(losses[:end]), losses[:end], np.nan)
        losses[end:] = np.inf
        return cls(key, numbers["step"], losses, numbers["time"])

    @cached_property
    def finite(self) -> list[tuple[int, float]]:
        """The steps with a finite loss, and that loss."""
        there = np.isfinite(self.losses)
        return list(zip(self.steps[there].tolist(), self.losses[there].tolist(), strict=True))

    @property
    def broken(self) -> int | None:
        """The step from which on no loss is finite."""
        lost = self.steps[np.isinf(self.losses)]
        return int(lost[0]) if lost.size else None

    def norms(self, tensors: Iterable[TensorHistory]) -> Floats:
        """Norms of the whole gradient, float64[S]; infinite where some values are not finite."""
        energy = np.zeros(self.steps.size)
        for one in tensors:
            if one.info.stream == self.key:
                energy[np.searchsorted(self.steps, one.steps)] += np.square(one.shown_norms)
        return np.sqrt(energy)


class RunHistory:
    """Some tensors of a trace, and the steps of their streams."""

    def __init__(self, trace: Trace, infos: Iterable[TensorInfo]) -> None:
        self._together = trace.attrs.get("world_size", 1) != 1
        self.tensors = [TensorHistory.of(trace, info) for info in infos]
        there = {one.info.stream for one in self.tensors}
        self.streams = [StreamHistory.of(trace, key) for key in trace.streams if key in there or not there]

    @property
    def steps(self) -> str:
        """How many steps there are."""
        counts: dict[tuple[int, str, int], int] = {stream.key: stream.steps.size for stream in self.streams}
        return steps_in_words(counts, together=self._together)

    @cached_property
    def divergence(self) -> dict[str, Any]:
        """What is not finite: the loss, of the stream which broke first, and gradients; None where all is."""
        lost = [stream for stream in self.streams if stream.broken is not None]
        stream = min(lost, key=lambda one: one.broken or 0, default=None)
        last_step, last_loss = stream.finite[-1] if stream is not None else (None, None)
        bad = [one for one in self.tensors if one.nonfinite.any()]
        steps = {step for one in bad for step in one.steps[one.nonfinite > 0].tolist()}
        return {
            "loss_step": None if stream is None else stream.broken,
            "last_step": last_step,
            "last_loss": last_loss,
            "gradient_step": min(steps, default=None),
            "bad_tensors": len(bad),
            "bad_steps": len(steps),
            "values": sum(int(one.nonfinite.sum()) for one in bad),
        }

    def troubles(self) -> list[tuple[str, str]]:
        """What is wrong with the run itself, each with a word before it."""
        found, said = self.divergence, []
        if found["loss_step"] is not None:
            last = f"last finite loss {number(found['last_loss'])} at step {found['last_step']:,}"
            said.append(("DIVERGED", f"the loss is not finite from step {found['loss_step']:,} on; {last}"))
        for stream in self.streams if not said else ():
            losses = [loss for _, loss in stream.finite]
            if len(losses) > 1 and losses[-1] > _GREW * abs(losses[0]):
                said.append(("DIVERGED", f"the loss rises from {number(losses[0])} to {number(losses[-1])}"))
        if found["gradient_step"] is not None:
            every = len({step for stream in self.streams for step in stream.steps.tolist()})
            tensors = f"{found['bad_tensors']} of {count(len(self.tensors), 'tensor')}"
            steps = f"{found['bad_steps']:,} of {count(every, 'step')}, first at step {found['gradient_step']:,}"
            said.append(("broken", f"NaN or infinity in the gradients of {tensors}, at {steps}"))
        return list(dict.fromkeys(said))


def steps_in_words(counts: Mapping[tuple[int, str, int], int], *, together: bool = True) -> str:
    """Recorded steps of every (rank, kind, optimizer), whose ranks train ``together``, as a capture's last line says.

    >>> steps_in_words({(0, "weight", optimizer): 20 for optimizer in range(2)})
    '20 steps of each of 2 optimizers'
    >>> steps_in_words({(rank, kind, 0): n + rank for rank in range(2) for kind, n in (("weight", 9), ("neural", 5))})
    '9 to 10 steps of weight gradients and 5 to 6 of neural gradients on each of 2 ranks'
    >>> steps_in_words({})
    'no steps'
    """
    kinds: dict[str, list[int]] = {}
    for (_, kind, _), steps in counts.items():
        kinds.setdefault(kind, []).append(steps)
    # Second moments come with the gradients of the same steps.
    kinds = {kind: found for kind, found in kinds.items() if kind in KINDS} or kinds
    spans = {kind: span_text(found) for kind, found in kinds.items()}
    if not spans:
        return "no steps"
    first, *others = spans.items()
    said = f"{first[1]} step{'s' * (first[1] != '1')}"
    if len(set(spans.values())) > 1:
        said += f" of {KINDS.get(first[0], first[0])}"
        said += "".join(f" and {steps} of {KINDS.get(kind, kind)}" for kind, steps in others)
    for place, between in ((2, "of each of {} optimizers"), (0, "on each of {} ranks")):
        several = len({stream[place] for stream in counts})
        between = between if together or place else "in each of {} processes"
        said += f" {between.format(several)}" if several > 1 else ""
    return said


def energy_shares(tensors: Sequence[TensorHistory]) -> list[float]:
    """Each tensor's part of the squared norms of all gradients of its kind, over the recorded steps."""
    pairs = [(one.info.kind, float(np.square(one.norms).sum())) for one in tensors]
    totals: dict[str, float] = {}
    for kind, energy in pairs:
        totals[kind] = totals.get(kind, 0.0) + energy
    return [energy / totals[kind] if totals[kind] else 0.0 for kind, energy in pairs]


def status_in_words(trace: Trace) -> str:
    """How the run ended, or that it has not."""
    status = trace.attrs.get("status")
    if status in ("complete", "interrupted"):
        return str(status)
    if trace.location is not None and being_written(place_of(trace.location)):
        return WRITING
    return "not finished: its process was killed, or runs on another machine"


def _noise(trace: Trace, rows: Sequence[TensorHistory]) -> str:
    """Whether gradient noise can be estimated, from the table of contents alone."""
    infos = [row.info for row in rows if row.info.kind == "weight"]
    for info in infos:
        statistics = trace.statistics(info.name, kind=info.kind, optimizer=info.optimizer, rank=info.rank)
        if "replicas" in statistics and (statistics["replicas"] >= 2).any():
            return "can be estimated, from micro-batches"
    if len({info.rank for info in infos if info.stage == "local"}) > 1:
        return "can be estimated, from the gradients of several ranks"
    for info in infos:
        steps = steps_of(trace, info).tolist()
        if not info.sketches and any(c - a == 2 for a, c in zip(steps, steps[2:], strict=False)):
            return "can be estimated, from three consecutive steps"
    return "unknown: capture again with --noise, or with bursts such as --steps 100+10"


def _trainings(trace: Trace) -> list[str]:
    said = []
    for rank, kind, optimizer in {key.optimizer: key for key in reversed(trace.streams)}.values():
        facts = trace.optimizer_facts(optimizer)
        if rank != trace.streams[0].rank or facts.kind is None:
            continue
        rates = [f"{lr:.3g}" for lr in trace.scalars(rank=rank, kind=kind, optimizer=optimizer)["lr"] if lr == lr]
        parts = [facts.kind]
        if rates:
            parts.append(f"lr {rates[0]}" + (f" to {rates[-1]}" if rates[-1] != rates[0] else ""))
        if facts.momentum:
            parts.append(f"{'Nesterov ' if facts.nesterov else ''}momentum {facts.momentum:g}")
        if facts.betas is not None:
            parts.append(f"betas {facts.betas[0]:g} and {facts.betas[1]:g}")
        infos = [info for info in trace.tensors if info.stream == (rank, kind, optimizer)]
        decays = Counter(facts.of_tensor(info.attrs).weight_decay for info in infos)
        for decay, tensors in decays.items():
            if decay:
                some = "" if len(decays) == 1 else f" on {tensors} of {count(len(infos), 'tensor')}"
                parts.append(f"weight decay {decay:g}{some}")
        groups = [", ".join(parts)]
        if facts.batch_size is not None:
            groups.append(f"batch {'about ' * ('batch_size' in facts.varies)}{facts.batch_size:g}")
        if facts.length is not None:
            groups.append(f"{count(facts.length, 'step')} {'taken' if facts.planned_steps is None else 'planned'}")
        said.append("; ".join(groups))
    return said


def run_lines(trace: Trace, run: RunHistory, encoding: str = "utf-8", *, full: bool = False) -> list[tuple[str, str]]:
    """What a trace says about its run: a word, empty in the first line, and a sentence each."""
    attrs, rows = trace.attrs, run.tensors
    amounts = f"{count(len(rows), 'tensor')}, {count(sum(row.stored for row in rows), 'element')}"
    lines = [("", f"{trace.path}: {status_in_words(trace)}, {run.steps}, {amounts}"), *run.troubles()]
    argv = attrs.get("argv")
    if isinstance(argv, list) and argv:
        lines.append(("script", shlex.join(str(word) for word in argv)))
    if isinstance(attrs.get("model"), str):
        lines.append(("model", attrs["model"]))
    lines.append(("ranks", "; ".join([str(len({stream.key.rank for stream in run.streams})), *_agreements(trace)])))
    lines += _steps(run, encoding, full=full)
    lines += [("training", text) for text in _trainings(trace)[: None if full else _FEW_STREAMS]]
    if times := str(StepTimes.of(attrs)):
        lines.append(("time", times))
    sketched = next((row.info for row in rows if row.info.sketches), None)
    if sketched is not None:
        names = ", ".join(sketch_name(spec) for spec in sketched.sketches)
        large = count(sum(bool(row.info.sketches) for row in rows), "tensor")
        lines.append(("sketch", f"{names} of {large}; no values, so sweeps give expectations only"))
    cut = [row.info for row in rows if (row.info.sample or {}).get("kind") == "blocks"]
    if cut:
        lines.append(("sample", f"whole blocks of {count(len(cut), 'tensor')}; their norms are those of all elements"))
    capture = attrs.get("capture")
    errors = capture.get("errors") if isinstance(capture, dict) else None
    if isinstance(errors, int) and errors > 0:
        lines.append(("errors", f"{errors} while capturing; gradients may be missing"))
    if any(row.info.kind == "weight" for row in rows):
        lines.append(("noise", _noise(trace, rows)))
    return lines


def _steps(run: RunHistory, encoding: str, *, full: bool) -> list[tuple[str, str]]:
    """From which step to which, and how the losses changed; without ``full`` a few of the first rank."""
    found = []
    for stream in run.streams if full else [one for one in run.streams if one.key.rank == run.streams[0].key.rank]:
        text = f"{stream.steps[0]:,} to {stream.steps[-1]:,}" if stream.steps.size else "none"
        if full and len(run.streams) > 1:
            rank, kind, optimizer = stream.key
            what = f"{KINDS.get(kind, 'second moments')}, optimizer {optimizer}, rank {rank}"
            text = f"{stream.steps.size:,}, {text} ({what})"
        found.append(("steps", text))
        if losses := [number(loss) for _, loss in stream.finite]:
            end = ", then not finite" if stream.broken is not None else ""
            line = sparkline(stream.losses.tolist(), encoding=encoding)
            found.append(("loss", f"{' to '.join(dict.fromkeys((losses[0], losses[-1])))}{end}  {line}"))
    # Streams that took the same steps, with the same losses, are said once.
    found = list(dict.fromkeys(found))
    most = len(found) if full else 2 * _FEW_STREAMS
    left = sum(head == "steps" for head, _ in found[most:])
    return found[:most] + ([("", f"{left} more of them; --full shows all")] if left else [])


def _agreements(trace: Trace) -> Iterator[str]:
    cut = {(info.kind, info.optimizer, info.name) for info in trace.tensors if part_of(info)}
    if cut:
        yield f"each holds its part of {count(len(cut), 'tensor')}"
    for stage in ("local", "reduced"):
        compared, equal, step, tensor = agreement(trace, stage)
        if not compared:
            continue
        share = f"{compared - equal} of {compared}"
        if equal == compared:
            same = ": they saw the same data" if stage == "local" else ""
            yield f"{stage} gradients are the same on all{same}"
        elif stage == "local":
            yield f"local gradients differ ({share}), as on different data"
        else:
            where = f"first at step {step}: {printable(str(tensor))}"
            yield f"reduced gradients differ ({share}, {where}); the ranks have drifted apart"
