"""A codec in your own training loop: each optimizer step uses the decoded gradients."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gtrace.codecs import Identity
from gtrace.errors import UsageError
from gtrace.schedule import DEFAULT_REFIT
from gtrace.torch_hooks.hooks import never_compiled
from gtrace.torch_hooks.naming import KeptNames, local_part
from gtrace.torch_hooks.steps import grad_scale_of, is_nested, parameters_of
from gtrace.trackers import Tracker, Tracking, of_record
from gtrace.training.checkpoint import as_arrays, as_tensors
from gtrace.training.exchange import BadGradients, Exchange, Exchanged, Nonfinite, Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gtrace.codecs.assignment import TableLike


class Compression:
    """A codec between backward pass and optimizer step; made by :func:`compress`. A context manager that ends it.

    Attributes:
        steps: optimizer steps so far.
        tally: bits and errors, summed over the steps.
    """

    def __init__(self, target: Optimizer | nn.Module, exchange: Exchange, tracking: Tracking) -> None:
        self.steps = 0
        self.tally = Tally()
        self._target = target
        self._exchange = exchange
        self._tracking = tracking
        self._names = KeptNames()
        self._bad = BadGradients()
        if isinstance(target, nn.Module):
            self._handle = register_optimizer_step_pre_hook(self._before_step)
        else:
            self._handle = target.register_step_pre_hook(self._before_step)

    def use_bits(self, bits: int) -> None:
        """Encode the gradients of later steps with other ``bits``; the codec is fitted again, its memory is kept.

        Before :meth:`load_state_dict`, choose the bits of the saved state.

        Raises:
            UsageError: the codec has no bits to choose, or cannot have these.
        """
        self._exchange.use(self._exchange.rules.codec.at_bits(bits))

    def remove(self) -> None:
        """Leave the gradients of later steps alone."""
        self._handle.remove()
        self._tracking.close()

    def state_dict(self) -> dict[str, Any]:
        """Steps and codec states, as numbers, text and tensors for ``torch.save``."""
        return {"steps": self.steps, **as_tensors(self._exchange.to_arrays())}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, with the same codec and settings.

        Raises:
            UsageError: it was saved with another codec.
        """
        self._exchange.load_arrays(as_arrays({name: value for name, value in saved.items() if name != "steps"}))
        self.steps = int(saved["steps"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @never_compiled
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # A subclass may call its base's step, and a wrapper that of the optimizer inside: one step, encoded once.
        if is_nested(sys._getframe(2), None, optimizer if optimizer is self._target else None):
            return None
        return after_closure(args, kwargs, lambda: self._compress(optimizer))

    def _compress(self, optimizer: Optimizer) -> None:
        groups, models = optimizer.param_groups, list[nn.Module]()
        if isinstance(self._target, nn.Module):
            groups, models = [{"params": list(self._target.parameters())}], [self._target]
        # A program may replace layers, and add groups.
        self._names.add(parameters_of(groups), groups, lambda: models, scan=not models)
        parameters = parameters_of(optimizer.param_groups)
        held = {self._names[p]: p for p in parameters if p in self._names and p.grad is not None}
        if not held:
            return
        for name, parameter in held.items():
            if not is_dense(parameter):
                raise UsageError(f"compress: the gradient of {name} is sparse; codecs take dense ones")
        exchanged = exchange_gradients(self._exchange, self.steps, held, grad_scale_of(optimizer))
        for item in self._bad.add(exchanged.bad):
            text = f"gtrace: step {self.steps}, {item.tensor}: {item.count} gradient values are not finite; "
            warnings.warn(text + _HANDLED[self._exchange.nonfinite], RuntimeWarning, 2)
        tally = exchanged.tally
        about = {"type": "step", "run": str(self._exchange.rules), "seed": 0, "step": self.steps}
        self._tracking.log(of_record({**about, **tally.record(), "norm": math.sqrt(tally.energy)}))
        self.steps += 1
        self.tally.add(tally)


_HANDLED = {"skip": "the tensor is not updated", "zero": "sent as zeros", "pass": "they go on as they are"}


def compress(
    optimizer_or_model: Optimizer | nn.Module,
    codec: TableLike,
    *,
    seed: int = 0,
    refit: str = DEFAULT_REFIT,
    nonfinite: Nonfinite = "skip",
    to: str | Tracker | None = None,
) -> Compression:
    """Replace gradients by their encoded and decoded values, before each optimizer step.

    Every gradient is encoded to bytes and decoded from them alone, in float32 on the CPU. Level codecs round and
    restore gradients of a CUDA device there. If a step has a closure (LBFGS, Lightning), gradients are
    replaced after each of its evaluations, which then count as steps.

    Args:
        optimizer_or_model: an optimizer, or a model (then every optimizer's steps on its parameters).
        codec: a codec or its spec, or a table or plan that names one for each tensor.
        seed: seed of the rounding.
        refit: when the codec is fitted to the gradients; steps are those of this compression.
        nonfinite: what to do with a gradient that holds NaN or infinity: ``skip`` does not update the tensor
            in this step, ``zero`` sends zeros in their place, ``pass`` leaves them to the optimizer, ``error`` raises;
            the others warn.
        to: a tracker for error, norm and bits per value of each step: ``tensorboard:runs``, or any object with
            ``log(numbers, step)``. If it fails, training goes on without it, with a warning.

    Returns:
        the compression: its ``tally`` counts, its ``remove()`` ends it.

    Raises:
        UsageError: not an optimizer or a model, or an unknown codec, schedule or policy. Later, in
            ``optimizer.step``: a sparse gradient.
    """
    if not isinstance(optimizer_or_model, (Optimizer, nn.Module)):
        raise UsageError(f"compress: a {type(optimizer_or_model).__name__} is neither an optimizer nor a model")
    tracking = Tracking(to, lambda error: warnings.warn(f"gtrace: {error}", RuntimeWarning, 2))
    return Compression(optimizer_or_model, Exchange(codec, seed=seed, refit=refit, nonfinite=nonfinite), tracking)


def after_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of an optimizer's ``step`` with ``then`` called after each evaluation of its closure.

    A pre-hook gets these arguments, the optimizer first, and returns the result, None if nothing changes. Without a
    closure ``then`` is called at once: gradients are there.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        then()
        return None

    @functools.wraps(closure, updated=())
    def followed() -> object:
        result = closure()
        then()
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": followed}
    return (args[0], followed, *args[2:]), kwargs


def is_dense(parameter: torch.Tensor) -> bool:
    """Whether the parameter has a dense gradient, which a codec can encode."""
    gradient = parameter.grad
    return gradient is not None and gradient.layout == torch.strided


def exchange_gradients(
    exchange: Exchange, step: int, parameters: Mapping[str, torch.Tensor], scale: float
) -> Exchanged:
    """Replace dense gradients by what arrives of them, in place: whoever holds one sees the new values.

    All workers have the same; they are divided by ``scale`` on their way. What no worker could send is None.
    """
    given = {}
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        values = own_values(parameter.grad).to(torch.float32)
        # On CUDA, division by a number of the host would multiply by its reciprocal.
        given[name] = values if scale == 1.0 else values / values.new_full((), scale)
    exchanged = exchange.step(step, [given] * exchange.workers)
    bad = {item.tensor for item in exchanged.bad}
    for name, parameter in parameters.items():
        found = exchanged.gradients.get(name)
        if found is None or parameter.grad is None:
            parameter.grad = None
        elif name in bad or exchange.rules.choose(name, math.prod(found.shape)) != Identity():
            if 0 in parameter.grad.stride():
                # Several of its values may lie in one place.
                parameter.grad = parameter.grad.clone()
            values = torch.as_tensor(found)
            own_values(parameter.grad).copy_(values if scale == 1.0 else values * scale)
    return exchanged


def own_values(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a parameter or gradient, sharing its memory, without its graph.

    A complex one has real and imaginary parts along a last axis.
    """
    part = local_part(tensor.detach())
    return torch.view_as_real(part) if part.is_complex() else part
