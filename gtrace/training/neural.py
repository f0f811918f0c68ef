"""A codec inside the backward pass: it replaces the gradient that enters a layer's backward by the decoded one.

Compressed are the gradients with respect to the outputs of every module with its own parameters (convolutions, linear
and recurrent layers, normalizations, embeddings). A layer's backward uses them in two matrix products,
one for the weights and one for the layer below. Outputs of modules without parameters (activations, pooling, dropout)
are left alone: their gradient reaches the layer below and is compressed there, once. The last layer is left out by
default: its gradient comes from the loss itself, in few values that span many more magnitudes (a softmax that is
nearly sure of most samples) than those of inner layers. Low-precision recipes keep it exact, and so do Chmiel et al.
(2021), who compress the gradients of convolutions.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import weakref
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from gtrace.buckets import as_values
from gtrace.codecs.link import LinkOptions, Receiver, Sender, fit_spec, on_host, refitted
from gtrace.coding import ENVELOPE_BYTES
from gtrace.errors import UsageError, suggest
from gtrace.metrics import ratio
from gtrace.sketch import MomentSketch
from gtrace.torch_hooks.steps import nodes_below, output_tensors
from gtrace.training import vectors
from gtrace.training.exchange import Bad, Tally, without_nonfinite
from gtrace.training.settings import LAYERS, StudySettings
from gtrace.types import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import nn
    from torch.autograd.graph import Node

    from gtrace.codecs import Codec


@dataclass(slots=True)
class _Layer:
    """One tensor's link, and the last scheduled summary of its input, until all tensors of a batch are there.

    A codec that allocates uses the gradient's own ``sketch``, and is fitted to the ``summary`` of its
    input.
    """

    sender: Sender
    receiver: Receiver
    summary: MomentSketch | None = None
    sketch: MomentSketch | None = None
    share: float | None = None


class LayerCodecs:
    """One worker's tensors, each with its own codec state, or one state for all under ``scope=model``.

    A tensor's codec is fitted to the gradient that it is about to encode, at the steps of the schedule. Two kinds of
    codecs need all tensors of a batch at once, which are not there before the batch's last one: those with
    ``scope=model`` are fitted to the merged sketches when the batch is over, and until then values pass in float32 and
    are counted so; those with ``allocates`` get each tensor's share when the batch is over, and fit to their own
    parameter before.
    """

    def __init__(self, codec: Codec, options: LinkOptions, worker: int) -> None:
        if codec.stateful:
            raise UsageError(
                f"kind neural: {codec} keeps memory of each value between steps, and every batch has other values; "
                "choose a codec without memory"
            )
        self._codec, self._worker, self._options = codec, worker, options
        spec = fit_spec(codec)
        #: the one receiver of all tensors under scope=model, and their common state, once it is fitted
        self._common = Receiver(codec, 0) if spec is not None and spec.scope == "model" else None
        self._fitted: State | None = None
        self._tensors: dict[str, _Layer] = {}
        self._fresh = False

    def carry(self, name: str, array: NDArray[np.float32], step: int, tally: Tally) -> NDArray[np.float32]:
        """Fit if the schedule says so, encode float32 of any shape, decode from the bytes alone, and count.

        Returns float32[n], the values themselves while nothing can be encoded.
        """
        values = array.reshape(-1)
        start = time.thread_time()
        tensor = self._tensor(name, array)
        sender, receiver = tensor.sender, tensor.receiver
        before = sender.fit_seconds
        if self._common is not None or self._codec.allocates:
            self._note(tensor, values, step)
        decoded = values
        if self._common is None or self._fitted is not None:
            # Tensors of one receiver send it the shared bytes once.
            sender.known = receiver.shared
            message = sender.send(values, step)
            decoded = receiver.receive(message)
            tally.payload_bits += message.payload_bits
            tally.shared_bits += message.shared_bits
            tally.envelope_bits += 8 * ENVELOPE_BYTES
        else:
            tally.payload_bits += 32 * values.size
        tally.float32_bits += 32 * values.size
        tally.fit_seconds += sender.fit_seconds - before
        tally.codec_seconds += time.thread_time() - start
        return decoded

    def preview(self, name: str, array: NDArray[np.float32], step: int) -> NDArray[np.float32]:
        """The result of :meth:`carry` with the current codec state; nothing is fitted or counted."""
        sender, values = self._tensor(name, array).sender, array.reshape(-1)
        if self._common is not None and self._fitted is None:
            return values
        payload = self._codec.encode(sender.state, values, sender.key(step))
        return self._codec.decode(self._codec.shared(sender.state), payload, values.size)

    def settle(self, step: int, tally: Tally) -> None:
        """End the batch: fit codecs that need all of its tensors."""
        fresh, self._fresh = self._fresh, False
        if not fresh:
            return
        start = time.thread_time()
        tensors = [tensor for tensor in self._tensors.values() if tensor.summary is not None]
        sketches = [tensor.summary for tensor in tensors if tensor.summary is not None]
        if self._common is not None:
            merged = functools.reduce(MomentSketch.merge, sketches)
            size = round(merged.size)
            before = self._fitted or self._codec.init(size)
            self._fitted = refitted(self._codec, State(size, before.arrays), merged, step)
        else:
            shares = self._codec.allocate([tensor.sketch for tensor in tensors if tensor.sketch is not None])
            for tensor, sketch, share in zip(tensors, sketches, shares, strict=True):
                tensor.share = share
                tensor.sender.state = refitted(self._codec, tensor.sender.state, sketch, step, share)
        spent = time.thread_time() - start
        tally.codec_seconds += spent
        tally.fit_seconds += spent

    def _tensor(self, name: str, array: NDArray[np.float32]) -> _Layer:
        """A tensor's link, with a state of the array's size and the latest fit."""
        if name not in self._tensors:
            sender = Sender(self._codec, 0, self._options, tensor=name, worker=self._worker)
            self._tensors[name] = _Layer(sender, self._common or Receiver(self._codec, 0))
        tensor = self._tensors[name]
        fitted = self._fitted or tensor.sender.state
        tensor.sender.state = State(array.size, fitted.arrays, array.shape)
        tensor.receiver.held = State(array.size)
        return tensor

    def _note(self, tensor: _Layer, values: NDArray[np.float32], step: int) -> None:
        """Keep the summary of a scheduled fit for the end of the batch."""
        sender = tensor.sender
        sender.watch(values, step)
        if not sender.due(step):
            return
        start = time.thread_time()
        scheduled, summary = sender.scheduled(step), sender.summary(values, step)
        if scheduled:
            tensor.summary, self._fresh = summary, True
            if self._codec.allocates:
                tensor.sketch = sender.sketch(values) if sender.looks_further else summary
        sender.fit_seconds += time.thread_time() - start
        if self._common is None:
            sender.fit(summary, step, share=tensor.share)
        else:
            sender.skip(step)


class NeuralCompression:
    """A codec on the neural gradients of a model that simulated workers share.

    A layer is called by the path of its module, the model itself by its class. The k-th further call of a module within
    a batch is ``path#k``, the j-th further tensor of a structured output ``path.out<j>``; each has a codec state of its
    own, for each worker. Outputs that need no gradient are skipped, and of modules that hand on the same tensor the
    innermost counts.

    If a gradient holds NaN or infinity, ``skip`` leaves it unchanged, so that the resulting weight gradients are left
    out. Layers ``inner`` leave out gradients that come from the loss without passing another layer; the loss must
    depend on the output of the model.

    Attributes:
        owners: parameter name -> the modules that own it; a tied weight has several.
    """

    def __init__(self, model: nn.Module, codec: Codec, settings: StudySettings) -> None:
        layers = settings.layers
        if layers not in LAYERS:
            raise UsageError(f"layers: '{layers}' is unknown; {suggest(str(layers), LAYERS)}")
        options = LinkOptions(settings.refit, settings.seed)
        self.workers = [LayerCodecs(codec, options, worker) for worker in range(settings.workers)]
        self.nonfinite = settings.nonfinite
        self._batch: Batch | None = None
        #: of the batches since they were last collected
        self.tally, self.bad = Tally(), list[Bad]()
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
        """Compress the backward pass of one worker's batch; run forward and backward inside."""
        self._batch = batch = Batch(self, step, worker)
        try:
            yield batch
        finally:
            self._batch = None
        self.workers[worker].settle(step, self.tally)

    def collect(self) -> tuple[Tally, tuple[Bad, ...]]:
        """Costs of the batches since the last call, and their tensors with NaN or infinity."""
        found = self.tally, tuple(self.bad)
        self.tally, self.bad = Tally(), []
        return found

    def _forwarded(self, path: str, _module: nn.Module, _inputs: object, output: object) -> None:
        if self._batch is not None and torch.is_grad_enabled():
            self._batch.watch(path, output)

    def _returned(self, _module: nn.Module, _inputs: object, output: object) -> None:
        if self._batch is not None:
            self._batch.spare_last(output)


class Batch:
    """One worker's batch; made by :meth:`NeuralCompression.batch`."""

    def __init__(self, compression: NeuralCompression, step: int, worker: int) -> None:
        self.step = step
        #: number of gradients compressed for a shadow so far
        self.previewed = 0
        self._compression, self._worker = compression, worker
        self._layers = compression.workers[worker]
        self._calls: dict[str, int] = {}
        self._spared: set[str] = set()
        self._nodes: dict[Node, list[str]] = {}
        self._seen: dict[tuple[int, int], weakref.ref[torch.Tensor]] = {}
        self._only: frozenset[str] | None = None

    @contextlib.contextmanager
    def only(self, paths: frozenset[str]) -> Iterator[None]:
        """Backward passes inside compress these modules alone, and do not change codecs and counts."""
        self._only = paths
        try:
            yield
        finally:
            self._only = None

    def watch(self, path: str, output: object) -> None:
        """Replace the gradients of a module's outputs when they arrive."""
        call = self._calls[path] = self._calls.get(path, -1) + 1
        for place, tensor in enumerate(output_tensors(output)):
            # A leaf is not the output of a computation, and a hook on one would outlive the batch.
            if tensor.grad_fn is None or self._known(tensor):
                continue
            name = path + (f"#{call}" if call else "") + (f".out{place}" if place else "")
            self._nodes.setdefault(tensor.grad_fn, []).append(name)
            # Registered now, the hook belongs to this value: a later in-place ReLU does not move it.
            tensor.register_hook(functools.partial(self._arrived, name, path))  # type: ignore[no-untyped-call]

    def spare_last(self, output: object) -> None:
        """Leave out the gradients that reach a layer from the model's output without passing another layer."""
        for node in nodes_below(output_tensors(output), self._nodes):
            self._spared.update(self._nodes.get(node, ()))
        # The graph must not outlive its batch for the sake of these names.
        self._nodes.clear()

    def _known(self, tensor: torch.Tensor) -> bool:
        """Whether an outer module returns an inner module's output unchanged."""
        key = id(tensor), tensor._version
        seen = self._seen.get(key)
        self._seen[key] = weakref.ref(tensor)
        return seen is not None and seen() is tensor

    def _arrived(self, name: str, path: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient for a layer's backward to read instead; None to keep it."""
        # For an operation with several outputs, autograd also reports those without a gradient.
        if gradient is None:
            return None
        if name in self._spared or (self._only is not None and path not in self._only):
            return None
        if gradient.layout != torch.strided:
            raise UsageError(f"kind neural: the gradient of {name} is sparse; codecs take dense ones")
        values = as_values(gradient.detach().to("cpu", torch.float32).numpy()).reshape(gradient.shape)
        if self._only is None:
            decoded = self._carry(name, values)
        else:
            self.previewed += 1
            decoded = self._layers.preview(name, values, self.step) if np.isfinite(values).all() else None
        if decoded is None or np.array_equal(decoded, values.reshape(-1)):
            return None
        # Keep the gradient's strides: others would take other paths through the matrix products.
        return torch.empty_like(gradient).copy_(torch.from_numpy(decoded).reshape(gradient.shape))

    def _carry(self, name: str, values: NDArray[np.float32]) -> NDArray[np.float32] | None:
        tally, sent = self._compression.tally, values.reshape(-1)
        if count := vectors.count_nonfinite(sent):
            where = f"step {self.step}, worker {self._worker}, neural gradient of {name}"
            kept = without_nonfinite(sent, count, self._compression.nonfinite, where)
            self._compression.bad.append(Bad(name, self._worker, count))
            tally.nonfinite += count
            if kept is None:
                tally.payload_bits += 32 * sent.size
                tally.float32_bits += 32 * sent.size
                tally.zeros += vectors.count_zeros(sent)
                return None
            sent = on_host(kept)
        decoded = self._layers.carry(name, sent.reshape(values.shape), self.step, tally)
        energy, error = vectors.error_of(sent, decoded)
        tally.energy += energy
        tally.worker_energy += energy
        tally.squared_error += error
        tally.worker_squared_error += error
        tally.zeros += vectors.count_zeros(decoded)
        return decoded


@dataclass(frozen=True, slots=True)
class ShadowError:
    """The difference between one weight gradient and the exact one of the same batch, as :func:`compare` has it.

    Attributes:
        cosine_alone: if only the gradients of this layer's own outputs are compressed; NaN if there are none.
        error_alone: the same.
        cosine: if all layers are compressed, as in the training step.
        error: the same.
    """

    tensor: str
    cosine_alone: float
    error_alone: float
    cosine: float
    error: float


@dataclass(slots=True)
class ShadowSummary:
    """Means over the shadow passes of a run: how many there were, and the CPU seconds that they took."""

    steps: int = 0
    seconds: float = 0.0
    _found: dict[str, list[ShadowError]] = field(default_factory=dict)

    def add(self, errors: Iterable[ShadowError], seconds: float) -> None:
        """Add one shadow pass."""
        self.steps += 1
        self.seconds += seconds
        for item in errors:
            self._found.setdefault(item.tensor, []).append(item)

    @property
    def tensors(self) -> list[ShadowError]:
        """Per weight gradient the means over the passes, in the order of the model."""
        return [
            ShadowError(name, *map(finite_mean, zip(*(astuple(item)[1:] for item in items), strict=True)))
            for name, items in self._found.items()
        ]

    @property
    def cosine(self) -> float:
        """Mean cosine over the weight gradients, all layers compressed; NaN before the first pass."""
        return finite_mean([item.cosine for item in self.tensors])

    @property
    def worst(self) -> ShadowError | None:
        """The weight gradient with the lowest mean cosine, all layers compressed."""
        known = [item for item in self.tensors if math.isfinite(item.cosine)]
        return min(known, key=lambda item: item.cosine, default=None)


def shadow(
    batch: Batch,
    loss: torch.Tensor,
    parameters: Mapping[str, torch.nn.Parameter],
    owners: Mapping[str, frozenset[str]],
) -> list[ShadowError]:
    """Compare the weight gradients of a compressed backward pass with exact ones.

    The forward pass is not repeated, so random numbers and running statistics stay as they are. There is one further
    backward pass without compression and one per layer; none of them writes to ``grad``, fits a codec or is counted.
    The graph of the ``loss`` was retained; ``owners`` are the modules of each parameter.
    """
    held = {name: p for name, p in parameters.items() if p.grad is not None}
    with batch.only(frozenset()):
        exact = _gradients(loss, held)
    layers: dict[frozenset[str], dict[str, torch.nn.Parameter]] = {}
    for name, parameter in held.items():
        layers.setdefault(owners[name], {})[name] = parameter
    alone: dict[str, NDArray[np.float64]] = {}
    for paths, own in layers.items():
        before = batch.previewed
        with batch.only(paths):
            found = _gradients(loss, own)
        if batch.previewed > before:
            alone.update(found)
    errors = []
    for name, parameter in held.items():
        assert parameter.grad is not None
        by_itself = compare(exact[name], alone[name]) if name in alone else (math.nan, math.nan)
        errors.append(ShadowError(name, *by_itself, *compare(exact[name], _wide(parameter.grad))))
    return errors


def compare(exact: NDArray[np.float64], other: NDArray[np.float64]) -> tuple[float, float]:
    """Cosine of the angle between two float64[n], and ||other - exact|| / ||exact||.

    Both are NaN if the exact gradient is zero. If only the other one is zero, the cosine is 0.
    """
    length, reached = float(np.linalg.norm(exact)), float(np.linalg.norm(other))
    cosine = ratio(float(exact @ other), length * reached) if reached or not length else 0.0
    return cosine, ratio(float(np.linalg.norm(other - exact)), length)


def _gradients(loss: torch.Tensor, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, NDArray[np.float64]]:
    found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
    return {name: _wide(gradient) for name, gradient in zip(parameters, found, strict=True)}


def _wide(gradient: torch.Tensor) -> NDArray[np.float64]:
    return gradient.detach().to("cpu", torch.float64).reshape(-1).numpy()


def finite_mean(values: Sequence[float]) -> float:
    """The mean of the finite values; NaN without any."""
    known = [value for value in values if math.isfinite(value)]
    return float(np.mean(known)) if known else math.nan
