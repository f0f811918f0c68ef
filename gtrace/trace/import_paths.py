"""Which step, tensor and rank a file of gradients belongs to, by its name and its folders."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from gtrace.errors import TraceError, UsageError
from gtrace.trace.foreign import join_name
from gtrace.trace.foreign_zarr import is_zarr
from gtrace.trace.names import printable
from gtrace.trace.zarr_read import is_gtrace_zarr

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

#: Suffix of files that are one tensor each; others hold several under their own names.
SINGLE = ".npy"
ZARR = ".zarr"

_NUMBER = re.compile(r"\d+")
#: Several files of one state, as in model-00001-of-00002.safetensors.
_SHARD = re.compile(r"[-_.]?\d+-of-\d+$")
_FIELD = re.compile(r"\{(\w*)\}|(\*)")
_FIELDS = {"step": "(?P<step>[^/]+?)", "tensor": "(?P<tensor>.+)", "rank": r"(?P<rank>\d{1,9})"}


@dataclass(frozen=True, slots=True)
class Found:
    """A file of a source.

    Attributes:
        path: where it is.
        parts: its folders inside the source and its name without suffix.
        suffix: of its name, in lower case.
    """

    path: Path
    parts: tuple[str, ...]
    suffix: str

    @property
    def told(self) -> str:
        """The path inside the source, as a pattern is matched against it."""
        return "/".join(self.parts) + self.path.suffix


@dataclass(frozen=True, slots=True)
class Placed:
    """A file and what its name says.

    Attributes:
        path: where it is.
        suffix: of its name, in lower case.
        step: the training step, None where the name does not say.
        tensor: the start of its tensors' names.
        rank: number of the process that it came from.
    """

    path: Path
    suffix: str
    step: int | None
    tensor: str
    rank: int = 0


def natural(text: str) -> list[tuple[int, str]]:
    """Sorts numbers inside of names by their value.

    >>> sorted(["s10", "s9"], key=natural)
    ['s9', 's10']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


def find_files(sources: Sequence[Path], suffixes: Collection[str]) -> tuple[list[Found], int]:
    """The files of these suffixes, and the Zarr stores, that sources are or contain; links are followed.

    Returns:
        The files in natural order of their paths, and how many others were left out. Hidden ones do not count.

    Raises:
        TraceError: a source is missing, or nothing is in them.
    """
    several = len(sources) > 1
    # Of several sources the names tell steps or tensors, as in step_1/ step_2/; they count from what they share.
    base = Path(os.path.commonpath([os.path.abspath(path.parent) for path in sources])) if several else None
    found: dict[str, Found] = {}
    others = 0
    for source in sources:
        if not source.exists():
            raise TraceError(f"{printable(str(source))}: no such file or folder")
        root = base or (source if source.is_dir() and not is_zarr(source) else source.parent)
        for path in _walk(source):
            suffix = ZARR if path.is_dir() else path.suffix.lower()
            if suffix not in suffixes or (path != source and suffix == ZARR and is_gtrace_zarr(path)):
                others += 1
                continue
            inside = PurePosixPath(Path(os.path.relpath(os.path.abspath(path), os.path.abspath(root))).as_posix())
            name = inside.name.removesuffix(path.suffix) if path.suffix.lower() == suffix else inside.name
            found[os.path.abspath(path)] = Found(path, (*inside.parts[:-1], name), suffix)
    if not found:
        shown = printable(", ".join(map(str, sources)))[:200]
        raise TraceError(f"{shown}: no file to import; {', '.join(sorted(suffixes))} are read")
    return sorted(found.values(), key=lambda file: natural(file.told)), others


def _walk(source: Path) -> Iterable[Path]:
    """The files and Zarr stores that a source is or contains."""
    if source.is_file() or is_zarr(source):
        yield source
        return
    seen = set()
    for folder, folders, files in os.walk(source, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            # A link to a folder above would lead around for ever.
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        stores = [name for name in folders if is_zarr(Path(folder, name))]
        folders[:] = [name for name in folders if name not in stores and not name.startswith(".")]
        for name in (*files, *stores):
            if not name.startswith(".") and Path(folder, name).exists():
                yield Path(folder, name)


def place_by_pattern(files: Sequence[Found], pattern: str) -> tuple[list[Placed], str]:
    """What a template such as ``{step}/{tensor}.npy`` says of files; those that it does not fit are left out.

    ``{step}`` is text without a slash whose last number counts, ``{tensor}`` any text whose slashes become dots,
    ``{rank}`` a number, ``*`` anything without a slash.

    Raises:
        UsageError: it is no such template, or fits nothing.
    """
    expression = re.compile("".join(_pieces(pattern)))
    placed, texts = [], []
    for file in files:
        match = expression.fullmatch(file.told)
        if match is None:
            continue
        told = match.groupdict()
        texts.append(told.get("step"))
        tensor = (told.get("tensor") or "").replace("/", ".")
        placed.append(Placed(file.path, file.suffix, None, tensor, int(told.get("rank") or 0)))
    if not placed:
        raise UsageError(
            f"--pattern: no file fits '{printable(pattern)}'; the first of {len(files)} is '{printable(files[0].told)}'"
        )
    if texts[0] is None:
        return placed, "none"
    numbers = _last_numbers([text or "" for text in texts])
    if all(number is None for number in numbers):
        order = {text: k for k, text in enumerate(sorted({text or "" for text in texts}, key=natural))}
        steps = [order[text or ""] for text in texts]
        return [_with_step(file, step) for file, step in zip(placed, steps, strict=True)], "sorted"
    if None in numbers:
        without = printable(str(placed[numbers.index(None)].path))
        raise UsageError(f"--pattern: no number in the step of {without}, but in that of others")
    return [_with_step(file, step) for file, step in zip(placed, numbers, strict=True)], "pattern"


def _pieces(pattern: str) -> Iterable[str]:
    at, seen = 0, set()
    for match in _FIELD.finditer(pattern):
        yield re.escape(pattern[at : match.start()])
        at = match.end()
        if match[2]:
            yield "[^/]*"
            continue
        if match[1] not in _FIELDS or match[1] in seen:
            shown = printable(match[0])
            raise UsageError(f"--pattern: '{shown}' is unknown or there twice; write {{step}}, {{tensor}}, {{rank}}")
        seen.add(match[1])
        yield _FIELDS[match[1]]
    yield re.escape(pattern[at:])


def _with_step(file: Placed, step: int | None) -> Placed:
    return Placed(file.path, file.suffix, step, file.tensor, file.rank)


def _last_numbers(texts: Iterable[str]) -> list[int | None]:
    return [int(numbers[-1]) if (numbers := _NUMBER.findall(text)) else None for text in texts]


def place_by_name(files: Sequence[Found], *, step_axis: bool) -> tuple[list[Placed], str]:
    """What names and folders of files say without a template.

    One folder per step directly in the source, else one file per step with the step as the last number in its name.
    Other folders become the start of tensors' names; so does the name of a ``.npy`` file, which is one tensor.

    Returns:
        The files and how steps were told: ``folders``, ``names``, ``sorted``, or ``none`` where only the files
        themselves may say.

    Raises:
        UsageError: names can be read in several ways.
    """
    if step_axis:
        return [Placed(file.path, file.suffix, None, _prefix(file, file.parts[:-1])) for file in files], "none"
    tops = [number if len(file.parts) > 1 else None for file, number in _numbered(files, 0)]
    ends = [None if file.suffix == SINGLE else number for file, number in _numbered(files, -1)]
    if None not in tops:
        if any(end not in (None, top) for top, end in zip(tops, ends, strict=True)):
            raise _ambiguous(files[0], "numbers in folders and in file names")
        placed = [
            Placed(file.path, file.suffix, top, _prefix(file, file.parts[1:-1]))
            for file, top in zip(files, tops, strict=True)
        ]
        return placed, "folders"
    if any(file.suffix == SINGLE for file in files):
        first = next(file for file in files if file.suffix == SINGLE)
        raise UsageError(
            f"{printable(first.told)}: nothing says its step; pass --step-axis when the first axis counts steps, "
            "or --pattern as in '{tensor}-{step}.npy', or '{tensor}.npy' for a single step"
        )
    if None not in ends:
        placed = [
            Placed(file.path, file.suffix, end, _prefix(file, file.parts[:-1]))
            for file, end in zip(files, ends, strict=True)
        ]
        return placed, "names"
    if any(end is not None for end in ends):
        raise _ambiguous(files[ends.index(None)], "no number in its name, but in those of others")
    if max(Counter(file.parts[:-1] for file in files).values()) < len(files):
        raise _ambiguous(files[0], "files in several folders, and no number in their names")
    return [Placed(file.path, file.suffix, k, "") for k, file in enumerate(files)], "sorted"


def _prefix(file: Found, folders: tuple[str, ...]) -> str:
    return join_name(*folders, file.parts[-1] if file.suffix == SINGLE else "")


def _numbered(files: Sequence[Found], place: int) -> Iterable[tuple[Found, int | None]]:
    return zip(files, _last_numbers(_SHARD.sub("", file.parts[place]) for file in files), strict=True)


def _ambiguous(file: Found, why: str) -> UsageError:
    shown = printable(file.told)
    return UsageError(f"{shown}: {why}; say with --pattern where the step is, as in '{{step}}/{{tensor}}{file.suffix}'")
