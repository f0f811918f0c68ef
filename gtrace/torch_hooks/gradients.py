"""Gradients at the moment when they have been accumulated: this process's own, and those of micro-batches."""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from gtrace.torch_hooks.naming import is_sharded
from gtrace.torch_hooks.processes import process_place
from gtrace.torch_hooks.steps import Rounds, backward_in_progress, hides_from_swaps, parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.optim import Optimizer


#: stage of a gradient: before or after the processes' gradients were averaged
LOCAL, REDUCED = "local", "reduced"


def as_real_dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as a strided real tensor: sparse ones become dense, complex ones get a last axis of 2."""
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def main_gradient(parameter: torch.Tensor) -> tuple[torch.Tensor | None, str]:
    """The gradient that Megatron accumulates beside ``grad``, in ``main_grad``, and its stage; None without one."""
    found = getattr(parameter, "main_grad", None)
    if not isinstance(found, torch.Tensor) or found.shape != parameter.shape:
        return None, LOCAL
    return found, LOCAL if process_place().world_size == 1 else REDUCED


def own_gradient(parameter: torch.Tensor) -> tuple[torch.Tensor | None, str]:
    """The gradient of a process that trains alone, and its stage."""
    return parameter.grad, LOCAL


def given_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that an optimizer finds."""
    return main_gradient(parameter)[0] if parameter.grad is None else parameter.grad


@dataclass(slots=True)
class _Copy:
    """The state of one parameter.

    Attributes:
        strict: a wrapper averages its gradient during the backward pass, so ``grad`` never is the local one.
        value: its local gradient after the last wanted backward pass.
        fresh: ``value`` belongs to the current step.
        before: ``grad`` at the start of a backward pass that is not the first of its step.
    """

    strict: bool = False
    value: torch.Tensor | None = None
    fresh: bool = False
    before: torch.Tensor | None = None


class _Accumulated(ABC):
    """Watches parameters for the moment when their gradients have been accumulated, and keeps a state of each."""

    #: the class of a state
    make: type[Any]

    def __init__(self, guarded: Callable[..., None]) -> None:
        #: whether the current step will be recorded
        self.wanted = True
        self._guarded = guarded
        self._known: Any = WeakTensorKeyDictionary()
        #: by the parameter's id
        self._handles: dict[int, tuple[Any, Any]] = {}
        hides_from_swaps(self)

    @property
    def watching(self) -> bool:
        return bool(self._handles)

    def remove(self) -> None:
        for handle in itertools.chain.from_iterable(self._handles.values()):
            handle.remove()
        self._handles = {}

    def forget(self, parameter: torch.Tensor) -> Callable[[], None] | None:
        """See :func:`~gtrace.torch_hooks.steps.hides_from_swaps`."""
        if self._known.pop(parameter, None) is None:
            return None
        for handle in self._handles.pop(id(parameter)):
            handle.remove()
        # torch calls hooks of what a tensor holds, and keeps them with the tensor: later ones would not be called.
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if not getattr(parameter, name):
                setattr(parameter, name, None)
        return functools.partial(self.watch, [parameter])

    def watched(self) -> list[tuple[torch.Tensor, Any]]:
        return list(self._known.items())

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch these parameters too; those that need no gradient, and sharded ones, are left out."""
        for parameter in parameters:
            self._entry(parameter)

    def _entry(self, parameter: Any) -> Any:
        """The state of a parameter; None for one that is not watched.

        For a sharded parameter the hooks run only after its gradient was summed up.
        """
        if not parameter.requires_grad or not parameter.is_leaf or is_sharded(parameter):
            return None
        entry = self._known.get(parameter)
        if entry is None:
            entry = self._known[parameter] = self.make()
            # A strong reference would keep the parameter alive through its own hook.
            owner = TensorWeakRef(parameter)

            # Called for each parameter and micro-batch.
            def arrives(_gradient: torch.Tensor) -> None:
                if self.wanted:
                    self._arrives(owner(), entry)

            def accumulated(parameter: torch.Tensor) -> None:
                if self.wanted:
                    self._accumulated(parameter, entry)

            self._handles[id(parameter)] = (
                parameter.register_hook(arrives),
                parameter.register_post_accumulate_grad_hook(accumulated),
            )
        return entry

    def _of(self, optimizer: Optimizer) -> list[Any]:
        several = parameters_of(optimizer.param_groups) if len(self._known) else ()
        return [entry for entry in map(self._known.get, several) if entry is not None]

    @abstractmethod
    def _arrives(self, parameter: torch.Tensor | None, entry: Any) -> None:
        """A gradient is about to be accumulated."""

    @abstractmethod
    def _accumulated(self, parameter: torch.Tensor, entry: Any) -> None:
        """It has been."""


class LocalGradients(_Accumulated):
    """Copies gradients at the moment when they have been accumulated.

    ``DistributedDataParallel`` gets a gradient from the node that accumulates it, after the parameter's own
    post-accumulate hooks: in those hooks, ``grad`` is still this process's own. The same holds if a program averages
    gradients itself after its backward pass, and with ``gradient_as_bucket_view``, ``no_sync`` and unused parameters.
    Micro-batches without ``no_sync`` differ: all but the first are added to an
    average. For those, only what they add is taken, exact except for rounding.

    A gradient that does not pass through such a hook in the parameter's shape has no local form; neither has
    that of a sharded parameter (``fully_shard`` puts sums over all processes into ``grad``).
    """

    make = _Copy

    def watch(self, parameters: Iterable[torch.Tensor], *, strict: bool = False) -> None:
        """Watch these parameters too; ``strict``: a wrapper averages their gradients during the backward pass."""
        for parameter in parameters:
            copy = self._entry(parameter)
            if copy is not None:
                copy.strict = copy.strict or strict

    def forget(self, parameter: torch.Tensor) -> Callable[[], None] | None:
        """See the base class."""
        copy = self._known.get(parameter)
        strict = copy is not None and copy.strict
        return super().forget(parameter) and functools.partial(self.watch, [parameter], strict=strict)

    def gradient(self, parameter: torch.Tensor, scale: float) -> tuple[torch.Tensor | None, str]:
        """The gradient of this step, and ``local``, or ``reduced`` if there is no local one.

        A local gradient is divided by ``scale``, the factor that a gradient scaler put on the loss.
        """
        copy = self._known.get(parameter)
        if copy is not None and copy.fresh and copy.value is not None and copy.value.shape == parameter.shape:
            return (copy.value if scale == 1.0 else copy.value / scale), LOCAL
        if copy is not None and (copy.strict or (copy.value is not None and copy.value.shape == parameter.shape)):
            return None, LOCAL
        return parameter.grad, REDUCED

    def consume(self, optimizer: Optimizer) -> None:
        """Mark the gradients as used; the next backward pass starts a new step."""
        for copy in self._of(optimizer):
            copy.fresh = False

    def _arrives(self, parameter: torch.Tensor | None, entry: _Copy) -> None:
        if entry.fresh:
            self._guarded(self._remember, parameter, entry)

    def _accumulated(self, parameter: torch.Tensor, entry: _Copy) -> None:
        self._guarded(self._copy, parameter, entry)

    @torch.no_grad()
    def _remember(self, parameter: torch.Tensor | None, copy: _Copy) -> None:
        """Another micro-batch starts: remember the current ``grad``, which is not its own."""
        gradient = None if parameter is None else parameter.grad
        copy.before = None if gradient is None else gradient.detach().clone()

    @torch.no_grad()
    def _copy(self, parameter: torch.Tensor, copy: _Copy) -> None:
        gradient, before, value = parameter.grad, copy.before, copy.value
        copy.before = None
        if gradient is None:
            return
        if (
            before is not None
            and value is not None
            and before.shape == value.shape
            # Averaged: ``grad`` is neither the value after the previous micro-batch nor zero.
            and not torch.equal(before, value)
            and bool(before.any())
        ):
            copy.value = value + (gradient - before)
        elif value is not None and value.layout == gradient.layout == torch.strided and _fits(value, gradient):
            value.copy_(gradient)
        else:
            copy.value = gradient.detach().clone()
        copy.fresh = True


class Replicas(NamedTuple):
    """Second moments of the gradients g_1, ..., g_n that were added up in one parameter.

    The inputs of unbiased estimates, if the g_i are drawn from one law: with S = sum ||g_i||^2 and T = ||sum g_i||^2,
    ||E g||^2 is (T - S) / (n (n - 1)), and the variance of one g_i, summed over elements, is (S - T / n) / (n - 1).

    Attributes:
        number: n, at least 2.
        norm2: S, a float64 sum.
        sum_norm2: T, a float64 sum.
    """

    number: int
    norm2: float
    sum_norm2: float


@dataclass(slots=True)
class OptimizerStep:
    """One step of one optimizer, when its gradients are final and its weights are still the old ones.

    Attributes:
        optimizer: the optimizer; its parameters' ``grad`` are those of this step.
        stream: its number, in the order of first steps.
        step: number of its earlier steps, including those that a gradient scaler left out.
        loss: sum of the scalars that were backpropagated since the previous step, or since the optimizer's gradients
            were set to zero, without a gradient scaler's factor; NaN without any.
        micro_batches: number of these scalars.
        lr: learning rate of the first parameter group.
        grad_scale: factor that the gradients still carry (1 except for a fused optimizer under a gradient scaler).
        clip_norm: total norm that ``clip_grad_norm_`` measured of the optimizer's gradients in this step; NaN if it
            was not called.
        gradient: returns a parameter's gradient (None without one), and whether it is ``local`` or ``reduced``.
        loss_scale: factor that gradients of anything but the weights carry: a gradient scaler's, or 1.
        replicas: returns the second moments of a parameter's micro-batches, None if they are not known.
        first: no other optimizer has stepped since the last backward pass.
        samples: behind the gradients, by the first axis of what the model was called with; 0 if not counted.
        tokens: of a sample, if samples are sequences of integers.
    """

    optimizer: Optimizer | Rounds
    stream: int
    step: int
    loss: float
    micro_batches: int
    lr: float
    grad_scale: float
    clip_norm: float
    gradient: Callable[[torch.Tensor], tuple[torch.Tensor | None, str]]
    loss_scale: float = 1.0
    replicas: Callable[[torch.Tensor], Replicas | None] = lambda _parameter: None
    first: bool = True
    samples: int = 0
    tokens: int = 1


@dataclass(slots=True)
class _BatchSums:
    """The state of one parameter since its gradient was last zero or its optimizer stepped.

    Attributes:
        looks: location of the norm of each micro-batch's gradient: what reads the norms of a backward pass from their
            devices, and the position in them.
        last: copy of ``grad`` after the last look; reused in the next step, because fresh memory costs time.
        offset: the part of ``grad`` that is not from micro-batches; None without any.
        seen: ``grad`` at the last look, and its version counter then.
        before: ``grad`` before the present micro-batch, if it changed since the last look.
    """

    looks: list[tuple[Callable[[], list[float]], int]] = field(default_factory=list)
    last: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    seen: tuple[TensorWeakRef, int] | None = None
    before: torch.Tensor | None = None


class MicroBatches(_Accumulated):
    """Takes the gradient of each micro-batch as the change of the accumulated gradient.

    All parameters of a backward pass are read together when it ends. With several processes, each is read at
    once: before ``DistributedDataParallel`` averages, so the micro-batches are those of this process, with
    and without ``no_sync``. After a gradient is set to zero or None, sums start again. Sharded parameters are left
    out. One copy of the gradients is kept.
    """

    make = _BatchSums

    def __init__(self, guarded: Callable[..., None]) -> None:
        super().__init__(guarded)
        #: the current backward pass, and whether its gradients cannot wait for its end
        self._task = -1
        self._at_once = False
        self._arrived: list[tuple[torch.Tensor, _BatchSums]] = []
        #: norms of the sums of micro-batches, by the identity of their ``_BatchSums``
        self._totals: dict[int, float] = {}

    def replicas(self, parameter: torch.Tensor, scale: float) -> Replicas | None:
        """Second moments of this step's micro-batches, None with fewer than two of them.

        ``scale``, the factor that a gradient scaler put on the loss, is divided out.
        """
        sums = self._known.get(parameter)
        if sums is None or len(sums.looks) < 2:
            return None
        if id(sums) not in self._totals:
            self._measure_totals()
        norm2 = sum(look()[place] ** 2 for look, place in sums.looks)
        return Replicas(len(sums.looks), norm2 / scale**2, self._totals[id(sums)] ** 2 / scale**2)

    def consume(self, optimizer: Optimizer) -> None:
        """Mark the gradients as used; the next backward pass starts a new step."""
        self._totals.clear()
        for sums in self._of(optimizer):
            sums.looks = []

    def remove(self) -> None:
        """Stop to watch."""
        super().remove()
        self._arrived = []

    def _arrives(self, parameter: torch.Tensor | None, entry: _BatchSums) -> None:
        gradient = None if parameter is None else parameter.grad
        entry.before = None
        if gradient is None:
            entry.seen = None
        elif entry.seen is None or entry.seen[0]() is not gradient or entry.seen[1] != gradient._version:
            self._guarded(self._remember, gradient, entry)

    def _accumulated(self, parameter: torch.Tensor, entry: _BatchSums) -> None:
        self._arrived.append((parameter, entry))
        if self._at_once or backward_in_progress() != self._task:
            self._guarded(self._begin_pass)

    def _remember(self, gradient: torch.Tensor, sums: _BatchSums) -> None:
        """Remember ``grad``, which changed since the last look."""
        sums.seen = None
        before = as_real_dense(gradient.detach())
        if bool(before.any()):
            sums.before = before.clone()

    def _begin_pass(self) -> None:
        """Called at the first accumulated gradient of a backward pass, or at any if they are read one by one."""
        task = backward_in_progress()
        if task != self._task:
            # The previous pass raised before its end; the next look finds its gradients in ``grad``.
            self._task, self._arrived = task, self._arrived[-1:]
            self._at_once = process_place().world_size > 1
            if not self._at_once:
                torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if self._at_once:
            self._look()

    def _end(self) -> None:
        self._task = -1
        self._guarded(self._look)

    @torch.no_grad()
    def _look(self) -> None:
        arrived, self._arrived = self._arrived, []
        present, gradients, added, changed, lasts = [], [], [], [], []
        for parameter, sums in arrived:
            if parameter.grad is None:
                continue
            gradient = as_real_dense(parameter.grad.detach())
            present.append(sums)
            gradients.append(gradient)
            fits = sums.last is not None and _fits(sums.last, gradient)
            last = sums.last if fits and sums.last is not None else torch.empty_like(gradient)
            if sums.seen is None:
                self._begin(sums, fits)
            elif not sums.looks:
                # The optimizer stepped without clearing its gradients.
                sums.offset = last.clone()
            if sums.seen is None and sums.before is None:
                added.append(gradient)
            else:
                # Reuse the copy's memory; the copy is made again below.
                if sums.before is not None:
                    last.copy_(sums.before)
                changed.append((last, gradient))
                added.append(last)
            sums.last, sums.before = last, None
            sums.seen = TensorWeakRef(parameter.grad), parameter.grad._version
            lasts.append(last)
        if not present:
            return
        if changed:
            differences, minuends = map(list, zip(*changed, strict=True))
            torch._foreach_sub_(differences, minuends)
        look = functools.cache(functools.partial(numbers_of, torch._foreach_norm(added, 2, torch.float64)))
        for place, sums in enumerate(present):
            sums.looks.append((look, place))
        torch._foreach_copy_(lasts, gradients)

    @staticmethod
    def _begin(sums: _BatchSums, fits: bool) -> None:
        """Start new sums, because the part of ``grad`` that is not from micro-batches has changed."""
        if sums.before is None:
            sums.looks, sums.offset = [], None
        elif not sums.looks or not fits or sums.last is None:
            sums.looks, sums.offset = [], sums.before
        else:
            more = sums.before - sums.last
            sums.offset = more if sums.offset is None else sums.offset + more

    @torch.no_grad()
    def _measure_totals(self) -> None:
        several = [sums for sums in self._known.values() if len(sums.looks) > 1 and sums.last is not None]
        parts = [sums.last if sums.offset is None else sums.last - sums.offset for sums in several]
        norms = numbers_of(torch._foreach_norm(parts, 2, torch.float64))
        self._totals = {id(sums): norm for sums, norm in zip(several, norms, strict=True)}


def _fits(room: torch.Tensor, values: torch.Tensor) -> bool:
    return room.shape == values.shape and room.dtype == values.dtype and room.device == values.device


def numbers_of(values: Sequence[torch.Tensor]) -> list[float]:
    """The values of tensors with one element. It waits once for each device: separate transfers take longer."""
    out = [0.0] * len(values)
    for device in {value.device for value in values}:
        places = [place for place, value in enumerate(values) if value.device == device]
        for place, number in zip(places, torch.stack([values[p] for p in places]).tolist(), strict=True):
            out[place] = number
    return out
