"""What an optimizer does: what one of its steps, or several, take from the weights, and its momentum after a step."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from gtrace.capture.writer import Row
from gtrace.torch_hooks.gradients import LOCAL, REDUCED, OptimizerStep, as_real_dense, given_gradient
from gtrace.torch_hooks.naming import is_sharded, local_part
from gtrace.torch_hooks.optimizers import undivided
from gtrace.torch_hooks.processes import process_place
from gtrace.torch_hooks.steps import Rounds, parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from gtrace.capture.layout import Found, RowLayout, Slot
    from gtrace.capture.options import CaptureOptions

#: names under which optimizers keep a running mean of gradients: SGD, RMSprop and Muon; Adam and its kin
_BUFFERS = ("momentum_buffer", "exp_avg")
#: wrapper that shards, by name: importing the class would cost every other program time
_SHARDING = "FullyShardedDataParallel"


class _Begun(NamedTuple):
    """A row from before its first step until after its last one; ``first`` is its number.

    ``before`` are the values of the parameters behind its slots when it was begun, in float32 or float64.
    """

    first: int
    last: int
    scalars: Mapping[str, float]
    slots: Sequence[Slot] = ()
    parameters: Sequence[torch.Tensor] = ()
    before: Sequence[torch.Tensor] = ()


class Changes:
    """Records weight updates, outer gradients and momentum buffers.

    An update is w before a step minus w after it: what descent subtracts, so it has the sign of a gradient. An outer
    gradient is the same over H steps. Each of the two keeps one copy of the weights.

    Args:
        options: of the capture; ``every`` is H.
        layout: makes a layout for the optimizer of this number.
        models: the live modules.
        has_room: whether a row with these slots is within the budget; counts it.
        submit: takes a row, and the seconds that it took to copy.
        drop: called with an optimizer's number and the step of a row for which no buffer is free.
    """

    def __init__(
        self,
        options: CaptureOptions,
        layout: Callable[[int], RowLayout],
        models: Callable[[], Sequence[nn.Module]],
        has_room: Callable[[Sequence[Slot]], bool],
        submit: Callable[[Row, float], None],
        drop: Callable[[int, int], None],
    ) -> None:
        self.kinds = tuple(kind for kind in ("update", "outer", "momentum") if kind in options.kinds)
        self._spans: dict[str, int] = {"update": 1, "outer": options.every or 1, "momentum": 1}
        self._wait = not options.drop
        self._reduced = options.reduced
        self._layout, self._models, self._has_room = layout, models, has_room
        self._submit, self._drop = submit, drop
        #: (optimizer's number, kind) -> its tensors
        self.layouts: dict[tuple[int, str], RowLayout] = {}
        self._begun: dict[tuple[int, str], _Begun] = {}
        #: optimizer's number -> ids of its parameters that a wrapper keeps equal, or whole, across processes
        self._shared: dict[int, set[int]] = {}
        #: kind -> rows so far
        self.rows: dict[str, int] = dict.fromkeys(self.kinds, 0)

    def tensors(self) -> dict[str, int]:
        """Kind -> number of distinct tensors so far."""
        return {kind: sum(one.tensors for (_, k), one in self.layouts.items() if k == kind) for kind in self.kinds}

    def begins(self, stream: int, step: int) -> bool:
        """Whether an outer gradient can begin at this step, because its first one was left out."""
        begun = self._begun.get((stream, "outer"))
        return "outer" in self.kinds and (begun is None or begun.last < step)

    def begin(self, step: OptimizerStep, scalars: Mapping[str, float], *, chosen: bool) -> None:
        """A step begins: remember the weights that it finds; if it is not chosen, only an outer gradient may begin."""
        for kind in self.kinds if chosen else ("outer",):
            key = step.stream, kind
            if key not in self.layouts:
                self.layouts[key] = self._layout(step.stream)
                # Nothing may keep the parameters of an optimizer that the program has dropped.
                weakref.finalize(step.optimizer, self._forget, key).atexit = False
            if kind == "momentum":
                self._begun[key] = _Begun(step.step, step.step, scalars)
            elif kind == "update" or self.begins(step.stream, step.step):
                first = step.step - step.step % self._spans[kind]
                self._remember(key, step, _Begun(first, first + self._spans[kind] - 1, scalars))

    @torch.no_grad()
    def end(self, optimizer: Optimizer | Rounds, stream: int, step: int) -> None:
        """A step is over, or was left out: record the rows that end with it."""
        for kind in self.kinds:
            begun = self._begun.get((stream, kind))
            if begun is None or begun.last != step:
                continue
            slots, values = begun.slots, begun.before
            if kind == "momentum":
                slots, values, _ = self.layouts[stream, kind].place(optimizer, self._momenta(optimizer, stream))
            elif slots:
                now = [as_real_dense(local_part(parameter.detach())) for parameter in begun.parameters]
                torch._foreach_sub_(list(values), now)
            if not slots or not self._has_room(slots):
                continue
            started = time.perf_counter()
            pool = self.layouts[stream, kind].pool
            buffer = None if pool is None else pool.acquire(wait=self._wait)
            if buffer is None:
                self._drop(stream, begun.first)
                continue
            buffer.fill([slot.index for slot in slots], values)
            self.rows[kind] += 1
            row = Row(stream, begun.first, slots, buffer, 1.0, begun.scalars, kind)
            self._submit(row, time.perf_counter() - started)

    def _forget(self, key: tuple[int, str]) -> None:
        self._begun.pop(key, None)
        self.layouts[key].release()

    def _remember(self, key: tuple[int, str], step: OptimizerStep, begun: _Begun) -> None:
        """Copy the weights, into the room of an earlier copy if it fits."""
        found = self._weights(step, every=key[1] == "outer")
        slots, values, parameters = self.layouts[key].place(step.optimizer, found)
        earlier = self._begun.pop(key, None)
        room = () if earlier is None else earlier.before
        if [(old.shape, old.device) for old in room] != [(value.shape, value.device) for value in values]:
            # In a type in which a difference of weights keeps its digits.
            precise = [torch.promote_types(value.dtype, torch.float32) for value in values]
            room = [torch.empty_like(value, dtype=kind) for value, kind in zip(values, precise, strict=True)]
        if values:
            torch._foreach_copy_(list(room), list(values))
        self._begun[key] = begun._replace(slots=slots, parameters=parameters, before=room)

    def _weights(self, step: OptimizerStep, *, every: bool) -> list[Found]:
        """The weights before a step: of the parameters with a gradient, or of all that can have one."""
        rounds = step.optimizer if isinstance(step.optimizer, Rounds) else None
        found = []
        for parameter in parameters_of(step.optimizer.param_groups):
            gradient = given_gradient(parameter) if rounds is None else rounds.gradient(parameter)
            if parameter.requires_grad and (every or gradient is not None):
                weight = parameter if rounds is None else rounds.weight(parameter)
                found.append((parameter, local_part(weight.detach()), self._stage(parameter, step.stream)))
        return found

    def _momenta(self, optimizer: Optimizer | Rounds, stream: int) -> list[Found]:
        found = []
        for member in optimizer.members.values() if isinstance(optimizer, Rounds) else (optimizer,):
            state = getattr(undivided(member), "state", {})
            for parameter in parameters_of(member.param_groups):
                own = state.get(parameter, {}) if parameter in state else {}
                mean = next((own[name] for name in _BUFFERS if isinstance(own.get(name), torch.Tensor)), None)
                if mean is not None:
                    found.append((parameter, local_part(mean.detach()), self._stage(parameter, stream)))
        return found

    def _stage(self, parameter: torch.Tensor, stream: int) -> str:
        """Whether all processes have the same, or this process its own."""
        if process_place().world_size == 1:
            return LOCAL
        if stream not in self._shared:
            wrappers = [
                module
                for module in self._models()
                if isinstance(module, DistributedDataParallel) or type(module).__name__ == _SHARDING
            ]
            self._shared[stream] = {id(one) for wrapper in wrappers for one in wrapper.parameters()}
        shared = self._reduced or is_sharded(parameter) or id(parameter) in self._shared[stream]
        return REDUCED if shared else LOCAL
