"""Gradients with respect to module outputs, gathered during a backward pass until the optimizer steps.

A tensor hook on the output finds them, not a backward hook on the module: those wrap the output in an autograd
function, after which an in-place ReLU raises an error.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import warnings
from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.modules.loss import _Loss
from torch.nn.modules.module import register_module_forward_hook

from gtrace.capture.buffers import Returns
from gtrace.capture.layout import Slot, shape_and_type
from gtrace.capture.options import MAX_ELEMENTS, CaptureOptions
from gtrace.torch_hooks.gradients import as_real_dense
from gtrace.torch_hooks.naming import ModulePaths, TreeName
from gtrace.torch_hooks.steps import output_tensors
from gtrace.trace.rows import SAMPLE, default_capacity, sample_indices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle


#: recorded calls of one module in a step
MOST_CALLS = 64
#: Limit on the bytes of a row while it is gathered; it cannot wait for room, because training completes it.
_ROW_BYTES = 2**30
#: Sample indices are kept for this many samples; at the default element cap they take 64 MiB.
_KEPT_SAMPLES = 32
#: names in a message
_NAMED = 5


class Output(NamedTuple):
    """One tensor that one call of a module returned.

    Attributes:
        order: number of the call among all calls of all modules, ascending.
        place: number of the tensor in the call's output.
    """

    name: TreeName
    order: int
    place: int


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

    ``limit`` is on the bytes of waiting rows, for which ``find_room`` waits, and of the blocks that wait for reuse.
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
    """Gathers the gradients of module outputs that arrive before each optimizer step, while ``listening`` is set.

    It watches modules without children (their outputs include those of everything above them) and modules that own
    parameters themselves. Losses (``torch.nn``'s) are left out.

    Args:
        options: elements to keep of one gradient, and the limit on bytes of rows that wait to be written.
        models: the live modules.
        keeps: whether to watch a module of this name.
        scan: search the whole process for modules that are not in ``models``; otherwise these are left out.
        paused: whether to ignore the current forward pass.
        say: prints one line for the user.
        on_error: called with an exception of the hooks; training continues.
    """

    def __init__(
        self,
        options: CaptureOptions,
        models: Callable[[], Sequence[nn.Module]],
        *,
        keeps: Callable[[TreeName], bool],
        scan: bool,
        paused: Callable[[], bool],
        say: Callable[[str], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self.listening = False
        #: seconds that forward and backward passes waited here
        self.seconds = 0.0
        #: paths of watched modules -> whether a gradient of theirs has arrived
        self.watched: dict[str, bool] = {}
        #: Paths of modules whose outputs need no gradient.
        self.idle: dict[str, None] = {}
        #: paths of modules that torch.compile has replaced
        self.compiled: dict[str, None] = {}
        #: names modules
        self.paths = ModulePaths(models, scan=scan, closed=not scan)
        self._keeps = functools.cache(keeps)
        self._paused = paused
        self._on_error = on_error
        self._order = 0
        # Several devices run their parts of one backward pass in threads of their own.
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._handle: RemovableHandle | None = None
        # Hooks on leaves of the graph outlive it.
        self._lasting: list[RemovableHandle] = []
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
        self._blocks = HostBlocks(options.queue_bytes)
        self._capacities: dict[tuple[str, int], int] = {}
        self._row: dict[tuple[int, int], _Arrival] = {}
        #: bytes of the row that is being gathered
        self.pending_bytes = 0
        #: module -> its calls in this row, ascending
        self._calls: dict[str, list[int]] = {}
        self._indices = functools.lru_cache(_KEPT_SAMPLES)(
            lambda total, kept, device: torch.from_numpy(sample_indices(total, kept).copy()).to(device)
        )
        self._steps = 0
        self._empty = 0
        self._said: set[str] = set()

    def install(self) -> None:
        """Start watching. The hook stays until the end: torch compiles a graph again whenever hooks change."""
        # torch warns that a hook is called again for a compiled module. A script that turns warnings into errors
        # would end there.
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
        self._filter = warnings.filters[0]
        self._handle = register_module_forward_hook(self._after_forward)

    def remove(self) -> None:
        """Stop watching. Graphs that still exist report nothing more."""
        self.listening = False
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            # The program may have set its own filters, or reset them.
            with contextlib.suppress(ValueError):
                warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
        self.forget()

    def forget(self) -> None:
        """Remove hooks that would reach into the next step."""
        for handle in self._lasting:
            handle.remove()
        self._lasting = []

    def _after_forward(self, module: nn.Module, _args: object, output: object) -> None:
        # This comes first: while a graph is being compiled, nothing below may enter it.
        if torch.compiler.is_compiling() or not self.listening or not torch.is_grad_enabled():
            return
        if not torch.jit.is_tracing() and not self._paused():  # type: ignore[attr-defined,no-untyped-call]
            self._safely(self._watch, module, output)

    def _safely(self, function: Callable[..., None], *args: object) -> None:
        """Call a function; its errors stop nothing. In a forked child, do nothing."""
        started = time.perf_counter()
        try:
            if os.getpid() == self._owner:
                function(*args)
        except Exception as error:  # noqa: BLE001 - an error of capture must not stop training
            self._on_error(error)
        finally:
            self.seconds += time.perf_counter() - started

    def _watch(self, module: nn.Module, output: object) -> None:
        compiled = _is_compiled(module)
        if not compiled and not _is_watched(module):
            return
        name = self.paths.of(module)
        if name is None or not self._keeps(name):
            return
        if compiled:
            self.compiled[name.name] = None
            return
        tensors = [(place, tensor) for place, tensor in enumerate(output_tensors(output)) if _has_gradient(tensor)]
        if not tensors:
            self.idle[name.name] = None
            return
        self.watched.setdefault(name.name, False)
        self._order += 1
        for place, tensor in tensors:
            about = Output(name, self._order, place)
            handle = tensor.register_hook(functools.partial(self._safely, self._arrived, about))  # type: ignore[no-untyped-call]
            if tensor.is_leaf:
                self._lasting.append(handle)

    def _arrived(self, output: Output, gradient: torch.Tensor | None) -> None:
        # Autograd also reports missing gradients.
        if gradient is not None and self.listening:
            self.watched[output.name.name] = True
            with self._lock, torch.no_grad():
                self._store(output, gradient.detach())

    def discard(self) -> None:
        """Start a new row."""
        self.forget()
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
            key = arrival.output.name.name, arrival.output.place
            if key not in self._capacities:
                # All calls of a module share one stream, so a gradient is cut at most once.
                sizes = [a.total for a in arrivals if (a.output.name.name, a.output.place) == key]
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
        idle = [path for path in self.idle if not self.watched.get(path)]
        lost = [path for path, arrived in self.watched.items() if not arrived and path not in idle]
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

    def _store(self, output: Output, given: torch.Tensor) -> None:
        """Copy a gradient; called in the backward pass, again for the same output if the graph is used again."""
        if self.dropped or given.device.type == "meta" or given.numel() == 0 or not self._is_among_first(output):
            return
        gradient = as_real_dense(given)
        total = gradient.numel()
        path = output.name.name
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
        calls = self._calls.setdefault(output.name.name, [])
        if output.order in calls:
            return True
        if len(calls) == MOST_CALLS:
            self._say_once(
                "calls",
                f"calls of a module beyond the {MOST_CALLS}th of a step are left out, first: {output.name.name}",
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
            calls = numbers.setdefault(name.name, {})
            call = calls.setdefault(order, len(calls))
            shown = name.name + (f"#{call}" if call else "") + (f".out{place}" if place else "")
            about = {"module": name.name, "call": call, "output": place, "sample": dict(SAMPLE)}
            attrs = {"shape": list(arrival.shape), **about}
            sizes = {"n_total": arrival.total, "capacity": self._capacities[name.name, place]}
            slots.append(Slot(index, shown, arrival.shape, arrival.dtype, name.aliases, name.module_type, attrs, sizes))
        return slots

    def _tell_compiled(self) -> None:
        for module in self._models():
            if _is_compiled(module):
                name = self.paths.of(module)
                if name is not None and self._keeps(name):
                    self.compiled[name.name] = None
        if self.compiled:
            names = ", ".join(f"'{path}'" for path in list(self.compiled)[:_NAMED])
            self._say_once(
                "compiled",
                f"neural gradients inside of the compiled {names} are not recorded; run without torch.compile to "
                "record them",
            )

    def _say_once(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self._say(f"gtrace: warning: {text}")


def _is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` runs this module, so that hooks inside it are not called."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _is_watched(module: nn.Module) -> bool:
    if isinstance(module, _Loss):
        return False
    # A module whose weight is computed from another one keeps that in this child.
    children = [child for name, child in module._modules.items() if child is not None and name != "parametrizations"]
    return not children or any(parameter is not None for parameter in module._parameters.values())


def _has_gradient(tensor: torch.Tensor) -> bool:
    if not tensor.requires_grad or tensor.device.type == "meta":
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _modules(paths: Sequence[str]) -> str:
    names = ", ".join(paths[:_NAMED]) + (", ..." if len(paths) > _NAMED else "")
    return f"{len(paths)} module{'s' * (len(paths) > 1)} ({names})"
