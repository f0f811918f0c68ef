"""Turn methods and ranges into codecs, and a trace and codecs into rows."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from gtrace.codecs import (
    Codec,
    codec,
    codec_class,
    codec_names,
    expecting,
    level_grid,
    parameter_fields,
    parse_spec,
    split_specs,
)
from gtrace.codecs.assignment import CodecTable, Coding, HasTable, TableLike, coding_of
from gtrace.codecs.plugins import package_versions
from gtrace.errors import UsageError, keep_inputs, printable, suggest
from gtrace.runlog import versions
from gtrace.sweep.engine import Workers, run_jobs
from gtrace.sweep.fits import Allocation
from gtrace.sweep.gradients import Gradients, Kind
from gtrace.sweep.jobs import LEFT_OUT, Block, Job, Nonfinite, Refit, Settings, any_burst, gaps_line, windows_of
from gtrace.sweep.limits import CHUNK, MOST, Limits
from gtrace.sweep.noise_cost import CostJobs
from gtrace.sweep.replay import has_optimum
from gtrace.sweep.rows import identity
from gtrace.sweep.schema import EXPECTATION, OF_CODEC
from gtrace.sweep.store import ResultStore, SweepResult
from gtrace.trace import TensorInfo, Trace, open_trace
from gtrace.trace.choose import part_of
from gtrace.trace.rows import BlockSample
from gtrace.types import WHOLE_MODEL, Scope

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Mapping, Sequence

    from distributed import Client

    from gtrace.sweep.jobs import Among, Name

_Key = tuple[str, int, str, int]
#: the rows in a store: (tensor, step, codec, draw) -> steps in the window that ends there; 0 for a row without numbers
Stored = dict[_Key, "int | None"]
#: The largest tensors keep the data for figures of levels: reports draw five of them, and some may have no levels.
_PICTURED = 8
_FLOAT_BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


def expand(
    methods: str | Iterable[str],
    ranges: Mapping[str, Sequence[Any]] | None = None,
    *,
    prefix: str = "",
    asked: Mapping[str, str] | None = None,
) -> list[Codec]:
    """Every codec that the methods and ranges name, each once, in order.

    Args:
        methods: specs such as ``qsgd,nuqsgd:p=0.3``, as text or a list; ``all`` means every codec.
        ranges: parameter -> values. A codec takes those that it has and that its spec does not fix; one
            without the parameter runs once. With ``amount`` a codec takes no ``bits``, which set the same thing.
        prefix: put before every spec, such as ``ef:``.
        asked: the ranges that some codec must take -> their names in errors; by default all of them.

    ``fp:all`` means every format of the given bits.

    Raises:
        UsageError: an unknown codec or parameter, a value that a codec refuses, or a range that no codec takes.

    >>> [str(c) for c in expand("qsgd,terngrad", {"bits": [2, 3]})]
    ['qsgd:bits=2', 'qsgd:bits=3', 'terngrad']
    """
    ranges = {name: values for name, values in (ranges or {}).items() if values}
    given = split_specs(methods) if isinstance(methods, str) else methods
    specs = [name for spec in given for name in (codec_names() if spec == "all" else (spec,))]
    taken = {name for spec in specs for name in _open(spec, ranges)}
    for name, called in (dict(zip(ranges, ranges, strict=True)) if asked is None else asked).items():
        if name not in taken:
            raise UsageError(f"{called}: {_why_not(specs, name)}")
    found: dict[str, Codec] = {}
    for spec in chain.from_iterable(_spelled(spec, ranges) for spec in specs):
        keys = _open(spec, ranges)
        for values in product(*(ranges[key] for key in keys)):
            made = codec(prefix + spec, **dict(zip(keys, values, strict=True)))
            found[str(made)] = made
    return list(found.values())


def _open(spec: str, ranges: Mapping[str, Any]) -> list[str]:
    """The ranges that a spec takes."""
    parsed = parse_spec(spec)
    kind = codec_class(parsed.name)
    # natural has a norm, but only one.
    known = {item.name for item in parameter_fields(kind) if len(item.metadata["choices"]) != 1}
    # A named format has its own bits.
    named = parsed.given.get(kind.word, "auto") not in ("auto", "all")
    if named or ("amount" in known and ("amount" in parsed.given or "amount" in ranges)):
        known.discard("bits")
    return [name for name in ranges if name in known and name not in parsed.given]


def _why_not(specs: Sequence[str], name: str) -> str:
    """Why none of the specs takes the range of a parameter."""
    fixed = next((spec for spec in specs if name in parse_spec(spec).given), None)
    if fixed is not None:
        return f"{fixed} has {name} of its own; leave one of the two out"
    if len(specs) != 1:
        return f"none of these codecs has {name} to choose; leave it out"
    about = f"gtrace codecs {parse_spec(specs[0]).name} shows what it has"
    return f"{specs[0]} has no {name} to choose; leave it out ({about})"


def _spelled(spec: str, ranges: Mapping[str, Sequence[Any]]) -> Sequence[str]:
    """The specs that a spec with the word ``all`` means; any other spec alone."""
    parsed = parse_spec(spec)
    word = codec_class(parsed.name).word
    if not word or parsed.given.get(word) != "all":
        return (spec,)
    bits = ranges.get("bits", ())
    if "bits" in parsed.given:
        bits = (codec(parsed.name, bits=parsed.given["bits"]).parameters["bits"],)
    rest = {key: value for key, value in parsed.given.items() if key not in (word, "bits")}
    head = spec[: spec.rindex(f"{parsed.name}:")] + parsed.name
    words = codec_class(parsed.name).words(tuple(bits))
    return [f"{head}:" + ",".join([name, *(f"{key}={value}" for key, value in rest.items())]) for name in words]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """How a sweep runs: the keyword arguments of :func:`run_sweep`.

    Attributes:
        steps: only these steps; all by default.
        tensors: only tensors whose name matches one of these globs.
        kind: gradients of weights, or neural ones (of layer outputs); by default those of weights if there are any.
            The provenance names what was left out under ``left_out`` (kind -> number of tensors).
        draws: keyed encodings per (tensor, step, codec); 0 for expectations alone.
        seed: seed of the encodings.
        refit: the steps that fit a codec, see :class:`~gtrace.sweep.jobs.Settings`.
        nonfinite: what to do with a tensor that has NaN or infinite gradients.
        optimal: if a codec with fitted levels takes part, compare every level codec with the best levels of the
            same number.
        noise: measure what noise costs over a horizon, where the trace has samples of the gradient's noise; see
            :mod:`gtrace.sweep.noise_cost`.
        leave_out: if no two captured steps are consecutive, leave out stateful codecs, with a warning
            and with their specs in the provenance under ``left_out_codecs``; otherwise they are refused.
        chunk: elements of a tensor that are read and summarized at a time; see :mod:`gtrace.sweep.limits` for what
            happens to larger tensors. Rows do not depend on it beyond rounding.
        jobs: worker processes, or threads if this process has other threads or the trace is not a folder on Linux; the
            number of processors by default. Rows do not depend on it.
        scheduler: run on a Dask cluster instead: its address, its scheduler file, ``local:N``, or a
            client; see :func:`gtrace.sweep.cluster.connected`. Rows do not depend on it.
        output: SQLite file to write or resume; without one nothing is kept on disk.
        force: start over: replace an ``output`` that is there, whatever it holds.
        command: the command line, for the provenance.
        progress: called with (steps of tensors done, all of them).
        work: called with (values done, all of them): elements times codecs, and a little for each tensor.

    Raises:
        UsageError: a number that is too small, an unknown word, or both ``jobs`` and ``scheduler``.
    """

    steps: Sequence[int] | None = None
    tensors: Sequence[str] | None = None
    kind: Kind | None = None
    draws: int = 1
    seed: int = 0
    refit: Refit | Sequence[int] = "pooled"
    nonfinite: Nonfinite = "skip"
    optimal: bool = True
    noise: bool = True
    leave_out: bool = False
    chunk: int = CHUNK
    jobs: int | None = None
    scheduler: str | os.PathLike[str] | Client | None = None
    output: str | os.PathLike[str] | None = None
    force: bool = False
    command: Sequence[str] = ()
    progress: Callable[[int, int], None] | None = None
    work: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        if self.draws < 0:
            raise UsageError(f"sweep: draws cannot be {self.draws}; 0 means expectations alone")
        if not 1 <= self.chunk <= MOST:
            raise UsageError(
                f"sweep: chunk cannot be {self.chunk} elements; give a power of two such as {CHUNK}, up to {MOST}"
            )
        if self.jobs is not None and self.jobs < 1:
            raise UsageError(f"sweep: jobs cannot be {self.jobs}; give at least 1")
        for name, words in (("refit", get_args(Refit)), ("nonfinite", get_args(Nonfinite))):
            value = getattr(self, name)
            if isinstance(value, str) and value not in words:
                raise UsageError(f"sweep: {name} '{printable(value)}' is unknown; choose {', '.join(words)}")
        if self.scheduler is not None and self.jobs is not None:
            raise UsageError("--jobs: sets workers on this machine and cannot go with --scheduler; leave it out")


class _Sweep:
    """The codecs of a sweep matched with the tensors of a trace, before anything is computed.

    ``able`` are the codecs that can run, and ``alone`` the stateful ones without two consecutive steps. ``asked`` has
    those of each tensor and of the whole model, ``codecs`` all of these once. :meth:`jobs` notes in ``limits`` what
    it leaves out.
    """

    def __init__(self, trace: Trace, given: Iterable[Coding], options: SweepOptions) -> None:
        self._trace, self._options = trace, options
        self.gradients = Gradients(trace, options.tensors, options.kind, options.chunk)
        self._steps = self.gradients.choose(options.steps)
        self.able, self.alone = _split_by_memory(self.gradients, self._steps, list(given), options.draws)
        if self.alone and not (options.leave_out and self.able):
            raise UsageError(f"sweep: {gaps_line(self.alone)}")
        self.asked = _asked(self.gradients, self.able)
        self.codecs = list(dict.fromkeys(item.codec for items in self.asked.values() for item in items))
        self.settings = Settings(
            options.seed,
            options.refit if isinstance(options.refit, str) else tuple(sorted(options.refit)),
            options.nonfinite,
            options.optimal and any(grid.adaptive for grid in map(level_grid, self.codecs) if grid is not None),
        )
        self.limits = Limits(self.gradients.infos, self.codecs, options.draws, options.chunk)
        self.limits.check()

    def fingerprint(self, trace: str | None = None) -> str:
        """The sweep's identity. Codecs, steps and draws only extend a sweep; anything that changes rows changes it.

        Args:
            trace: fingerprint of the trace at another length; None for the one that it has.
        """
        settings, options = self.settings, self._options
        whole = any(scope_of(item) == "model" or item.allocates for item in self.codecs)
        tensors = list(options.tensors or ()) if whole else None
        about = [trace or self._trace.fingerprint, settings.seed, settings.refit, settings.nonfinite, tensors]
        about += [] if self.gradients.kind == "weight" else [self.gradients.kind]
        return hashlib.blake2b(json.dumps(about).encode(), digest_size=16).hexdigest()

    def earlier(self, provenance: Mapping[str, Any]) -> str:
        """The identity of a sweep with this provenance if it was made when the trace was shorter."""
        found = provenance.get("trace_steps")
        lengths = {key: n for key, n in found.items() if isinstance(n, int)} if isinstance(found, dict) else {}
        return self.fingerprint(self._trace.fingerprint_of(lengths))

    def provenance(self, trace: Trace | str | os.PathLike[str]) -> dict[str, Any]:
        """The provenance in the result file."""
        gradients = self.gradients
        return {
            "command": list(self._options.command),
            "trace": str(trace) if isinstance(trace, (str, os.PathLike)) else self._trace.fingerprint,
            "trace_fingerprint": self._trace.fingerprint,
            "trace_steps": self._trace.lengths,
            "trace_attrs": self._trace.attrs,
            "kind": gradients.kind,
            "stages": sorted({info.stage for info in gradients.infos}),
            "noise": gradients.yardstick.describe(),
            "learning": _learning(self._trace),
            "tensors": gradients.elements,
            "left_out": gradients.left_out,
            "left_out_codecs": [str(item) for item in self.alone],
            "seed": self.settings.seed,
            "refit": self.settings.refit,
            "nonfinite": self.settings.nonfinite,
            "versions": versions() | package_versions(self.codecs),
        }

    def cautions(self) -> list[str]:
        """Warnings on how far the errors can be trusted, a line each."""
        found = []
        if not self._options.draws and (silent := [str(item) for item in self.codecs if not expecting(item)]):
            found.append(f"without draws nothing is measured of {', '.join(silent)}: no closed form")
        world = self._trace.attrs.get("world_size")
        swept = {(info.kind, info.name) for info in self.gradients.infos}
        parts = {(one.name, part_of(one)) for one in self._trace.tensors if (one.kind, one.name) in swept}
        most = max(Counter(name for name, part in parts if part).values(), default=0)
        if most > 1:
            found.append(f"rows are about 1 of {most} parts of each sharded tensor; the others are on other ranks")
        weights = self.gradients.kind == "weight" and isinstance(world, int) and world > 1
        if weights and any(info.stage == "reduced" for info in self.gradients.infos):
            averages = f"gradients are averages over {world} processes"
            noisier = "those that each of them would send have more noise, so errors on the wire will be larger"
            found.append(f"{averages}; {noisier} (capture --local records them)")
        optimizers = {info.optimizer for info in self.gradients.infos}
        if len(optimizers) > 1 and any(scope_of(item) == "model" for item in self.codecs):
            several = f"the gradients of {len(optimizers)} optimizers at steps of the same number as those of one model"
            own = "each optimizer counts its own steps (--tensors chooses those of one)"
            found.append(f"scope=model takes {several}; {own}")
        return [*found, f"{LEFT_OUT}{gaps_line(self.alone)}"] if self.alone else found

    def selection(self) -> dict[str, Any]:
        """What this sweep asks for, whatever else a result file holds."""
        names = {name["codec"] for items in self.asked.values() for item in items for name in item.names}
        return {"codecs": sorted(names), "steps": sorted(self._steps), "tensors": list(self.asked)}

    def jobs(self, stored: Stored, again: Container[_Key] = ()) -> list[Job]:
        """The missing work per tensor; the largest tensors first, so that no worker ends with one of them.

        Args:
            stored: the rows that are there.
            again: those of them that are measured again.
        """
        gradients = self.gradients
        there: dict[str, set[int]] = defaultdict(set)
        skipped: dict[str, set[int]] = defaultdict(set)
        for (tensor, step, _, _), window in stored.items():
            there[tensor].add(step)
            if window == 0:
                skipped[tensor].add(step)
        bits = {_dtype_bits(info) for info in gradients.infos}
        model = Job(
            WHOLE_MODEL,
            bits.pop() if len(bits) == 1 else 32,
            tuple(sorted(gradients.all_steps)),
            (),
            sketched=any(info.sketches for info in gradients.infos),
            size=gradients.size(WHOLE_MODEL),
        )
        bare: list[tuple[Job, TensorInfo | None]] = [(model, None)]
        for rank, one in enumerate(sorted(gradients.infos, key=lambda info: -info.size)):
            job = Job(one.name, _dtype_bits(one), gradients.steps[one.name], (), size=one.size, final=rank < _PICTURED)
            shape = one.shape if one.sample is None else None
            sample = BlockSample.read(one.sample)
            bare.append((replace(job, sketched=bool(one.sketches), sample=sample, shape=shape), one))
        jobs = []
        for job, tensor_info in bare:
            swept = self._steps | there[job.tensor]
            if gradients.kind in ("weight", "update", "outer") and not job.sketched and job.sample is None:
                # Existing and new rows make one sweep. Gradients of outputs belong to other samples
                # at each step, so they have no sum; momentum is a sum already.
                job = replace(job, windows=windows_of(job.steps, swept))
            summed = ((job.steps[first : last + 1], last) for first, last in job.windows)
            ends: dict[int, int | None] = dict.fromkeys(swept)
            ends |= {
                job.steps[last]: len(steps)
                for steps, last in summed
                if skipped[job.tensor].isdisjoint(steps) and gradients.have_sum(job.tensor, steps)
            }
            # A codec may allocate among all tensors for its own rows, and among some for those of a plan.
            for among in dict.fromkeys(item.among for item in self.asked[job.tensor]):
                own = [item for item in self.asked[job.tensor] if item.among == among]
                named = replace(job, among=among, names={str(item.codec): item.names for item in own})
                kept = self.limits.keep([item.codec for item in own], tensor_info)
                for chunked, count, codecs in self.limits.split(job, kept):
                    part = replace(named, chunked=chunked)
                    jobs.append(_with_missing(part, self._steps, codecs, count, stored, again, ends))
        return [job for job in jobs if job.wanted]

    def runner(self, stack: ExitStack) -> Callable[[Sequence[Job], Callable[[Block], None], CostJobs | None], None]:
        """A function that runs jobs and hands over finished blocks: here, or on a cluster that the stack ends.

        What noise costs is always measured here.
        """
        options, gradients = self._options, self.gradients
        workers = Workers.of(self._trace, options.jobs)
        here = partial(run_jobs, gradients, self.settings, self._allocation, workers, options.chunk)
        if options.scheduler is None:
            return here
        from gtrace.sweep.cluster import Session, connected, run_on_cluster

        codecs = self._sharing()
        session = Session.of(self._trace, options.tensors, gradients.kind, options.chunk, self.settings, codecs)
        client = stack.enter_context(connected(options.scheduler))

        def there(jobs: Sequence[Job], sink: Callable[[Block], None], costs: CostJobs | None) -> None:
            run_on_cluster(client, session, jobs, sink)
            here((), sink, costs)

        return there

    def noise_costs(self, done: Collection[tuple[str, int, str]]) -> CostJobs:
        """What codecs' noise costs over a horizon, to be measured; ``done`` are the details there."""
        asked = {
            tensor: [(item.codec, item.among, [name["codec"] for name in item.names]) for item in items]
            for tensor, items in self.asked.items()
        }
        return CostJobs(self._trace, self.gradients, asked, self._allocation, self.settings.seed, done)

    def _sharing(self) -> list[tuple[Codec, Among]]:
        return list(dict.fromkeys((item.codec, item.among) for items in self.asked.values() for item in items))

    @cached_property
    def _allocation(self) -> Allocation:
        return Allocation(self.gradients, self.gradients.steps, self._sharing())


_SETTINGS = {own.name for own in fields(SweepOptions)}


def _named(codecs: str | TableLike | Iterable[TableLike], ranges: Mapping[str, Any]) -> Iterable[Coding]:
    """The codecs that specs mean over some ranges, then those that are there already."""
    if isinstance(codecs, str):
        items: list[TableLike] = [*split_specs(codecs)]
    else:
        items = [codecs] if isinstance(codecs, (Codec, CodecTable, HasTable)) else list(codecs)
    specs = [item for item in items if isinstance(item, str)]
    parameters = {own.name for name in codec_names() for own in parameter_fields(codec_class(name))}
    if unknown := ranges.keys() - parameters:
        name = min(unknown)
        raise UsageError(
            f"sweep: '{name}' is neither an option of a sweep nor a codec's parameter; "
            f"{suggest(name, sorted(_SETTINGS | parameters))}"
        )
    several = {name: [v] if isinstance(v, str) or not isinstance(v, Iterable) else [*v] for name, v in ranges.items()}
    made = expand(specs, several, asked={name: f"sweep: {name}" for name in several})
    return [*made, *(coding_of(item) for item in items if not isinstance(item, str))]


def run_sweep(
    trace: Trace | str | os.PathLike[str], codecs: str | TableLike | Iterable[TableLike], **options: Any
) -> SweepResult:
    """Run codecs over a trace; ``gtrace.sweep(...)`` is this function.

    Args:
        trace: an open trace, or the path of one.
        codecs: specs such as ``"alq,mcgq"``, as text or a list; codecs; plans and other tables of codecs, whose rows
            are called ``plan:NAME``.
        options: the fields of :class:`~gtrace.sweep.run.SweepOptions`: ``steps``, ``tensors``, ``draws``, ``seed``,
            ``refit``, ``jobs``, ``output`` and so on. Any other name is a parameter of codecs with one value or
            several, e.g. ``bits=range(2, 9)`` or ``ratio=0.01``: specs that have it and do not fix it run with each.

    Returns:
        all rows of the store, including those of earlier runs that this one resumed or extended.

    Raises:
        UsageError: an unknown codec, tensor, step or option; no gradients of this kind; draws of stateful codecs
            without consecutive steps; no cluster at ``scheduler``, or one with another gtrace.
        TraceError: the trace cannot be read, here or by a worker.
        OutputExistsError: ``output`` exists, belongs to another sweep, and ``force`` is off.
    """
    with ExitStack() as stack:
        if options.get("output") is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gtrace-"))
            options["output"] = Path(folder) / "sweep.db"
        write_sweep(trace, codecs, **options)
        return ResultStore.load(Path(options["output"]))


def write_sweep(
    trace: Trace | str | os.PathLike[str], codecs: str | TableLike | Iterable[TableLike], **options: Any
) -> None:
    """:func:`run_sweep` into the file ``output``, without reading it at the end."""
    asked = SweepOptions(**{name: options.pop(name) for name in _SETTINGS & options.keys()})
    assert asked.output is not None, "a sweep is written to a file"
    given = {str(c): c for c in _named(codecs, options)}.values()
    if not given:
        raise UsageError("sweep: no codec given; name some with --methods, or write all")
    with ExitStack() as stack:
        opened = stack.enter_context(open_trace(trace)) if isinstance(trace, (str, os.PathLike)) else trace
        sweep = _Sweep(opened, given, asked)
        runner = sweep.runner(stack)
        if not asked.draws and not any(map(expecting, sweep.codecs)):
            raise UsageError(f"--draws 0: {sweep.codecs[0]} has no closed form, so nothing is measured; leave it out")
        keep_inputs(asked.output, opened.path, *(one.source for one in sweep.able if isinstance(one, CodecTable)))
        store = ResultStore.create(
            Path(asked.output), sweep.provenance(trace), sweep.fingerprint(), force=asked.force, earlier=sweep.earlier
        )
        try:
            store.add((), warnings=sweep.cautions())
            store.check_plans({str(c): c.digest for c in sweep.able if isinstance(c, CodecTable)})
            store.note(selection=sweep.selection())
            jobs = sweep.jobs(store.done(), _again(store, sweep))
            store.add((), warnings=sweep.limits.lines())
            total = sum(len(job.wanted) for job in jobs)
            values = sum(job.values(wanted) for job in jobs for _, wanted in job.wanted)
            count = done = 0

            def sink(block: Block) -> None:
                nonlocal count, done
                store.add(block.rows, block.times, details=block.details, tables=block.tables)
                if not block.values:
                    return
                count += block.cells
                done += block.values
                if asked.progress is not None:
                    asked.progress(count, total)
                if asked.work is not None:
                    asked.work(done, values)

            runner(jobs, sink, sweep.noise_costs(store.details()) if asked.noise else None)
        finally:
            store.close()


def _learning(trace: Trace) -> dict[str, Any]:
    """The last captured step, and the mean learning rate so far, for predictions of what noise costs."""
    scalars = trace.scalars()
    steps, rates = scalars["step"], scalars.get("lr", np.zeros(0))
    if not steps.size:
        return {}
    known = rates.size == steps.size and bool(np.isfinite(rates).all())
    span = int(steps[-1] - steps[0])
    mean = float(np.trapezoid(rates, steps)) / span if known and span else float(rates[-1]) if known else math.nan
    return {"last": int(steps[-1])} | ({"lr": mean} if mean > 0 else {})


def _again(store: ResultStore, sweep: _Sweep) -> set[_Key]:
    """The rows that lack an optimum which is wanted."""
    if not sweep.settings.optimal:
        return set()
    levels = {
        (tensor, name["codec"])
        for tensor, items in sweep.asked.items()
        for item in items
        if has_optimum(item.codec)
        for name in item.names
    }
    return {key for key in store.without_optimum() if (key[0], key[2]) in levels}


def expectations(trace: Trace, codecs: Sequence[Codec], sink: Callable[[Block], None], **options: Any) -> list[str]:
    """The expectations of codecs on single tensors, handed over block by block; nothing is encoded or stored.

    Args:
        trace: an open trace.
        codecs: codecs with closed forms.
        sink: called with each tensor at each step.
        options: ``steps``, ``tensors``, ``kind``, ``refit``, ``nonfinite``, ``chunk`` and ``jobs`` of
            :class:`SweepOptions`.

    Returns:
        warnings on how far the errors can be trusted, one line each.

    Raises:
        UsageError: a codec without closed forms or over the whole model, or an unknown tensor or step.
        TraceError: the trace cannot be read.
    """
    for item in codecs:
        if not expecting(item):
            raise UsageError(f"{item}: its error has no closed form; sweep the trace first, and pass that sweep")
        if scope_of(item) == "model":
            raise UsageError(f"{item}: runs over the whole model and leaves no tensor to another codec")
    sweep = _Sweep(trace, codecs, SweepOptions(draws=0, optimal=False, **options))
    jobs = [replace(job, windows=()) for job in sweep.jobs({})]
    with ExitStack() as stack:
        sweep.runner(stack)(jobs, sink, None)
    return [*sweep.cautions(), *sweep.limits.lines()]


class Chosen(NamedTuple):
    """A codec for a tensor.

    Attributes:
        codec: the codec; a plan's rows are those of the codecs that it names.
        among: the tensors that it allocates among, if it allocates.
        names: the names under which its rows are written.
    """

    codec: Codec
    among: Among
    names: tuple[Name, ...]


def _asked(gradients: Gradients, given: Iterable[Coding]) -> dict[str, list[Chosen]]:
    """The codecs for each tensor, and for the whole model."""
    sizes = {info.name: info.size for info in gradients.infos}
    found: dict[str, dict[tuple[Codec, Among], list[Name]]] = {name: {} for name in (WHOLE_MODEL, *sizes)}
    for item in given:
        assigned = CodecTable.of(item).assign(sizes)
        for tensor, chosen in assigned.items():
            among = tuple(name for name, other in assigned.items() if other == chosen) if chosen.allocates else None
            among = None if among is None or len(among) == len(sizes) else among
            if isinstance(item, CodecTable):
                name = item.identity
            else:
                name = {column: identity(chosen)[column] for column in ("codec", *OF_CODEC)}
            found[tensor].setdefault((chosen, among), []).append(name)
    return {
        tensor: [Chosen(chosen, among, tuple(names)) for (chosen, among), names in items.items()]
        for tensor, items in found.items()
    }


def _split_by_memory(
    gradients: Gradients, wanted: frozenset[int], given: Sequence[Coding], draws: int
) -> tuple[list[Coding], list[Coding]]:
    """The codecs that can run, and the stateful ones that would replay only single steps."""
    whole = [tuple(sorted(gradients.all_steps))]
    # Sketches allow no draws, so nothing is replayed.
    each = [gradients.steps[info.name] for info in gradients.infos if not info.sketches]
    bursts = {"tensor": any_burst(each, wanted) or not each, "model": any_burst(whole, wanted) or not each}
    sizes = {info.name: info.size for info in gradients.infos}

    def remembers(item: Coding) -> bool:
        used = set(CodecTable.of(item).assign(sizes).values())
        return any(chosen.stateful and not bursts[scope_of(chosen)] for chosen in used)

    alone = [item for item in given if draws and remembers(item)]
    return [item for item in given if item not in alone], alone


def scope_of(item: Codec) -> Scope:
    """Whether a codec runs over single tensors or over the whole model's concatenated gradient."""
    return "tensor" if item.needs is None else item.needs.scope


def _dtype_bits(info: TensorInfo) -> int:
    return _FLOAT_BITS.get(str(info.dtype).removeprefix("torch."), 32)


def _with_missing(
    job: Job,
    steps: frozenset[int],
    codecs: Sequence[Codec],
    draws: int,
    stored: Stored,
    again: Container[_Key],
    ends: Mapping[int, int | None],
) -> Job:
    """The job for rows that are missing, that are wanted ``again``, or whose window is not that of ``ends`` any more.

    ``ends``: step that is swept -> steps in the window that ends there, if any.
    """
    rows = [
        (
            item,
            [name["codec"] for name in job.names[str(item)]],
            (EXPECTATION,) * expecting(item) + tuple(range(draws)),
        )
        for item in codecs
    ]

    def missing(item: Codec, key: _Key) -> bool:
        if key not in stored or key in again:
            return key[1] in steps
        # Expected errors have a sum if they are independent.
        summed = key[3] != EXPECTATION or (item.unbiased and not item.stateful)
        return summed and (stored[key] or None) != ends.get(key[1])

    wanted: list[tuple[int, tuple[tuple[Codec, tuple[int, ...]], ...]]] = []
    for index, step in enumerate(job.steps):
        left = []
        for item, names, every in rows if step in ends else ():
            missed = every
            if stored:
                missed = tuple(d for d in every if any(missing(item, (job.tensor, step, name, d)) for name in names))
            if missed:
                left.append((item, missed))
        if left:
            # Steps that want the same share one object.
            same = wanted[-1][1] if wanted and list(wanted[-1][1]) == left else tuple(left)
            wanted.append((index, same))
    # A codec's own rows already carry its spec.
    named = {spec: names for spec, names in job.names.items() if [name["codec"] for name in names] != [spec]}
    # On a cluster the last step may finish before others.
    last = max((index for index, step in enumerate(job.steps) if step in steps), default=0)
    return replace(job, wanted=tuple(wanted), names=named, final=job.final and bool(wanted) and wanted[-1][0] >= last)
