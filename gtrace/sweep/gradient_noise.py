"""Gradient noise of a trace, per tensor and step: the scale to which a codec's error is compared."""

from __future__ import annotations

import math
from functools import partial
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
from gtrace.trace.choose import part_of, steps_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
            name: [frozenset(steps_of(trace, info).tolist()) for info in streams]
            for name, streams in self._streams.items()
            if self._comparable(name)
        }
        self._places = {info.name: info.stream._asdict() for info in infos}
        self._bursts = {
            name: middles
            for name, streams in self._streams.items()
            if streams and not self._infos[name].sketches and (middles := self._burst(name))
        }
        #: tensor -> the middle ones of the three steps whose noise was estimated last, with that noise
        self._latest: dict[str, Mapping[int, Noise]] = {}
        self._ways: dict[str, Callable[[str, int], Noise | None]] = {
            **dict.fromkeys(self._bursts, self._of_steps),
            **dict.fromkeys(self._steps, self._of_ranks),
            **dict.fromkeys(self._replicas, self._of_micro_batches),
        }
        self.known = bool(self._ways)

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

    def way(self, name: str) -> Callable[[int], Noise | None] | None:
        """A function that estimates the noise of the swept gradient at a step, in its units squared.

        It returns None where the noise is unknown; None instead of it: the noise is unknown at all steps.
        """
        way = self._ways.get(name)
        return None if way is None else partial(way, name)

    def _burst(self, name: str) -> dict[int, int]:
        """Step -> the step itself or the one next to it that has a captured step before and after it."""
        steps = self._trace.steps(name, **self._places[name])
        near = np.diff(steps) == 1
        middles = steps[1:-1][near[:-1] & near[1:]].tolist()
        later = {middle + 1: middle for middle in middles}
        earlier = {middle - 1: middle for middle in middles}
        # Of two neighbors that serve, the earlier one.
        return earlier | later | {middle: middle for middle in middles}

    def _of_steps(self, name: str, step: int) -> Noise | None:
        """Estimate from the step and its neighbors; at the end of a burst from the last three; elsewhere None."""
        middle = self._bursts[name].get(step)
        if middle is None:
            return None
        if middle not in self._latest.get(name, ()):
            place = self._places[name]
            three = (middle - 1, middle, middle + 1)
            if 3 * self._infos[name].size <= self._chunk:
                found = noise_of_steps([[self._trace.read(name, near, copy=False, **place) for near in three]])
            else:
                read = (self._trace.read_chunks(name, near, BLOCK, **place) for near in three)
                found = noise_of_steps(zip(*read, strict=True))
            self._latest[name] = {middle: found}
        noise, info = self._latest[name][middle], self._infos[name]
        stretch = 1.0 if info.sample is None else info.sample["total"] / info.size
        if not math.isfinite(noise.variance + noise.signal):
            return None
        return noise._replace(variance=noise.variance * stretch, signal=noise.signal * stretch)

    def middles(self, name: str, steps: Sequence[int]) -> list[int]:
        """The steps from which the noise at some steps is estimated with their neighbors, if it is so estimated."""
        if self._ways.get(name) != self._of_steps:
            return []
        return sorted({middle for step in steps if (middle := self._bursts[name].get(step)) is not None})

    def learn(self, name: str, noises: Mapping[int, Noise]) -> None:
        """Keep what somebody else estimated from middle steps and their neighbors."""
        self._latest[name] = noises

    def _replicas_of(self, name: str) -> list[_Replicas]:
        found = []
        for info in self._streams[name]:
            numbers = self._trace.statistics(info.name, **info.stream._asdict())
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
        read = (self._trace.read_chunks(info.name, step, share, **info.stream._asdict()) for info in there)
        found = moments(zip(*read, strict=True), len(there))
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
