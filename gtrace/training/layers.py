"""Codec states of the tensors that one worker compresses inside its backward pass.

Sizes may change from batch to batch, so a state may hold nothing of a tensor's size: codecs with memory are refused,
and what a stateless codec has fitted (levels, formats, thresholds) is taken along to the next size.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gtrace.codecs.link import LinkOptions, Receiver, Sender, fit_spec, refitted
from gtrace.coding import ENVELOPE_BYTES
from gtrace.errors import UsageError
from gtrace.sketch import MomentSketch
from gtrace.types import State

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gtrace.codecs import Codec
    from gtrace.schedule import RefitSchedule
    from gtrace.training.exchange import Tally


@dataclass(slots=True)
class _Layer:
    """One tensor's link, and the last scheduled summary of what it encodes, until all tensors of a batch are there.

    A codec that allocates does so from the gradient's own ``sketch``, and is fitted to the ``summary`` of what it
    encodes.
    """

    sender: Sender
    receiver: Receiver
    summary: MomentSketch | None = None
    sketch: MomentSketch | None = None
    share: float | None = None


class LayerCodecs:
    """One worker's tensors, each with a codec state of its own, or one state for all under ``scope=model``.

    A tensor's codec is fitted to the gradient that it is about to encode, at the steps of the schedule. Two kinds of
    codecs need all tensors of a batch at once, which are not there before the batch's last one: those with
    ``scope=model`` are fitted to the merged sketches when the batch is over, and until then values pass in float32 and
    are counted so; those with ``allocates`` get each tensor's share when the batch is over, and fit to their own
    parameter before.

    Args:
        codec: what encodes; without memory.
        worker: number of the worker, part of the keys.
        seed: of all keys.
        refit: when codecs are fitted.

    Raises:
        UsageError: the codec keeps memory between steps.
    """

    def __init__(self, codec: Codec, *, worker: int, seed: int, refit: RefitSchedule) -> None:
        if codec.stateful:
            raise UsageError(
                f"kind neural: {codec} keeps memory of each value between steps, and every batch has other values; "
                "choose a codec without memory"
            )
        self._codec, self._worker, self._options = codec, worker, LinkOptions(refit, seed)
        spec = fit_spec(codec)
        #: the one receiver of all tensors under scope=model, and the state that they share, once it is fitted
        self._common = Receiver(codec, 0) if spec is not None and spec.scope == "model" else None
        self._fitted: State | None = None
        self._tensors: dict[str, _Layer] = {}
        self._fresh = False

    def carry(self, name: str, array: NDArray[np.float32], step: int, tally: Tally) -> NDArray[np.float32]:
        """Fit if the schedule says so, encode float32 of any shape, decode from the bytes alone, and count.

        Returns:
            float32[n]; the values themselves as long as nothing can be encoded.
        """
        values = array.reshape(-1)
        start = time.thread_time()
        tensor = self._tensor(name, array)
        sender, receiver = tensor.sender, tensor.receiver
        before = sender.fit_seconds
        if self._common is not None or self._codec.allocates:
            self._note(tensor, values, step)
        decoded = values
        if self._encodes:
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
        """What :meth:`carry` would return with the codec as it is; nothing is fitted and nothing is counted."""
        sender, values = self._tensor(name, array).sender, array.reshape(-1)
        if not self._encodes:
            return values
        return self._codec.decode(self._codec.shared(sender.state), sender.encode(values, step), values.size)

    def settle(self, step: int, tally: Tally) -> None:
        """The batch is over: fit what needs all of its tensors."""
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

    @property
    def _encodes(self) -> bool:
        return self._common is None or self._fitted is not None

    def _tensor(self, name: str, array: NDArray[np.float32]) -> _Layer:
        """A tensor's link, with a state of the array's size and what was fitted so far."""
        if name not in self._tensors:
            sender = Sender(self._codec, 0, self._options, tensor=name, worker=self._worker)
            self._tensors[name] = _Layer(sender, self._common or Receiver(self._codec, 0))
        tensor = self._tensors[name]
        fitted = self._fitted or tensor.sender.state
        tensor.sender.state = State(array.size, fitted.arrays, array.shape)
        tensor.receiver.size = array.size
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
                tensor.sketch = sender.sketch(values, step) if sender.looks_further else summary
        sender.fit_seconds += time.thread_time() - start
        if self._common is None:
            sender.fit(summary, step, share=tensor.share)
        else:
            sender.skip(step)
