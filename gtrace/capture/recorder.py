"""Turns optimizer steps into rows of a trace: names, selection, copies, budget and summary."""

from __future__ import annotations

import functools
import math
import operator
import queue
import sys
import time
import weakref
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from gtrace.capture.changes import Changes
from gtrace.capture.layout import RowLayout, moments_of, second_moments, shape_and_type
from gtrace.capture.neural import NeuralRecorder
from gtrace.capture.options import PATIENCE, AutomaticSteps, CaptureOptions, TensorSelection
from gtrace.capture.summary import CaptureSummary
from gtrace.capture.writer import AsyncWriter, Gaps, Row
from gtrace.errors import size_text
from gtrace.settings import KINDS
from gtrace.torch_hooks.hooks import TrainingHooks
from gtrace.torch_hooks.naming import Names, TreeName
from gtrace.torch_hooks.optimizers import OptimizerHistory
from gtrace.trace.facts import OPTIMIZERS, TIMES
from gtrace.trace.files import disk_bytes
from gtrace.trace.format import SECOND_MOMENT, Rows, StreamKey
from gtrace.trace.numbers import numbers_of
from gtrace.trace.rows import BLOCK
from gtrace.trackers import Tracking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from gtrace.capture.buffers import RowBuffer
    from gtrace.capture.layout import MomentsOf, Slot
    from gtrace.torch_hooks.gradients import OptimizerStep
    from gtrace.torch_hooks.steps import Losses, Rounds, Samples
    from gtrace.trace import SketchPlan, TraceWriter

_MOST_WARNINGS = 3
#: optimizers whose settings are followed
_MOST_HISTORIES = 1000
#: steps in a row from which gradient noise can be estimated, and how to get them
_SHORTEST, _BURSTS = 3, "record bursts, e.g. --steps 0+4,100+4"
#: rows between two progress lines
_TOLD_ROWS = 100


class Recorder:
    """Watches optimizer steps, and records their gradients in the background.

    Args:
        open_trace: creates the trace from attributes that are known at the first recorded step, and returns it with
            the rank to write under; called once, in the background.
        options: what to record. Its budget counts float32 values, or the estimated size of their sketches.
        optimizers, models: see :meth:`gtrace.capture.CaptureSession.start`.
        sharers: returns how many processes share the budget, 0 if this one records nothing; called at the first step.
        plan: the sketches that the trace stores of large gradients, None if it stores values.
        say: prints one line for the user.
        report: prints one progress line: a first one, and with ``verbose`` one for every 100th row.
    """

    def __init__(
        self,
        open_trace: Callable[[dict[str, Any]], tuple[TraceWriter, int]],
        options: CaptureOptions,
        *,
        optimizers: Iterable[Optimizer] | None,
        models: Sequence[nn.Module] | None,
        sharers: Callable[[], int],
        plan: SketchPlan | None,
        say: Callable[[str], None],
        report: Callable[[str], None],
    ) -> None:
        self.selection = TensorSelection(options.tensors, options.exclude)
        #: errors of capture so far; training went on
        self.errors = 0
        #: facts about the run for the trace: the classes of its models, its seed at the first step
        self.attrs: dict[str, Any] = {}
        self._wanted = 0
        self._over_budget = False
        self._options = options
        self._weights, self._with_neural = "weight" in options.kinds, "neural" in options.kinds
        #: the program changes its weights without an optimizer
        self._by_hand = False
        #: elements of a gradient -> bytes that count against the budget
        self._cost = functools.cache(functools.partial(_stored_bytes, plan, options.max_elements))
        self._budget = options.budget
        self._sharers = sharers
        #: whether this process records, once it is known
        self._records: bool | None = None
        #: no other rank records gradients of its own at the same steps
        self._alone = True
        self._dropped, self._skipped = Gaps(), Gaps()
        self._warned: set[str] = set()
        self._say = say
        self._classes: dict[str, None] = {}
        self._report = report
        #: kinds of rows of the first step, the bytes of each kind's first row in the trace, and the line to print when
        #: all of them are known
        self._first_rows = 0
        self._first_bytes: dict[str, float] = {}
        self._prediction: Callable[[int], str] | None = None
        # Printed from the training's own thread: a line must not fall into one that the script prints.
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()
        #: gradients with several micro-batches seen
        self._replicated = 0
        #: recorded second moments of an optimizer
        self._moments = 0
        self._writer = AsyncWriter(
            lambda: self._followed(*open_trace(self.attrs)),
            self.error,
            options.max_elements,
            self._written,
            values=plan is None,
        )
        self._tracking = None if options.to is None else Tracking(options.to, self.error)
        #: committed rows whose numbers go to the tracker; from the training's own thread, as the news
        self._commits: queue.SimpleQueue[tuple[StreamKey, Sequence[str], Rows]] = queue.SimpleQueue()
        self._parameter_names = Names()
        #: optimizers with named parameters
        self._named: set[int] = set()
        self._layouts: dict[int, RowLayout] = {}
        self._histories: dict[int, OptimizerHistory] = {}
        #: streams -> whether their optimizer had several groups of parameters at the first recorded step
        self._several: dict[int, bool] = {}
        self._recorded: set[int] = set()
        self._bytes = 0
        #: rows that the budget takes, once it is known
        self._room: int | None = None
        self._first: float | None = None
        self._last = 0.0
        self._scan = models is None
        self.hooks = TrainingHooks(
            self._wants,
            self._take_step,
            self.error,
            optimizers,
            self._prepare if self._with_neural else None,
            lambda step: math.inf if self._records is False else self._coming(step),
            reduced=options.reduced,
            noise=options.noise,
        )
        self.hooks.left_out = self._left_out
        if self._with_neural:
            self.hooks.waited = lambda: self.hooks.seconds + self.neural.seconds
        if options.kinds == ("weight",) and not (options.second_moments or options.optimizer_state or options.noise):
            self.hooks.again = self._take_again
        if options.kinds != ("weight",):
            self.hooks.unstepped = None
        elif self.hooks.unstepped is not None:
            self.hooks.unstepped.chosen = self._choose_by_hand
        self._models = self.hooks.modules.modules if models is None else lambda: list(models)
        self._changes = Changes(options, self._layout, self._models, self._has_room, self._submit, drop=self._leave_out)
        if self._changes.kinds:
            self.hooks.after = self._changes.end
        #: gathers the gradients of module outputs, if these are recorded
        self.neural = NeuralRecorder(
            options,
            self._models,
            keeps=self._keeps,
            scan=self._scan,
            paused=lambda: self.hooks.repeating,
            say=say,
            on_error=self.error,
        )

    def install(self) -> None:
        """Start watching."""
        try:
            self.hooks.install()
            if self._with_neural:
                self.neural.install()
                self._prepare([0])
        except BaseException:
            self._let_go()
            self._writer.close("interrupted", dict)
            raise

    def pause(self) -> Callable[[], None] | None:
        """Let no row be written until the result is called; None if one takes longer than ``PATIENCE``."""
        busy = self._writer.busy
        return busy.release if busy.acquire(timeout=PATIENCE) else None

    def abandon(self) -> None:
        """Stop watching in a forked child. It has no thread that writes, and the rows so far are its parent's."""
        self.hooks.remove()
        self.neural.remove()

    def _let_go(self) -> None:
        """Stop watching, and wait until everything so far is written."""
        try:
            self.hooks.finish()
            self.abandon()
        finally:
            self._writer.drain()
            self._tell_news()
            if self._tracking is not None:
                self._tracking.close()

    def finish(self, status: Literal["complete", "interrupted"]) -> CaptureSummary:
        """Stop watching, finish the trace, and return the summary."""
        self._let_go()
        for note in self.neural.notes() if self._with_neural else ():
            self._say(f"gtrace: note: {note}")
        if self._lacks_bursts():
            self._report(f"gtrace: note: gradient noise can't be estimated from single steps; {_BURSTS}")
        path, hooks = self._options.path, self.hooks
        blocked, waited, span = self.waiting()
        self._writer.close(status, self._facts)
        lost = self._writer.lost
        rows = max(self._writer.rows.values(), default=0) if lost is None else 0
        return CaptureSummary(
            path=path,
            torch_seen=True,
            steps_seen=hooks.steps,
            backward_passes=hooks.backward_passes,
            steps_wanted=self._wanted,
            rows=rows,
            optimizers=len(self._recorded),
            tensors=self._tensors(),
            bytes=disk_bytes(path) if rows else 0,
            blocked=blocked,
            waited=waited,
            span=span,
            skipped_steps=hooks.skipped_steps,
            dropped=self._dropped.count,
            unwritten=self._writer.unwritten.count,
            errors=self.errors,
            over_budget=self._over_budget,
            complaints=tuple(self.selection.complaints()),
            neural_rows=self._writer.rows["neural"],
            neural_tensors=len(self.neural.tensors),
            changes=self._changes.tensors(),
            without=tuple(self._without()),
            lost=getattr(lost, "exit_code", 0),
            functional=hooks.functional,
            by_hand=self._by_hand,
            counts=(tuple(functools.reduce(operator.or_, (self._writer.streams[kind] for kind in KINDS)).values()),),
        )

    def _facts(self) -> dict[str, object]:
        """The attributes of the trace at its end; called by the writer's thread when nothing is left to write."""
        blocked, waited, span = self.waiting()
        outcome = {
            "steps_seen": self.hooks.steps,
            "skipped_steps": self.hooks.skipped_steps,
            "over_budget": self._over_budget,
            "skipped": self._skipped.describe(),
            "dropped": self._dropped.describe(),
            "unwritten": self._writer.unwritten.describe(),
            "errors": self.errors,
            "blocked": round(blocked, 6),
            "waited": round(waited, 6),
            "span": round(span, 6),
        }
        times = {TIMES: found} if (found := self.hooks.clock.describe()) else {}
        return {"capture": self._options.describe() | outcome, **times, **self.attrs, **self._optimizers()}

    def press(self, times: int) -> None:
        """Answer Ctrl-C while :meth:`finish` waits: the second one drops what is not written."""
        if times > 1:
            self._writer.drop()
        elif (count := self._writer.waiting) > 1:
            self._say(f"gtrace: writing the last {count} steps, press again to drop them")
        else:
            self._say(f"gtrace: closing {self._options.path}")

    def hurry(self) -> None:
        """Let :meth:`finish` end soon, whatever is not written by then."""
        self._writer.hurry()

    def waiting(self) -> tuple[float, float, float]:
        """The share of the time from first to last step that training waited for capture, and both in seconds."""
        waited = self.hooks.waited()
        span = self._last - self._first if self._first is not None else 0.0
        return min(1.0, waited / span) if span > 0 else 0.0, waited, span

    def _without(self) -> list[str]:
        """What was asked for besides the gradients and never occurred."""
        out = []
        if (self._options.optimizer_state or self._options.second_moments) and not self._moments:
            out.append("no second moments: the optimizer keeps no exp_avg_sq, or took one step")
        if self._options.noise and not self._replicated:
            out.append("no noise: one micro-batch in each step")
        lacking = {
            "update": "no step was recorded to its end",
            "outer": f"the training took fewer than {self._options.every} steps",
            "momentum": "the optimizer keeps no momentum_buffer or exp_avg",
        }
        out += [f"no {KINDS[kind]}: {lacking[kind]}" for kind, rows in self._changes.rows.items() if not rows]
        return out

    def _lacks_bursts(self) -> bool:
        """Whether gradient noise is unknown because of the steps that were asked for."""
        options, longest = self._options, max((one.burst for one in self._histories.values()), default=0)
        asked = self._weights and options.sketch is None and not isinstance(options.policy, AutomaticSteps)
        return asked and self._alone and not self._replicated and 0 < longest < _SHORTEST <= self.hooks.steps

    def _tensors(self) -> int:
        return sum(layout.tensors for layout in self._layouts.values())

    def _wants(self, stream: int, step: int) -> bool:
        if self._records is None:
            # Not earlier: a program creates its process group after it has imported torch.
            sharers = self._sharers()
            self._records = sharers > 0
            self._alone = sharers == 1 or self._options.reduced
            if self._budget is not None:
                self._budget //= max(1, sharers)
                self._room = None
        if not self._records:
            self.hooks.clock.due = math.inf
            return False
        # All optimizers follow one policy, each with its own steps.
        chosen = self._chooses(step) or (bool(self._changes.kinds) and self._changes.begins(stream, step))
        self._begin(stream, step, self._histories.get(stream), chosen)
        return chosen

    def _begin(self, stream: int, step: int, history: OptimizerHistory | None, chosen: bool) -> None:
        self._tell_news()
        if history is not None and history.scheduled:
            self.hooks.follow(stream, history.look(step))
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last
        if stream == 0 and step >= self.hooks.clock.due:
            self.hooks.clock.step(step, recorded=chosen, models=self._models)
        self._wanted += chosen

    def _left_out(self, stream: int, step: int) -> None:
        if self._chooses(step):
            self._skipped.add(stream, step)

    def _leave_out(self, stream: int, step: int) -> None:
        if not (self._options.drop or self._dropped.count):
            self.error(TimeoutError("no step was written for a while; steps are left out until the disk goes on"))
        self._dropped.add(stream, step)

    def _layout(self, stream: int) -> RowLayout:
        # The number and not the step, which would keep the optimizer and its parameters alive.
        return RowLayout(functools.partial(self._names, stream=stream), self._keeps, self._options.queue_bytes)

    def _has_room(self, slots: Sequence[Slot]) -> bool:
        """Whether the budget takes a row of these tensors; counts it."""
        size = sum(self._cost(math.prod(slot.shape)) for slot in slots)
        self._over_budget = self._over_budget or (self._budget is not None and self._bytes + size > self._budget)
        self._bytes += 0 if self._over_budget else size
        return not self._over_budget

    def _prepare(self, steps: Iterable[int]) -> None:
        """Choose whether to watch module outputs until the next step, which is one of ``steps``."""
        self.neural.discard()
        self.neural.listening = any(map(self._chooses, steps))

    def _take_step(self, step: OptimizerStep) -> None:
        with torch.set_grad_enabled(False):  # torch.no_grad() costs twice as much
            self._take(step)
        self._last = time.perf_counter()

    def error(self, error: Exception) -> None:
        """Count an error of capture and print the first few different ones."""
        self.errors += 1
        message = f"{type(error).__name__}: {error}"
        # A full disk fails at each step with the same message.
        if message not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(message)
            self._say(f"gtrace: warning: capture: {message}; training goes on")

    def _coming(self, step: int) -> float:
        """The first step from this one on that is to be recorded."""
        if self._writer.lost is not None or self._over_budget:
            return math.inf
        return self._options.policy.coming(step, self._capacity())

    def _chooses(self, step: int) -> bool:
        return self._coming(step) == step

    def _capacity(self) -> int:
        """Rows that the budget takes. Their size changes with new names, and with every gradient of an output."""
        if self._budget is None:
            return sys.maxsize
        if self._room is None or self._with_neural:
            # A row that records every tensor.
            values = self._weights + self._options.second_moments + len(self._changes.kinds)
            self._room = self._budget // max(1, self._weights_bytes() * values + self.neural.row_bytes)
        return self._room

    def _weights_bytes(self) -> int:
        """Bytes of one value for each weight."""
        sizes = Counter[str](weight=sum(layout.row_bytes(self._cost) for layout in self._layouts.values()))
        for (_, kind), layout in self._changes.layouts.items():
            sizes[kind] += layout.row_bytes(self._cost)
        return max(sizes.values(), default=0)

    def _optimizers(self) -> dict[str, Any]:
        """What is known about optimizers, and the batch size of the first one, as attributes of the trace."""
        found = {
            str(stream): history.facts(self.hooks.numbered[stream].steps) for stream, history in self._histories.items()
        }
        batches = [facts["batch_size"] for facts in found.values() if "batch_size" in facts]
        return {OPTIMIZERS: found} | ({"batch_size": batches[0]} if batches else {})

    def _note(self, step: OptimizerStep) -> None:
        """Follow an optimizer from its first recorded step on; of thousands, for as many tasks, only the first ones."""
        history = self._histories.get(step.stream)
        if history is None:
            if len(self._histories) >= _MOST_HISTORIES:
                return
            history = OptimizerHistory(step.optimizer, self.hooks.schedulers.of(step.optimizer))
            self.hooks.follow(step.stream, history.look(step.step))
            self._histories[step.stream] = history
        history.note(step.step, step.optimizer.param_groups[0], step.samples, step.tokens)

    def _layout_of(self, step: OptimizerStep) -> RowLayout:
        layout = self._layouts.get(step.stream)
        if layout is None:
            layout = self._layouts[step.stream] = self._layout(step.stream)
            # Some programs create an optimizer for each of thousands of tasks.
            weakref.finalize(step.optimizer, layout.release).atexit = False
        return layout

    def _take_again(self, optimizer: Optimizer, stream: int, step: int, losses: Losses, samples: Samples) -> bool:
        """Record a chosen step that is like the one before, without all that :meth:`_take` looks at; False if not."""
        layout, history = self._layouts.get(stream), self._histories.get(stream)
        if layout is None or layout.pool is None or history is None or self._several.get(stream, True):
            return False
        found, size = layout.same(optimizer), layout.row_bytes(self._cost)
        if found is None or (self._budget is not None and self._bytes + size > self._budget):
            return False
        buffer = None if self._writer.lost is not None else layout.pool.acquire(wait=False)
        if buffer is None:
            return False
        self._begin(stream, step, history, chosen=True)
        group, (loss, count) = optimizer.param_groups[0], losses.of(())
        history.note(step, group, samples.count, samples.tokens)
        scalars = _scalars(loss, float(group.get("lr", math.nan)), math.nan, count)
        row, addresses = Row(stream, step, found[0], buffer, 1.0, scalars), layout.addresses(found[1])
        if addresses is not None:
            self._take_weights(row, buffer, found[1], addresses)
        else:
            with torch.set_grad_enabled(False):  # torch.no_grad() costs twice as much
                self._take_weights(row, buffer, found[1])
        self._bytes += size
        self._last = time.perf_counter()
        return True

    def _take(self, step: OptimizerStep) -> None:
        self._note(step)
        layout, chosen = self._layout_of(step), not self._changes.kinds or self._chooses(step.step)
        slots, gradients, parameters = layout.gradients(step) if self._weights and chosen else ([], [], [])
        size = layout.bytes_of(gradients, self._cost)
        moments = moments_of(step.optimizer, parameters) if self._options.second_moments else []
        size += sum(self._cost(found[0].numel()) for found in moments if found is not None)
        size += self.neural.pending_bytes
        if self._budget is not None and self._bytes + size > self._budget:
            self._over_budget = True
            return
        scalars = _scalars(step.loss, step.lr, step.clip_norm, step.micro_batches)
        self._changes.begin(step, scalars, chosen=chosen)
        buffer = None
        if slots and layout.pool is not None:
            buffer = layout.pool.acquire(wait=not self._options.drop)
        if (slots and buffer is None) or self.neural.dropped:
            if buffer is not None:
                buffer.release()
            self._leave_out(step.stream, step.step)
            return
        self._bytes += size
        row = self.neural.collect(expected=step.first) if self._with_neural else None
        if not self._first_rows:
            self._first_rows = (buffer is not None) + (row is not None)
        if buffer is not None:
            numbers = self._numbers(step, slots, parameters)
            own = {**scalars, "grad_scale": step.grad_scale} if step.grad_scale != 1.0 else scalars
            own_row = Row(step.stream, step.step, slots, buffer, step.grad_scale, own, "weight", numbers)
            self._take_weights(own_row, buffer, gradients)
        if row is not None:
            if not self.attrs:
                self._names(step.optimizer, step.stream)
            if step.loss_scale != 1.0:
                scalars = {**scalars, "grad_scale": step.loss_scale}
            self._submit(Row(step.stream, step.step, row.slots, row, step.loss_scale, scalars, "neural"), 0.0)
        if moments:
            # After the others: the first line reports their bytes.
            self._take_moments(step, slots, moments, scalars)

    def _take_weights(
        self, row: Row, buffer: RowBuffer, gradients: list[torch.Tensor], addresses: list[int] | None = None
    ) -> None:
        started = time.perf_counter()
        if addresses is not None:
            buffer.copy(addresses)
        else:
            buffer.fill([slot.index for slot in row.slots], gradients)
        self._submit(row, time.perf_counter() - started)

    def _take_moments(
        self,
        step: OptimizerStep,
        slots: Sequence[Slot],
        moments: Sequence[MomentsOf | None],
        scalars: Mapping[str, float],
    ) -> None:
        """Record second moments in rows of their own, with as many bytes as those of the gradients."""
        there = [(slot, *found) for slot, found in zip(slots, moments, strict=bool(moments)) if found is not None]
        pool = self._layouts[step.stream].pool
        # Without room the gradients are still recorded: their numbers do not need these.
        buffer = pool.acquire(wait=not self._options.drop) if there and pool is not None else None
        if buffer is None:
            return
        buffer.fill([slot.index for slot, *_ in there], [mean for _, mean, *_ in there])
        self._moments += len(there)
        own = [
            replace(slot, dtype=shape_and_type(mean)[1], attrs={**slot.attrs, "decay": decay, "eps": eps})
            for slot, mean, _, decay, eps in there
        ]
        numbers = {slot.index: {"optimizer_step": done} for slot, _, done, *_ in there}
        self._writer.submit(Row(step.stream, step.step, own, buffer, 1.0, scalars, SECOND_MOMENT, numbers))

    def _numbers(
        self, step: OptimizerStep, slots: Sequence[Slot], parameters: Sequence[torch.Tensor]
    ) -> dict[int, dict[str, float]]:
        groups = step.optimizer.param_groups
        # A stream has the numbers of its first step.
        several = self._several.setdefault(step.stream, len(groups) > 1)
        if not (several or self._options.optimizer_state or self._options.noise):
            return {}
        found: dict[int, dict[str, float]] = {slot.index: {} for slot in slots}
        if self._options.optimizer_state:
            for slot, value in zip(slots, second_moments(step.optimizer, parameters), strict=True):
                found[slot.index]["second_moment"] = value
                self._moments += not math.isnan(value)
        if several:
            rates = {id(parameter): _rates(group) for group in groups for parameter in group["params"]}
            for slot, parameter in zip(slots, parameters, strict=True):
                found[slot.index] |= rates[id(parameter)]
        if self._options.noise:
            for slot, parameter in zip(slots, parameters, strict=True):
                seen = step.replicas(parameter)
                self._replicated += seen is not None
                count, norm2, sum_norm2 = (math.nan,) * 3 if seen is None else seen
                found[slot.index] |= {"replicas": count, "replicas_norm2": norm2, "replicas_sum_norm2": sum_norm2}
        return found

    def _submit(self, row: Row, seconds: float) -> None:
        self._first_rows = self._first_rows or 1
        self._recorded.add(row.stream)
        if self._prediction is None:
            self._prediction = self._predictor(seconds)
        self._writer.submit(row)

    def _written(self, row: Row, stored: float) -> None:
        """A row is in the trace and takes ``stored`` bytes; called in the writer's thread."""
        if row.kind == SECOND_MOMENT:
            return
        count = self._writer.rows.total() - self._writer.rows[SECOND_MOMENT]
        first = row.kind not in self._first_bytes
        self._first_bytes.setdefault(row.kind, stored)
        if first and len(self._first_bytes) == self._first_rows and self._prediction is not None:
            # Second moments and changes come after it.
            others = self._weights + self._options.second_moments + len(self._changes.kinds) - 1
            size = round(sum(self._first_bytes.values())) + max(0, others) * self._weights_bytes()
            self._news.put(f"gtrace: recording {self._prediction(size)}")
        elif self._options.verbose and count % _TOLD_ROWS == 0:
            self._news.put(
                f"gtrace: step {row.step}: {count} rows written, {size_text(self._writer.stored)} recorded, "
                f"{self._writer.waiting} waiting, training waited {self.waiting()[0]:.1%} of its time"
            )

    def _choose_by_hand(self) -> None:
        self._by_hand = True
        self._news.put("gtrace: no optimizer of torch steps here; recording the gradients after each backward pass")

    def _followed(self, trace: TraceWriter, rank: int) -> tuple[TraceWriter, int]:
        """The trace, of which the first rank's numbers go to the tracker."""
        if self._tracking is not None and not rank:
            trace.follower = lambda *commit: self._commits.put(commit)
        return trace, rank

    def _tell_news(self) -> None:
        while not self._news.empty():
            self._report(self._news.get())
        while self._tracking is not None and not self._commits.empty():
            self._tracking.log(numbers_of(*self._commits.get()))

    def _predictor(self, seconds: float) -> Callable[[int], str]:
        """A function from a step's bytes to a line about budget and steps; ``seconds`` is the time of copying it.

        The size of sketches is known when the first are made, in the writer's thread; everything else is known here.
        """
        tensors = max(self._tensors(), *self._changes.tensors().values(), 0) + len(self.neural.tensors)
        start = f"{tensors} tensor{'s' * (tensors != 1)}, "
        copied = f" a step, copied in {seconds * 1e3:.1f} ms"
        if self._budget is None:
            return lambda row: f"{start}{size_text(row)}{copied}"
        steps, budget = self._capacity(), size_text(self._budget)
        if not isinstance(self._options.policy, AutomaticSteps):
            return lambda row: f"{start}{size_text(row)}{copied}; the {budget} budget takes {steps:,} steps"
        steps = self._options.policy.most(steps)
        end = f"; auto keeps at most {steps:,} steps"
        return lambda row: f"{start}{size_text(row)}{copied}{end} ({size_text(row * steps)} of the {budget} budget)"

    def _names(self, optimizer: Optimizer | Rounds, stream: int) -> Mapping[int, TreeName]:
        self._room = None
        # If two models share names, one gets its class in front: the order of module names decides which, and
        # not the model whose step happens to be recorded first.
        if (first := self.neural.paths.first) is not None:
            self._parameter_names.reserve(first)
        for number, earlier in self.hooks.stepped():
            if number < stream and number not in self._named:
                self._name(earlier, number)
        names = self._name(optimizer, stream)
        self._classes |= {entry.model: None for entry in names.values() if entry.model}
        seed = self.attrs.get("seed", torch.initial_seed())
        self.attrs = {"model": ", ".join(self._classes), "seed": seed}
        if not self._recorded:
            # Of a program that is killed no more is known.
            self.attrs |= self._optimizers()
        return names

    def _name(self, optimizer: Optimizer | Rounds, stream: int) -> Mapping[int, TreeName]:
        self._named.add(stream)
        return self._parameter_names.of(optimizer.param_groups, self._models(), stream=stream, scan=self._scan)

    def _keeps(self, entry: TreeName) -> bool:
        return self.selection.keeps(entry.name, entry.aliases)


def _scalars(loss: float, lr: float, clip_norm: float, micro_batches: int) -> dict[str, float]:
    """The numbers of a step's commit that begins now."""
    scalars = {"time": time.time(), "loss": loss, "lr": lr, "clip_norm": clip_norm}
    return scalars | {"micro_batches": micro_batches} if micro_batches else scalars


def _rates(group: Mapping[str, Any]) -> dict[str, float]:
    """Learning rate and momentum of a parameter group at a step; Adam's momentum is its first beta."""
    momentum = group.get("momentum", group.get("betas", (math.nan,))[0])
    return {"group_lr": float(group.get("lr", math.nan)), "group_momentum": float(momentum)}


def _stored_bytes(plan: SketchPlan | None, most: int | None, size: int) -> int:
    """Bytes of a gradient of ``size`` elements that count against the budget."""
    kept = size if most is None else min(size, -(-most // BLOCK) * BLOCK)
    # A sample stores values, whatever its size.
    return 4 * kept if plan is None or kept < size else plan.stored_bytes(size)
