"""The header that every payload carries, so that foreign or damaged bytes are refused before they are decoded."""

from __future__ import annotations

import struct
import zlib

from gtrace.errors import PayloadError

MAGIC = b"GTP1"
_HEADER = struct.Struct("<4sHHQII")
#: bytes of the envelope; counted apart from the payload so that counts compare with the papers'
ENVELOPE_BYTES = _HEADER.size
#: A payload of one byte holds at most this many values, so that a receiver's memory grows with what it received.
MOST_PER_BYTE = 1 << 20
#: flag of a body that zeros make long enough; its last four bytes are their number, these included
_PADDED = 1 << 15


def codec_number(name: str) -> int:
    """The 16-bit number of a codec's name in the envelope."""
    return zlib.crc32(name.encode()) & 0xFFFF


def seal(body: bytes | memoryview, *, codec: str, size: int, shared: bytes, flags: int = 0) -> bytes:
    """Put the envelope before a payload body: magic, codec, flags, elements, checksums of shared and body.

    A body with less than a byte for each 2^20 elements, such as that of a large tensor of zeros, is padded.
    """
    padding = sealed_size(len(body), size) - ENVELOPE_BYTES - len(body)
    if padding:
        body = b"".join((body, bytes(padding - 4), padding.to_bytes(4, "little")))
        flags |= _PADDED
    return _HEADER.pack(MAGIC, codec_number(codec), flags, size, zlib.crc32(shared), zlib.crc32(body)) + body


def sealed_size(body: int, size: int) -> int:
    """Bytes of the payload that :func:`seal` makes of ``body`` bytes for ``size`` elements."""
    lacking = size // MOST_PER_BYTE - ENVELOPE_BYTES - body
    return ENVELOPE_BYTES + body + (lacking + 4 if lacking > 0 else 0)


def open_envelope(payload: bytes, *, codec: str, size: int, shared: bytes) -> tuple[memoryview, int]:
    """Check the envelope and return the body and the flags.

    Args:
        payload: a result of :func:`seal`.
        codec: name of the codec that decodes.
        size: number of elements that the receiver expects.
        shared: the shared bytes that the receiver holds.

    Raises:
        PayloadError: too short, also for its number of elements, not a gtrace payload, of another codec, size or shared
            state, or damaged.
    """
    if len(payload) < ENVELOPE_BYTES:
        raise PayloadError(f"payload of {len(payload)} bytes is shorter than its envelope of {ENVELOPE_BYTES}")
    magic, number, flags, count, shared_sum, body_sum = _HEADER.unpack_from(payload)
    if magic != MAGIC:
        raise PayloadError("not a gtrace payload: it does not begin with GTP1")
    if number != codec_number(codec):
        raise PayloadError(f"payload of another codec than {codec}")
    if count != size:
        raise PayloadError(f"payload of {count} elements where {size} were expected")
    if size > MOST_PER_BYTE * len(payload):
        raise PayloadError(f"payload of {len(payload)} bytes cannot hold {size} elements")
    if shared_sum != zlib.crc32(shared):
        raise PayloadError("payload made with other shared bytes (levels, code) than the receiver holds")
    body = memoryview(payload)[ENVELOPE_BYTES:]
    if body_sum != zlib.crc32(body):
        raise PayloadError("payload damaged: the checksum of its body does not match")
    if flags & _PADDED:
        padding = int.from_bytes(body[-4:], "little")
        if not 4 < padding <= len(body) or any(body[-padding:-4]):
            raise PayloadError("payload has padding that no encoder writes")
        body = body[:-padding]
    return body, int(flags & ~_PADDED)
