"""One worker's codec for one tensor, and the other end: what is sent, and what decodes it from bytes alone.

A :class:`Sender` holds a codec's state. A :class:`Receiver` holds nothing but the shared bytes that were sent to
it, so whatever decoding needs has travelled in a :class:`Message` and has been counted. Simulated workers, hooks into
one's own training loop and real ranks use the same two.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gtrace.codecs.base import Codec
from gtrace.coding import ENVELOPE_BYTES
from gtrace.errors import UsageError
from gtrace.fitting.pooling import Pool, poolable
from gtrace.sketch import MomentSketch
from gtrace.training.vectors import on_host
from gtrace.types import Key, Role, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from numpy.typing import ArrayLike

    from gtrace.codecs.base import Rounds
    from gtrace.training.schedule import RefitSchedule
    from gtrace.training.vectors import Vector
    from gtrace.types import SummarySpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Message:
    """What one worker sends for one tensor.

    Attributes:
        payload: of the codec, envelope included.
        shared: what the receiver must hold from now on; None when it holds it already.
    """

    payload: bytes
    shared: bytes | None

    @property
    def payload_bits(self) -> int:
        """Bits of the payload without its envelope."""
        return 8 * (len(self.payload) - ENVELOPE_BYTES)

    @property
    def shared_bits(self) -> int:
        """Bits of the shared bytes that travel in this message."""
        return 0 if self.shared is None else 8 * len(self.shared)


class Sender:
    """One worker's codec for one tensor, with its state.

    Args:
        codec: what encodes.
        size: elements of the tensor.
        tensor: its name, part of the key.
        worker: number of the worker, part of the key.
        seed: of all keys.
        refit: when the codec is fitted.
        shape: of the parameter, None if it is not known.
        role: ``up`` for what a worker sends, ``down`` for what is sent on after a sum; part of the key.

    Attributes:
        codec: what encodes.
        state: of the codec.
        fit_seconds: CPU time of all fits.
    """

    def __init__(
        self,
        codec: Codec,
        size: int,
        *,
        tensor: str,
        worker: int,
        seed: int,
        refit: RefitSchedule,
        shape: tuple[int, ...] | None = None,
        role: Role = "up",
    ) -> None:
        self.codec = codec
        self.state = codec.init(size, shape)
        self.fit_seconds = 0.0
        self._tensor, self._worker, self._seed, self._role = tensor, worker, seed, role
        self._refit = refit
        self._fitted = -1
        self._known = b""
        self._spec = _fit_spec(codec)
        self._pool = Pool()
        self._watched = -1

    def adopt(self, codec: Codec) -> None:
        """Go on with a codec that differs in ``bits`` alone: it is fitted at once, and memory is kept."""
        self.codec, self.state = codec, codec.renewed(self.state)
        self._spec, self._fitted = _fit_spec(codec), -1

    def due(self, step: int) -> bool:
        """Whether the codec is to be fitted before it encodes at this step."""
        if self._spec is None:
            return False
        return (step if self.codec.fits_itself else self._refit.latest(step)) > self._fitted

    def watch(self, values: Vector, step: int) -> None:
        """Take note of a step that the fit of this step or a later one pools; once for each step."""
        if self._spec is None or not self._pools or step <= self._watched:
            return
        if self.due(step) or self._refit.watches(step):
            start = time.thread_time()
            self._pool.add(self._viewed(values))
            self._watched = step
            self.fit_seconds += time.thread_time() - start

    def sketch(self, values: Vector, step: int) -> MomentSketch:
        """The sketch of float32[size] itself, for :meth:`~gtrace.codecs.Codec.allocate`.

        Sketches are made on the host, which a tensor of a device is copied to.

        Raises:
            UsageError: a codec that is never fitted.
        """
        del step
        return self._sketched(on_host(values))

    def summary(self, values: Vector, step: int) -> MomentSketch:
        """What a fit looks at: the sketch of float32[size], or of what a codec with memory makes of it.

        With a pooled schedule it is the decayed mean of this sketch and of those of the steps before.

        Raises:
            UsageError: a codec that is never fitted.
        """
        if not self._pools:
            return self._viewed(values)
        self.watch(values, step)
        return self._pool.mean()

    def _viewed(self, values: Vector) -> MomentSketch:
        return self._sketched(self.codec.view(self.state, on_host(values)))

    def _sketched(self, values: ArrayLike) -> MomentSketch:
        if self._spec is None:
            raise UsageError(f"{self.codec}: there is nothing to fit")
        return MomentSketch.from_spec(values, self._spec)

    @property
    def _pools(self) -> bool:
        return self._refit.pooled and poolable(self._spec)

    @property
    def looks_further(self) -> bool:
        """Whether the codec is fitted to more than the sketch of the gradient itself."""
        return self._pools or type(self.codec).view is not Codec.view

    def fit(self, summary: MomentSketch, step: int, *, agreed: bool = False, share: float | None = None) -> None:
        """Fit to a summary, with the tensor's share of an allocation if there is one.

        If all workers ``agreed`` on the summary, what receivers must hold does not travel.
        """
        start = time.thread_time()
        self.state = refitted(self.codec, self.state, summary, step, share)
        self._fitted = step
        if not self._refit.watches(step + 1):
            self._pool = Pool()
        self.fit_seconds += time.thread_time() - start
        if agreed:
            self._known = self.codec.shared(self.state)

    @property
    def known(self) -> bytes:
        """What receivers hold."""
        return self._known

    def send(self, values: Vector, step: int) -> Message:
        """Fit where the schedule says so, and encode float32[size]; a tensor on its own device, to the same bytes."""
        self.watch(values, step)
        if self.due(step):
            start = time.thread_time()
            summary = self.summary(values, step)
            self.fit_seconds += time.thread_time() - start
            self.fit(summary, step)
        key = self._key(step)
        if isinstance(values, np.ndarray):
            payload = self.codec.encode(self.state, values, key)
        else:
            from gtrace.training import device

            payload = device.encode(self.codec, self.state, values, key)
        shared = self.codec.shared(self.state)
        changed, self._known = shared != self._known, shared
        return Message(payload, shared if changed else None)

    def rounds(self, values: Vector, step: int) -> Rounds:
        """What a linear codec sends in its rounds instead of a message; its state is the next step's when they end."""
        ended = yield from self.codec.rounds(self.state, on_host(values), self._key(step))
        self.state = ended.state
        return ended

    def settle(self, values: Vector, decoded: Vector) -> None:
        """Take note of how ``values`` arrived, for residuals and momentum."""
        if type(self.codec).update is not Codec.update:
            self.state = self.codec.update(self.state, on_host(values), on_host(decoded))

    def _key(self, step: int) -> Key:
        return Key.derive(self._seed, tensor=self._tensor, step=step, worker=self._worker, role=self._role)

    def to_arrays(self) -> dict[str, Any]:
        """The state, as plain numbers and arrays."""
        return {
            "state": dict(self.state.to_arrays()),
            "fitted": self._fitted,
            "known": np.frombuffer(self._known, np.uint8).copy(),
            "watched": self._watched,
            "pool": self._pool.to_arrays(),
        }

    def load_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Undo :meth:`to_arrays`."""
        self.state = State.from_arrays(arrays["state"])
        self._fitted = int(arrays["fitted"])
        self._known = np.asarray(arrays["known"], np.uint8).tobytes()
        self._watched = int(arrays["watched"])
        if self._spec is not None:
            self._pool = Pool.from_arrays(arrays["pool"], self._spec)


def _fit_spec(codec: Codec) -> SummarySpec | None:
    # A sketch that nobody reads would be charged to the codec as its own time.
    return codec.needs if type(codec).fit is not Codec.fit else None


def refitted(codec: Codec, state: State, summary: MomentSketch, step: int, share: float | None = None) -> State:
    """The state after a fit that depends on the summary alone, so that a sweep knows it without the steps before.

    Memory is kept. So is what was fitted before when the summary is of zeros, which say nothing.
    """
    if not codec.stateful and summary.sums.size:
        state = codec.init(state.size, state.shape)
    if share is not None:
        state = codec.with_target(state, share)
    return codec.fit(state, summary, step)


def allocate(sending: Iterable[tuple[Sender, Vector]], step: int) -> None:
    """Fit the codecs of one worker that share something out among their tensors, before any of these is encoded.

    The shares come from the gradients of all tensors that are sent at this step, as in a sweep. Of several codecs each
    shares out among its own tensors.

    Args:
        sending: the senders of a step with what they are about to send.
        step: number of the step.
    """
    for codec, members in sharing((sender.codec, (sender, values)) for sender, values in sending):
        if not any(sender.due(step) for sender, _ in members):
            continue
        sketches = [sender.sketch(values, step) for sender, values in members]
        for (sender, values), sketch, share in zip(members, sketches, codec.allocate(sketches), strict=True):
            if sender.due(step):
                sender.fit(sender.summary(values, step) if sender.looks_further else sketch, step, share=share)


def sharing(items: Iterable[tuple[Codec, T]]) -> Iterable[tuple[Codec, list[T]]]:
    """Each codec that allocates, with what goes through it."""
    groups: dict[Codec, list[T]] = {}
    for codec, item in items:
        if codec.allocates:
            groups.setdefault(codec, []).append(item)
    return groups.items()


class Receiver:
    """The other end of one worker's messages for one tensor: knows the codec, the size, and what was sent.

    Attributes:
        codec: what decodes.
        size: elements of the tensor.
        shared: the shared bytes that it was sent last.
    """

    def __init__(self, codec: Codec, size: int) -> None:
        self.shared = b""
        self.codec = codec
        self.size = size

    def receive(self, message: Message, device: torch.device | None = None) -> Vector:
        """Decode to float32[size], an array or a tensor of a device.

        Raises:
            PayloadError: the bytes are damaged, or were made with other shared bytes.
        """
        if message.shared is not None:
            self.shared = message.shared
        if device is None:
            return self.codec.decode(self.shared, message.payload, self.size)
        from gtrace.training import device as on_device

        return on_device.decode(self.codec, self.shared, message.payload, self.size, device)
