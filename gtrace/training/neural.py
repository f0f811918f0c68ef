"""A codec inside the backward pass: the gradient that enters a layer's backward is replaced by its decoded self.

Which gradients: those with respect to the outputs of every module that has parameters of its own (convolutions, linear
and recurrent layers, normalizations, embeddings). These are what the two matrix products of a layer's backward read,
one for the weights and one for the layer below. Outputs of modules without parameters (activations, pooling, dropout)
are left alone: their gradient reaches the layer below and is compressed there, once. The last layer is left out unless
it is asked for: what arrives there comes from the loss itself, in few values of many more magnitudes (a softmax that is
nearly sure of most samples) than those of the layers inside. Low-precision recipes keep it exact, as Chmiel et al.
(2021) do, who compress the gradients of convolutions.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
import torch

from gtrace.buckets import as_values
from gtrace.errors import UsageError, suggest
from gtrace.torch_hooks.outputs import output_tensors
from gtrace.training.exchange import Bad, Nonfinite, NonfiniteGradientError, Tally
from gtrace.training.layers import LayerCodecs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import nn
    from torch.autograd.graph import Node

    from gtrace.codecs import Codec
    from gtrace.schedule import RefitSchedule

#: whose output gradients are compressed: those of all layers but the last, or of all
Layers: TypeAlias = Literal["inner", "all"]
LAYERS: tuple[Layers, ...] = get_args(Layers)


class NeuralGradients:
    """A codec on the neural gradients of a model that simulated workers share.

    A layer is called by the path of its module, the model itself by its class. The k-th further call of a module within
    a batch is ``path#k``, the j-th further tensor of a structured output ``path.out<j>``; each has a codec state of its
    own, for each worker. Outputs that need no gradient are skipped, and of modules that hand on the same tensor the
    innermost counts.

    Args:
        model: whose backward passes are meant.
        codec: what the gradients go through; without memory.
        workers: how many share the model.
        seed: of the rounding.
        refit: when codecs are fitted.
        nonfinite: what to do with a gradient that holds NaN or infinity: ``skip`` lets it pass as it is, so that the
            weight gradients that result are left out; ``zero`` puts zeros in their place; ``error`` raises.
        layers: ``inner`` leaves the gradients alone that come from the loss without passing another layer, ``all``
            compresses them too. The loss must be of what ``model`` returns.

    Attributes:
        owners: parameter name -> the modules that own it; a tied weight has several.

    Raises:
        UsageError: the codec keeps memory between steps, or an unknown choice of layers.
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
        layers: Layers = "inner",
    ) -> None:
        if layers not in LAYERS:
            raise UsageError(f"layers: '{layers}' is unknown; {suggest(str(layers), LAYERS)}")
        self._layers = [LayerCodecs(codec, worker=worker, seed=seed, refit=refit) for worker in range(workers)]
        self._nonfinite = nonfinite
        self._batch: Batch | None = None
        self._tally, self._bad = Tally(), list[Bad]()
        holders: dict[int, set[str]] = {}
        for path, module in model.named_modules():
            own = list(module.parameters(recurse=False))
            name = path or type(model).__name__
            for parameter in own:
                holders.setdefault(id(parameter), set()).add(name)
            if own:
                module.register_forward_hook(functools.partial(self._forwarded, name))
        if layers == "inner":
            model.register_forward_hook(self._returned)
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

    def _returned(self, _module: nn.Module, _inputs: object, output: object) -> None:
        if self._batch is not None:
            self._batch.spare_last(output)


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
        self._spared: set[str] = set()
        self._nodes: dict[Node, list[str]] = {}
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
        for place, tensor in enumerate(output_tensors(output)):
            # A leaf is no output of a computation, and a hook on one would outlive the batch.
            if tensor.grad_fn is None or self._known(tensor):
                continue
            name = path + (f"#{call}" if call else "") + (f".out{place}" if place else "")
            self._nodes.setdefault(tensor.grad_fn, []).append(name)
            # Registered now, the hook belongs to the value as it is: a later in-place ReLU does not move it.
            tensor.register_hook(functools.partial(self._arrived, name, path))  # type: ignore[no-untyped-call]

    def spare_last(self, output: object) -> None:
        """Leave the gradients alone that reach a layer from the model's output without passing another one."""
        ahead: list[Node | None] = [tensor.grad_fn for tensor in output_tensors(output)]
        passed: set[Node] = set()
        while ahead:
            node = ahead.pop()
            if node is None or node in passed:
                continue
            passed.add(node)
            if node in self._nodes:
                self._spared.update(self._nodes[node])
            else:
                ahead.extend(following for following, _ in node.next_functions)
        # The graph must not outlive its batch for the sake of these names.
        self._nodes.clear()

    def _known(self, tensor: torch.Tensor) -> bool:
        """Whether an inner module's output is handed on unchanged by one around it."""
        key = id(tensor), tensor._version
        seen = self._seen.get(key)
        self._seen[key] = weakref.ref(tensor)
        return seen is not None and seen() is tensor

    def _arrived(self, name: str, path: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient that a layer's backward reads instead; None for the one that came."""
        # Of an operation with several outputs, autograd tells of those without a gradient, too.
        if gradient is None:
            return None
        if name in self._spared or (self._only is not None and path not in self._only):
            return None
        if gradient.layout != torch.strided:
            raise UsageError(f"kind neural: the gradient of {name} is sparse; codecs take dense ones")
        values = as_values(gradient.detach().to("cpu", torch.float32).numpy()).reshape(gradient.shape)
        decoded = self._preview(name, values) if self._only is not None else self._carry(name, values)
        if decoded is None or np.array_equal(decoded, values.reshape(-1)):
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
                tally.zeros += values.size - int(np.count_nonzero(values))
                return None
            values = np.where(finite, values, np.float32(0))
        decoded = self._layers.carry(name, values, self.step, tally)
        wide = values.reshape(-1).astype(np.float64)
        energy = float(wide @ wide)
        wide -= decoded
        error = float(wide @ wide)
        tally.energy += energy
        tally.worker_energy += energy
        tally.squared_error += error
        tally.worker_squared_error += error
        tally.zeros += values.size - int(np.count_nonzero(decoded))
        return decoded
