"""The error of the average that every rank ends with, after exchanges that add and encode again, from a trace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.codecs.assignment import CodecTable
from gtrace.codecs.link import LinkOptions, on_host
from gtrace.errors import UsageError
from gtrace.schedule import RefitSchedule
from gtrace.sweep.gradients import Gradients, Kind
from gtrace.sweep.limits import CHUNK
from gtrace.trace.choose import steps_of
from gtrace.training import vectors
from gtrace.training.exchange import node_of
from gtrace.training.ranks import Piece, RankCodecs, SimulatedRank, lockstep
from gtrace.training.ways import averaging, way
from gtrace.types import Key

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from numpy.typing import NDArray

    from gtrace.codecs import Codec
    from gtrace.trace import TensorInfo, Trace

#: the beginning of keys in a result file's table of details
EXCHANGE = "exchange"
#: tensors, the largest, that are measured if nobody chooses
TENSORS = 4
#: values of a tensor that are exchanged, the first ones: ranks times ranks messages take long enough
VALUES = 1 << 16
#: where the gradients of several ranks come from
RECORDED, NOISY, COPIES = "recorded ranks", "one rank and its noise", "one rank, the same for all"


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """What is exchanged among how many ranks, by which ways; the seed is that of noise and rounding.

    Codecs that keep a memory are left out, because one step says nothing about them, and linear ones, which are
    averaged before they are decoded.
    """

    codecs: tuple[Codec, ...]
    exchanges: tuple[str, ...]
    ranks: tuple[int, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.exchanges:
            way(name)
        if min(self.ranks) < 2:
            raise UsageError(f"--ranks: {min(self.ranks)} cannot exchange anything; name 2 or more")
        able = tuple(codec for codec in self.codecs if not (codec.stateful or codec.linear or codec.declared))
        if not able:
            raise UsageError("--exchange: all of these codecs keep a memory, or are averaged before decoding")
        if any(codec.needs is not None and codec.needs.scope == "model" for codec in able):
            raise UsageError("--exchange: ranks exchange tensor by tensor; leave out scope=model")
        object.__setattr__(self, "codecs", able)


def measure_averages(
    trace: Trace,
    plan: ExchangePlan,
    *,
    steps: Sequence[int] | None = None,
    globs: Sequence[str] | None = None,
    kind: Kind | None = None,
    done: Container[tuple[str, int, str]] = (),
    work: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[str, int, str, dict[str, Any]]]:
    """Exchange gradients among simulated ranks, by the code that real ranks run.

    The ranks are those of the trace if it has enough. Otherwise each gets the gradient of the first one plus noise of
    its own: the noise of three consecutive steps, with a random sign for each value. Codecs are fitted to what they
    encode. Large tensors exchange their first values only.

    Args:
        steps: None for one in the middle of training that has neighbors.
        globs: None for the largest tensors.
        done: (tensor, step, what) of what need not be measured again.
        work: called with the values exchanged so far and in all.

    Yields:
        (tensor, step, what, details of a result file). Of the details ``energy`` is ||mean of the ranks' gradients||^2,
        ``error`` ||what every rank ends with - that mean||^2, ``sent`` bytes that a rank sends, on average, and
        ``across`` the part of them that leaves its node. Combinations that do not fit together (codes that do not add
        up, ranks that are not whole nodes) are left out.
    """
    gradients = Gradients(trace, globs, kind, CHUNK)
    infos = [info for info in gradients.infos if not info.sketches]
    if not infos:
        raise UsageError("--exchange: the trace holds sketches, which cannot be encoded; capture without --sketch")
    if globs is None:
        infos = sorted(infos, key=lambda info: -info.size)[:TENSORS]
    places = [(info, step) for info in infos for step in _chosen(gradients, info, steps)]
    each = [(count, codec, name) for count in plan.ranks for codec in plan.codecs for name in plan.exchanges]
    whole = sum(min(VALUES, info.size) * count for info, _ in places for count, _, _ in each)
    ready = 0
    for info, step in places:
        given = RankGradients(trace, info, step, plan.seed)
        for count, codec, name in each:
            what = f"{EXCHANGE} {name} {count} {codec}"
            if (info.name, step, what) not in done:
                found = _averaged(codec, name, info, given, count)
                if found is not None:
                    yield info.name, step, what, found
            ready += min(VALUES, info.size) * count
            if work is not None:
                work(ready, whole)


def _chosen(gradients: Gradients, info: TensorInfo, steps: Sequence[int] | None) -> list[int]:
    """The steps of a tensor that were asked for; otherwise the middle one of those with neighbors, or of all."""
    there = gradients.steps[info.name]
    if steps is not None:
        return sorted(set(there).intersection(steps))
    known = set(there)
    middles = [step for step in there if {step - 1, step + 1} <= known] or list(there)
    return [middles[len(middles) // 2]]


class RankGradients:
    """Gradients of a tensor at a step for any number of ranks."""

    def __init__(self, trace: Trace, info: TensorInfo, step: int, seed: int) -> None:
        def read(one: TensorInfo, at: int) -> NDArray[np.float32]:
            values = trace.read(one.name, at, **one.stream._asdict())[:VALUES]
            return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)

        same = (info.kind, info.name, info.optimizer)
        ranks = [one for one in trace.tensors if (one.kind, one.name, one.optimizer) == same and one.stage == "local"]
        self._recorded = [read(one, step) for one in ranks if step in steps_of(trace, one)]
        self._first = self._recorded[0] if self._recorded else read(info, step)
        self._noise: NDArray[np.float32] | None = None
        if {step - 1, step + 1} <= set(steps_of(trace, info).tolist()):
            before, after = (read(info, other) for other in (step - 1, step + 1))
            # The noise of three consecutive steps, without a steady drift.
            noise = (before - 2 * self._first + after) / np.float32(math.sqrt(6.0))
            # The average of some ranks has so much less noise than one of them.
            world = trace.attrs.get("world_size")
            more = math.sqrt(world) if info.stage == "reduced" and isinstance(world, int) and world > 1 else 1.0
            self._noise = noise * np.float32(more)
        self._name, self._step, self.seed = info.name, step, seed

    def source(self, ranks: int) -> str:
        """Where the gradients of this number of ranks come from."""
        if len(self._recorded) >= ranks:
            return RECORDED
        return COPIES if self._noise is None else NOISY

    def of(self, ranks: int) -> list[NDArray[np.float32]]:
        """float32[n] of each rank; the first ones are the same for any number."""
        if len(self._recorded) >= ranks:
            return self._recorded[:ranks]
        if self._noise is None:
            return [self._first] * ranks
        found = []
        for rank in range(ranks):
            key = Key.derive(self.seed, tensor=self._name, step=self._step, worker=rank, role="noise")
            signs = np.random.default_rng(list(key)).integers(0, 2, self._first.size, np.int8)
            found.append(self._first + (1 - 2 * signs).astype(np.float32) * self._noise)
        return found


def _averaged(codec: Codec, name: str, info: TensorInfo, given: RankGradients, ranks: int) -> dict[str, Any] | None:
    values = given.of(ranks)
    size = values[0].size
    options = LinkOptions(RefitSchedule.parse("once"), given.seed, vectors.engine)
    shape = info.shape if math.prod(info.shape) == size else None
    whole = [Piece(info.name, codec, size, None, shape)]
    places = [SimulatedRank(rank, ranks) for rank in range(ranks)]
    everyone = [RankCodecs(CodecTable.of(codec), options, place, common=False) for place in places]
    chosen = way(name)
    try:
        found, sent = lockstep(
            [averaging(one, chosen, whole, [own], 0) for one, own in zip(everyone, values, strict=True)]
        )
    except UsageError:
        return None
    mean: NDArray[np.float64] = np.mean(values, axis=0, dtype=np.float64)
    off = on_host(found[0][0]) - mean
    nodes = np.arange(ranks) // (node_of(name) or 1)
    across = sent[nodes[:, None] != nodes[None, :]].sum()
    return {
        "codec": str(codec),
        "exchange": name,
        "ranks": ranks,
        "energy": float(mean @ mean),
        "error": float(off @ off),
        "size": size,
        "sent": float(sent.sum()) / ranks,
        "across": float(across) / ranks,
        "source": given.source(ranks),
    }
