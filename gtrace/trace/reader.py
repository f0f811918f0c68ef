"""Reads a trace from any backend."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import threading
from collections import OrderedDict
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypedDict, Unpack

import numpy as np

from gtrace.errors import TraceError, UsageError, printable, suggest
from gtrace.trace.facts import OptimizerFacts
from gtrace.trace.files import LOCAL
from gtrace.trace.format import EXTRAS, SCALARS, SKETCH, STATISTICS, VALUES, VERSION, StreamKey, TensorSpec
from gtrace.trace.remote import RemoteFiles, is_hdf5, place_of
from gtrace.trace.rows import checksum, checksum_bytes, rechunk, verify
from gtrace.trace.sketches import SketchPlan, SketchRow, sketch_name, unpack_row
from gtrace.trace.source import Stream, TraceSource, refuse
from gtrace.trace.writer import source_of
from gtrace.trace.zarr import GONE, open_zarr
from gtrace.types import Norm, SummarySpec, Tabular

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from os import PathLike
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

    from gtrace.sketch import MomentSketch
    from gtrace.trace.format import Tolerate
    from gtrace.trace.remote import Files


#: A stream of a trace, and a name in it.
_Place: TypeAlias = "tuple[StreamKey, str]"

_OWN_ATTRIBUTES = ("index", "name", "shape", "dtype", "aliases", "module_type", "stage", "sample", SKETCH)


class Where(TypedDict, total=False):
    """Selects streams of a trace; None, or a missing key, selects any."""

    kind: str | None
    optimizer: int | None
    rank: int | None


_WHERE = Where.__annotations__.keys()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Facts about one tensor of a trace.

    Attributes:
        name: the parameter's name. If an earlier optimizer has a tensor of this name too, the optimizer's number
            is in front: ``opt1/fc.weight``.
        shape: shape of the gradient in training.
        dtype: its type in training, such as ``bfloat16``; a trace holds float32.
        size: elements stored per step, fewer than the shape has if it was sampled; for a neural gradient the
            largest possible number in a step, while its shape is that of its first step.
        kind: ``weight`` or ``neural``.
        optimizer: number of the optimizer that steps it.
        rank: number of the process that recorded it.
        aliases: other names of the same parameter (tied weights).
        module_type: type of the module that owns it, None if unknown.
        stage: ``local`` or ``reduced``: before or after gradients of several ranks were averaged.
        sketches: norm and bucket size of the moment sketches that are stored instead of values, empty for values;
            ``size`` is then the gradient's size at one step.
        mantissa: bits of the stored sketches that distinguish bins within an octave; 0 for values.
        merged: number of consecutive recorded steps in one step's sketches; fewer at the end of a run.
        sample: which elements were kept, None for all of them. Of weights: ``kind`` "blocks", ``offsets`` of the
            blocks of ``block`` elements, and ``total`` elements. For neural gradients how elements of a long one are
            chosen; ``n_total`` of a step shows whether it was long.
        attrs: everything else that was recorded about it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    kind: str = "weight"
    optimizer: int = 0
    rank: int = 0
    aliases: tuple[str, ...] = ()
    module_type: str | None = None
    stage: str = "local"
    sample: Mapping[str, Any] | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)
    sketches: tuple[SummarySpec, ...] = ()
    merged: int = 1
    mantissa: int = 0

    @property
    def stream(self) -> StreamKey:
        """The sequence of steps that it belongs to."""
        return StreamKey(self.rank, self.kind, self.optimizer)

    @classmethod
    def of(cls, key: StreamKey, spec: TensorSpec, name: str) -> TensorInfo:
        """The public view of a stored tensor, under a name that is unique among optimizers."""
        attrs = dict(spec.attrs)
        plan = SketchPlan.read(attrs[SKETCH]) if spec.sketched else None
        return cls(
            name=name,
            shape=tuple(attrs["shape"]),
            dtype=attrs.get("dtype", "float32"),
            size=spec.size if plan is None else math.prod(attrs["shape"]),
            kind=key.kind,
            optimizer=key.optimizer,
            rank=key.rank,
            aliases=tuple(attrs.get("aliases", ())),
            module_type=attrs.get("module_type"),
            stage=attrs.get("stage", "local"),
            sample=attrs.get("sample"),
            attrs={key: value for key, value in attrs.items() if key not in _OWN_ATTRIBUTES},
            sketches=() if plan is None else plan.specs,
            merged=1 if plan is None else plan.merged,
            mantissa=0 if plan is None else plan.mantissa,
        )


def shown_names(stored: Iterable[_Place]) -> dict[_Place, str]:
    """Names that are unique among optimizers for tensors of the same kind.

    The first optimizer with a name, in any process, keeps the stored name. Others get their number in front.

    >>> from gtrace.trace.format import StreamKey
    >>> shown_names([(StreamKey(0, "weight", number), "fc.weight") for number in range(3)]).values()
    dict_values(['fc.weight', 'opt1/fc.weight', 'opt2/fc.weight'])
    """
    places = list(stored)
    taken = {(key.kind, name) for key, name in places}
    first: set[tuple[str, str]] = set()
    names: dict[tuple[str, int, str], str] = {}
    for kind, optimizer, name in sorted({(key.kind, key.optimizer, name) for key, name in places}):
        shown = name
        if (kind, name) in first:
            while (kind, shown) in taken:
                shown = f"opt{optimizer}/{shown}"
            taken.add((kind, shown))
        first.add((kind, name))
        names[kind, optimizer, name] = shown
    return {(key, name): names[key.kind, key.optimizer, name] for key, name in places}


#: Bytes of decoded chunks that a trace keeps, and of the largest one among them: a sweep compares three steps for the
#: noise of their gradients, and reads each of them for its rows.
_CACHE_BYTES = 48 * 1024 * 1024
LARGEST_KEPT = _CACHE_BYTES // 3


class _Decoded(NamedTuple):
    """Rows of one chunk: the number of the first, (rows, elements), and those whose checksum was verified."""

    first: int
    rows: NDArray[np.float32]
    verified: set[int]


class Trace(Tabular, AbstractContextManager["Trace"]):
    """A trace opened for reading: the steps that were committed when it was opened.

    Safe to use from several threads. If a name occurs in several places (kinds of gradient, optimizers,
    ranks), the keywords ``kind``, ``optimizer`` and ``rank`` select one; without them the first place
    counts, in the order of ``tensors``: lowest rank, weight before neural gradients, lowest optimizer. In ``tensors``
    names of several optimizers are unique, with ``opt1/`` in front for optimizer 1; that name can be used for
    reading, too.

    Attributes:
        path: the trace's path or address.
        location: the absolute path or address at which it can be opened again, None if it cannot.
        tensors: its tensors, in that order and then in the order in which they first appeared.
    """

    def __init__(self, source: TraceSource, location: str | None = None) -> None:
        self._source = source
        self.location = location
        self._streams = {stream.key: stream for stream in source.streams}
        self._specs: dict[tuple[StreamKey, str], TensorSpec] = {
            (stream.key, spec.name): spec for stream in source.streams for spec in stream.tensors
        }
        self.path = source.path
        names = shown_names(self._specs)
        self.tensors = tuple(TensorInfo.of(key, spec, names[key, name]) for (key, name), spec in self._specs.items())
        # Both names of a tensor find it.
        self._specs |= {(key, names[key, name]): spec for (key, name), spec in self._specs.items()}
        self._found: dict[tuple[str, str | None, int | None, int | None], tuple[Stream, TensorSpec]] = {}
        self._cache: OrderedDict[tuple[StreamKey, int, int], _Decoded] = OrderedDict()
        #: gradients read in pieces that match their checksums
        self._verified: set[tuple[StreamKey, int, int]] = set()
        self._cached = 0
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def from_arrays(
        cls,
        tensors: Mapping[str, ArrayLike | Mapping[int, ArrayLike]],
        *,
        scalars: Mapping[int, Mapping[str, Any]] | None = None,
        attrs: Mapping[str, Any] | None = None,
        kind: str = "weight",
    ) -> Trace:
        """A trace in memory, with all features of one on disk.

        Args:
            tensors: name -> array (one step, numbered 0) or {step: array}; real numbers, copied to float32.
            scalars: step -> the scalars of ``TraceWriter.commit``, such as ``{"loss": 0.5}``.
            attrs: attributes of the trace.
            kind: ``weight`` or ``neural``.

        Raises:
            UsageError: an array is not real, or the arrays of one weight tensor differ in size.

        >>> trace = Trace.from_arrays({"w": {0: [1.0, -2.0], 5: [0.0, 3.0]}})
        >>> trace.steps("w").tolist(), trace.read("w", 5).tolist()
        ([0, 5], [0.0, 3.0])
        """
        return cls(source_of(tensors, scalars or {}, attrs or {}, kind))

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Facts about the run: model, argv, seed, versions and others, if they were recorded."""
        return self._source.attrs

    def optimizer_facts(self, optimizer: int = 0) -> OptimizerFacts:
        """How an optimizer updates weights, for how long and with how many samples; unknown facts are None.

        Args:
            optimizer: its number.
        """
        return OptimizerFacts.of(self.attrs, optimizer)

    @property
    def status(self) -> Literal["complete", "interrupted"]:
        """``complete`` after a normal end; ``interrupted`` if the run was cut short, or is not over yet."""
        return "complete" if self.attrs.get("status") == "complete" else "interrupted"

    @property
    def streams(self) -> tuple[StreamKey, ...]:
        """Its sequences of steps, one per rank, kind and optimizer."""
        return tuple(self._streams)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that affects numbers computed from the gradients; reads no gradient.

        It covers names, shapes, types, sampling, steps, presence and the checksum of every gradient, but not paths,
        times, losses and the backend. So a repeated run with the same gradients has the same
        fingerprint.
        """
        return self.fingerprint_of(self.lengths)

    @property
    def lengths(self) -> dict[str, int]:
        """Rank, kind and optimizer of a stream, in one text -> number of its steps."""
        return {" ".join(map(str, key)): int(stream.steps.size) for key, stream in self._streams.items()}

    def fingerprint_of(self, lengths: Mapping[str, int]) -> str:
        """The :attr:`fingerprint` that this trace had when it was shorter.

        Args:
            lengths: its :attr:`lengths` then.
        """
        digest = hashlib.blake2b(f"gtrace trace {VERSION}\n".encode(), digest_size=16)
        for key, stream in self._streams.items():
            steps = stream.steps[: lengths.get(" ".join(map(str, key)), 0)]
            if not steps.size:
                continue
            digest.update(json.dumps([*key, steps.tolist()]).encode())
            present, crc = (stream.statistic(name)[: steps.size] for name in ("present", "crc32c"))
            for spec in stream.tensors:
                described = [
                    spec.name,
                    spec.size,
                    *(spec.attrs.get(name) for name in ("shape", "dtype", "stage", "sample", SKETCH)),
                ]
                digest.update(json.dumps(described, sort_keys=True).encode())
                digest.update(present[:, spec.index].tobytes())
                there = present[:, spec.index] != 0
                digest.update(np.where(there, crc[:, spec.index], 0).astype("<u4").tobytes())
                if key.kind == "neural":
                    found = stream.lengths(spec, np.flatnonzero(there))
                    digest.update(b"".join(found[which].astype("<i8").tobytes() for which in sorted(found)))
        return digest.hexdigest()

    def stored_name(self, info: TensorInfo) -> str:
        """The name of one of ``tensors`` among those of its own optimizer, which other optimizers may have, too."""
        return self._specs[info.stream, info.name].name

    def steps(self, name: str, **where: Unpack[Where]) -> NDArray[np.int64]:
        """Committed steps at which the tensor is present, ascending.

        Raises:
            UsageError: there is no such tensor.
        """
        stream, spec = self._find(name, where)
        there: NDArray[np.int64] = stream.steps[stream.statistic("present")[:, spec.index] != 0]
        return there

    def read(self, name: str, step: int, *, copy: bool = True, **where: Unpack[Where]) -> NDArray[np.float32]:
        """The gradient as a 1-D C-contiguous float32 array of ``size`` elements, a neural one of ``n_valid``.

        Reading the steps of one tensor in order decodes each chunk once, and chunks that were read last are kept.

        Args:
            name: the tensor.
            step: the step.
            copy: a new array; without, it may be what is kept, and must not be written.
            where: the stream, if several have the tensor.

        Raises:
            UsageError: there is no such tensor, it is absent at that step, or the trace is closed.
            TraceError: the stored data are damaged.
        """
        stream, spec, row, about = self._locate(name, step, where)
        if spec.sketched:
            kept = ", ".join(sketch_name(own) for own in SketchPlan.read(spec.attrs[SKETCH]).specs)
            raise UsageError(
                f"{about}: the trace holds sketches of it ({kept}) and no values; capture without --sketch"
            )
        chunk = self._chunk(stream, spec, row)
        valid = stream.lengths(spec, slice(row, row + 1))["n_valid"][0] if stream.key.kind == "neural" else spec.size
        # A row that is not kept was decoded for this call and may be as large as memory: do not copy it again.
        # Kernels are compiled for arrays that can be written.
        alone = chunk.rows.nbytes > LARGEST_KEPT and len(chunk.rows) == 1
        copied = None if chunk.rows.flags.writeable and (alone or not copy) else True
        values = np.array(chunk.rows[row - chunk.first][:valid], np.float32, order="C", copy=copied)
        if row not in chunk.verified:
            verify(checksum(values), stream.statistic("crc32c")[row, spec.index], about)
            chunk.verified.add(row)
        return values

    def read_chunks(self, name: str, step: int, chunk: int, **where: Unpack[Where]) -> Iterator[NDArray[np.float32]]:
        """The values of :meth:`read` in pieces of ``chunk`` elements, the last one shorter; never all in memory.

        Every stored chunk is decoded, and its checksum verified, once. The gradient's checksum is verified along
        the way when it is read first: if it does not match, the last piece is not yielded.

        Raises:
            UsageError: as in :meth:`read`, or a chunk below 1.
            TraceError: the stored data are damaged; some pieces may have been yielded.
        """
        if chunk < 1:
            raise UsageError(f"chunk: cannot be {chunk} elements; give at least 1")
        stream, spec, row, about = self._locate(name, step, where)
        if spec.sketched or spec.parts < 2:
            yield from rechunk([self.read(name, step, **where)], chunk)
            return
        left = int(stream.lengths(spec, slice(row, row + 1))["n_valid"][0])
        wanted, crc, place = int(stream.statistic("crc32c")[row, spec.index]), 0, (stream.key, spec.index, row)
        for piece in rechunk(stream.read_pieces(spec, row), chunk):
            piece = piece[:left]
            left -= piece.size
            if place not in self._verified:
                crc = checksum_bytes(np.ascontiguousarray(piece, VALUES).view(np.uint8), crc)
                if left == 0:
                    verify(crc, wanted, about)
                    self._verified.add(place)
            yield piece
            if left == 0:
                return

    def sketch(
        self, name: str, step: int, norm: Norm = "l2", bucket_size: int | None = None, **where: Unpack[Where]
    ) -> MomentSketch:
        """The moment sketch of one gradient: the stored one if the trace holds sketches, else made from the values.

        Raises:
            UsageError: as in :meth:`read`, or this sketch is not stored.
            TraceError: the stored data are damaged.
        """
        spec = SummarySpec(norm, bucket_size)
        if self._find(name, where)[1].sketched:
            return self.sketch_row(name, step, [spec], **where).sketches[0]
        from gtrace.sketch import MomentSketch

        return MomentSketch.from_spec(self.read(name, step, **where), spec)

    def sketch_row(self, name: str, step: int, specs: Sequence[SummarySpec], **where: Unpack[Where]) -> SketchRow:
        """Stored sketches of a tensor at a step, with the numbers about them.

        Args:
            name, step, where: see :meth:`read`.
            specs: which of the tensor's ``sketches``; empty for the numbers alone.

        Raises:
            UsageError: as in :meth:`read`, or one of the sketches is not stored.
            TraceError: the stored data are damaged.
        """
        stream, spec, row, about = self._locate(name, step, where)
        there = SketchPlan.read(spec.attrs[SKETCH]).specs if spec.sketched else ()
        missing = [sketch_name(wanted) for wanted in specs if wanted not in there]
        if missing or not spec.sketched:
            kept = ", ".join(map(sketch_name, there)) or "values"
            raise UsageError(f"{about}: sketch {', '.join(missing)} is not stored, only {kept}; choose one of these")
        data = stream.read_rows(spec, row)[1][0]
        verify(checksum_bytes(data), stream.statistic("crc32c")[row, spec.index], about)
        size = int(stream.lengths(spec, slice(row, row + 1))["n_valid"][0])
        norm1, sketches = unpack_row(data, spec.attrs, specs, size, about)
        norm2, absmax, zeros, nonfinite = (
            stream.statistic(name)[row, spec.index].item() for name in ("norm2", "absmax", "zeros", "nonfinite")
        )
        return SketchRow(sketches, norm1, norm2, absmax, zeros, nonfinite, size)

    def scalars(self, **where: Unpack[Where]) -> dict[str, NDArray[Any]]:
        """Numbers about the steps, arrays of one length; no gradient is read.

        Returns:
            ``step`` (int64) and, as float64 with NaN for unknown values, ``loss``, ``lr``,
            ``grad_scale``, ``found_inf``, ``clip_norm``, ``micro_batches`` and ``time`` (seconds since
            1970).

        Raises:
            UsageError: the keywords select no stream.
        """
        if not self._streams and not any(value is not None for value in where.values()):
            return {"step": np.empty(0, np.int64), **{name: np.empty(0) for name in SCALARS}}
        stream = self._select(where)[0]
        return {"step": stream.steps.copy(), **{name: values.copy() for name, values in stream.scalars.items()}}

    def statistics(self, name: str, **where: Unpack[Where]) -> dict[str, NDArray[Any]]:
        """Numbers about one tensor at the steps at which it is present, arrays of one length; reads no gradient.

        Returns:
            ``step`` (int64), ``norm2`` (sum of squares of the finite values) and ``absmax`` (their largest
            magnitude) as float64, ``zeros`` and ``nonfinite`` (counts, int64), ``crc32c`` (of the float32
            bytes, uint32), ``n_valid`` and ``n_total`` (stored elements, original elements,
            int64). The others are about the stored elements. If the capture recorded them, also as
            float64 with NaN for unknown values: ``whole_norm1``, ``whole_norm2``, ``whole_absmax`` and
            ``whole_nonfinite`` (of the whole gradient, if a sample of its blocks is stored), ``second_moment``
            (sum of Adam's running means of squared gradients before the step), ``replicas``,
            ``replicas_norm2`` and ``replicas_sum_norm2`` (micro-batches that were accumulated, the sum of their
            squared norms, the squared norm of their sum).

        Raises:
            UsageError: there is no such tensor.
            TraceError: the stored lengths are impossible.
        """
        stream, spec = self._find(name, where)
        there = stream.statistic("present")[:, spec.index] != 0
        names = [name for name in (*STATISTICS, *filter(stream.has, EXTRAS)) if name != "present"]
        found = {name: stream.statistic(name)[there, spec.index] for name in names}
        return {"step": stream.steps[there], **found, **stream.lengths(spec, there)}

    def frame_columns(self) -> dict[str, NDArray[Any]]:
        """A row for each tensor and step, from the table of contents: where, loss, learning rate, elements, norm."""
        found: dict[str, list[NDArray[Any]]] = {}
        for info in self.tensors:
            where: Where = {"kind": info.kind, "optimizer": info.optimizer, "rank": info.rank}
            numbers, scalars = self.statistics(info.name, **where), self.scalars(**where)
            rows = numbers["step"].size
            place = np.searchsorted(scalars["step"], numbers["step"])
            columns = {name: np.full(rows, value, object) for name, value in {"tensor": info.name, **where}.items()}
            columns |= {"step": numbers["step"], "loss": scalars["loss"][place], "lr": scalars["lr"][place]}
            columns |= {"elements": numbers["n_total"], "norm": np.sqrt(numbers["norm2"])}
            columns |= {name: numbers[name] for name in ("absmax", "zeros", "nonfinite")}
            for name, values in columns.items():
                found.setdefault(name, []).append(values)
        return {name: np.concatenate(values) for name, values in found.items()}

    def close(self) -> None:
        """Close the files; the trace can no longer be read."""
        self._closed = True
        with self._lock:
            self._cache.clear()
            self._cached = 0
        self._source.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Trace {self.path}: {len(self.tensors)} tensors, {self.status}>"

    def _select(self, where: Where) -> list[Stream]:
        asked = {what: value for what, value in where.items() if value is not None}
        if unknown := asked.keys() - StreamKey._fields:
            raise TypeError(f"unexpected keyword '{min(unknown)}'")
        chosen = [
            stream
            for key, stream in self._streams.items()
            if all(getattr(key, what) == value for what, value in asked.items())
        ]
        if not chosen:
            there = [f"{key.kind} gradients of optimizer {key.optimizer} on rank {key.rank}" for key in self._streams]
            wanted = ", ".join(f"{what} {asked[what]}" for what in ("kind", "optimizer", "rank") if what in asked)
            raise UsageError(f"{self.path}: holds no {wanted or 'steps'}; it holds {'; '.join(there[:4]) or 'no step'}")
        return chosen

    def _find(self, name: str, where: Where) -> tuple[Stream, TensorSpec]:
        place = (name, where.get("kind"), where.get("optimizer"), where.get("rank"))
        if place in self._found and where.keys() <= _WHERE:
            return self._found[place]
        chosen = self._select(where)
        for stream in chosen:
            spec = self._specs.get((stream.key, name))
            if spec is not None:
                self._found[place] = stream, spec
                return stream, spec
        known = [printable(known) for stream in chosen for key, known in self._specs if key == stream.key]
        shown = printable(name)
        raise UsageError(f"{self.path}: no tensor '{shown}'; {suggest(shown, known)}")

    def _locate(self, name: str, step: int, where: Where) -> tuple[Stream, TensorSpec, int, str]:
        """The place of a gradient: stream, tensor and row, and words for messages."""
        if self._closed:
            raise UsageError(f"{self.path}: the trace is closed; open it again")
        stream, spec = self._find(name, where)
        about = f"{self.path}: tensor '{printable(name)}'"
        row = int(np.searchsorted(stream.steps, step))
        if row == stream.steps.size or stream.steps[row] != step or not stream.statistic("present")[row, spec.index]:
            known = stream.steps[stream.statistic("present")[:, spec.index] != 0]
            near = sorted(known.tolist(), key=lambda other: abs(other - step))[:2]
            raise UsageError(f"{about} has no gradient at step {step}; did you mean {' or '.join(map(str, near))}?")
        return stream, spec, row, f"{about}, step {step}"

    def _chunk(self, stream: Stream, spec: TensorSpec, row: int) -> _Decoded:
        place = (stream.key, spec.index, row // spec.chunk_rows)
        with self._lock:
            found = self._cache.get(place)
            if found is not None and found.first <= row < found.first + len(found.rows):
                self._cache.move_to_end(place)
                return found
        # Decoded without the lock, so that several threads can read several tensors.
        found = _Decoded(*stream.read_rows(spec, row), set())
        # What is read-only is in memory anyway.
        if found.rows.nbytes <= LARGEST_KEPT and found.rows.flags.writeable:
            with self._lock:
                old = self._cache.pop(place, None)
                self._cached += found.rows.nbytes - (old.rows.nbytes if old else 0)
                self._cache[place] = found
                while self._cached > _CACHE_BYTES:
                    self._cached -= self._cache.popitem(last=False)[1].rows.nbytes
        return found


def open_trace(path: str | PathLike[str]) -> Trace:
    """Open a trace for reading: a folder ``.zarr`` or a file ``.h5`` or ``.hdf5``.

    An address such as ``s3://bucket/run.zarr`` is read through fsspec, which must be installed together with its
    package for this kind of address (s3fs, gcsfs, aiohttp).

    Nothing in it is executed. A trace whose writer is running or was killed opens with the
    committed steps.

    Raises:
        UsageError: an address, and the package that reads it is not installed.
        TraceError: it is missing, not a trace, damaged, or from a newer version.
    """
    place = place_of(path)
    return Trace(open_source(place), place if isinstance(place, str) else os.path.abspath(place))


def open_source(place: Path | str, tolerate: Tolerate = refuse) -> TraceSource:
    """The source of the trace at a place, see :func:`gtrace.trace.remote.place_of`.

    ``tolerate`` is called with damage that leaves other parts readable; by default it raises.

    Raises:
        UsageError: the package that reads such addresses is not installed.
        TraceError: as in :func:`gtrace.open_trace`, unless it is tolerated.
    """
    files: Files = LOCAL
    stream = None
    if isinstance(place, str):
        files = remote = RemoteFiles(place)
        folder = not is_hdf5(place)
        if not folder:
            stream = remote.stream(place)
        elif not remote.read_root(place):
            raise TraceError(f"{place}: no such trace; a Zarr trace has a zarr.json there")
    else:
        try:
            kind = place.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            raise TraceError(f"{place}: no such trace; `gtrace capture SCRIPT` makes one") from None
        except OSError as error:
            raise TraceError(f"{place}: cannot be read ({error.strerror})") from None
        folder = stat.S_ISDIR(kind)
        if not folder and not stat.S_ISREG(kind):
            raise TraceError(f"{place}: is neither a file nor a folder, so not a trace")
    if folder:
        try:
            return open_zarr(place, tolerate, files)
        finally:
            # Whatever was found, or not found any more, in its place.
            if not isinstance(place, str) and not place.exists():
                raise TraceError(f"{place}: {GONE}")
    # h5py takes long to load, and many traces do not need it.
    from gtrace.trace.hdf5 import open_hdf5

    return open_hdf5(place, tolerate, stream)
