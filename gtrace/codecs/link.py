"""The loop of compressed training: fit, send, receive, settle, and allocate among tensors.

A :class:`Sender` is one worker's codec for one tensor and holds the codec's state. A :class:`Receiver` holds only
what it made of the messages before: shared bytes, and the memory of a codec that sends differences. So everything that
decoding needs has traveled in a :class:`Message` and is counted. Simulated workers, real ranks, neural gradients and
hooks into a training loop all use these two, and :func:`compress` sends a single tensor from one to the other.

Values are arrays, or tensors that an engine encodes on their device.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from gtrace.buckets import as_values
from gtrace.codecs.base import Codec
from gtrace.codecs.spec import codec as build_codec
from gtrace.coding.envelope import ENVELOPE_BYTES
from gtrace.errors import UsageError
from gtrace.fitting.pooling import Pool, poolable
from gtrace.schedule import RefitSchedule
from gtrace.sketch import MomentSketch
from gtrace.types import Key, Role, State, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from gtrace.codecs.base import EncodedPart, Rounds

T = TypeVar("T")
#: values of one tensor that have random numbers of their own
_MOST = 1 << 32
#: values whose squares :func:`compress` sums at a time
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Options that all links of a training share.

    Attributes:
        refit: when codecs are fitted.
        seed: seed of all keys.
        engine: imports the module that encodes and decodes tensors on their device, with the same bytes, of codecs
            without memory; None if all values are arrays.
    """

    refit: RefitSchedule
    seed: int = 0
    engine: Callable[[], Any] | None = None


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


class SentPiece(NamedTuple):
    """A piece of a tensor that was sent.

    Attributes:
        state: with which it was encoded.
        values: float32[n], the exact values.
        part: what arrived of them.
    """

    state: State
    values: NDArray[np.float32]
    part: EncodedPart


class PieceArrays:
    """Arrays of each piece of a tensor in a temporary file: written once, then read in the same order."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._names: list[list[str]] = []

    def add(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Those of the next piece.

        Raises:
            UsageError: the folder of temporary files has no room.
        """
        self._names.append(list(arrays))
        try:
            for array in arrays.values():
                np.save(self._file, array, allow_pickle=False)
        except OSError as error:
            where = f"{tempfile.gettempdir()}: cannot keep what codecs remember of a large tensor"
            raise UsageError(f"{where} ({error.strerror}); free some space there, or set TMPDIR") from None

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        self._file.seek(0)
        for names in self._names:
            yield {name: np.load(self._file, allow_pickle=False) for name in names}

    def __del__(self) -> None:
        self._file.close()


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
        # Of a tensor in pieces the state has what is known of the whole, besides these.
        self._start = state.arrays
        self._kept: PieceArrays | None = None
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
            self._pool.add(self.sketch(values, viewed=True).alone)
            self._watched = step
            self.fit_seconds += time.thread_time() - start

    def sketch(self, values: Any, *, viewed: bool = False) -> MomentSketch:
        """The sketch of float32[size]; ``viewed``: of what a stateful codec encodes instead. Made on the host.

        Raises:
            UsageError: the codec is never fitted.
        """
        if self._spec is None:
            raise UsageError(f"{self.codec}: has nothing to fit")
        array = on_host(values)
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
        return self._pool.mean()[0]

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
        """Fit if the schedule says so, and encode float32[size]; a tensor on a device gives the same bytes.

        Raises:
            UsageError: more than 2^32 values for a codec that draws random numbers.
        """
        if len(values) > _MOST and not self.codec.deterministic:
            most = f"random numbers of {self.codec} repeat after 2^32 values"
            raise UsageError(f"{self._tensor}: has {len(values)}, and {most}; send this tensor with none or bf16")
        self.watch(values, step)
        if self.due(step):
            start = time.thread_time()
            summary = self.summary(values, step)
            self.fit_seconds += time.thread_time() - start
            self.fit(summary, step)
        if self._engine is None or isinstance(values, np.ndarray):
            payload = self.codec.encode(self.state, values, self.key(step))
        else:
            payload = self._engine().encode(self.codec, self.state, values, self.key(step))
        shared = self.codec.shared(self.state)
        news, self.known = shared != self.known, shared
        return Message(payload, shared if news else None)

    def rounds(self, values: Any, step: int) -> Rounds:
        """A linear codec's rounds instead of a message; its state becomes the next step's when they end."""
        ended = yield from self.codec.rounds(self.state, values, self.key(step))
        self.state = ended.state
        return ended

    def settle(self, values: Any, decoded: Any) -> None:
        """Record how ``values`` arrived, for residuals and momentum."""
        if self.codec.stateful:
            self.state = self.codec.update(self.state, values, decoded)

    def pieces(self, values: Iterable[NDArray[np.float32]]) -> Iterator[tuple[State, NDArray[np.float32]]]:
        """The pieces of a step of a tensor that is never held whole, each with its state."""
        known = changed(self._start, self.state.arrays)
        kept = None if self._kept is None else iter(self._kept)
        for x in values:
            own = self.codec.init(x.size).arrays if kept is None else next(kept)
            yield State(x.size, {**own, **known}), x

    def send_pieces(
        self, values: Callable[[], Iterable[NDArray[np.float32]]], key: tuple[int, int]
    ) -> Iterator[SentPiece]:
        """Encode a step piece by piece, each a multiple of the codec's ``part_multiple``; the last one settles it."""
        prepared = self.codec.prepare(self.state, lambda: self.pieces(values()), key)
        news, known = (changed(before, prepared.arrays) for before in (self.state.arrays, self._start))
        kept, start = PieceArrays(), 0
        for state, x in self.pieces(values()):
            state = state.with_arrays(**news)
            part = self.codec.encode_part(state, x, key, start)
            after = self.codec.update(state, x, part.values).arrays
            kept.add({name: array for name, array in after.items() if name not in known})
            yield SentPiece(state, x, part)
            start += x.size
        self.state, self._kept = self.codec.settled(self.state, prepared), kept

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
    return values if isinstance(values, np.ndarray) else values.cpu().numpy()


def changed(before: Mapping[str, NDArray[Any]], after: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The arrays of a state that are new."""
    return {name: array for name, array in after.items() if before.get(name) is not array}


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

    def __init__(self, codec: Codec, size: int, engine: Callable[[], Any] | None = None) -> None:
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
            return self._engine().receive(self.codec, self.shared, message.payload, self.held.size, place)
        values, self.held = self.codec.receive(self.held, self.shared, message.payload)
        return values

    def to_arrays(self) -> dict[str, Any]:
        """What it holds, as plain numbers and arrays."""
        return {"shared": np.frombuffer(self.shared, np.uint8).copy(), "held": dict(self.held.to_arrays())}

    def load_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Undo :meth:`to_arrays`."""
        self.shared = np.asarray(arrays["shared"], np.uint8).tobytes()
        self.held = State.from_arrays(arrays["held"])


@dataclass(frozen=True, slots=True)
class Compressed:
    """What :func:`compress` returns.

    Attributes:
        values: the decoded gradient: an array or tensor of the type, shape, dtype and device of the input.
        payload: the bytes as sent, with their envelope.
        bits: measured bits per value as everywhere in gtrace: the payload without its envelope of 24 bytes, and the
            levels and code lengths that the receiver needs besides (``bits_total`` of a sweep).
        error: ||values - g||^2 / ||g||^2, the share of the gradient's energy that is lost; 0 if
            nothing is, NaN if g is all zeros and something is.
    """

    values: Any = field(repr=False)
    payload: bytes = field(repr=False)
    bits: float
    error: float


def compress(gradient: Any, codec: str | Codec, *, seed: int = 0) -> Compressed:
    """Encode one gradient, decode the bytes, and measure both.

    Codecs with levels are fitted to this gradient, and codecs with memory start empty, as in a training's first step.

    Args:
        gradient: a torch tensor on any device, or what numpy makes a floating-point array of; any shape. It is encoded
            as float32.
        codec: a codec or its spec, e.g. ``"qsgdinf:bits=4"``.
        seed: seed of the random rounding; the same seed gives the same bytes.

    Raises:
        UsageError: an unknown codec, values that are not finite, or not floating-point numbers.

    >>> sent = compress([3.0, -1.0, 0.0, 2.0], "none")
    >>> sent.values.tolist(), len(sent.payload), sent.bits, sent.error
    ([3.0, -1.0, 0.0, 2.0], 40, 32.0, 0.0)
    """
    chosen = codec if isinstance(codec, Codec) else build_codec(codec)
    torch = sys.modules.get("torch")
    tensor = torch is not None and isinstance(gradient, torch.Tensor)
    given = _array_of(gradient, torch) if tensor else np.asarray(gradient)
    if not np.issubdtype(given.dtype, np.floating):
        raise UsageError(f"compress: needs floating-point values, not {given.dtype}; convert them first")
    x = as_values(given)
    sender = Sender(chosen, x.size, LinkOptions(RefitSchedule((0,)), seed), tensor="g", shape=given.shape)
    allocate([(sender, x)], 0)
    message = sender.send(x, 0)
    decoded = Receiver(chosen, x.size).receive(message).reshape(given.shape)
    if tensor:
        values = torch.from_numpy(decoded).to(gradient)  # type: ignore[union-attr]
        back = _array_of(values, torch)
    else:
        values = back = decoded.astype(given.dtype, copy=False)
    bits = (message.payload_bits + message.shared_bits) / max(1, x.size)
    return Compressed(values, message.payload, bits, _relative_error(back, given))


def _array_of(tensor: Any, torch: Any) -> NDArray[Any]:
    """A dense tensor's values on the host; of types that numpy lacks as float32, which holds them exactly."""
    if tensor.layout != torch.strided:
        raise UsageError("compress: needs a dense tensor; pass g.to_dense()")
    host = tensor.detach().cpu()
    known = not host.is_floating_point() or host.dtype in (torch.float64, torch.float32, torch.float16)
    return (host if known else host.float()).numpy()


def _relative_error(decoded: NDArray[Any], given: NDArray[Any]) -> float:
    one, other = decoded.reshape(-1), given.reshape(-1)
    lost = energy = 0.0
    for start in range(0, one.size, _BLOCK):
        block = other[start : start + _BLOCK].astype(np.float64)
        energy += float(block @ block)
        block = one[start : start + _BLOCK] - block
        lost += float(block @ block)
    return lost / energy if energy else lost and float("nan")
