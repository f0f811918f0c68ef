"""Errors that a user can cause, each with the exit code that the command line documents.

Every message is one line: what is wrong, where, and what to do about it.
"""

from __future__ import annotations

import difflib
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

EXIT_OK = 0
EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_INPUT = 3
EXIT_EXISTS = 4
EXIT_SCRIPT = 5
EXIT_INTERRUPTED = 130


class GtraceError(Exception):
    """Base of every error that is the input's fault and not a bug of gtrace."""

    exit_code = EXIT_USAGE


class UsageError(GtraceError, ValueError):
    """An argument is wrong: unknown name, impossible value, options that exclude each other."""

    exit_code = EXIT_USAGE


class TraceError(GtraceError):
    """A trace or a result file is missing, foreign, damaged or from a newer version."""

    exit_code = EXIT_INPUT


class PayloadError(GtraceError, ValueError):
    """Bytes handed to a decoder are not a payload of this codec, or are damaged."""

    exit_code = EXIT_INPUT


class OutputExistsError(GtraceError):
    """The output already exists; it was left unchanged."""

    exit_code = EXIT_EXISTS


class ScriptError(GtraceError):
    """The user's own training script failed."""

    exit_code = EXIT_SCRIPT


def suggest(word: str, known: Iterable[str], shown: Mapping[str, str] | None = None) -> str:
    """The end of an error message about an unknown name: the nearest known ones, or all of them if they are few.

    Args:
        word: the unknown name.
        known: those that are known.
        shown: what is shown instead of some of them.

    >>> suggest("qsgdnf", ["qsgd", "qsgdinf", "natural"])
    'did you mean qsgdinf or qsgd?'
    """
    names = sorted(set(known))
    begun = [name for name in names if word and name.lower().startswith(word.lower())]
    near = begun[:3] or next(filter(None, (difflib.get_close_matches(w, names) for w in (word, word.lower()))), [])
    if near:
        return f"did you mean {' or '.join((shown or {}).get(name, name) for name in near)}?"
    first = ", ".join(names[:12])
    return f"known: {first}{', ...' if len(names) > 12 else ''}" if names else "there are none here"


def keep_inputs(output: str | os.PathLike[str], *inputs: object) -> None:
    """UsageError for a result that would replace what is read for it, or lie in a trace; only paths count as inputs."""
    paths = [os.path.realpath(one) for one in inputs if isinstance(one, (str, os.PathLike))]
    place = os.path.realpath(output)
    if place in paths:
        raise UsageError(f"{output}: is what is being read; give another -o")
    for path in paths:
        if path.endswith(".zarr") and place.startswith(path + os.sep):
            raise UsageError(f"{output}: is inside the trace {path}, which is being read; give another -o")


def need_folder(output: Path) -> None:
    """UsageError for a result whose folder does not exist."""
    if not output.parent.is_dir():
        raise UsageError(f"{output}: the folder {output.parent} does not exist; create it or choose another -o")


def keep_existing(*outputs: Path, force: bool) -> None:
    """OutputExistsError for a file's place where a folder is, and for a file unless ``force`` is on."""
    for path in outputs:
        if path.is_dir():
            raise OutputExistsError(f"{path}: is a folder and was left untouched; choose another -o")
        if path.exists() and not force:
            raise taken(path)


def taken(output: Path) -> OutputExistsError:
    """The error about a place where something is that may be replaced."""
    return OutputExistsError(f"{output} already exists. Use --force to replace it or -o to write elsewhere.")


def check_output(output: Path, *inputs: object, force: bool) -> None:
    """Refuse a file's place: what is being read, without a folder, a folder itself, or a file without ``force``."""
    keep_inputs(output, *inputs)
    need_folder(output)
    keep_existing(output, force=force)


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """UsageError for a result that the system does not let be written."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{output}: cannot be written ({error.strerror}); choose another -o") from None


def check_folder(folder: Path, *, force: bool) -> None:
    """OutputExistsError for a file at a folder's place, and for a folder that holds anything unless ``force`` is on."""
    if folder.exists() and not folder.is_dir():
        raise OutputExistsError(f"{folder}: is a file and was left untouched; choose another -o")
    if folder.is_dir() and not force and any(folder.iterdir()):
        raise OutputExistsError(f"{folder}: holds something else and was left untouched; use --force or -o")


def size_text(count: float) -> str:
    """A number of bytes for people."""
    if count < 1000:
        return f"{count:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


def printable(text: str) -> str:
    r"""The text with everything that a terminal would act on written out as an escape.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
