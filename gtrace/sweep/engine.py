"""The only loop over a trace: read a tensor once, summarize it, judge every codec on it."""

from __future__ import annotations

import json
import math
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from gtrace.codecs import Codec, ExpectingCodec
from gtrace.coding import ENVELOPE_BYTES
from gtrace.errors import TraceError
from gtrace.kernels.norms import count_nonfinite
from gtrace.metrics import Reference, ratio, snr_db
from gtrace.sketch import MomentSketch
from gtrace.sweep.results import EXPECTATION
from gtrace.types import Key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from gtrace.types import State, SummarySpec

Refit = Literal["previous", "each", "once"]
Nonfinite = Literal["skip", "zero", "error"]
Row = dict[str, Any]
#: tensor, step, codec, draw, stage, seconds
Timing = tuple[str, int, str, int, str, float]


class Source(Protocol):
    """What the engine needs of a trace."""

    def read(self, name: str, step: int) -> NDArray[np.float32]:
        """The tensor at a step, flat."""


@dataclass(frozen=True, slots=True)
class Job:
    """One tensor's share of a sweep.

    Attributes:
        tensor: its name.
        dtype_bits: bits per element of the run's own dtype.
        steps: ascending steps that the trace holds for it.
        wanted: (index into ``steps``, codec, draws that are missing), steps ascending.
    """

    tensor: str
    dtype_bits: int
    steps: tuple[int, ...]
    wanted: tuple[tuple[int, tuple[tuple[Codec, tuple[int, ...]], ...]], ...]


@dataclass(frozen=True, slots=True)
class Block:
    """What one tensor at one step gave: the unit that is committed."""

    rows: list[Row]
    times: list[Timing]
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    """What a row depends on besides the data and the codec."""

    seed: int = 0
    refit: Refit | tuple[int, ...] = "previous"
    nonfinite: Nonfinite = "skip"

    def source(self, index: int, steps: Sequence[int]) -> int:
        """Index of the step whose summary fits the codec that encodes step ``index``.

        ``previous``: the preceding captured step, because fitting on the tensor that is then encoded flatters
        every adaptive codec; the first step has only itself. ``each``: the step itself. ``once``: the first
        one. A list of steps: the last listed step so far (the first one where there is none).
        """
        if self.refit == "previous":
            return max(0, index - 1)
        if self.refit == "each":
            return index
        if self.refit == "once":
            return 0
        due = [k for k in range(index + 1) if steps[k] in self.refit]
        return due[-1] if due else 0


def run_jobs(
    source: Source,
    jobs: Sequence[Job],
    settings: Settings,
    workers: int,
    sink: Callable[[Block], None],
) -> None:
    """Run every job on ``workers`` threads; ``sink`` is called in this thread with each finished block.

    An exception, Ctrl-C among them, stops the workers after their current step; blocks that were finished
    are handed over first.
    """
    stop = threading.Event()
    finished: list[Block] = []
    lock = threading.Lock()

    def work(job: Job) -> None:
        for block in _Tensor(source, job, settings).blocks():
            with lock:
                finished.append(block)
            if stop.is_set():
                return

    def drain() -> None:
        with lock:
            blocks, finished[:] = finished[:], []
        for block in blocks:
            sink(block)

    pool = ThreadPoolExecutor(max_workers=max(1, workers), thread_name_prefix="gtrace-sweep")
    pending: set[Future[None]] = set()
    try:
        pending = {pool.submit(work, job) for job in jobs}
        while pending:
            done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            drain()
            for future in done:
                future.result()
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        drain()


class _Tensor:
    """One tensor's way through its steps, with the summaries that neighbouring steps share."""

    def __init__(self, source: Source, job: Job, settings: Settings) -> None:
        self._source = source
        self._job = job
        self._settings = settings
        self._summaries: dict[int, dict[SummarySpec, MomentSketch]] = {}
        self._states: dict[tuple[str, int], State] = {}

    def blocks(self) -> Iterator[Block]:
        for index, wanted in self._job.wanted:
            yield self._block(index, wanted)
            near = range(index, min(index + 2, len(self._job.steps)))
            keep = {self._settings.source(k, self._job.steps) for k in near} | {index}
            self._summaries = {k: v for k, v in self._summaries.items() if k in keep}
            self._states = {key: state for key, state in self._states.items() if key[1] in keep}

    def _read(self, index: int) -> tuple[NDArray[np.float32], int]:
        values = self._source.read(self._job.tensor, self._job.steps[index])
        bad = int(count_nonfinite(values))
        if bad:
            values = np.where(np.isfinite(values), values, np.float32(0))
        return values, bad

    def _summary(self, index: int, spec: SummarySpec, values: NDArray[np.float32] | None = None) -> MomentSketch:
        found = self._summaries.setdefault(index, {})
        if spec not in found:
            if values is None:
                # Resumed after this step was done, or fitted on a step that is not swept itself.
                values, _ = self._read(index)
            found[spec] = MomentSketch.from_spec(values, spec)
        return found[spec]

    def _fitted(self, codec: Codec, index: int, size: int) -> State:
        key = (str(codec), index)
        if key not in self._states:
            state = codec.init(size)
            if codec.needs is not None:
                state = codec.fit(state, self._summary(index, codec.needs), self._job.steps[index])
            self._states[key] = state
        return self._states[key]

    def _block(self, index: int, wanted: Sequence[tuple[Codec, tuple[int, ...]]]) -> Block:
        job, settings = self._job, self._settings
        step = job.steps[index]
        values, bad = self._read(index)
        note, warnings = "", []
        if bad:
            where = f"{job.tensor} at step {step}: {bad} of {values.size} gradients are not finite"
            if settings.nonfinite == "error":
                raise TraceError(f"{where}; pass --nonfinite skip or zero, or sweep other --steps")
            warnings.append(f"{where}; {'taken as zero' if settings.nonfinite == 'zero' else 'skipped'}")
            note = f"{bad} non-finite, {'taken as zero' if settings.nonfinite == 'zero' else 'skipped'}"
            if settings.nonfinite == "skip":
                empty = {"tensor": job.tensor, "step": step, "n": values.size, "note": note}
                return Block(
                    [{**empty, **_identity(codec), "draw": draw} for codec, draws in wanted for draw in draws],
                    [],
                    warnings,
                )
        reference = Reference(values)
        common = {
            "tensor": job.tensor,
            "step": step,
            "n": values.size,
            "energy": reference.energy,
            "note": note or None,
        }
        rows: list[Row] = []
        times: list[Timing] = []
        for codec, draws in wanted:
            for row, spent in self._codec_rows(codec, draws, index, reference, common):
                rows.append(row)
                times.extend((job.tensor, step, row["codec"], row["draw"], stage, s) for stage, s in spent.items())
        return Block(rows, times, warnings)

    def _codec_rows(
        self, codec: Codec, draws: tuple[int, ...], index: int, reference: Reference, common: Row
    ) -> Iterator[tuple[Row, dict[str, float]]]:
        job, settings = self._job, self._settings
        size = reference.values.size
        clock = time.perf_counter()
        if codec.needs is not None:
            self._summary(index, codec.needs, reference.values)
        sketched = time.perf_counter()
        source = settings.source(index, job.steps)
        state = self._fitted(codec, source, size)
        shared = codec.shared(state)
        shared_bytes = len(shared)
        if index > 0:
            before = settings.source(index - 1, job.steps)
            if before == source or codec.shared(self._fitted(codec, before, size)) == shared:
                shared_bytes = 0
        fitted = time.perf_counter()
        per = 8.0 / max(1, size)
        base = {
            **common,
            **_identity(codec),
            "mean_abs": reference.mean_abs,
            "bits_shared": shared_bytes * per,
            "bits_envelope": ENVELOPE_BYTES * per,
            "fitted_on": _fitted_on(source, index, job.steps) if shared else "-",
        }
        expected = None
        if isinstance(codec, ExpectingCodec):
            assert codec.needs is not None
            expected = codec.expect(state, self._summary(index, codec.needs))
        for draw in draws:
            if draw == EXPECTATION:
                if expected is None:
                    continue
                row = {
                    **base,
                    "draw": draw,
                    "squared_error": expected.squared_error,
                    "relative_variance": _relative(expected.squared_error, reference.energy),
                    "relative_variance_bound": _relative(expected.error_bound, reference.energy),
                    "relative_bias": _relative(expected.bias, math.sqrt(reference.energy)),
                    "snr_db": snr_db(reference.energy, expected.squared_error),
                    "bits_fixed": expected.bits_fixed,
                    "bits_entropy": expected.bits_entropy,
                    "bits_huffman": expected.bits_huffman,
                    "bits_norms": expected.bits_norms,
                    "sparsity": expected.sparsity,
                    **_rates(expected.bits_payload, base["bits_shared"], job.dtype_bits),
                }
                yield row, {"sketch": sketched - clock, "fit": fitted - sketched}
                continue
            started = time.perf_counter()
            payload = codec.encode(
                state,
                reference.values,
                Key.derive(settings.seed, tensor=job.tensor, step=common["step"], draw=draw),
            )
            encoded = time.perf_counter()
            decoded = codec.decode(shared, payload, size)
            ended = time.perf_counter()
            found = reference.compare(decoded)
            row = {
                **base,
                "draw": draw,
                "squared_error": found.squared_error,
                "relative_variance": _relative(found.squared_error, reference.energy),
                "mean_relative_error": found.mean_relative_error,
                "mean_abs_error": found.mean_abs_error,
                "cosine": found.cosine,
                "snr_db": found.snr_db,
                "w1": found.w1,
                "w1_normalized": found.w1_normalized,
                "w1_mcgq": found.w1_mcgq,
                "w1_method": "exact",
                "sparsity": found.sparsity,
                "bits_norms": None if expected is None else expected.bits_norms,
                **_rates((len(payload) - ENVELOPE_BYTES) * per, base["bits_shared"], job.dtype_bits),
            }
            compared = time.perf_counter()
            yield row, {"encode": encoded - started, "decode": ended - encoded, "compare": compared - ended}


def _identity(codec: Codec) -> Row:
    parameters = codec.parameters
    return {
        "codec": str(codec),
        "method": codec.name,
        "bits": parameters.get("bits"),
        "params": json.dumps(parameters, sort_keys=True),
    }


def _relative(value: float, energy: float) -> float:
    return 0.0 if value == 0 else ratio(value, energy)


def _rates(payload: float, shared: float, dtype_bits: int) -> Row:
    total = payload + shared
    return {
        "bits_payload": payload,
        "bits_total": total,
        "ratio_float32": ratio(32.0, total),
        "ratio_dtype": ratio(float(dtype_bits), total),
    }


def _fitted_on(source: int, index: int, steps: Sequence[int]) -> str:
    if source == index:
        return "itself"
    return "previous" if source == index - 1 else f"step {steps[source]}"
