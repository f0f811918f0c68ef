"""A codec inside the backward pass: the gradient that enters a layer's backward is replaced by its decoded self.

Which gradients: those with respect to the outputs of every module that has parameters of its own (convolutions, linear
and recurrent layers, normalizations, embeddings), the last one included. These are what the two matrix products of a
layer's backward read, one for the weights and one for the layer below. Outputs of modules without parameters
(activations, pooling, dropout) are left alone: their gradient reaches the layer below and is compressed there, once.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gtrace.errors import UsageError
from gtrace.online.exchange import Bad, Nonfinite, NonfiniteGradientError, Tally
from gtrace.online.layers import LayerCodecs
from gtrace.sketch import as_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import nn

    from gtrace.codecs import Codec
    from gtrace.online.schedule import RefitSchedule

#: what the outputs of a model with parameters of its own are called
_ROOT = "(model)"


class NeuralGradients:
    """A codec on the neural gradients of a model that simulated workers share.

    The k-th further call of a module within a batch is ``path#k``, the j-th further tensor of a structured output
    ``path.out<j>``; each has a codec state of its own, for each worker. Outputs that need no gradient are skipped, and
    of modules that hand on the same tensor the innermost counts.

    Args:
        model: whose backward passes are meant.
        codec: what the gradients go through; without memory.
        workers: how many share the model.
        seed: of the rounding.
        refit: when codecs are fitted.
        nonfinite: what to do with a gradient that holds NaN or infinity: ``skip`` lets it pass as it is, so that the
            weight gradients that result are left out; ``zero`` puts zeros in their place; ``error`` raises.

    Attributes:
        owners: parameter name -> the modules that own it; a tied weight has several.

    Raises:
        UsageError: the codec keeps memory between steps.
    """

    def __init__(
        self,
        model: nn.Module,
        codec: Codec,
        *,
        workers: int,
        seed: int,
        refit: RefitSchedule,
        nonfinite: Nonfinite,
    ) -> None:
        self._layers = [LayerCodecs(codec, worker=worker, seed=seed, refit=refit) for worker in range(workers)]
        self._nonfinite = nonfinite
        self._batch: Batch | None = None
        self._tally, self._bad = Tally(), list[Bad]()
        holders: dict[int, set[str]] = {}
        for path, module in model.named_modules():
            own = list(module.parameters(recurse=False))
            for parameter in own:
                holders.setdefault(id(parameter), set()).add(path or _ROOT)
            if own:
                module.register_forward_hook(functools.partial(self._forwarded, path or _ROOT))
        self.owners = {name: frozenset(holders[id(p)]) for name, p in model.named_parameters()}

    @contextlib.contextmanager
    def batch(self, step: int, worker: int = 0) -> Iterator[Batch]:
        """Compress the backward pass of one worker's batch; forward and backward belong inside."""
        self._batch = batch = Batch(self._layers[worker], step, worker, self._nonfinite, self._tally, self._bad)
        try:
            yield batch
        finally:
            self._batch = None
        self._layers[worker].settle(step, self._tally)

    def collect(self) -> tuple[Tally, tuple[Bad, ...]]:
        """What the batches since the last call cost, and where they held NaN or infinity."""
        found = self._tally, tuple(self._bad)
        self._tally, self._bad = Tally(), []
        return found

    def _forwarded(self, path: str, _module: nn.Module, _inputs: object, output: object) -> None:
        if self._batch is not None and torch.is_grad_enabled():
            self._batch.watch(path, output)


class Batch:
    """One worker's batch; made by :meth:`NeuralGradients.batch`.

    Attributes:
        step: of the training.
        previewed: gradients that were compressed for a shadow so far.
    """

    def __init__(
        self, layers: LayerCodecs, step: int, worker: int, nonfinite: Nonfinite, tally: Tally, bad: list[Bad]
    ) -> None:
        self.step = step
        self.previewed = 0
        self._layers, self._worker, self._nonfinite = layers, worker, nonfinite
        self._tally, self._bad = tally, bad
        self._calls: dict[str, int] = {}
        self._seen: dict[tuple[int, int], weakref.ref[torch.Tensor]] = {}
        self._only: frozenset[str] | None = None

    @contextlib.contextmanager
    def only(self, paths: frozenset[str]) -> Iterator[None]:
        """Backward passes in here compress these modules alone, and leave no trace in codecs and counts."""
        self._only = paths
        try:
            yield
        finally:
            self._only = None

    def watch(self, path: str, output: object) -> None:
        """Replace the gradients of a module's outputs once they arrive."""
        call = self._calls[path] = self._calls.get(path, -1) + 1
        for place, tensor in enumerate(_tensors(output)):
            # A leaf is no output of a computation, and a hook on one would outlive the batch.
            if tensor.grad_fn is None or self._known(tensor):
                continue
            name = path + (f"#{call}" if call else "") + (f".out{place}" if place else "")
            # Registered now, the hook belongs to the value as it is: a later in-place ReLU does not move it.
            tensor.register_hook(functools.partial(self._arrived, name, path))  # type: ignore[no-untyped-call]

    def _known(self, tensor: torch.Tensor) -> bool:
        """Whether an inner module's output is handed on unchanged by one around it."""
        key = id(tensor), tensor._version
        seen = self._seen.get(key)
        self._seen[key] = weakref.ref(tensor)
        return seen is not None and seen() is tensor

    def _arrived(self, name: str, path: str, gradient: torch.Tensor) -> torch.Tensor | None:
        """The gradient that a layer's backward reads instead; None for the one that came."""
        if self._only is not None and path not in self._only:
            return None
        if gradient.layout != torch.strided:
            raise UsageError(f"kind neural: the gradient of {name} is sparse; codecs take dense ones")
        values = as_values(gradient.detach().to("cpu", torch.float32).numpy())
        decoded = self._preview(name, values) if self._only is not None else self._carry(name, values)
        if decoded is None or np.array_equal(decoded, values):
            return None
        # With the strides of the gradient that came: other strides would take other paths through the matrix products.
        return torch.empty_like(gradient).copy_(torch.from_numpy(decoded).reshape(gradient.shape))

    def _preview(self, name: str, values: NDArray[np.float32]) -> NDArray[np.float32] | None:
        self.previewed += 1
        if not np.isfinite(values).all():
            return None
        return self._layers.preview(name, values, self.step)

    def _carry(self, name: str, values: NDArray[np.float32]) -> NDArray[np.float32] | None:
        finite = np.isfinite(values)
        count = values.size - int(np.count_nonzero(finite))
        tally = self._tally
        if count:
            if self._nonfinite == "error":
                raise NonfiniteGradientError(
                    f"step {self.step}, worker {self._worker}, {name}: {count} of {values.size} neural gradient values "
                    "are not finite; lower the learning rate, or choose nonfinite=skip or zero"
                )
            self._bad.append(Bad(name, self._worker, count))
            tally.nonfinite += count
            if self._nonfinite == "skip":
                tally.payload_bits += 32 * values.size
                tally.float32_bits += 32 * values.size
                return None
            values = np.where(finite, values, np.float32(0))
        decoded = self._layers.carry(name, values, self.step, tally)
        wide = values.astype(np.float64)
        energy = float(wide @ wide)
        wide -= decoded
        error = float(wide @ wide)
        tally.energy += energy
        tally.worker_energy += energy
        tally.squared_error += error
        tally.worker_squared_error += error
        return decoded


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of a module's output, through tuples, lists and mappings, in order."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _tensors(item)
    elif isinstance(output, dict):
        for item in output.values():
            yield from _tensors(item)
