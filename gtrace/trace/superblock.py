"""The first bytes of an HDF5 file, and files that are marked as open for writing."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

import numpy as np
from numcodecs.jenkins import jenkins_lookup3

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
#: Superblock version 3 with 8-byte addresses: signature, version, two sizes, flags, three addresses and the end of
#: the file between them, checksum of all that.
SUPERBLOCK_BYTES = 48
_FLAGS = 11
_END = slice(28, 36)
_CHECKSUM = slice(44, 48)
_NO_END = 2**62


def read_superblock(path: str | os.PathLike[str]) -> bytes:
    """The superblock, or what there is where the file is shorter."""
    with open(path, "rb") as file:
        return file.read(SUPERBLOCK_BYTES)


def is_marked(superblock: bytes) -> bool:
    """Whether a superblock says that its file is open for writing: it is, or was when its writer died."""
    whole = len(superblock) == SUPERBLOCK_BYTES
    return whole and superblock[:11] == _SIGNATURE + b"\x03\x08\x08" and superblock[_FLAGS] != 0


def unmarked(superblock: bytes, size: int) -> bytes:
    """The superblock of the same file of ``size`` bytes, not open for writing."""
    out = bytearray(superblock)
    out[_FLAGS] = 0
    # A writer brings the stored end up to date when it closes the file.
    out[_END] = size.to_bytes(8, "little")
    checksum = int(jenkins_lookup3(np.frombuffer(out[: _CHECKSUM.start], np.uint8), 0))
    out[_CHECKSUM] = checksum.to_bytes(4, "little")
    return bytes(out)


def unmark(path: str | os.PathLike[str]) -> None:
    """Take the mark off a file that nobody has open."""
    superblock = read_superblock(path)
    if is_marked(superblock):
        with open(path, "r+b") as file:
            file.write(unmarked(superblock, os.path.getsize(path)))


class MarkedFile(io.RawIOBase):
    """A marked file to be read, with the mark taken off what it returns.

    HDF5 itself reads such files in SWMR mode only, in which it repeats each read that fails, at growing intervals,
    for longer than anybody waits: damage would never be reported. What a writer in SWMR mode has flushed can be
    read without that mode as well. The file seems to have no end, since it may grow while it is read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._head = unmarked(os.pread(self._descriptor, SUPERBLOCK_BYTES, 0), _NO_END)
        self._position = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """To anywhere up to the end that is none."""
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: _NO_END}[whence]
        if not 0 <= position <= _NO_END:
            raise OSError(f"address {position} is none of a file")
        self._position = position
        return position

    def tell(self) -> int:
        """The position."""
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill the buffer; beyond the end of the file there are zeros, as with HDF5's own drivers."""
        view = memoryview(buffer).cast("B")
        start, count = self._position, 0
        while count < len(view) and (more := os.preadv(self._descriptor, [view[count:]], start + count)):
            count += more
        view[count:] = bytes(len(view) - count)
        covered = min(start + len(view), SUPERBLOCK_BYTES) - start
        if covered > 0:
            view[:covered] = self._head[start : start + covered]
        self._position += len(view)
        return len(view)

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            os.close(self._descriptor)
        super().close()
