"""One writer for a file: a second sweep on the same results is refused instead of mixing its rows in."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gtrace.errors import OutputExistsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# File systems that have no such locks (some networks') are written without.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def own(path: Path) -> Iterator[bool]:
    """Make a file this process's own until the block is left, or the process dies; an empty one where there is none.

    The lock is one of the whole file (flock), of which those that SQLite takes on parts of it know nothing. The file
    must not be closed by this process while SQLite has it open: that would drop SQLite's own locks.

    Yields:
        whether the file was made here.

    Raises:
        OutputExistsError: another process, or another thread of this one, owns it.
        OSError: it cannot be opened for writing.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        descriptor, new = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:
        if not path.is_file():
            raise OutputExistsError(f"{path}: exists already and is no file; choose another -o") from None
        descriptor, new = os.open(path, flags), False
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise _taken(path) from None
            if error.errno not in _NO_LOCKS:
                raise
        if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            raise _taken(path)
        yield new
    finally:
        os.close(descriptor)


def _taken(path: Path) -> OutputExistsError:
    return OutputExistsError(f"{path}: another sweep is writing it; wait for its end, or choose another -o")
