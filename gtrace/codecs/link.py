"""The loop of compressed training: fit, send, receive, settle, and allocate among tensors.

A :class:`Sender` is one worker's codec for one tensor and holds the codec's state. A :class:`Receiver` holds only
what it made of the messages before: shared bytes, and the memory of a codec that sends differences. So everything that
decoding needs has traveled in a :class:`Message` and is counted. Simulated workers, real ranks, neural gradients and
hooks into a training loop all use these two.

Values are arrays, or tensors that an :class:`Engine` encodes on their device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from gtrace.codecs.base import Codec
from gtrace.coding import ENVELOPE_BYTES
from gtrace.errors import UsageError
from gtrace.fitting.pooling import Pool, poolable
from gtrace.sketch import MomentSketch
from gtrace.types import Key, Role, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from gtrace.codecs.base import Rounds
    from gtrace.schedule import RefitSchedule
    from gtrace.types import SummarySpec

T = TypeVar("T")


class Engine(Protocol):
    """Encodes and decodes tensors where they are; arrays go through the codec itself."""

    def encode(self, codec: Codec, state: State, values: Any, key: Key) -> bytes:
        """The payload of ``codec.encode``, with the same bytes for values on any device."""

    def receive(self, codec: Codec, shared: bytes, payload: bytes, size: int, place: Any) -> Any:
        """The result of ``codec.decode`` on a device."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Options that all links of a training share.

    Attributes:
        refit: when codecs are fitted.
        seed: seed of all keys.
        engine: encodes and decodes values that are not arrays, of codecs without memory; None if there are none.
    """

    refit: RefitSchedule
    seed: int = 0
    engine: Engine | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One worker's message for one tensor.

    Attributes:
        payload: the codec's payload, envelope included.
        shared: what the receiver must hold from now on; None if it holds it already.
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
        codec: the codec.
        size: elements of the tensor.
        options: the options of all links.
        tensor: its name, part of the key.
        worker: number of the worker, part of the key.
        shape: the parameter's shape, None if it is not known.
        role: ``up`` for a worker's message, ``down`` for one that is sent on after a sum; part of the key.

    Attributes:
        codec: the codec.
        state: the codec's state.
        known: the shared bytes that the receiver holds.
        fit_seconds: CPU time of all fits.
    """

    def __init__(
        self,
        codec: Codec,
        size: int,
        options: LinkOptions,
        *,
        tensor: str,
        worker: int = 0,
        shape: tuple[int, ...] | None = None,
        role: Role = "up",
    ) -> None:
        self.known = b""
        self.fit_seconds = 0.0
        self._tensor, self._worker, self._role = tensor, worker, role
        self._options, self._refit, self._engine = options, options.refit, options.engine
        self._pool = Pool()
        self._watched = -1
        self._take(codec, codec.init(size, shape))

    def adopt(self, codec: Codec) -> None:
        """Go on with a codec that differs only in ``bits``: it is fitted at once, and memory is kept."""
        self._take(codec, codec.renewed(self.state))

    def _take(self, codec: Codec, state: State) -> None:
        self.codec, self.state, self._fitted = codec, state, -1
        self._spec = fit_spec(codec)
        self._pools = self._refit.pooled and poolable(self._spec)

    def scheduled(self, step: int) -> bool:
        """Whether the schedule wants a fit at this step, or wanted one earlier that did not happen yet."""
        return self._spec is not None and self._refit.latest(step) > self._fitted

    def due(self, step: int) -> bool:
        """Whether the codec must be fitted before it encodes at this step."""
        latest = step if self.codec.fits_itself else self._refit.latest(step)
        return self._spec is not None and latest > self._fitted

    def watch(self, values: Any, step: int) -> None:
        """Record a step that the fit of this step or a later one pools; once for each step."""
        if not self._pools or step <= self._watched:
            return
        if self.due(step) or self._refit.watches(step):
            start = time.thread_time()
            self._pool.add(self.sketch(values, viewed=True))
            self._watched = step
            self.fit_seconds += time.thread_time() - start

    def sketch(self, values: Any, *, viewed: bool = False) -> MomentSketch:
        """The sketch of float32[size] itself, for :meth:`~gtrace.codecs.Codec.allocate`; made on the host.

        Args:
            values: float32[size].
            viewed: of what a stateful codec encodes instead of the values.

        Raises:
            UsageError: the codec is never fitted.
        """
        if self._spec is None:
            raise UsageError(f"{self.codec}: has nothing to fit")
        array = values if isinstance(values, np.ndarray) else on_host(values)
        return MomentSketch.from_spec(self.codec.view(self.state, array) if viewed else array, self._spec)

    def summary(self, values: Any, step: int) -> MomentSketch:
        """The input of a fit: the sketch of float32[size], or of what a stateful codec encodes instead.

        With a pooled schedule it is the decayed mean of this sketch and those of the steps before.

        Raises:
            UsageError: the codec is never fitted.
        """
        if not self._pools:
            return self.sketch(values, viewed=True)
        self.watch(values, step)
        return self._pool.mean()

    @property
    def looks_further(self) -> bool:
        """Whether a fit needs more than the sketch of the gradient itself."""
        return self._pools or type(self.codec).view is not Codec.view

    def fit(self, summary: MomentSketch, step: int, *, agreed: bool = False, share: float | None = None) -> None:
        """Fit to a summary, with the tensor's share of an allocation if there is one.

        If all workers ``agreed`` on the summary, the shared bytes do not travel.
        """
        start = time.thread_time()
        self.state = refitted(self.codec, self.state, summary, step, share)
        self.skip(step)
        self.fit_seconds += time.thread_time() - start
        if agreed:
            self.known = self.codec.shared(self.state)

    def skip(self, step: int) -> None:
        """Count this step's fit as done."""
        self._fitted = step
        if not self._refit.watches(step + 1):
            self._pool = Pool()

    def send(self, values: Any, step: int) -> Message:
        """Fit if the schedule says so, and encode float32[size]; a tensor on a device gives the same bytes."""
        self.watch(values, step)
        if self.due(step):
            start = time.thread_time()
            summary = self.summary(values, step)
            self.fit_seconds += time.thread_time() - start
            self.fit(summary, step)
        if self._engine is None or isinstance(values, np.ndarray):
            payload = self.codec.encode(self.state, values, self.key(step))
        else:
            payload = self._engine.encode(self.codec, self.state, values, self.key(step))
        shared = self.codec.shared(self.state)
        changed, self.known = shared != self.known, shared
        return Message(payload, shared if changed else None)

    def rounds(self, values: Any, step: int) -> Rounds:
        """A linear codec's rounds instead of a message; its state becomes the next step's when they end."""
        ended = yield from self.codec.rounds(self.state, values, self.key(step))
        self.state = ended.state
        return ended

    def settle(self, values: Any, decoded: Any) -> None:
        """Record how ``values`` arrived, for residuals and momentum."""
        if self.codec.stateful:
            self.state = self.codec.update(self.state, values, decoded)

    def key(self, step: int) -> Key:
        """The key of a step's randomness."""
        return Key.derive(self._options.seed, tensor=self._tensor, step=step, worker=self._worker, role=self._role)

    def common_number(self, step: int) -> int:
        """32 bits for what all workers do in the same way at a step, e.g. a rotation under which codes add up."""
        return Key.derive(self._options.seed, tensor=self._tensor, step=step, role="sample").low & 0xFFFFFFFF

    def to_arrays(self) -> dict[str, Any]:
        """The state, as plain numbers and arrays."""
        return {
            "state": dict(self.state.to_arrays()),
            "fitted": self._fitted,
            "known": np.frombuffer(self.known, np.uint8).copy(),
            "watched": self._watched,
            "pool": self._pool.to_arrays(),
        }

    def load_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Undo :meth:`to_arrays`."""
        self.state = State.from_arrays(arrays["state"])
        self._fitted = int(arrays["fitted"])
        self.known = np.asarray(arrays["known"], np.uint8).tobytes()
        self._watched = int(arrays["watched"])
        if self._spec is not None:
            self._pool = Pool.from_arrays(arrays["pool"], self._spec)


def on_host(values: Any) -> NDArray[np.float32]:
    """An array as it is, a tensor of any device as one."""
    array: NDArray[np.float32] = values if isinstance(values, np.ndarray) else values.cpu().numpy()
    return array


def fit_spec(codec: Codec) -> SummarySpec | None:
    """The summary that a fit needs; None for a codec that is never fitted."""
    # An unused sketch would count as the codec's own time.
    return codec.needs if codec.fits else None


def refitted(codec: Codec, state: State, summary: MomentSketch, step: int, share: float | None = None) -> State:
    """The state after a fit that depends on the summary alone, so a sweep can compute it without earlier steps.

    Memory is kept. Earlier fits are kept if the summary holds only zeros.
    """
    if not codec.stateful and summary.sums.size:
        state = codec.init(state.size, state.shape)
    if share is not None:
        state = codec.with_target(state, share)
    return codec.fit(state, summary, step)


def allocate(sending: Iterable[tuple[Sender, Any]], step: int) -> None:
    """Fit one worker's codecs that share something out among their tensors, before any of these is encoded.

    The shares come from the gradients of all tensors of this step, as they do in a sweep. With several codecs, each
    allocates among its own tensors.

    Args:
        sending: the senders of a step with their values.
        step: number of the step.
    """
    for codec, members in sharing((sender.codec, (sender, values)) for sender, values in sending):
        if not any(sender.due(step) for sender, _ in members):
            continue
        sketches = [sender.sketch(values) for sender, values in members]
        for (sender, values), sketch, share in zip(members, sketches, codec.allocate(sketches), strict=True):
            if sender.due(step):
                sender.fit(sender.summary(values, step) if sender.looks_further else sketch, step, share=share)


def sharing(items: Iterable[tuple[Codec, T]]) -> Iterable[tuple[Codec, list[T]]]:
    """Each codec that allocates, with its items."""
    groups: dict[Codec, list[T]] = {}
    for codec, item in items:
        if codec.allocates:
            groups.setdefault(codec, []).append(item)
    return groups.items()


class Receiver:
    """The other end of one worker's messages for one tensor: knows the codec, the size, and what arrived before.

    Attributes:
        codec: the codec.
        shared: the latest shared bytes.
        held: what the codec keeps on this side; it has the tensor's size.
    """

    def __init__(self, codec: Codec, size: int, engine: Engine | None = None) -> None:
        self.shared = b""
        self.codec = codec
        self.held = State(size)
        self._engine = engine

    def receive(self, message: Message, place: Any = None) -> Any:
        """The values that arrive, float32[size]: an array, or a tensor on the device ``place``.

        Raises:
            PayloadError: the bytes are damaged, or were made with other shared bytes.
        """
        if message.shared is not None:
            self.shared = message.shared
        if self._engine is not None and place is not None:
            return self._engine.receive(self.codec, self.shared, message.payload, self.held.size, place)
        values, self.held = self.codec.receive(self.held, self.shared, message.payload)
        return values

    def to_arrays(self) -> dict[str, Any]:
        """What it holds, as plain numbers and arrays."""
        return {"shared": np.frombuffer(self.shared, np.uint8).copy(), "held": dict(self.held.to_arrays())}

    def load_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Undo :meth:`to_arrays`."""
        self.shared = np.asarray(arrays["shared"], np.uint8).tobytes()
        self.held = State.from_arrays(arrays["held"])
