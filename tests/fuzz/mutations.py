"""Inputs that are almost right: seeds with a few edits."""

import random
from typing import NamedTuple

#: numbers at the edges of their types, little- and big-endian, and words that parsers trip over
PIECES = (
    *(value.to_bytes(4, order) for value in (0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1) for order in ("little", "big")),
    *(value.to_bytes(8, order) for value in (2**31, 2**63 - 1, 2**64 - 1) for order in ("little", "big")),
    *(b"NaN", b"1e999", b"-1", b"null", b"[]", b"{}", b'"', b"[" * 3000, b"9" * 400, b"\xff\xfe", b"\0", b"\x1b[2J"),
    *(b"<script>alert(1)</script>", b"../..", b"0.5", b"true", b"1,2", b"=", b":", b"-", "é∞\u202e".encode()),
)


class Edit(NamedTuple):
    """One change: ``how`` is 0 set, 1 insert, 2 delete, 3 repeat, 4 cut the end off, 5 flip a bit.

    ``place`` and ``length`` are taken modulo what is there.
    """

    how: int
    place: int
    length: int
    piece: bytes


HOWS = 6


def edited(seed: bytes, edits: list[Edit]) -> bytes:
    """The seed after its edits."""
    data = bytearray(seed)
    for how, place, length, piece in edits:
        at = place % (len(data) + 1)
        end = at + length % 32
        if how == 0:
            data[at : at + len(piece)] = piece
        elif how == 1:
            data[at:at] = piece
        elif how == 2:
            del data[at:end]
        elif how == 3:
            data[at:at] = data[at:end] * (1 + length % 7)
        elif how == 4:
            del data[at:]
        elif at < len(data):
            data[at] ^= 1 << length % 8
    return bytes(data)


def random_edits(rng: random.Random) -> list[Edit]:
    """A few edits; single ones are the most frequent."""
    return [
        Edit(
            rng.randrange(HOWS),
            rng.randrange(1 << 20),
            rng.randrange(1 << 10),
            rng.choice(PIECES) if rng.random() < 0.7 else rng.randbytes(rng.randrange(1, 5)),
        )
        for _ in range(min(1 + int(rng.expovariate(0.7)), 8))
    ]
