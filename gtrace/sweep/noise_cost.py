"""What each codec's noise costs over a horizon: measured on a few windows of steps, beside the rows of a sweep.

A window of consecutive steps holds samples of the gradient's noise: contrasts of its gradients in which a drift that is
linear over the window drops out. Ranks at one step hold better ones. Each codec encodes a gradient in the middle of
each window twice, and its errors are projected on these samples; see :class:`gtrace.noise.NoiseCosts`. A prediction for
any horizon needs no more. Gradients shrink as training goes on, so each window of a tensor is scaled to the same noise.
Of a large tensor, evenly spaced blocks stand for the rest.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtrace.codecs import Codec
from gtrace.codecs.level_sets import LevelSets, noisy_together
from gtrace.codecs.link import LinkOptions, Sender, refitted
from gtrace.errors import TraceError
from gtrace.kernels.noise import contrast, noise_of_two, weighted_grams
from gtrace.kernels.norms import count_nonfinite
from gtrace.noise import ADAM, NoiseCosts
from gtrace.noise.prediction import FEWEST, contrasts_of
from gtrace.schedule import RefitSchedule
from gtrace.sketch import MomentSketch
from gtrace.sweep.gradient_noise import RANKS, STEPS
from gtrace.trace import OptimizerFacts, TensorInfo, Trace
from gtrace.trace.choose import steps_of
from gtrace.types import Key, State, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.sweep.fits import Allocation
    from gtrace.sweep.gradients import Gradients
    from gtrace.sweep.jobs import Among, Detail
    from gtrace.sweep.store import SweepResult

#: what a detail of a tensor is about: the noise of its gradient, and of one codec
SAMPLES, COST = "samples", "cost"
#: windows of a trace, steps in each, and samples of noise in all
_WINDOWS, _LENGTH, _SAMPLES = 4, 6, 16
#: elements of a tensor that are looked at, in blocks
_ELEMENTS, _BLOCK = 1 << 17, 2048
#: codecs whose variances of all elements are held at a time
_TOGETHER = 16


class Span(NamedTuple):
    """Gradients that are read together.

    Attributes:
        steps: consecutive steps; a codec encodes the middle one, one with memory all of them.
        ranks: whether the ranks at the middle step are the samples of noise, and not these steps.
        contrasts: float64[samples, gradients].
    """

    steps: tuple[int, ...]
    ranks: bool
    contrasts: NDArray[np.float64]

    @property
    def middle(self) -> int:
        """The index of the middle step."""
        return len(self.steps) // 2


@dataclass(frozen=True, slots=True)
class Sampling:
    """Where the noise of a trace's gradients is looked at.

    Attributes:
        windows: the windows; empty if the trace has no samples of noise, or fewer than four.
        streams: tensor -> its stream on each rank, its own first.
    """

    windows: tuple[Span, ...]
    streams: Mapping[str, tuple[TensorInfo, ...]]

    @classmethod
    def of(cls, trace: Trace, gradients: Gradients) -> Sampling:
        """The plan for the tensors of a sweep."""
        named: defaultdict[Any, list[TensorInfo]] = defaultdict(list)
        for info in trace.tensors:
            named[info.kind, info.optimizer, info.name].append(info)
        streams = {info.name: _ranks_of(named, info) for info in gradients.infos}
        if gradients.kind != "weight" or any(info.sketches for info in gradients.infos):
            return cls((), streams)
        common = frozenset.intersection(*(frozenset(steps) for steps in gradients.steps.values()))
        ranks = min(map(len, streams.values()))
        if ranks >= 3:
            # Each rank's stream has the steps of the first, unless it ended early.
            everywhere = (steps_of(trace, one).tolist() for own in streams.values() for one in own)
            common = common.intersection(*map(frozenset, everywhere))
        windows = _chosen(sorted(common), 1 if ranks >= 3 else 3)
        ones = np.ones((1, ranks))
        found: list[Span] = []
        for steps in windows:
            left = _SAMPLES // max(1, len(windows))
            design = ones if ranks >= 3 else np.vander(np.arange(float(len(steps))), 2).T
            found.append(Span(steps, ranks >= 3, contrasts_of(design)[:left]))
        enough = sum(len(window.contrasts) for window in found) >= FEWEST
        return cls(tuple(found) if enough else (), streams)


def _chosen(steps: Sequence[int], least: int) -> list[tuple[int, ...]]:
    """Windows of consecutive steps, at least ``least`` and at most six each, spread over the steps."""
    runs = np.split(np.asarray(steps), np.flatnonzero(np.diff(steps) != 1) + 1)
    windows = [
        tuple(run[start : start + _LENGTH].tolist())
        for run in runs
        for start in range(0, len(run), _LENGTH)
        if len(run[start : start + _LENGTH]) >= least
    ]
    if len(windows) <= _WINDOWS:
        return windows
    middles = np.array([window[len(window) // 2] for window in windows])
    wanted = steps[0] + (np.arange(_WINDOWS) + 0.5) / _WINDOWS * (steps[-1] - steps[0])
    return [windows[k] for k in sorted({int(np.argmin(np.abs(middles - want))) for want in wanted})]


class CodecNoise(NamedTuple):
    """A codec on a tensor, see :class:`~gtrace.noise.NoiseCosts`; sums over windows, divided by their number."""

    gram: NDArray[np.float64]
    variance: float
    lost: float
    growth: float = math.nan


class _Window(NamedTuple):
    """One tensor in a window.

    Attributes:
        span: the window.
        values: float32[steps, n], its gradient at each step.
        near: float32[n], a gradient with independent noise, of the same weights as the middle one or between them.
        keys: of two encodings of the middle gradient.
        sketches: those that codecs were fitted to, by place in the window.
    """

    span: Span
    values: NDArray[np.float32]
    near: NDArray[np.float32]
    keys: tuple[Key, ...]
    sketches: dict[tuple[int, SummarySpec], MomentSketch]


_level_noise = lru_cache(maxsize=64)(LevelSets)


class _Tensor:
    """One tensor's gradients in the windows, and the samples of their noise."""

    def __init__(
        self,
        trace: Trace,
        plan: Sampling,
        info: TensorInfo,
        seed: int,
        sketches: Mapping[int, Mapping[SummarySpec, MomentSketch]],
    ) -> None:
        self._info, self._seed = info, seed
        own = plan.streams[info.name]
        stride = max(1, math.ceil(info.size / _ELEMENTS))
        self._shape = tuple(info.shape) if stride == 1 and info.sample is None else None
        read = partial(_read, trace, stride=stride)
        self._windows, noisy = [], []
        for span in plan.windows:
            values = np.stack([read(own[0], step) for step in span.steps])
            others = [read(rank, span.steps[span.middle]) for rank in own[1:]] if span.ranks else []
            before, after = values[span.middle - 1], values[min(span.middle + 1, len(values) - 1)]
            near = others[0] if len(values) == 1 else before / 2 + after / 2
            keys = (Key.derive(seed, tensor=info.name, step=span.steps[span.middle], draw=draw) for draw in (0, 1))
            known = {
                (k, spec): one for k, step in enumerate(span.steps) for spec, one in sketches.get(step, {}).items()
            }
            self._windows.append(_Window(span, values, near, tuple(keys), known))
            noisy.append(np.stack([values[span.middle], *others]) if span.ranks else values)
        size = self._windows[0].near.size
        #: float64[size], factor of each element in Adam's coordinates; 1 under another optimizer
        self._scale = np.ones(size)
        facts = trace.optimizer_facts(info.optimizer).of_tensor(info.attrs)
        if facts.kind in ADAM:
            reads = [values for window in self._windows for values in window.values]
            second = sum((np.square(values, dtype=np.float64) for values in reads), np.zeros(size)) / len(reads)
            floor = 1e-8 if facts.eps is None else facts.eps
            self._scale = np.where(second > 0, 1 / np.sqrt(np.sqrt(second) + floor), 0.0)
        total = info.size if info.sample is None else info.sample["total"]
        #: elements of the tensor for each of its samples
        self._stretch = total / max(1, size)
        ends = np.cumsum([0, *(len(span.contrasts) for span in plan.windows)]).tolist()
        self._samples = np.empty((ends[-1], size))
        parts = [self._samples[first:last] for first, last in itertools.pairwise(ends)]
        # Products of small gradients would underflow in float32.
        energies = np.array(
            [
                contrast(values, span.contrasts, self._scale, part) / len(part)
                for values, span, part in zip(noisy, plan.windows, parts, strict=True)
            ]
        )
        level = math.exp(np.log(energies[energies > 0]).mean()) if energies.any() else 1.0
        #: factor of each window, with which all have the same noise: the geometric mean of theirs
        self._factors = np.sqrt(np.divide(level, energies, out=np.ones_like(energies), where=energies > 0)).tolist()
        for factor, part in zip(self._factors, parts, strict=True):
            part *= factor
        self.gram = self._weighed(np.ones((1, size)))[0]
        inner = [
            factor**2 * self._inner(window.values[window.span.middle], window.near)
            for factor, window in zip(self._factors, self._windows, strict=True)
        ]
        self.signal = float(np.mean(inner))

    def _inner(self, left: NDArray[Any], right: NDArray[Any]) -> float:
        """Inner product in Adam's coordinates, of the whole tensor."""
        return self._stretch * float((left * self._scale) @ (right * self._scale))

    def _weighed(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64[rows, n, n]: D diag(weights[row]) D^T of the whole tensor."""
        grams = np.zeros((len(weights), *(len(self._samples),) * 2))
        if weights.any():
            weighted_grams(self._samples, weights, grams)
        return self._stretch * (grams + np.triu(grams, 1).transpose(0, 2, 1))

    def costs(self, codecs: Sequence[tuple[Codec, float | None]]) -> list[CodecNoise]:
        """Encode with codecs in each window, each with its share of an allocation."""
        groups: dict[tuple[bool, SummarySpec | None], list[int]] = {}
        for place, (codec, _) in enumerate(codecs):
            together = noisy_together(codec)
            groups.setdefault((together, codec.needs if together else None), []).append(place)
        found: dict[int, CodecNoise] = {}
        for (together, _), group in groups.items():
            for start in range(0, len(group), _TOGETHER):
                places = group[start : start + _TOGETHER]
                some = [codecs[place] for place in places]
                found |= zip(places, (self._of_levels if together else self._of_each)(some), strict=True)
        return [found[place] for place in range(len(codecs))]

    def _of_levels(self, codecs: Sequence[tuple[Codec, float | None]]) -> Iterator[CodecNoise]:
        """The noise of level codecs that want the same sketch."""
        together = _level_noise(tuple(codec for codec, _ in codecs))

        def add(window: _Window, factor: float, variances: NDArray[np.float64]) -> NDArray[np.float64]:
            middle, sketch = window.span.middle, None
            if together.adaptive:
                sketch = self._sketch(codecs[0][0], window, max(0, middle - 1))
            values = window.values[middle]
            return together.add_noise(sketch, values, window.keys, window.near, self._scale, factor, variances)

        return self._of_errors(len(codecs), add)

    def _of_each(self, codecs: Sequence[tuple[Codec, float | None]]) -> Iterator[CodecNoise]:
        """The noise of codecs that are encoded one by one."""
        alone = [(codec, share) for codec, share in codecs if not codec.stateful]

        def add(window: _Window, factor: float, variances: NDArray[np.float64]) -> NDArray[np.float64]:
            values, lost = window.values[window.span.middle], np.empty(len(alone))
            for row, (codec, share) in enumerate(alone):
                state, keys = self._fitted(codec, window, share), window.keys[: 1 if codec.deterministic else 2]
                arrived = [codec.simulate(state, values, key).values for key in keys]
                first, last = arrived[0], arrived[-1]
                lost[row] = noise_of_two(values, first, last, window.near, self._scale, factor, variances[row])
            return lost

        errors = self._of_errors(len(alone), add)
        for codec, share in codecs:
            yield self._of_memory(codec, share) if codec.stateful else next(errors)

    def _of_errors(
        self, number: int, add: Callable[[_Window, float, NDArray[np.float64]], NDArray[np.float64]]
    ) -> Iterator[CodecNoise]:
        """The noise of codecs without memory.

        Args:
            number: of codecs.
            add: compares two encodings of a window's middle gradient by each codec: adds the variance of each element,
                and returns inner products of the mean error and the near gradient.
        """
        variances, lost = np.zeros((number, self._scale.size)), np.zeros(number)
        for factor, window in zip(self._factors, self._windows, strict=True):
            lost -= factor**2 * self._stretch * add(window, factor, variances)
        sums, windows = self._stretch * variances.sum(axis=1), len(self._windows)
        for gram, variance, bias in zip(self._weighed(variances), sums.tolist(), lost.tolist(), strict=True):
            yield CodecNoise(gram / windows, variance / windows, bias / windows)

    def _of_memory(self, codec: Codec, share: float | None) -> CodecNoise:
        """The noise of a codec with memory: what it owes after the steps of each window."""
        number = len(self._windows)
        gram = np.zeros_like(self.gram)
        half = end = 0.0
        for factor, window in zip(self._factors, self._windows, strict=True):
            owed, middle = (np.float64(factor) * each for each in self._owed(codec, window, share))
            along = self._stretch * (self._samples @ (owed * self._scale))
            gram += np.outer(along, along)
            half, end = half + self._inner(middle, middle), end + self._inner(owed, owed)
        return CodecNoise(gram / number, end / number, 0.0, end / half if half else 1.0)

    def _fitted(self, codec: Codec, window: _Window, share: float | None) -> State:
        """A codec without memory, fitted to the gradient before the middle one."""
        middle = window.span.middle
        state = codec.init(self._scale.size, self._shape)
        if codec.needs is None or not (codec.fits or codec.allocates):
            return state
        place = middle if codec.fits_itself else max(0, middle - 1)
        return refitted(codec, state, self._sketch(codec, window, place), window.span.steps[middle], share)

    def _sketch(self, codec: Codec, window: _Window, place: int) -> MomentSketch:
        """The sketch of a gradient that a codec is fitted to, before its memory holds anything."""
        assert codec.needs is not None
        values = window.values[place]
        if type(codec).view is not Codec.view:
            return MomentSketch.from_spec(codec.view(codec.init(values.size, self._shape), values), codec.needs)
        key = place, codec.needs
        if key not in window.sketches:
            window.sketches[key] = MomentSketch.from_spec(values, codec.needs)
        return window.sketches[key]

    def _owed(
        self, codec: Codec, window: _Window, share: float | None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """What a memory owes after all steps of a window, and after half of them."""
        options = LinkOptions(RefitSchedule((0,)), self._seed)
        steps, values = window.span.steps, window.values
        sender = Sender(codec, self._scale.size, options, tensor=self._info.name, shape=self._shape)
        if codec.needs is not None:
            sender.fit(self._sketch(codec, window, 0), steps[0], share=share)
        owed = middle = np.zeros_like(values[0])
        for place, (step, each) in enumerate(zip(steps, values, strict=True)):
            key = Key.derive(self._seed, tensor=self._info.name, step=step, draw=0)
            arrived = codec.simulate(sender.state, each, key).values
            sender.settle(each, arrived)
            with np.errstate(over="ignore"):
                owed = owed + (each - arrived)
            if 2 * (place + 1) <= len(values):
                middle = owed
        return owed, middle


def _read(trace: Trace, info: TensorInfo, step: int, stride: int) -> NDArray[np.float32]:
    """A gradient, or every ``stride``-th block of it; non-finite values become zero."""
    if stride == 1:
        values = trace.read(info.name, step, copy=False, **info.stream._asdict())
    else:
        pieces = trace.read_chunks(info.name, step, _BLOCK * stride, **info.stream._asdict())
        values = np.concatenate([piece[:_BLOCK] for piece in pieces])
    return np.where(np.isfinite(values), values, np.float32(0)) if count_nonfinite(values) else values


class CostJobs:
    """What codecs' noise costs, still to be measured; a tensor at a time, in any order and process.

    Args:
        trace: an open trace.
        gradients: its gradients.
        asked: tensor -> codecs, the tensors among which each allocates, and the names of its rows.
        allocation: what tensors share out among themselves.
        seed: of the encodings.
        done: details that are there already.
    """

    def __init__(
        self,
        trace: Trace,
        gradients: Gradients,
        asked: Mapping[str, Sequence[tuple[Codec, Among, Sequence[str]]]],
        allocation: Allocation,
        seed: int,
        done: Collection[tuple[str, int, str]],
    ) -> None:
        self._trace, self._allocation, self._seed = trace, allocation, seed
        self._plan = plan = Sampling.of(trace, gradients)
        self._last = plan.windows[-1].steps[-1] if plan.windows else 0
        self._missing: dict[str, list[tuple[Codec, Among, list[str]]]] = {}
        for info in gradients.infos if plan.windows else ():
            left = [
                (codec, among, [name for name in names if (info.name, self._last, f"{COST} {name}") not in done])
                for codec, among, names in asked[info.name]
            ]
            if missing := [item for item in left if item[2]]:
                self._missing[info.name] = missing
        self._infos = {info.name: info for info in gradients.infos if info.name in self._missing}

    def sizes(self) -> dict[str, int]:
        """The tensors, with their elements."""
        return {name: info.size for name, info in self._infos.items()}

    def fitted(self, tensor: str) -> frozenset[int]:
        """Steps whose sketches, made for rows of a tensor, serve here, too; none for one of which only blocks count."""
        info = self._infos.get(tensor)
        if info is None or info.size > _ELEMENTS or info.sample is not None:
            return frozenset()
        if all(noisy_together(codec) and not _level_noise((codec,)).adaptive for codec, *_ in self._missing[tensor]):
            return frozenset()
        return frozenset(
            window.steps[place]
            for window in self._plan.windows
            for place in (0, max(0, window.middle - 1), window.middle)
        )

    def details(self, tensor: str, sketches: Mapping[int, Mapping[SummarySpec, MomentSketch]]) -> list[Detail]:
        """Measure a tensor's codecs; ``sketches`` are those of :meth:`fitted`, as far as they are there."""
        missing = self._missing[tensor]
        plan, last, allocation = self._plan, self._last, self._allocation
        noisy = _Tensor(self._trace, plan, self._infos[tensor], self._seed, sketches)
        samples = {"gram": _packed(noisy.gram), "signal": noisy.signal, "steps": [w.steps for w in plan.windows]}
        samples["from"] = RANKS if plan.windows[0].ranks else STEPS
        found: list[Detail] = [(tensor, last, SAMPLES, samples)]
        first = plan.windows[0].steps[0]
        shared = [
            (codec, allocation.share(codec, tensor, first, among) if codec.allocates else None)
            for codec, among, _ in missing
        ]
        for (codec, _, names), cell in zip(missing, noisy.costs(shared), strict=True):
            gram = _packed(cell.gram)
            value = {"gram": gram, "variance": cell.variance, "lost": cell.lost}
            value |= {"unbiased": codec.unbiased} | ({"growth": cell.growth} if codec.stateful else {})
            # What a memory owes of gradients next to the largest float32 may be beyond it; then it stays unknown.
            known = np.isfinite([*gram, cell.variance, cell.lost, cell.growth if codec.stateful else 0.0]).all()
            found += [(tensor, last, f"{COST} {name}", value) for name in (names if known else ())]
        return found


def noise_costs(result: SweepResult) -> NoiseCosts | None:
    """What a sweep measured, for predictions of what noise costs; None if its trace has no samples of noise.

    Raises:
        TraceError: the parts of the result do not belong together.
    """
    samples = {tensor: value for (tensor, _, what), value in result.details.items() if what == SAMPLES}
    if not samples:
        return None
    tensors = tuple(name for name in result.provenance.get("tensors", samples) if name in samples)
    cells = {
        (what.removeprefix(f"{COST} "), tensor): value
        for (tensor, _, what), value in result.details.items()
        if what.startswith(f"{COST} ")
    }
    codecs = tuple(dict.fromkeys(codec for codec, _ in cells))
    n = round(math.sqrt(2 * len(samples[tensors[0]]["gram"]) + 0.25) - 0.5)
    if any(len(one["gram"]) != n * (n + 1) // 2 for one in (*samples.values(), *cells.values())):
        raise TraceError("what the noise of codecs costs was measured on different samples; sweep again with --force")
    unknown = {"gram": [math.nan] * (n * (n + 1) // 2), "variance": math.nan, "lost": math.nan, "unbiased": True}
    table = [[cells.get((codec, tensor), unknown) for tensor in tensors] for codec in codecs]
    attrs, learning = (result.provenance.get(name) or {} for name in ("trace_attrs", "learning"))
    facts = OptimizerFacts.of(attrs)
    return NoiseCosts(
        codecs=codecs,
        tensors=tensors,
        noise=sum((_unpacked(samples[tensor]["gram"], n) for tensor in tensors), np.zeros((n, n))),
        gram=np.array([[_unpacked(cell["gram"], n) for cell in row] for row in table]).reshape(-1, len(tensors), n, n),
        variance=np.array([[cell["variance"] for cell in row] for row in table], float).reshape(-1, len(tensors)),
        lost=np.array([[cell["lost"] for cell in row] for row in table], float).reshape(-1, len(tensors)),
        signal=np.array([samples[tensor]["signal"] for tensor in tensors]),
        growth=np.array([max((cell["growth"] for cell in row if "growth" in cell), default=math.nan) for row in table]),
        unbiased=tuple(all(cell["unbiased"] for cell in row) for row in table),
        source=str(samples[tensors[0]]["from"]),
        batch=math.nan if facts.batch_size is None else facts.batch_size,
        tokens=facts.tokens or 1,
        optimizer=facts.describe(),
        lr=float(learning.get("lr", math.nan)),
        last=int(learning.get("last", 0)),
    )


_triangle = lru_cache(maxsize=64)(np.triu_indices)


def _packed(gram: NDArray[np.float64]) -> list[float]:
    """The upper triangle, to six digits: a sample of noise says no more."""
    values = gram[_triangle(len(gram))].tolist()
    return list(map(float, ("%.6g " * len(values) % tuple(values)).split()))


def _unpacked(packed: Sequence[float], n: int) -> NDArray[np.float64]:
    """Undo :func:`_packed`."""
    gram = np.zeros((n, n))
    gram[_triangle(n)] = packed
    return gram + np.triu(gram, 1).T


def _ranks_of(named: Mapping[Any, list[TensorInfo]], own: TensorInfo) -> tuple[TensorInfo, ...]:
    """A tensor on each rank, its own stream first; alone if its gradient is not a rank's own."""
    there = named[own.kind, own.optimizer, own.name]
    same = [info for info in there if info.rank != own.rank and info.stage == "local" and info.size == own.size]
    return (own, *same) if own.stage == "local" else (own,)
