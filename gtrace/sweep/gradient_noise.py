"""Gradient noise of a trace, per tensor and step: the scale to which a codec's error is compared."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtrace.kernels.norms import BLOCK
from gtrace.noise import (
    Moments,
    Noise,
    averaged,
    moments,
    noise_between,
    noise_of_steps,
    noise_of_sum,
    pooled,
)
from gtrace.trace.choose import part_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.trace import TensorInfo, Trace

#: the key of a tensor's noise at a step in a result file's table of details
NOISE = "noise"
MICRO_BATCHES, RANKS, STEPS = "micro-batches", "ranks", "consecutive steps"
#: a ratio of noise to the squared norms below this is rounding error
_SAME = 1e-12

_ALONE = (
    "noise can't be estimated from single gradients, and the trace has no three consecutive steps; capture again with "
    "bursts such as --steps 100+10"
)
_SUMMARIES = (
    "noise can't be estimated from sketches, which cannot be subtracted; capture again without --sketch, or with "
    "--noise if the training accumulates micro-batches"
)
_NEURAL = "gradients of layer outputs belong to single samples, so averaging over workers does not reduce their noise"
_MADE = "noise is estimated from gradients alone: what an optimizer makes of them carries over from step to step"


class _Replicas(NamedTuple):
    """What a stream's statistics say about the micro-batches of a tensor, arrays of one entry per step."""

    step: NDArray[np.int64]
    number: NDArray[np.float64]
    norm2: NDArray[np.float64]
    sum_norm2: NDArray[np.float64]
    energy: NDArray[np.float64]

    def at(self, step: int) -> tuple[Moments, float] | None:
        """Moments of two micro-batches or more, and the energy of what the trace holds at that step."""
        place = int(np.searchsorted(self.step, step))
        if place == self.step.size or self.step[place] != step:
            return None
        number, *sums = (float(column[place]) for column in self[1:])
        if not (number >= 2 and all(map(math.isfinite, sums))):
            return None
        return Moments(int(number), sums[0], sums[1]), sums[2]


class Yardstick:
    """Gradient noise of the tensors of a trace.

    Micro-batches are used first: they vary within a process, while ranks may hold data of different kinds, which adds
    a difference that is not noise. Without either, three consecutive steps serve; their gradients also drift.
    Several gradients are read at the same time, at most a chunk of elements in all.

    Args:
        trace: an open trace.
        infos: the tensors of the sweep.
        chunk: elements that are held at a time.

    Attributes:
        known: whether the noise of any tensor is known at any step.
    """

    def __init__(self, trace: Trace, infos: Sequence[TensorInfo], chunk: int) -> None:
        self._trace = trace
        self._chunk = chunk
        world = trace.attrs.get("world_size")
        self._world = world if isinstance(world, int) and world > 1 else 1
        swept = {_identity(info): info.name for info in infos if info.kind == "weight" and info.merged == 1}
        self._streams: dict[str, list[TensorInfo]] = {info.name: [] for info in infos}
        for info in trace.tensors:
            name = swept.get(_identity(info))
            if name is not None:
                self._streams[name].append(info)
        self._infos = {info.name: info for info in infos}
        self._replicas = {name: found for name in self._streams if (found := self._replicas_of(name))}
        self._steps = {
            name: [frozenset(trace.steps(info.name, **stream(info)).tolist()) for info in streams]
            for name, streams in self._streams.items()
            if self._comparable(name)
        }
        self._bursts = {
            name: middles
            for name, streams in self._streams.items()
            if streams and not self._infos[name].sketches and (middles := self._burst(name)).size
        }
        #: tensor -> the middle ones of the three steps whose noise was estimated last, with that noise
        self._latest: dict[str, dict[int, Noise | None]] = {}
        self.known = bool(self._replicas or self._steps or self._bursts)

    def describe(self) -> dict[str, Any]:
        """The source of the noise, or why there is none, for the provenance of a sweep."""
        known = {MICRO_BATCHES: self._replicas.keys(), RANKS: self._steps.keys() - self._replicas.keys()}
        known[STEPS] = self._bursts.keys() - known[MICRO_BATCHES] - known[RANKS]
        sources = [source for source, names in known.items() if names]
        if sources:
            return {"from": sources}
        infos = self._infos.values()
        if any(info.kind != "weight" for info in infos):
            return {"from": [], "why": _NEURAL if any(info.kind == "neural" for info in infos) else _MADE}
        return {"from": [], "why": _SUMMARIES if any(info.sketches for info in infos) else _ALONE}

    def noise(self, name: str, step: int) -> Noise | None:
        """Noise of the swept gradient, in its units squared; None if it is unknown."""
        if name in self._replicas:
            return self._of_micro_batches(name, step)
        if name in self._steps:
            return self._of_ranks(name, step)
        return self._of_steps(name, step) if name in self._bursts else None

    def _burst(self, name: str) -> NDArray[np.int64]:
        """The steps that have a captured step before and after them."""
        info = self._infos[name]
        steps = self._trace.steps(info.name, **stream(info))
        near = np.diff(steps) == 1
        middles: NDArray[np.int64] = steps[1:-1][near[:-1] & near[1:]]
        return middles

    def _middle(self, name: str, step: int) -> int | None:
        """The step that has captured neighbors and is next to a step or the step itself, None if none is."""
        middles = self._bursts[name]
        middle = int(middles[np.argmin(np.abs(middles - step))])
        return middle if abs(middle - step) <= 1 else None

    def _of_steps(self, name: str, step: int) -> Noise | None:
        """Estimate from the step and its neighbors; at the end of a burst from the last three; elsewhere None."""
        middle = self._middle(name, step)
        if middle is None:
            return None
        found: Mapping[int, Noise | None] = self._latest.get(name, {})
        if middle not in found:
            place = stream(self._infos[name])
            read = (self._trace.read_chunks(name, near, BLOCK, **place) for near in (middle - 1, middle, middle + 1))
            found = self.learn(name, {middle: noise_of_steps(zip(*read, strict=True))})
        return found[middle]

    def middles(self, name: str, steps: Sequence[int]) -> list[int]:
        """The steps from which :meth:`noise` at some steps is estimated with their neighbors, if it is so estimated."""
        if name not in self._bursts or name in self._replicas or name in self._steps:
            return []
        return sorted({middle for step in steps if (middle := self._middle(name, step)) is not None})

    def learn(self, name: str, noises: Mapping[int, Noise]) -> Mapping[int, Noise | None]:
        """Keep the noise that was estimated from middle steps and their neighbors; returns it for the whole tensor."""
        info = self._infos[name]
        stretch = 1.0 if info.sample is None else info.sample["total"] / info.size
        found = self._latest[name] = {
            middle: noise._replace(variance=noise.variance * stretch, signal=noise.signal * stretch)
            if math.isfinite(noise.variance + noise.signal)
            else None
            for middle, noise in noises.items()
        }
        return found

    def _replicas_of(self, name: str) -> list[_Replicas]:
        found = []
        for info in self._streams[name]:
            numbers = self._trace.statistics(info.name, **stream(info))
            if "replicas" in numbers and (numbers["replicas"] >= 2).any():
                energy = numbers["norm2"] if info.sample is None else numbers.get("whole_norm2", numbers["norm2"])
                norm2, sum_norm2 = numbers["replicas_norm2"], numbers["replicas_sum_norm2"]
                found.append(_Replicas(numbers["step"], numbers["replicas"], norm2, sum_norm2, energy))
        return found

    def _of_micro_batches(self, name: str, step: int) -> Noise | None:
        found = [sums for replicas in self._replicas[name] if (sums := replicas.at(step)) is not None]
        if self._infos[name].stage == "reduced":
            noise = pooled([noise_of_sum(sums) for sums, _ in found])
            return None if noise is None else averaged(noise, self._world)
        # A process may clip before the optimizer sees the gradient; several ranks are compared before that.
        return pooled([noise_of_sum(sums, energy if self._world == 1 else None) for sums, energy in found])

    def _comparable(self, name: str) -> bool:
        """Whether the trace holds values of several ranks."""
        streams = self._streams[name]
        return len(streams) > 1 and all(info.stage == "local" and not info.sketches for info in streams)

    def _of_ranks(self, name: str, step: int) -> Noise | None:
        there = [info for info, steps in zip(self._streams[name], self._steps[name], strict=True) if step in steps]
        if len(there) < 2:
            return None
        share = max(1, self._chunk // len(there))
        pieces = zip(*(self._trace.read_chunks(info.name, step, share, **stream(info)) for info in there), strict=True)
        found = moments(pieces, len(there))
        if not math.isfinite(found.sum_norm2):
            return None
        noise = noise_between(found)
        if found.norm2 and noise.variance <= _SAME * found.norm2:
            # The ranks saw the same data.
            return None
        sample = there[0].sample
        stretch = 1.0 if sample is None else sample["total"] / there[0].size
        return noise._replace(variance=noise.variance * stretch, signal=noise.signal * stretch)


def _identity(info: TensorInfo) -> tuple[Any, ...]:
    """The identity shared by the streams of one parameter; other slices and restarted ranks differ in it."""
    return info.kind, info.optimizer, info.name, part_of(info), str(info.attrs.get("restart"))


def stream(info: TensorInfo) -> dict[str, Any]:
    """The stream of a trace that a tensor belongs to."""
    return {"kind": info.kind, "optimizer": info.optimizer, "rank": info.rank}
