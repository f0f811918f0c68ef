"""Names on disk: percent-encoded, bounded, never a path, never a name the format uses itself."""

from __future__ import annotations

import hashlib
import string

from gtrace.errors import UsageError

#: Arrays of a group that are no tensors, and names kept free for the groups of later versions.
RESERVED = frozenset(
    (
        "step",
        "tensor",
        "loss",
        "lr",
        "grad_scale",
        "found_inf",
        "clip_norm",
        "micro_batches",
        "time",
        "present",
        "norm2",
        "absmax",
        "zeros",
        "nonfinite",
        "crc32c",
        "call",
        "n_valid",
        "n_total",
        "zarr.json",
    )
)

#: The element dimension of a tensor is its name on disk and this; no tensor's own name ends so.
DIMENSION_SUFFIX = ".i"

#: File systems stop at 255 bytes, some encrypted ones at 143; a dimension suffix has to fit as well.
MAX_ENTRY = 120
_KEPT = 100

_PLAIN = frozenset((string.ascii_letters + string.digits + "_-.").encode())


def encode_name(name: str) -> str:
    """The name under which a tensor is stored in its group, in Zarr and in HDF5.

    Bytes of its UTF-8 form other than ASCII letters, digits, ``_``, ``-`` and ``.`` become ``%XX``. Names
    that a file system, Zarr or the format itself understands otherwise get one more character encoded. An
    encoded name of more than 120 characters is cut to 100 and ends in ``~`` and a digest of the whole, so
    that no two collide.

    >>> encode_name("fc.weight"), encode_name("unnamed/opt0"), encode_name("step"), encode_name("..")
    ('fc.weight', 'unnamed%2Fopt0', '%73tep', '%2E.')

    Raises:
        UsageError: the name is empty or not valid Unicode.
    """
    if not name:
        raise UsageError("a tensor's name must not be empty")
    try:
        raw = name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"tensor {printable(name)}: the name is not valid Unicode") from None
    parts = [chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in raw]
    # A leading dot hides a file or climbs a folder, and Zarr keeps names that start with two underscores.
    if name in RESERVED or name.startswith((".", "__")):
        parts[0] = f"%{raw[0]:02X}"
    if name.endswith(DIMENSION_SUFFIX):
        parts[-1] = f"%{raw[-1]:02X}"
    entry = "".join(parts)
    if len(entry) <= MAX_ENTRY:
        return entry
    kept = ""
    for part in parts:
        if len(kept) + len(part) > _KEPT:
            break
        kept += part
    return f"{kept}~{hashlib.blake2b(raw, digest_size=8).hexdigest()}"


def printable(text: str) -> str:
    r"""The text with everything that a terminal would act on written out as an escape.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
