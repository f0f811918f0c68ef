"""Gradients with respect to module outputs, gathered during a backward pass until the optimizer steps."""

from __future__ import annotations

import functools
import threading
import time
from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gtrace.capture.layout import Slot, shape_and_type
from gtrace.capture.options import MAX_ELEMENTS
from gtrace.capture.waiting import Returns
from gtrace.torch_hooks.gradients import as_real_dense
from gtrace.torch_hooks.naming import ModulePaths
from gtrace.torch_hooks.outputs import OutputHooks, is_compiled
from gtrace.trace.rows import SAMPLE, default_capacity, sample_indices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from gtrace.capture.options import CaptureOptions, TensorSelection
    from gtrace.torch_hooks.outputs import Output

#: recorded calls of one module in a step
MOST_CALLS = 64
#: Limit on the bytes of a row while it is gathered; it cannot wait for room, because training completes it.
_ROW_BYTES = 2**30
#: Sample indices are kept for this many samples; at the default element cap they take 64 MiB.
_KEPT_SAMPLES = 32
#: names in a message
_NAMED = 5


@dataclass(slots=True)
class _Arrival:
    """One gradient: its elements, or a sample of them, as float32 on the host or still on their device."""

    output: Output
    values: torch.Tensor
    total: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class NeuralRow:
    """The gradients of one step on the host: for each slot a target, float32 with one dimension."""

    slots: Sequence[Slot]
    targets: Sequence[torch.Tensor]
    pool: HostBlocks
    #: These rows share no memory and wait for no other.
    slab: None = None
    ahead: None = None
    last: bool = True
    several: bool = False

    def wait(self) -> None:
        """Nothing to wait for."""

    def release(self) -> None:
        """Return the blocks."""
        self.pool.returned.put(self.targets)


class HostBlocks:
    """Reusable float32 blocks on the host, for rows that may all differ.

    ``find_room`` waits until the blocks of rows that wait to be written take no more than the limit.

    Args:
        limit: bytes that waiting rows may take together, and also the blocks that wait for reuse.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting = 0
        #: blocks that the writer's thread has written
        self.returned: Returns[Sequence[torch.Tensor]] = Returns()
        self._free: dict[int, list[torch.Tensor]] = {}
        self._free_bytes = 0

    def take(self, elements: int) -> torch.Tensor:
        """A block of ``elements`` values with arbitrary content."""
        found = self._free.get(elements)
        if found:
            self._free_bytes -= 4 * elements
            return found.pop()
        # Device and dtype are explicit because the script may have set other defaults.
        return torch.empty(elements, dtype=torch.float32, device="cpu")

    def hand_over(self, blocks: Sequence[torch.Tensor]) -> None:
        """Count these blocks as waiting to be written."""
        self._waiting += _bytes(blocks)

    def find_room(self, *, wait: bool = True) -> bool:
        """Whether there is room for another row; by default, wait until there is or the writer does not go on."""
        while True:
            full = self._waiting > self._limit
            blocks = self.returned.get(wait=wait and full)
            if blocks is None:
                return not full
            self._waiting -= _bytes(blocks)
            self.reuse(blocks)

    def reuse(self, blocks: Iterable[torch.Tensor]) -> None:
        """Keep blocks for later rows, up to the limit."""
        for block in blocks:
            if self._free_bytes + 4 * block.numel() > self._limit:
                # Sizes that no longer occur, such as those of a last batch, make room.
                self._free, self._free_bytes = {}, 0
            self._free.setdefault(block.numel(), []).append(block)
            self._free_bytes += 4 * block.numel()


def _bytes(blocks: Iterable[torch.Tensor]) -> int:
    return 4 * sum(block.numel() for block in blocks)


class NeuralRecorder:
    """Gathers the gradients of module outputs that arrive before each optimizer step.

    Args:
        options: elements to keep of one gradient, and the limit on bytes of rows that wait to be written.
        models: the live modules.
        selection: which modules.
        scan: search the whole process for modules that are not in ``models``; otherwise these are left out.
        paused: whether to ignore the current forward pass.
    """

    def __init__(
        self,
        options: CaptureOptions,
        models: Callable[[], Sequence[nn.Module]],
        *,
        selection: TensorSelection,
        scan: bool,
        paused: Callable[[], bool],
        say: Callable[[str], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._seconds = 0.0
        #: Names of tensors that were recorded.
        self.tensors: set[str] = set()
        #: Bytes of the largest row so far.
        self.row_bytes = 0
        #: The current row is left out, because too many wait to be written.
        self.dropped = False
        self._drop = options.drop
        self._models = models
        self._max_elements = options.max_elements or MAX_ELEMENTS
        self._say = say
        #: names modules
        self.paths = ModulePaths(models, scan=scan, closed=not scan)
        self._keeps = functools.cache(lambda name: selection.keeps(name.path, name.aliases))
        #: to be installed, and removed at the end; they listen to the forward passes before a wanted step
        self.hooks = OutputHooks(self.paths, self._keeps, self._arrive, paused, on_error)
        self._blocks = HostBlocks(options.queue_bytes)
        self._capacities: dict[tuple[str, int], int] = {}
        self._row: dict[tuple[int, int], _Arrival] = {}
        #: bytes of the row that is being gathered
        self.pending_bytes = 0
        #: module -> its calls in this row, ascending
        self._calls: dict[str, list[int]] = {}
        self._indices = functools.lru_cache(_KEPT_SAMPLES)(_sampled_places)
        self._steps = 0
        self._empty = 0
        self._said: set[str] = set()
        # Several devices run their parts of one backward pass in threads of their own.
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Time that forward and backward passes spent here."""
        return self._seconds + self.hooks.seconds

    def discard(self) -> None:
        """Start a new row."""
        self.hooks.forget()
        self._blocks.reuse(arrival.values for arrival in self._row.values() if arrival.values.device.type == "cpu")
        self._row, self._calls, self.pending_bytes, self.dropped = {}, {}, 0, False

    def collect(self, *, expected: bool = True) -> NeuralRow | None:
        """The gradients since the row began, as a row; None without any. They are expected after a backward pass."""
        if self._steps == 0:
            self._tell_compiled()
        if expected:
            self._steps += 1
            self._empty += not self._row
        arrivals = sorted(self._row.values(), key=lambda arrival: arrival.output[1:])
        self._row, self._calls, self.pending_bytes = {}, {}, 0
        if not arrivals:
            return None
        for arrival in arrivals:
            key = arrival.output.name.path, arrival.output.place
            if key not in self._capacities:
                # All calls of a module share one stream, so a gradient is cut at most once.
                sizes = [a.total for a in arrivals if (a.output.name.path, a.output.place) == key]
                self._capacities[key] = min(self._max_elements, default_capacity(max(sizes)))
        values = [arrival.values for arrival in arrivals]
        on_host = [one if one.device.type == "cpu" else self._blocks.take(one.numel()).copy_(one) for one in values]
        row = NeuralRow(self._slots(arrivals), on_host, self._blocks)
        self._blocks.hand_over(row.targets)
        self.row_bytes = max(self.row_bytes, _bytes(row.targets))
        self.tensors.update(slot.name for slot in row.slots)
        return row

    def notes(self) -> list[str]:
        """What was left out and why, one line for each reason."""
        self._tell_compiled()
        watched = self.hooks.watched
        idle = [path for path in self.hooks.idle if not watched.get(path)]
        lost = [path for path, arrived in watched.items() if not arrived and path not in idle]
        out = []
        if idle:
            out.append(f"{_modules(idle)} with outputs that need no gradient: skipped")
        if lost:
            out.append(
                f"{_modules(lost)} whose gradient never arrived: skipped (the loss does not depend on the output, "
                "or it is a view that was changed in place)"
            )
        if self._empty:
            out.append(
                f"no gradient of a module's output arrived in {self._empty} of {self._steps} recorded steps (what runs "
                "in a function under torch.compile is not seen)"
            )
        return out

    def _arrive(self, output: Output, gradient: torch.Tensor) -> None:
        started = time.perf_counter()
        with self._lock, torch.no_grad():
            self._store(output, gradient)
        self._seconds += time.perf_counter() - started

    def _store(self, output: Output, given: torch.Tensor) -> None:
        if self.dropped or given.device.type == "meta" or given.numel() == 0 or not self._is_among_first(output):
            return
        gradient = as_real_dense(given)
        total = gradient.numel()
        path = output.name.path
        kept = min(total, self._capacities.get((path, output.place), self._max_elements))
        found = self._row.get(output[1:])
        if self.pending_bytes + 4 * kept > _ROW_BYTES and found is None:
            self._say_once(
                "bytes", f"neural gradients of a step beyond {_ROW_BYTES >> 20} MiB are left out, first: {path}"
            )
            return
        if not self._row and not self._blocks.find_room(wait=not self._drop):
            self.dropped = True
            return
        if kept < total:
            gradient = gradient.take(self._indices(total, kept, gradient.device))
        if found is not None:
            # Another backward pass over the same graph: the weights also get the sum.
            found.values += gradient.reshape(-1).to(found.values.dtype)
            return
        if gradient.device.type == "cpu":
            values = self._blocks.take(kept)
            values.view(gradient.shape).copy_(gradient)
        else:
            # Copied to the host when the optimizer steps, so that the backward pass does not wait.
            values = gradient.reshape(-1).to(torch.float32, copy=True)
        self._row[output[1:]] = _Arrival(output, values, total, *shape_and_type(given))
        self.pending_bytes += 4 * kept

    def _is_among_first(self, output: Output) -> bool:
        """Whether the call is among the first of its module; an earlier call replaces a later one.

        Gradients arrive in the reverse order of the calls.
        """
        calls = self._calls.setdefault(output.name.path, [])
        if output.order in calls:
            return True
        if len(calls) == MOST_CALLS:
            self._say_once(
                "calls",
                f"calls of a module beyond the {MOST_CALLS}th of a step are left out, first: {output.name.path}",
            )
            if output.order > calls[-1]:
                return False
            dropped = calls.pop()
            for key in [key for key in self._row if key[0] == dropped]:
                arrival = self._row.pop(key)
                self.pending_bytes -= 4 * arrival.values.numel()
                if arrival.values.device.type == "cpu":
                    self._blocks.reuse([arrival.values])
        insort(calls, output.order)
        return True

    def _slots(self, arrivals: Sequence[_Arrival]) -> list[Slot]:
        numbers: dict[str, dict[int, int]] = {}
        slots = []
        for index, arrival in enumerate(arrivals):
            name, order, place = arrival.output
            calls = numbers.setdefault(name.path, {})
            call = calls.setdefault(order, len(calls))
            shown = name.path + (f"#{call}" if call else "") + (f".out{place}" if place else "")
            about = {"module": name.path, "call": call, "output": place, "sample": dict(SAMPLE)}
            attrs = {"shape": list(arrival.shape), **about}
            sizes = {"n_total": arrival.total, "capacity": self._capacities[name.path, place]}
            slots.append(Slot(index, shown, arrival.shape, arrival.dtype, name.aliases, name.module_type, attrs, sizes))
        return slots

    def _tell_compiled(self) -> None:
        for module in self._models():
            if is_compiled(module):
                name = self.paths.of(module)
                if name is not None and self._keeps(name):
                    self.hooks.compiled[name.path] = None
        if self.hooks.compiled:
            names = ", ".join(f"'{path}'" for path in list(self.hooks.compiled)[:_NAMED])
            self._say_once(
                "compiled",
                f"neural gradients inside of the compiled {names} are not recorded; run without torch.compile to "
                "record them",
            )

    def _say_once(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self._say(f"gtrace: warning: {text}")


def _sampled_places(total: int, kept: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(sample_indices(total, kept).copy()).to(device)


def _modules(paths: Sequence[str]) -> str:
    names = ", ".join(paths[:_NAMED]) + (", ..." if len(paths) > _NAMED else "")
    return f"{len(paths)} module{'s' * (len(paths) > 1)} ({names})"
