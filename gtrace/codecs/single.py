"""One tensor through a codec, as a worker would send it; no trace, no training."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.codecs.base import Codec
from gtrace.codecs.link import LinkOptions, Receiver, Sender, allocate
from gtrace.codecs.spec import codec as build_codec
from gtrace.errors import UsageError
from gtrace.schedule import RefitSchedule

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: values that are summed up at a time
_BLOCK = 1 << 20


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
    x = np.ascontiguousarray(given, np.float32).reshape(-1)
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
    found: NDArray[Any] = (host if known else host.float()).numpy()
    return found


def _relative_error(decoded: NDArray[Any], given: NDArray[Any]) -> float:
    one, other = decoded.reshape(-1), given.reshape(-1)
    lost = energy = 0.0
    for start in range(0, one.size, _BLOCK):
        block = other[start : start + _BLOCK].astype(np.float64)
        energy += float(block @ block)
        block = one[start : start + _BLOCK] - block
        lost += float(block @ block)
    return lost / energy if energy else lost and float("nan")
