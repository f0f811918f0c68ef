"""Makes a trace from gradients that other programs stored: arrays in files, one step each or one tensor each."""

from __future__ import annotations

import contextlib
import fnmatch
import math
import os
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from gtrace.errors import TraceError, UsageError, printable
from gtrace.trace.files import check_place, is_gtrace_zarr, move_in, new_beside, place_for
from gtrace.trace.foreign import READERS, is_zarr, join_name
from gtrace.trace.format import KINDS
from gtrace.trace.guard import Entry, Guard, GuardedFile
from gtrace.trace.reader import open_trace
from gtrace.trace.writer import TraceWriter, create_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray


#: suffix of files with one tensor each; others hold several under their own names
SINGLE = ".npy"
ZARR = ".zarr"

_NUMBER = re.compile(r"\d+")
#: one of several files of one state, e.g. model-00001-of-00002.safetensors
_SHARD = re.compile(r"[-_.]?\d+-of-\d+$")
_FIELD = re.compile(r"\{(\w*)\}|(\*)")
_FIELDS = {"step": "(?P<step>[^/]+?)", "tensor": "(?P<tensor>.+)", "rank": r"(?P<rank>\d{1,9})"}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a source, and the facts in its name.

    Attributes:
        path: the file.
        parts: its folders inside the source and its name without suffix.
        suffix: the suffix of its name, in lower case.
        step: the training step, None if the name does not hold it.
        tensor: the start of its tensors' names.
        rank: number of the process that wrote it.
    """

    path: Path
    parts: tuple[str, ...]
    suffix: str
    step: int | None = None
    tensor: str = ""
    rank: int = 0

    @property
    def inside(self) -> str:
        """The path inside the source, which patterns are matched against."""
        return "/".join(self.parts) + self.path.suffix


def natural(text: str) -> list[tuple[int, str]]:
    """A sort key that orders numbers inside names by value.

    >>> sorted(["s10", "s9"], key=natural)
    ['s9', 's10']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


def find_files(sources: Sequence[Path], suffixes: Collection[str]) -> tuple[list[SourceFile], int]:
    """The files with these suffixes, and the Zarr stores, in the sources; links are followed.

    Returns:
        The files in natural order of their paths, and the number of other files. Hidden ones do not count.

    Raises:
        TraceError: a source is missing, or there is nothing to import.
    """
    # The names of several sources may be steps or tensors, e.g. step_1/ step_2/; paths start at their common folder.
    base = Path(os.path.commonpath([os.path.abspath(path.parent) for path in sources])) if len(sources) > 1 else None
    found: dict[str, SourceFile] = {}
    others = 0
    for source in sources:
        if not source.exists():
            raise TraceError(f"{printable(str(source))}: no such file or folder")
        root = base or (source if source.is_dir() and not is_zarr(source) else source.parent)
        for path in _walk(source):
            suffix = ZARR if path.is_dir() else path.suffix.lower()
            trace = suffix == ZARR and is_gtrace_zarr(path)
            if trace and path == source:
                raise TraceError(f"{printable(str(path))}: is already a gtrace trace; pass it to gtrace sweep")
            if trace or suffix not in suffixes:
                others += 1
                continue
            inside = PurePosixPath(Path(os.path.relpath(os.path.abspath(path), os.path.abspath(root))).as_posix())
            name = inside.name.removesuffix(path.suffix) if path.suffix.lower() == suffix else inside.name
            found[os.path.abspath(path)] = SourceFile(path, (*inside.parts[:-1], name), suffix)
    if not found:
        shown = printable(", ".join(map(str, sources)))[:200]
        raise TraceError(f"{shown}: no file to import; {', '.join(sorted(suffixes))} are read")
    return sorted(found.values(), key=lambda file: natural(file.inside)), others


def _walk(source: Path) -> Iterable[Path]:
    if source.is_file() or is_zarr(source):
        yield source
        return
    seen = set()
    # Links come last, in a fixed order: one to a folder that is read anyway, such as ``latest``, adds nothing.
    pending = [os.fspath(source)]
    for top in pending:
        for folder, folders, files in os.walk(top, onerror=_unreadable):
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in seen:
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            stores = [name for name in folders if is_zarr(Path(folder, name))]
            folders[:] = sorted(name for name in folders if name not in stores and not name.startswith("."))
            pending += [path for name in folders if os.path.islink(path := os.path.join(folder, name))]
            for name in (*files, *stores):
                if not name.startswith(".") and Path(folder, name).exists():
                    yield Path(folder, name)


def _unreadable(error: OSError) -> NoReturn:
    raise TraceError(f"{printable(str(error.filename))}: cannot be read ({error.strerror})") from error


def place_by_pattern(files: Sequence[SourceFile], pattern: str) -> tuple[list[SourceFile], str]:
    """The facts that a template such as ``{step}/{tensor}.npy`` finds in paths; files that do not match are left out.

    ``{step}`` is text without a slash, with the step as its last number; ``{tensor}`` is any text, its slashes become
    dots; ``{rank}`` is a number; ``*`` matches anything without a slash.

    Raises:
        UsageError: the template is not valid, or matches nothing.
    """
    expression = re.compile("".join(_pieces(pattern)))
    placed, texts = [], []
    for file in files:
        match = expression.fullmatch(file.inside)
        if match is None:
            continue
        fields = match.groupdict()
        texts.append(fields.get("step"))
        tensor = (fields.get("tensor") or "").replace("/", ".")
        placed.append(replace(file, tensor=tensor, rank=int(fields.get("rank") or 0)))
    if not placed:
        raise UsageError(
            f"--pattern: '{printable(pattern)}' fits no file; the first file is '{printable(files[0].inside)}'"
        )
    if texts[0] is None:
        return placed, "none"
    numbers = _last_numbers([text or "" for text in texts])
    how = "pattern"
    if all(number is None for number in numbers):
        order = {text: k for k, text in enumerate(sorted({text or "" for text in texts}, key=natural))}
        numbers, how = [order[text or ""] for text in texts], "sorted"
    if None in numbers:
        without = printable(str(placed[numbers.index(None)].path))
        raise UsageError(f"--pattern: no number in the step of {without}, but in that of others")
    return [replace(file, step=step) for file, step in zip(placed, numbers, strict=True)], how


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
            raise UsageError(f"--pattern: '{shown}' is unknown or occurs twice; use {{step}}, {{tensor}}, {{rank}}")
        seen.add(match[1])
        yield _FIELDS[match[1]]
    yield re.escape(pattern[at:])


def _last_numbers(texts: Iterable[str]) -> list[int | None]:
    return [int(numbers[-1]) if (numbers := _NUMBER.findall(text)) else None for text in texts]


def place_by_name(files: Sequence[SourceFile], *, step_axis: bool) -> tuple[list[SourceFile], str]:
    """The facts in names and folders of files, without a template.

    One folder per step directly in the source, else one file per step with the step as the last number in its name.
    Other folders become the start of tensors' names; so does the name of a ``.npy`` file, which holds one tensor.

    Returns:
        The files and the source of the steps: ``folders``, ``names``, ``sorted``, or ``none`` if only the files
        themselves can hold them.

    Raises:
        UsageError: names can be understood in several ways.
    """
    if step_axis:
        return [_named(file, None, file.parts[:-1]) for file in files], "none"
    names = [[_SHARD.sub("", part) for part in file.parts] for file in files]
    tops = _last_numbers(folder[0] if folder else "" for *folder, _ in names)
    ends = _last_numbers("" if file.suffix == SINGLE else name[-1] for file, name in zip(files, names, strict=True))
    if None not in tops:
        if any(end not in (None, top) for top, end in zip(tops, ends, strict=True)):
            raise _ambiguous(files[0], "numbers in folders and in file names")
        return [_named(file, top, file.parts[1:-1]) for file, top in zip(files, tops, strict=True)], "folders"
    if (single := next((file for file in files if file.suffix == SINGLE), None)) is not None:
        raise UsageError(
            f"{printable(single.inside)}: its step is unknown; pass --step-axis if the first axis counts steps, "
            "or --pattern, e.g. '{tensor}-{step}.npy', or '{tensor}.npy' for a single step"
        )
    if None not in ends:
        return [_named(file, end, file.parts[:-1]) for file, end in zip(files, ends, strict=True)], "names"
    if any(end is not None for end in ends):
        raise _ambiguous(files[ends.index(None)], "its name has no number, but others have one")
    if max(Counter(file.parts[:-1] for file in files).values()) < len(files):
        raise _ambiguous(files[0], "files in several folders, and no number in their names")
    return [replace(file, step=k) for k, file in enumerate(files)], "sorted"


def _named(file: SourceFile, step: int | None, folders: tuple[str, ...]) -> SourceFile:
    """A file of a step, with the start of its tensors' names."""
    return replace(file, step=step, tensor=join_name(*folders, file.parts[-1] if file.suffix == SINGLE else ""))


def _ambiguous(file: SourceFile, why: str) -> UsageError:
    shown = printable(file.inside)
    return UsageError(f"{shown}: {why}; give the step's place with --pattern, e.g. '{{step}}/{{tensor}}{file.suffix}'")


#: source of the steps -> description
STEPS_FROM = {
    "folders": "steps from folder names",
    "names": "steps from file names",
    "pattern": "steps from the pattern",
    "sorted": "no numbers in names: steps numbered 0, 1, ... in sorted order",
    "array": "steps from the array 'step'",
    "axis": "steps numbered 0, 1, ... along the first axis",
    "none": "a single step, numbered 0",
}
_STEP_ARRAYS = ("step", "steps")


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import.

    Attributes:
        output: the trace.
        steps: its steps, ascending.
        tensors: names of its tensors, in the order of their appearance.
        files: number of files that were read.
        numbering: sources of the steps, keys of ``STEPS_FROM``.
        left_out: names of arrays that are not gradients: they hold integers or have no step.
        ignored: number of files that were not used.
        nonfinite: number of values that are NaN or infinite.
    """

    output: Path
    steps: tuple[int, ...]
    tensors: tuple[str, ...]
    files: int
    numbering: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    ignored: int = 0
    nonfinite: int = 0


@dataclass(slots=True)
class _Survey:
    """The content of all files: step -> files and the row in each, tensor -> largest size."""

    groups: dict[int, list[tuple[SourceFile, int | None]]] = field(default_factory=lambda: defaultdict(list))
    sizes: dict[str, tuple[int, SourceFile]] = field(default_factory=dict)
    left_out: dict[str, None] = field(default_factory=dict)
    numbering: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class ImportRules:
    """How files are read.

    Attributes:
        pattern: template of file names, e.g. ``{step}/{tensor}.npy``; see :func:`place_by_pattern`.
        step_axis: the first axis of every array counts steps.
        steps: only these, None for all.
        tensors: only tensors with names that match one of these shell patterns.
        kind: ``weight`` or ``neural``.
        readers: suffix -> ``module:class`` that reads such a file, for further formats.
    """

    pattern: str | None = None
    step_axis: bool = False
    steps: Collection[int] | None = None
    tensors: Sequence[str] = ()
    kind: str = "weight"
    readers: Mapping[str, str] = field(default_factory=dict)

    def gradients(self, file: SourceFile, opened: GuardedFile, *, rows: bool) -> Iterator[tuple[str, Entry]]:
        """Names and arrays of the chosen tensors in a file."""
        real = [entry for entry in opened.entries if entry.is_real]
        if rows:
            # If axes have names, these say which arrays have steps.
            named = [entry for entry in real if entry.dimensions[:1] == ("step",)]
            taken = named or [entry for entry in real if entry.shape]
        else:
            taken = real
        for entry in taken:
            # numpy's name for the only array of a file.
            alone = len(real) == 1 and bool(file.tensor) and entry.name == "arr_0"
            name = join_name(file.tensor, "" if alone else entry.name) or file.path.stem
            if not self.tensors or any(fnmatch.fnmatchcase(name, glob) for glob in self.tensors):
                yield name, entry


def import_trace(
    sources: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    rules: ImportRules | None = None,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Imported:
    """Make a trace of ``.npy``, ``.npz``, ``.safetensors`` and HDF5 files and Zarr stores.

    All files are checked before anything is written; then one tensor at a time is in memory. float64 is rounded to
    float32, float16 and bfloat16 become float32, complex values pairs of real ones along a last axis of 2. Arrays of
    integers are not gradients and are left out. Nothing in a file is executed.

    Args:
        sources: files, or folders that are searched for files. How names give steps and tensors:
            ``docs/importing.md``.
        output: the new trace, ``.zarr``, ``.h5`` or ``.hdf5``; it appears when it is complete. An interrupt keeps
            the finished steps.
        rules: how files are read; by default all weight gradients, with steps and tensors from names.
        force: replace a trace that is there.
        progress: called with the number of steps done and of all steps.

    Raises:
        UsageError: names can be understood in several ways, a tensor occurs twice or with two sizes, a wrong argument.
        TraceError: a file is missing or damaged, or the trace cannot be written.
        OutputExistsError: something is at ``output``.
    """
    place = place_for(output)
    rules = rules or ImportRules()
    if rules.kind not in KINDS:
        raise UsageError(f"kind '{printable(rules.kind)}': choose weight or neural")
    check_place(place, force=force)
    readers = {**READERS, **rules.readers}
    found, ignored = find_files([Path(source) for source in sources], readers)
    if rules.pattern is None:
        placed, numbering = place_by_name(found, step_axis=rules.step_axis)
    else:
        placed, numbering = place_by_pattern(found, rules.pattern)
    used = {file.suffix: readers[file.suffix] for file in placed}
    with Guard([file.path for file in placed], used) as guard:
        survey = _survey(guard, placed, numbering, rules)
        provenance = {
            "sources": [os.fspath(source) for source in sources],
            "files": len(placed),
            "steps": sorted(survey.numbering),
            "pattern": rules.pattern,
            "numpy": np.__version__,
        }
        with new_beside(place, "import", f"{output}:") as folder:
            folder.mkdir()
            new = folder / place.name
            try:
                with create_trace(new, attrs={"imported": provenance}) as writer:
                    _write(guard, writer, survey, rules, folder, progress)
            except KeyboardInterrupt:
                # Finished steps are kept, and the trace is marked as interrupted.
                move_in(new, place, force=force)
                raise
            with open_trace(new) as trace:
                infos = trace.tensors
                counts = [trace.statistics(i.name, kind=i.kind, rank=i.rank)["nonfinite"].sum() for i in infos]
            move_in(new, place, force=force)
    return Imported(
        output=Path(output),
        steps=tuple(sorted(survey.groups)),
        tensors=tuple(dict.fromkeys(info.name for info in infos)),
        files=len({file.path for files in survey.groups.values() for file, _ in files}),
        numbering=tuple(sorted(survey.numbering)),
        left_out=tuple(survey.left_out),
        ignored=ignored + len(found) - len(placed),
        nonfinite=int(sum(counts)),
    )


def _survey(guard: Guard, placed: Sequence[SourceFile], numbering: str, rules: ImportRules) -> _Survey:
    """Open every file once: find steps and tensors, and check that they fit together."""
    survey = _Survey()
    shared = _shared_steps(guard, placed, rules)
    names: dict[SourceFile, tuple[str, ...]] = {}
    # Files of different steps usually have the same names; they are held once.
    same: dict[tuple[str, ...], tuple[str, ...]] = {}
    for file in placed:
        with guard.open(file.path, file.suffix) as opened:
            rows, how = _rows_of(file, opened, shared.get(file.rank), numbering, rules)
            taken = list(rules.gradients(file, opened, rows=rows is not None))
            entries = {entry.name for _, entry in taken}
            steps = _step_arrays(opened.entries).values() if how == "array" else ()
            others = [e.name or file.path.stem for e in opened.entries if e.name not in entries and e not in steps]
        if not rules.tensors:
            survey.left_out.update(dict.fromkeys(name for name in others if name not in _STEP_ARRAYS))
        if not taken:
            continue
        survey.numbering.add(how)
        own = tuple(name for name, _ in taken)
        names[file] = same.setdefault(own, own)
        for step, row in (rows if rows is not None else {file.step or 0: None}).items():
            if rules.steps is None or step in rules.steps:
                survey.groups[step].append((file, row))
        for name, entry in taken:
            size = entry.size // (entry.shape[0] or 1) if rows is not None else entry.size
            _note_size(survey.sizes, name, size * (2 if entry.is_complex else 1), file, rules.kind)
    _check_groups(survey, names)
    if not survey.groups:
        asked = " with such names and steps" if rules.tensors or rules.steps is not None else ""
        left = f"; left out: {', '.join(map(printable, list(survey.left_out)[:4]))}" if survey.left_out else ""
        raise UsageError(f"no gradient{asked} in {len(placed)} files (real or complex numbers){left}")
    return survey


def _check_groups(survey: _Survey, names: Mapping[SourceFile, tuple[str, ...]]) -> None:
    for step, files in survey.groups.items():
        if step >= 2**63:
            raise UsageError(f"{printable(str(files[0][0].path))}: step {step} is too large; pass --pattern")
        seen: dict[tuple[int, str], SourceFile] = {}
        for file, _ in files:
            for name in names[file]:
                if (other := seen.get((file.rank, name))) is not None:
                    paths = " and ".join(printable(str(one.path)) for one in (other, file))
                    raise UsageError(
                        f"tensor '{printable(name)}' at step {step} is in {paths}; explain the names with "
                        "--pattern, e.g. '{step}/{tensor}.npz' or 'rank{rank}/{step}.npz'"
                    )
                seen[file.rank, name] = file


def _note_size(sizes: dict[str, tuple[int, SourceFile]], name: str, size: int, file: SourceFile, kind: str) -> None:
    known, other = sizes.setdefault(name, (size, file))
    if kind == "weight" and known != size:
        raise UsageError(
            f"tensor '{printable(name)}': {known} values in {printable(str(other.path))}, {size} in "
            f"{printable(str(file.path))}; only gradients of layer outputs (--kind neural) may change their size"
        )
    sizes[name] = max(known, size), file


def _shared_steps(guard: Guard, placed: Sequence[SourceFile], rules: ImportRules) -> dict[int, NDArray[np.int64]]:
    """Rank -> the steps of its files with a step axis, if a separate file holds them."""
    out = {}
    for file in placed:
        if rules.step_axis and file.suffix == ".npy" and file.tensor in _STEP_ARRAYS:
            with guard.open(file.path, file.suffix) as opened:
                out[file.rank] = _step_numbers(file, opened, opened.entries[0])
    return out


def _step_numbers(file: SourceFile, opened: GuardedFile, entry: Entry) -> NDArray[np.int64]:
    where = f"{printable(str(file.path))}: its array of steps"
    if entry.is_real or len(entry.shape) != 1:
        raise UsageError(f"{where} must be integers with a single axis")
    numbers = opened.read(entry).astype(np.int64)
    if (numbers < 0).any() or np.unique(numbers).size != numbers.size:
        raise UsageError(f"{where} has negative or repeated numbers")
    return numbers


def _step_arrays(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Group -> its array of steps."""
    parts = [(*entry.name.rpartition("."), entry) for entry in entries if len(entry.shape) == 1 and not entry.is_real]
    return {group: entry for group, _, name, entry in parts if name in _STEP_ARRAYS}


def _in_their_group(found: Mapping[str, Entry], gradients: Sequence[Entry]) -> Entry | None:
    """The array of as many steps as all gradients have, in the innermost group that holds all of them."""
    fits = [
        group
        for group, steps in found.items()
        if all(one.name.startswith(f"{group}.") and one.shape[:1] == steps.shape for one in gradients)
    ]
    return found[max(fits, key=len)] if fits else None


def _rows_of(
    file: SourceFile, opened: GuardedFile, shared: NDArray[np.int64] | None, numbering: str, rules: ImportRules
) -> tuple[dict[int, int] | None, str]:
    """Step -> row of a file with steps along the first axis (None for a single step), and the source of the steps."""
    gradients = [entry for _, entry in rules.gradients(file, opened, rows=True)]
    named = any(entry.dimensions[:1] == ("step",) for entry in gradients)
    found = _step_arrays(opened.entries)
    coordinate = found.pop("", None) or _in_their_group(found, gradients)
    if coordinate is None and named and found and shared is None:
        raise UsageError(
            f"{printable(str(file.path))}: its groups have steps of their own ({', '.join(map(printable, found))}); "
            "choose one group with --tensors"
        )
    numbers = shared if coordinate is None else _step_numbers(file, opened, coordinate)
    if not gradients or not (rules.step_axis or coordinate is not None or named):
        return None, numbering
    lengths = {entry.shape[:1] for entry in gradients}
    if len(lengths) > 1 or (numbers is not None and lengths != {numbers.shape}):
        shown = ", ".join(str(length) for (length,) in sorted(lengths))
        stepped = f" for {numbers.size} steps" if numbers is not None else ""
        raise UsageError(
            f"{printable(str(file.path))}: the first axis should count steps, but its lengths are {shown}{stepped}; "
            "choose arrays with --tensors"
        )
    length = gradients[0].shape[0]
    if length > opened.stored:
        raise UsageError(
            f"{printable(str(file.path))}: a first axis of {length} is too long to count steps in {opened.stored} bytes"
        )
    if numbers is None:
        return {k: k for k in range(length)}, "axis"
    return {int(step): row for row, step in enumerate(numbers)}, "array"


def _write(
    guard: Guard,
    writer: TraceWriter,
    survey: _Survey,
    rules: ImportRules,
    folder: Path,
    progress: Callable[[int, int], None] | None,
) -> None:
    with contextlib.ExitStack() as kept:
        opened_rows: dict[Path, GuardedFile] = {}
        for done, step in enumerate(sorted(survey.groups)):
            for file, row in sorted(survey.groups[step], key=lambda found: found[0].rank):
                with contextlib.ExitStack() as once:
                    opened = opened_rows.get(file.path)
                    if opened is None:
                        holder = once if row is None else kept
                        opened = holder.enter_context(guard.open(file.path, file.suffix, folder))
                    if row is not None:
                        opened_rows[file.path] = opened
                    for name, entry in rules.gradients(file, opened, rows=row is not None):
                        values = opened.read(entry, row)
                        if np.iscomplexobj(values):
                            # Capture does the same: a last axis of real and imaginary parts.
                            values = np.stack([values.real, values.imag], axis=-1)
                        capacity = max(survey.sizes[name][0], 1) if rules.kind == "neural" else None
                        about: dict[str, Any] = {"kind": rules.kind, "rank": file.rank, "dtype": entry.dtype}
                        writer.append(step, name, values, capacity=capacity, **about)
            # The time of the original run is unknown.
            writer.commit(step, time=math.nan)
            # Touch the folder, so that it is not taken for the leftover of a killed import.
            os.utime(folder)
            if progress is not None:
                progress(done + 1, len(survey.groups))
