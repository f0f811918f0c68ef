"""Hooks into forward passes that call one function with the gradient of the loss for each output of a module.

A tensor hook on the output, not a backward hook on the module: those wrap the output in an autograd
function, after which an in-place ReLU raises an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.modules.loss import _Loss
from torch.nn.modules.module import register_module_forward_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from gtrace.torch_hooks.naming import ModuleName, ModulePaths

_DEEPEST = 8


class Output(NamedTuple):
    """One tensor that one call of a module returned.

    Attributes:
        order: number of the call among all calls of all modules, ascending.
        place: number of the tensor in the call's output.
    """

    name: ModuleName
    order: int
    place: int


class OutputHooks:
    """Watches the outputs of modules while ``listening`` is set.

    It watches modules without children (their outputs include those of everything above them) and modules
    that own parameters themselves. Losses (``torch.nn``'s) are left out.

    Args:
        keeps: whether to watch a module of this name.
        on_gradient: called in the backward pass with each gradient of a watched output; it must copy what it
            wants to keep. It is called again for the same output if the graph is used again.
        paused: whether to ignore the current forward pass.
        on_error: called with an exception of the hooks or of ``on_gradient``; training continues.
    """

    def __init__(
        self,
        paths: ModulePaths,
        keeps: Callable[[ModuleName], bool],
        on_gradient: Callable[[Output, torch.Tensor], None],
        paused: Callable[[], bool],
        on_error: Callable[[Exception], None],
    ) -> None:
        self.listening = False
        #: seconds that forward passes waited here
        self.seconds = 0.0
        #: paths of watched modules -> whether a gradient of theirs has arrived
        self.watched: dict[str, bool] = {}
        #: Paths of modules whose outputs need no gradient.
        self.idle: dict[str, None] = {}
        #: paths of modules that torch.compile has replaced
        self.compiled: dict[str, None] = {}
        self._paths = paths
        self._keeps = keeps
        self._on_gradient = on_gradient
        self._paused = paused
        self._on_error = on_error
        self._calls = 0
        self._owner = os.getpid()
        self._handle: RemovableHandle | None = None
        # Hooks on leaves of the graph outlive it.
        self._lasting: list[RemovableHandle] = []

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
        started = time.perf_counter()
        try:
            if os.getpid() == self._owner and not torch.jit.is_tracing() and not self._paused():  # type: ignore[attr-defined,no-untyped-call]
                self._watch(module, output)
        except Exception as error:  # noqa: BLE001 - an error of capture must not stop training
            self._on_error(error)
        finally:
            self.seconds += time.perf_counter() - started

    def _watch(self, module: nn.Module, output: object) -> None:
        compiled = is_compiled(module)
        if not compiled and not _is_watched(module):
            return
        name = self._paths.of(module)
        if name is None or not self._keeps(name):
            return
        if compiled:
            self.compiled[name.path] = None
            return
        tensors = [(place, tensor) for place, tensor in enumerate(output_tensors(output)) if _has_gradient(tensor)]
        if not tensors:
            self.idle[name.path] = None
            return
        self.watched.setdefault(name.path, False)
        self._calls += 1
        for place, tensor in tensors:
            about = Output(name, self._calls, place)
            handle = tensor.register_hook(functools.partial(self._arrived, about))  # type: ignore[no-untyped-call]
            if tensor.is_leaf:
                self._lasting.append(handle)

    def _arrived(self, output: Output, gradient: torch.Tensor | None) -> None:
        # Autograd also reports missing gradients.
        if gradient is None or not self.listening:
            return
        try:
            if os.getpid() == self._owner:
                self.watched[output.name.path] = True
                self._on_gradient(output, gradient.detach())
        except Exception as error:  # noqa: BLE001 - an error of capture must not stop training
            self._on_error(error)


def is_compiled(module: nn.Module) -> bool:
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


def output_tensors(output: object, depth: int = _DEEPEST) -> Iterator[torch.Tensor]:
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
