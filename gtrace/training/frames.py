"""Several messages as one byte string: what ranks give to a collective.

A frame of k messages is k pairs of little-endian uint32, then the bytes that they count: length of the shared bytes
plus one (0 where none travel), and length of the payload (0 where there is no message, 2^32 - 1 where the values are
not finite and were not encoded).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from gtrace.codecs.link import Message
from gtrace.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: bytes of a frame for each message
HEADER_BYTES = 8
_NOT_FINITE = 2**32 - 1


class NotFinite:
    """In the place of a message: a gradient held NaN or infinity, and so must what comes of it."""


NOT_FINITE = NotFinite()


def pack(messages: Sequence[Message | NotFinite | None]) -> bytes:
    """The frame of some messages; None for one that is missing.

    Raises:
        PayloadError: a message of 4 GiB or more.
    """
    headers = np.zeros((len(messages), 2), "<u4")
    bodies = []
    for row, message in enumerate(messages):
        if isinstance(message, NotFinite):
            headers[row, 1] = _NOT_FINITE
        elif message is not None:
            shared = message.shared
            if max(len(message.payload), 0 if shared is None else len(shared) + 1) >= _NOT_FINITE:
                raise PayloadError("frame: a message of 4 GiB or more does not fit; use a codec for smaller tensors")
            headers[row] = 0 if shared is None else len(shared) + 1, len(message.payload)
            bodies += [shared or b"", message.payload]
    return headers.tobytes() + b"".join(bodies)


def unpack(frame: bytes, count: int) -> list[Message | NotFinite | None]:
    """Undo :func:`pack` for a frame of ``count`` messages.

    Raises:
        PayloadError: a frame of another number of messages, or a damaged one.
    """
    if len(frame) < HEADER_BYTES * count:
        raise PayloadError(
            f"frame: {len(frame)} bytes are too few for {count} messages; the ranks differ in their model"
        )
    headers = np.frombuffer(frame, "<u4", 2 * count).reshape(count, 2).astype(np.int64)
    place = HEADER_BYTES * count
    found: list[Message | NotFinite | None] = []
    for shared_length, payload_length in headers.tolist():
        if payload_length == _NOT_FINITE:
            found.append(NOT_FINITE)
            continue
        if payload_length == 0:
            found.append(None)
            continue
        shared = None
        if shared_length:
            shared = frame[place : place + shared_length - 1]
            place += shared_length - 1
        found.append(Message(frame[place : place + payload_length], shared))
        place += payload_length
    if place != len(frame):
        raise PayloadError(
            f"frame: {len(frame)} bytes where its headers announce {place}; the ranks differ in their model"
        )
    return found


def join(parts: Sequence[bytes]) -> bytes:
    """Some byte strings as one: their lengths as little-endian uint32, then the strings."""
    return np.array([len(part) for part in parts], "<u4").tobytes() + b"".join(parts)


def split(joined: bytes, count: int) -> list[bytes]:
    """Undo :func:`join` for ``count`` strings.

    Raises:
        PayloadError: other lengths than announced.
    """
    if len(joined) < 4 * count:
        raise PayloadError(f"frame: {len(joined)} bytes are too few for {count} parts; the ranks differ in their model")
    borders = np.concatenate([[0], np.cumsum(np.frombuffer(joined, "<u4", count).astype(np.int64))]) + 4 * count
    if borders[-1] != len(joined):
        raise PayloadError(f"frame: {len(joined)} bytes where its lengths announce {borders[-1]}")
    return [joined[start:stop] for start, stop in pairwise(borders.tolist())]
