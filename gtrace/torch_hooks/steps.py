"""Events between and during optimizer steps: losses, clipping, samples, and steps inside a backward pass."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import sys
import weakref
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping
    from types import CodeType, FrameType

    from torch import nn
    from torch.amp.grad_scaler import GradScaler
    from torch.autograd.graph import Node
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

_T = TypeVar("_T")
#: number of the backward pass in which this is called; -1 outside of one
backward_in_progress: Callable[[], int] = torch._C._current_graph_task_id


def parameters_of(groups: Iterable[Mapping[str, Any]]) -> list[torch.Tensor]:
    """The parameters of an optimizer's parameter groups, in order; torch only warns of one that is in a group twice."""
    return list({id(parameter): parameter for group in groups for parameter in group["params"]}.values())


def living(kind: type[_T]) -> Iterator[_T]:
    """The objects of a class that exist in this process."""
    # type() and not isinstance(): some objects compute their __class__, and warn or raise when asked.
    return (thing for thing in gc.get_objects() if issubclass(type(thing), kind))


def nodes_below(tensors: Iterable[torch.Tensor], ends: Container[Node] = ()) -> Iterator[Node]:
    """The nodes that a backward pass from these tensors runs, in the order of their use; none behind ``ends``."""
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        for below, _ in () if node in ends else reversed(node.next_functions):
            if below is not None and below not in seen:
                seen.add(below)
                pending.append(below)


class Patch(NamedTuple):
    """What replaces something of torch: its module or class, its name there, and both."""

    owner: object
    name: str
    original: object
    ours: object

    def use(self, ours: bool) -> None:
        """Have ours or the original there; nothing happens if another program has replaced them since."""
        before, after = (self.original, self.ours) if ours else (self.ours, self.original)
        if vars(self.owner)[self.name] is before:
            setattr(self.owner, self.name, after)


#: what holds weak references to tensors
_holders: weakref.WeakSet[Any] = weakref.WeakSet()


def hides_from_swaps(holder: Any) -> None:
    """Have ``holder`` let go of tensors that a program swaps, because torch refuses those with weak references.

    ``holder.forget(tensor)`` does so for ever, or until the function is called that it returns.
    """
    _holders.add(holder)
    _watch_swaps()


@functools.cache
def _watch_swaps() -> None:
    original: Any = torch.utils.swap_tensors

    @functools.wraps(original)
    def swap_tensors(one: torch.Tensor, other: torch.Tensor) -> object:
        forgotten = [holder.forget(tensor) for holder in list(_holders) for tensor in (one, other)]
        try:
            return original(one, other)
        finally:
            for hold_again in forgotten:
                if hold_again is not None:
                    hold_again()

    torch.utils.swap_tensors = swap_tensors


class OfTensors(WeakTensorKeyDictionary, Generic[_T]):
    """Values of tensors, as long as these exist: by weak reference and not by id, which a later one may get again."""

    def __init__(self) -> None:
        super().__init__()
        hides_from_swaps(self)

    def __hash__(self) -> int:
        return id(self)

    def forget(self, tensor: torch.Tensor) -> Callable[[], None] | None:
        """See :func:`hides_from_swaps`; the tensor gets its value back."""
        return functools.partial(self.__setitem__, tensor, self.pop(tensor)) if tensor in self else None  # type: ignore[no-untyped-call]


class Rounds:
    """Makes one step of all the steps that optimizers take during one backward pass.

    It acts as one optimizer: ``param_groups`` are those of all its members. ``begin`` is called at the first step of a
    backward pass and says whether to keep its gradients, ``end`` when the pass is over.
    """

    def __init__(self, begin: Callable[[], bool], end: Callable[[], None]) -> None:
        #: optimizers by id, in the order of their first steps; a program that drops them gets their memory back
        self.members: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        #: whether to remember weights, too
        self.weights = False
        self._gradients: dict[int, torch.Tensor] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._begin = begin
        self._end = end
        self._open: int | None = None
        self._wanted = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers that stepped so far."""
        return [group for member in self.members.values() for group in member.param_groups]

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The parameter's gradient at its step in this round."""
        return self._gradients.get(id(parameter))

    def weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter as its step in this round found it."""
        return self._before.get(id(parameter), parameter)

    def add(self, optimizer: Optimizer, gradient: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Add an optimizer that steps inside a backward pass; ``gradient`` returns that of one of its parameters."""
        task = backward_in_progress()
        if self._open != task:
            self.close()  # the previous pass raised before its end
            self._open, self._wanted = task, self._begin()
            torch.autograd.Variable._execution_engine.queue_callback(self.close)
        self.members.setdefault(id(optimizer), optimizer)
        if self._wanted:
            for parameter in parameters_of(optimizer.param_groups):
                value = gradient(parameter)
                if value is not None:
                    self._gradients[id(parameter)] = value.detach().clone()
                    if self.weights:
                        self._before[id(parameter)] = parameter.detach().clone()

    def close(self) -> None:
        """End the round: the backward pass is over."""
        if self._open is None:
            return
        self._open = None
        self._end()
        self._gradients, self._before = {}, {}


@dataclasses.dataclass(slots=True, eq=False)
class _Sum:
    """Sum and number of losses that were backpropagated since some moment."""

    total: float | torch.Tensor = 0.0
    count: int = 0


class Losses:
    """Sums the losses that one thread backpropagates between steps.

    The sums stay after a step, for a second optimizer that steps on the same backward pass; the
    next backward pass starts again at zero. Losses before gradients were set to zero do not belong to a step
    with these gradients: an attack on the input, a penalty's statistics, the first half of a two-sided step.
    """

    def __init__(self) -> None:
        self._all = _Sum()
        #: parameter's id -> losses that were backpropagated since its gradient was set to zero
        self._since: dict[int, _Sum] = {}
        self._sums = [self._all]
        #: parameters' ids, and the norm that ``clip_grad_norm_`` measured of their gradients
        self._clipped: list[tuple[set[int], float | torch.Tensor]] = []
        self._used = False
        self._unscaled: tuple[weakref.ref[torch.Tensor], torch.Tensor] | None = None
        #: the gradient scaler that scaled a loss since the previous step
        self.scaler: GradScaler | None = None

    def of(self, groups: Iterable[Mapping[str, Any]]) -> tuple[float, int]:
        """Sum and number of the losses behind a step of an optimizer with these groups; NaN and 0 without any."""
        found = (
            {self._since.get(id(parameter), self._all) for parameter in parameters_of(groups)} if self._since else ()
        )
        one = found.pop() if len(found) == 1 else self._all
        return (float(one.total) if one.count else math.nan), one.count

    def clip_norm(self, groups: Iterable[Mapping[str, Any]]) -> float:
        """The result of ``clip_grad_norm_`` for an optimizer's parameters; NaN if it was not called.

        For several calls with different parameters, the Euclidean norm of the results.
        """
        if not self._clipped:
            return math.nan
        ids = {id(parameter) for parameter in parameters_of(groups)}
        norms = [float(norm) for clipped, norm in self._clipped if clipped & ids]
        return norms[0] if len(norms) == 1 else math.hypot(*norms) if norms else math.nan

    @property
    def usual(self) -> bool:
        """Whether all of them belong to all parameters, and there was neither clipping nor a gradient scaler."""
        return not self._since and not self._clipped and self.scaler is None

    def use(self) -> bool:
        """Mark the sums as used by a step; returns whether it is the first one."""
        first, self._used = not self._used, True
        return first

    def forget(self) -> None:
        """Backward passes that follow are not seen: what was before them is not what a step is taken with."""
        self._used = True
        self._begin()

    def scaled(self, scaler: GradScaler, loss: object, result: object) -> None:
        """A gradient scaler turned ``loss`` into ``result``."""
        self.scaler = scaler
        if isinstance(loss, torch.Tensor) and isinstance(result, torch.Tensor) and result is not loss:
            self._unscaled = weakref.ref(result), loss.detach()

    def backward(self, tensors: object, gradients: object) -> None:
        """A backward pass starts. It starts at a loss if it starts at a single number, or at a multiple of one."""
        if self._used:
            self._used = False
            self._begin()
        if gradients is None and isinstance(tensors, torch.Tensor):
            # The usual case: what happens at every step of a small model has to be quick.
            if tensors.numel() == 1:
                usual = tensors.is_cpu and self._unscaled is None
                self._add(tensors.item() if usual else self._value(tensors))
            return
        roots = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
        given = gradients if isinstance(gradients, (tuple, list)) else (gradients,) * len(roots)
        if not all(isinstance(root, torch.Tensor) and root.numel() == 1 for root in roots):
            return
        if not all(factor is None or (isinstance(factor, torch.Tensor) and factor.numel() == 1) for factor in given):
            return
        for root, factor in zip(roots, given, strict=True):
            self._add(self._value(root) if factor is None else self._value(root) * _number(factor))
        for one in self._sums:
            one.count -= len(roots) - 1

    def _begin(self) -> None:
        self._all.total, self._all.count = 0.0, 0
        if self._since:
            self._since, self._sums = {}, [self._all]
        if self._clipped:
            self._clipped = []

    def _add(self, value: float | torch.Tensor) -> None:
        for one in self._sums:
            one.total = one.total + value
            one.count += 1

    def begun(self) -> bool:
        """Whether there was a loss since the last step; :meth:`zeroed` does nothing if not."""
        return not self._used and bool(self._all.count)

    def zeroed(self, parameters: Iterable[torch.Tensor]) -> None:
        """The gradients of these parameters were set to zero or None."""
        if not self.begun():
            return  # usual: most loops do this after a step
        fresh = _Sum()
        self._since.update((id(parameter), fresh) for parameter in parameters)
        self._sums = [self._all, *set(self._since.values())]

    def clipped(self, parameters: Iterable[torch.Tensor], norm: torch.Tensor) -> None:
        """``clip_grad_norm_`` returned this norm for the gradients of these parameters."""
        ids = {id(parameter) for parameter in parameters}
        self._clipped = [entry for entry in self._clipped if not entry[0] & ids] + [(ids, norm.detach())]

    def _value(self, root: torch.Tensor) -> float | torch.Tensor:
        if self._unscaled is not None and self._unscaled[0]() is root:
            root, self._unscaled = self._unscaled[1], None
        return _number(root)


def _number(tensor: torch.Tensor) -> float | torch.Tensor:
    # Reading a value from another device would make training wait, so a captured step does it later.
    # The copy is needed because a loss may be changed in place after its backward pass.
    return tensor.item() if tensor.is_cpu else tensor.detach().to(torch.float32, copy=True).reshape(())


#: the first steps count samples, later only every 16th does; a count gives up after 1000 calls of modules
_COUNTED, _CALLS = 16, 1000


class Samples:
    """Counts the samples behind a step: those of the first call of a module before each backward pass.

    That is the outermost module whose first argument is a tensor, in training mode and with gradients; samples are the
    length of its first axis. If it holds integers along more axes, a sample is a sequence of tokens. The
    hook on forward passes is there only from a step to that call, so that other calls cost nothing; and not once
    torch.compile has compiled anything, since it would compile again.
    """

    def __init__(self, guarded: Callable[..., None]) -> None:
        self._guarded = guarded
        self._handle: RemovableHandle | None = None
        self._open = False
        self._wanted = 0
        self._calls = 0
        #: samples behind the step that begins; 0 if they were not counted
        self.count = 0
        #: tokens of a sample
        self.tokens = 1
        self._used = True

    def stepped(self, wanted: bool) -> None:
        """A step is over; whether the next one is recorded. Its count stays until the next forward or backward pass."""
        self._used = True
        if not (wanted or self._open):
            return
        self._wanted += wanted
        self._open = wanted and (self._wanted <= _COUNTED or self._wanted % _COUNTED == 0) and not has_compiled()
        self._listen(self._open)

    def backward(self) -> None:
        """A backward pass begins; what a forward pass after it reads are further samples of the same step."""
        if self._used:
            self.count, self._used = 0, False
        if self._open and self._handle is None:
            self._listen(True)

    def remove(self) -> None:
        """Stop counting."""
        self._open = False
        self._listen(False)

    def _listen(self, wanted: bool) -> None:
        self._calls = 0
        if wanted and self._handle is None:
            self._handle = register_module_forward_pre_hook(self._before_forward)
        elif not wanted and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # This comes first: while a graph is being compiled, nothing below may enter it.
        if torch.compiler.is_compiling():
            return
        self._guarded(self._read, module, args)

    def _read(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._calls += 1
        given = args[0] if args else None
        if not (module.training and torch.is_grad_enabled() and isinstance(given, torch.Tensor) and given.dim()):
            # An evaluation between two steps.
            if self._calls >= _CALLS:
                self.remove()
            return
        self._listen(False)
        # Inside of a transformed function a shape is not that of the batch, or part of the graph.
        if torch._C._functorch.is_functorch_wrapped_tensor(given) or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            return
        if self._used:
            self.count, self._used = 0, False
        self.count += given.size(0)
        sequences = given.dim() > 1 and not given.is_floating_point() and not given.is_complex()
        self.tokens = max(1, given.numel() // max(1, given.size(0))) if sequences else 1


def output_tensors(output: object, depth: int = 8) -> Iterator[torch.Tensor]:
    """The tensors of a structured output: of sequences, mappings and dataclasses, in order."""
    if isinstance(output, torch.Tensor):
        yield output
    elif depth == 0:
        return
    elif isinstance(output, dict) or (hasattr(output, "values") and hasattr(output, "keys")):
        for value in output.values():
            yield from output_tensors(value, depth - 1)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from output_tensors(value, depth - 1)
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield from output_tensors(getattr(output, field.name), depth - 1)


def has_compiled() -> bool:
    """Whether torch.compile has compiled anything."""
    module = sys.modules.get("torch._dynamo.utils")
    return module is not None and bool(module.counters.get("frames"))


def grad_scale_of(optimizer: Optimizer | Rounds) -> float:
    """The factor that a gradient scaler sets on a fused optimizer during a step."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def is_nested(wrapper: FrameType, evaluation: CodeType | None, optimizer: Optimizer | None = None) -> bool:
    """Whether this step is a part of another one: a subclass that calls super().step(), or a wrapper.

    With an ``optimizer``, only of another one of its own.

    ``wrapper`` is the frame of torch's own wrapper around every ``step``. Frames instead of a flag, because a
    step that raises never resets a flag. A step that a closure takes while it is evaluated is its own:
    ``evaluation`` is the code that evaluates closures.
    """
    frame, step = wrapper.f_back, wrapper.f_code
    while frame is not None:
        code = frame.f_code
        if code is evaluation:
            return False
        if code is step and (optimizer is None or frame.f_locals["args"][0] is optimizer):
            return True
        frame = frame.f_back
    return False
