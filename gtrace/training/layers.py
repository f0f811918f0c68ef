"""Codec states of the tensors that one worker compresses inside its backward pass.

Sizes may change from batch to batch, so a state may hold nothing of a tensor's size: codecs with memory are refused,
and what a stateless codec has fitted (levels, formats, thresholds) is taken along to the next size.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gtrace.codecs.base import Codec
from gtrace.coding import ENVELOPE_BYTES
from gtrace.errors import UsageError
from gtrace.fitting.pooling import Pool, poolable
from gtrace.sketch import MomentSketch
from gtrace.training.links import refitted
from gtrace.types import Key, State

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gtrace.training.exchange import Tally
    from gtrace.training.schedule import RefitSchedule


@dataclass(slots=True)
class _Ends:
    """Both ends of a connection: the sender's state (None: not fitted yet), and the shared bytes that were sent."""

    state: State | None
    known: bytes = b""


@dataclass(slots=True)
class _Tensor:
    """One tensor: its connection, the scheduled step of its last summary, that summary, its share, and what is pooled.

    A codec that allocates does so from the gradient's own ``sketch``, and is fitted to the ``summary`` of what it
    encodes.
    """

    ends: _Ends
    due: int = -1
    summary: MomentSketch | None = None
    sketch: MomentSketch | None = None
    share: float | None = None
    pool: Pool = field(default_factory=Pool)


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
        self._codec, self._worker, self._seed, self._refit = codec, worker, seed, refit
        # A sketch that nobody reads would be charged to the codec as its own time.
        self._spec = codec.needs if type(codec).fit is not Codec.fit else None
        self._pools = refit.pooled and poolable(self._spec)
        self._common = _Ends(None) if self._spec is not None and self._spec.scope == "model" else None
        self._tensors: dict[str, _Tensor] = {}
        self._fresh = False

    def carry(self, name: str, array: NDArray[np.float32], step: int, tally: Tally) -> NDArray[np.float32]:
        """Fit where the schedule says so, encode float32 of any shape, decode from the bytes alone, and count.

        Returns:
            float32[n]; the values themselves where nothing can be encoded yet.
        """
        values = array.reshape(-1)
        start = time.thread_time()
        tensor = self._tensor(name)
        self._sketch(tensor, array, step, tally)
        ends = tensor.ends
        decoded = values
        if ends.state is None:
            tally.payload_bits += 32 * values.size
        else:
            state = State(values.size, ends.state.arrays, array.shape)
            payload, shared, decoded = self._through(state, name, values, step)
            tally.payload_bits += 8 * (len(payload) - ENVELOPE_BYTES)
            tally.envelope_bits += 8 * ENVELOPE_BYTES
            tally.shared_bits += 8 * len(shared) if shared != ends.known else 0
            ends.known = shared
        tally.float32_bits += 32 * values.size
        tally.codec_seconds += time.thread_time() - start
        return decoded

    def preview(self, name: str, array: NDArray[np.float32], step: int) -> NDArray[np.float32]:
        """What :meth:`carry` would return with the codec as it is; nothing is fitted and nothing is counted."""
        state, values = self._tensor(name).ends.state, array.reshape(-1)
        if state is None:
            return values
        return self._through(State(values.size, state.arrays, array.shape), name, values, step)[2]

    def settle(self, step: int, tally: Tally) -> None:
        """The batch is over: fit what needs all of its tensors."""
        fresh, self._fresh = self._fresh, False
        if not fresh or (self._common is None and not self._codec.allocates):
            return
        start = time.thread_time()
        tensors = [tensor for tensor in self._tensors.values() if tensor.summary is not None]
        sketches = [tensor.summary for tensor in tensors if tensor.summary is not None]
        if self._common is not None:
            merged = functools.reduce(MomentSketch.merge, sketches)
            size = round(merged.size)
            before = self._common.state or self._codec.init(size)
            self._common.state = refitted(self._codec, State(size, before.arrays), merged, step)
        else:
            shares = self._codec.allocate([tensor.sketch for tensor in tensors if tensor.sketch is not None])
            for tensor, sketch, share in zip(tensors, sketches, shares, strict=True):
                assert tensor.ends.state is not None
                tensor.share = share
                tensor.ends.state = refitted(self._codec, tensor.ends.state, sketch, step, tensor.share)
        spent = time.thread_time() - start
        tally.codec_seconds += spent
        tally.fit_seconds += spent

    def _tensor(self, name: str) -> _Tensor:
        if name not in self._tensors:
            self._tensors[name] = _Tensor(self._common or _Ends(self._codec.init(0)))
        return self._tensors[name]

    def _sketch(self, tensor: _Tensor, array: NDArray[np.float32], step: int, tally: Tally) -> None:
        due = self._refit.latest(step)
        fits = due > tensor.due
        if self._spec is None or not (fits or self._codec.fits_itself or (self._pools and self._refit.watches(step))):
            return
        start = time.thread_time()
        values = array.reshape(-1)
        state = State(values.size, tensor.ends.state.arrays if tensor.ends.state is not None else {}, array.shape)
        sketch = MomentSketch.from_spec(self._codec.view(state, values), self._spec)
        if self._pools:
            tensor.pool.add(sketch)
        if fits or self._codec.fits_itself:
            summary = tensor.pool.mean() if self._pools else sketch
            if fits:
                tensor.summary, tensor.due, self._fresh = summary, due, True
            if fits and self._codec.allocates:
                own = type(self._codec).view is Codec.view
                tensor.sketch = sketch if own else MomentSketch.from_spec(values, self._spec)
            if self._common is None:
                tensor.ends.state = refitted(self._codec, state, summary, step, tensor.share)
            if not self._refit.watches(step + 1):
                tensor.pool = Pool()
        tally.fit_seconds += time.thread_time() - start

    def _through(
        self, state: State, name: str, values: NDArray[np.float32], step: int
    ) -> tuple[bytes, bytes, NDArray[np.float32]]:
        """Payload, shared bytes, and what they decode to."""
        key = Key.derive(self._seed, tensor=name, step=step, worker=self._worker)
        payload = self._codec.encode(state, values, key)
        shared = self._codec.shared(state)
        return payload, shared, self._codec.decode(shared, payload, values.size)
