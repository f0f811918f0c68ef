"""Gradients between real ranks: each encodes its own, bytes are exchanged, decoded and averaged.

:class:`State` is what a communication hook of ``DistributedDataParallel`` keeps between buckets and steps::

    state = gtrace.training.State("ef:topk:ratio=0.01")
    model.register_comm_hook(state, gtrace.training.ddp_comm_hook)

Everything is kept by parameter and not by bucket, because buckets are built anew after the first step.
"""

from __future__ import annotations

import functools
import math
import operator
import time
import zlib
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard, get_args

import numpy as np
import torch
from torch._C._distributed_c10d import GradBucket

from gtrace.codecs import codec as build_codec
from gtrace.codecs.assignment import CodecTable
from gtrace.codecs.base import Averaged, advance
from gtrace.codecs.link import LinkOptions, Message, Receiver, Sender, allocate, sharing
from gtrace.coding import ENVELOPE_BYTES
from gtrace.coding.sketches import pack_sketch, unpack_sketch
from gtrace.errors import PayloadError, UsageError, suggest
from gtrace.schedule import DEFAULT_REFIT, RefitSchedule
from gtrace.torch_hooks.naming import name_parameters
from gtrace.training import vectors
from gtrace.training.checkpoint import as_arrays, as_tensors
from gtrace.training.exchange import NONFINITE, Nonfinite, NonfiniteGradientError, Tally
from gtrace.training.wire import HEADER_BYTES, NOT_FINITE, Collectives, NotFinite, join, pack, split, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch.distributed as dist
    from numpy.typing import NDArray
    from torch import nn

    from gtrace.codecs import Codec
    from gtrace.codecs.assignment import TableLike
    from gtrace.codecs.base import Rounds
    from gtrace.sketch import MomentSketch
    from gtrace.training.vectors import Vector
    from gtrace.types import Role

    #: float32[n]; what stands for values that are not finite; None for nothing to send
    Values: TypeAlias = Vector | NotFinite | None

ExchangeKind: TypeAlias = Literal["allgather", "two-shot"]
EXCHANGES: tuple[ExchangeKind, ...] = get_args(ExchangeKind)
Levels: TypeAlias = Literal["own", "common"]
LEVELS: tuple[Levels, ...] = get_args(Levels)
FORMAT = 1


@dataclass(frozen=True, slots=True)
class AllReduceComparison:
    """What a step would have been with plain all-reduces of the same gradients, measured beside it.

    Attributes:
        relative_variance: ||average of decoded - exact average||^2 / ||exact average||^2.
        bf16_variance: the same of an all-reduce in bfloat16.
        bf16_seconds: wall time of that all-reduce.
        float32_seconds: wall time of one in float32.
    """

    relative_variance: float
    bf16_variance: float
    bf16_seconds: float
    float32_seconds: float


@dataclass(slots=True)
class _ComparisonSums:
    """What comparisons add up over the buckets of a step."""

    energy: float = 0.0
    error: float = 0.0
    bf16_error: float = 0.0
    bf16_seconds: float = 0.0
    float32_seconds: float = 0.0

    def close(self) -> AllReduceComparison | None:
        if not self.float32_seconds:
            return None
        share = 1 / self.energy if self.energy > 0 else float("nan")
        return AllReduceComparison(self.error * share, self.bf16_error * share, self.bf16_seconds, self.float32_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """How ranks exchange gradients.

    Attributes:
        exchange: ``allgather`` sends every rank's payload to all others; ``two-shot`` sends each rank a piece of every
            tensor, which it decodes, averages and encodes once more for all: fewer bytes from three ranks on, and
            a second error, which is measured. Messages of linear codecs go through all-reduces either way.
        levels: ``own``: each rank fits to its own gradient, and its levels travel with its payload; ``common``: when
            the schedule says so, ranks exchange their sketches and all fit to the sum.
        seed: of the rounding; ranks and stages have keys of their own.
        refit: when codecs are fitted, as :meth:`RefitSchedule.parse` reads it.
        nonfinite: what to do with a gradient that holds NaN or infinity. ``pass``, the default, makes the average NaN,
            as it would be without a codec, so that a gradient scaler skips the step; others as in :class:`Exchange`.
        compare_every: every so many steps the same gradients go through plain all-reduces in float32 and in bfloat16,
            too, for ``comparison``; 0 for never.

    Raises:
        UsageError: an unknown choice, or a negative number of steps.
    """

    exchange: ExchangeKind = "allgather"
    levels: Levels = "own"
    seed: int = 0
    refit: str | RefitSchedule = DEFAULT_REFIT
    nonfinite: Nonfinite = "pass"
    compare_every: int = 100

    def __post_init__(self) -> None:
        for what, allowed in (("exchange", EXCHANGES), ("levels", LEVELS), ("nonfinite", NONFINITE)):
            value = getattr(self, what)
            if value not in allowed:
                raise UsageError(f"{what}: '{value}' is unknown; {suggest(str(value), allowed)}")
        if self.compare_every < 0:
            raise UsageError(f"compare_every: {self.compare_every} is below 0")

    @property
    def schedule(self) -> RefitSchedule:
        """``refit``, read."""
        return RefitSchedule.parse(self.refit) if isinstance(self.refit, str) else self.refit


#: a bucket that waits for the others: names, gradients, the buffer that they lie in, and what the hook promised
_Waiting: TypeAlias = "tuple[list[str], list[torch.Tensor], torch.Tensor, torch.futures.Future[torch.Tensor]]"


class State:
    """What a communication hook keeps: every parameter's codec states, the step, and what it all cost.

    Args:
        codec: a codec or its spec, for all tensors that no rule is about; or a table or plan, without rules.
        process_group: who exchanges; None for the default group.
        model: names the parameters; without it they are looked for among all live modules.
        rules: pattern -> codec for some tensors: ``{"bias": "none"}``; see
            :class:`gtrace.codecs.assignment.CodecTable`.
        min_size: tensors with fewer elements go uncompressed.
        on_step: called with this state after the last bucket of each step.
        options: how ranks exchange.
        settings: fields of :class:`~gtrace.training.ddp.RankOptions` that differ from ``options``.

    Attributes:
        steps: steps that were exchanged to their end.
        tally: summed over the steps, of this rank.
        last: tally of the step before.
        comparison: of the step before; None where there was none.

    Raises:
        UsageError: an unknown codec or choice, a codec over the whole model, or one whose payloads are no bytes that
            a receiver could decode.
    """

    def __init__(
        self,
        codec: TableLike,
        process_group: dist.ProcessGroup | None = None,
        *,
        model: nn.Module | None = None,
        rules: Mapping[str, str | Codec] | Iterable[tuple[str, str | Codec]] = (),
        min_size: int = 0,
        on_step: Callable[[State], None] | None = None,
        options: RankOptions | None = None,
        **settings: Any,
    ) -> None:
        self.options = replace(options or RankOptions(), **settings)
        self.rules = CodecTable.of(codec, rules, min_size)
        for one in self.rules.codecs:
            if one.needs is not None and one.needs.scope == "model":
                raise UsageError(
                    f"{one}: a codec over the whole model cannot go bucket by bucket; leave out scope=model"
                )
            if one.declared:
                raise UsageError(f"{one}: no other rank could decode its payloads, which are declared and not bytes")
        self.steps = 0
        self.tally, self.last = Tally(), Tally()
        self.comparison: AllReduceComparison | None = None
        self.on_step = on_step
        self._names: dict[int, str] = {}
        if model is not None:
            groups = [{"params": list(model.parameters())}]
            self._names = {key: entry.name for key, entry in name_parameters(groups, [model], scan=False).items()}
        self._group = process_group
        self._collectives: Collectives | None = None
        self._shots = Shots(
            self.rules, self.options.seed, self.options.schedule, common=self.options.levels == "common"
        )
        self._sums = _ComparisonSums()
        self._waiting: list[_Waiting] = []

    def exchange_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The work of the communication hook: the bucket's buffer with averages in the place of gradients."""
        buffer = bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.device.type == "cuda" else None
        )
        if bucket.index() == 0:
            # What a backward pass left that failed on its way.
            self._waiting = []
        parameters = bucket.parameters()
        if any(id(parameter) not in self._names for parameter in parameters):
            found = name_parameters([{"params": list(parameters)}], [])
            self._names.update({key: entry.name for key, entry in found.items()})
        names = [self._names[id(parameter)] for parameter in parameters]
        self._waiting.append((names, bucket.gradients(), buffer, future))
        # Shares come from the gradients of all tensors, so buckets wait for the last one.
        if bucket.is_last() or not self._shots.allocates:
            waiting, self._waiting = self._waiting, []
            names = [name for some, _, _, _ in waiting for name in some]
            gradients = [gradient for _, some, _, _ in waiting for gradient in some]
            values = [
                vectors.flat(gradient, self.rules.choose(name, gradient.numel()))
                for name, gradient in zip(names, gradients, strict=True)
            ]
            averages = self.average(names, values, [tuple(gradient.shape) for gradient in gradients])
            for gradient, average in zip(gradients, averages, strict=True):
                gradient.copy_(torch.as_tensor(average).view(gradient.shape))
            if bucket.is_last():
                self.end_step()
            for _, _, held, promised in waiting:
                promised.set_result(held)
        return future

    def average(
        self, names: Sequence[str], values: Sequence[Vector], shapes: Sequence[tuple[int, ...]] | None = None
    ) -> list[Vector]:
        """Exchange some tensors and average what arrives; every rank calls this with the same names in the same order.

        A codec that allocates shares out among the tensors of one call.

        Args:
            names: of the tensors.
            values: float32[n] of each, arrays or tensors; they are not changed.
            shapes: true shape of each, for codecs that look at it; None if they are not known.

        Returns:
            float32[n] of each, of the same kind, the same bytes on all ranks; zeros where no rank could send.

        Raises:
            NonfiniteGradientError: NaN or infinity under the policy ``error``.
            PayloadError: what arrived is damaged, or the ranks' models differ.
        """
        links = self._links()
        tally = self._shots.tally
        start, waited, before = time.thread_time(), links.seconds, links.sent
        shot = self._shots.one if self.options.exchange == "allgather" else self._shots.two
        sent = [self._finite(name, array) for name, array in zip(names, values, strict=True)]
        averages: list[Vector] = list(values)
        linear = [self.rules.choose(name, len(array)).linear for name, array in zip(names, values, strict=True)]
        for way, chosen in ((shot, False), (self._shots.averaged, True)):
            among = [k for k, one in enumerate(linear) if one is chosen]
            if among:
                found = way(
                    links,
                    [names[k] for k in among],
                    [sent[k] for k in among],
                    [values[k] for k in among],
                    self.steps,
                    None if shapes is None else [shapes[k] for k in among],
                )
                for k, average in zip(among, found, strict=True):
                    averages[k] = average
        tally.codec_seconds += time.thread_time() - start
        tally.wire_seconds += links.seconds - waited
        tally.wire_bytes += links.sent - before
        tally.float32_bits += 32 * sum(map(len, values))
        if self.options.compare_every and self.steps % self.options.compare_every == 0:
            self._compare(links, *(_joined(one, links.device) for one in (values, averages)))
        return averages

    def end_step(self) -> None:
        """All tensors of a step have been averaged."""
        self.last, self._shots.tally = self._shots.tally, Tally()
        self.comparison, self._sums = self._sums.close(), _ComparisonSums()
        self.tally.add(self.last)
        self.steps += 1
        if self.on_step is not None:
            self.on_step(self)

    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps depend on, of this rank: numbers, text and tensors for ``torch.save``.

        Ranks differ in it, so that a checkpoint holds one of each.
        """
        links = self._links()
        place = {"rank": links.rank, "world_size": links.size}
        return {
            "format": FORMAT,
            "settings": {**self._settings(), **place},
            "steps": self.steps,
            **self._shots.to_lists(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken, with the same settings, on the same rank of as many.

        Raises:
            UsageError: something else is different, or the format is another one.
        """
        links = self._links()
        if saved.get("format") != FORMAT:
            raise UsageError(f"state: its format is {saved.get('format')}, and this gtrace reads {FORMAT}")
        theirs = saved["settings"]
        for name, value in {**self._settings(), "rank": links.rank, "world_size": links.size}.items():
            if theirs.get(name) != value:
                raise UsageError(f"state: saved with {name} {theirs.get(name)}, and here it is {value}")
        self.steps = int(saved["steps"])
        self._shots.load_lists(saved, links.rank)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: without the process group and what else belongs to one process."""
        return {**vars(self), "_group": None, "_collectives": None, "on_step": None, "_names": {}}

    def _settings(self) -> dict[str, Any]:
        return {
            **self.rules.describe(),
            "exchange": self.options.exchange,
            "levels": self.options.levels,
            "seed": self.options.seed,
            "refit": str(self.options.schedule),
            "nonfinite": self.options.nonfinite,
        }

    def _links(self) -> Collectives:
        if self._collectives is None:
            self._collectives = Collectives(self._group)
        return self._collectives

    def _finite(self, name: str, values: Vector) -> Values:
        """What is to be encoded of this rank's values."""
        count = vectors.count_nonfinite(values)
        if count == 0:
            return values
        self._shots.tally.nonfinite += count
        if self.options.nonfinite == "error":
            raise NonfiniteGradientError(
                f"step {self.steps}, rank {self._links().rank}, {name}: {count} of {len(values)} gradient values are "
                "not finite; lower the learning rate, or choose nonfinite=pass, skip or zero"
            )
        if self.options.nonfinite == "zero":
            return vectors.zero_nonfinite(values)
        return NOT_FINITE if self.options.nonfinite == "pass" else None

    def _compare(self, links: Collectives, ours: torch.Tensor, averages: torch.Tensor) -> None:
        exact, seconds = links.mean(ours)
        rough, rough_seconds = links.mean(ours.to(torch.bfloat16))
        truth, sums = exact.double(), self._sums
        sums.energy += float(truth.square().sum())
        sums.error += float((truth - averages).square().sum())
        sums.bf16_error += float((truth - rough).square().sum())
        sums.float32_seconds += seconds
        sums.bf16_seconds += rough_seconds


def _joined(parts: Sequence[Vector], device: torch.device) -> torch.Tensor:
    return torch.cat([torch.as_tensor(part).to(device) for part in parts])


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor that one rank sums up, or all of it.

    Attributes:
        name: of the piece; the tensor's where it is all of it.
        owner: the rank that sums it up.
        start: first element.
        stop: one beyond the last.
        codec: what it goes through.
        device: where it is encoded and decoded; None for the host.
        shape: of the parameter where it is all of it and the shape is known.
    """

    name: str
    owner: int
    start: int
    stop: int
    codec: Codec
    device: torch.device | None = None
    shape: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Elements."""
        return self.stop - self.start


class Shots:
    """Every tensor's senders and receivers on this rank.

    Args:
        rules: which codec each tensor goes through.
        seed: of the rounding.
        refit: when codecs are fitted.
        common: fit to the sum of all ranks' sketches, which are exchanged for it.

    Attributes:
        tally: what travelled since it was last replaced, of this rank.
    """

    def __init__(self, rules: CodecTable, seed: int, refit: RefitSchedule, *, common: bool) -> None:
        self.tally = Tally()
        self._rules, self._common = rules, common
        self._options = LinkOptions(refit, seed, vectors.ENGINE)
        self._senders: dict[tuple[Role, str], Sender] = {}
        self._receivers: dict[tuple[Role, str, int], Receiver] = {}

    @property
    def allocates(self) -> bool:
        """Whether tensors share something out among them, and must be exchanged in one call."""
        return any(codec.allocates for codec in self._rules.codecs)

    def one(
        self,
        links: Collectives,
        names: Sequence[str],
        values: Sequence[Values],
        likes: Sequence[Vector],
        step: int,
        shapes: Sequence[tuple[int, ...] | None] | None = None,
    ) -> list[Vector]:
        """Every rank's payloads go to all; returns the averages, the same bytes on all ranks.

        Args:
            links: to the other ranks.
            names: of the tensors.
            values: of each, what is to be sent.
            likes: of each, something of the size and of the place that the average is to have.
            step: number of the step.
            shapes: of each, that of its parameter, None if it is not known.
        """
        whole = self._whole(links, names, likes, shapes)
        messages = self._encode(links, whole, values, "up", step)
        frames = links.scatter([pack(messages)] * links.size)
        gathered = [self._decode(whole, unpack(frame, len(whole)), "up", rank) for rank, frame in enumerate(frames)]
        self._settle(whole, values, gathered[links.rank], "up")
        return [_mean(piece, arrived) for piece, arrived in zip(whole, zip(*gathered, strict=True), strict=True)]

    def averaged(
        self,
        links: Collectives,
        names: Sequence[str],
        values: Sequence[Values],
        likes: Sequence[Vector],
        step: int,
        shapes: Sequence[tuple[int, ...] | None] | None = None,
    ) -> list[Vector]:
        """Tensors of linear codecs, by all-reduces of their messages; the same bytes on all ranks.

        A tensor that a rank cannot send goes uncompressed from the others, and no memory changes.

        Args:
            links: to the other ranks.
            names: of the tensors.
            values: of each, what is to be sent.
            likes: of each, something of the size and of the place that the average is to have.
            step: number of the step.
            shapes: of each, that of its parameter, None if it is not known.

        Raises:
            PayloadError: the ranks' models differ.
        """
        whole = self._whole(links, names, likes, shapes)
        flags = bytes(_sendable(array) + 2 * isinstance(array, NotFinite) for array in values)
        self.tally.frame_bits += 8 * len(flags)
        frames = links.scatter([flags] * links.size)
        if any(len(frame) != len(flags) for frame in frames):
            raise PayloadError("frame: other tensors than here; the ranks differ in their model")
        averages: list[Vector | None] = [None] * len(whole)
        runs: dict[int, Rounds] = {}
        alone: dict[int, NDArray[np.float32]] = {}
        sent: dict[int, Vector] = {}
        for k, (piece, array, seen) in enumerate(zip(whole, values, zip(*frames, strict=True), strict=True)):
            if 2 in seen or 1 not in seen:
                averages[k] = _mean(piece, [NOT_FINITE] if 2 in seen else [])
            elif 0 in seen:
                part = vectors.on_host(array) if _sendable(array) else np.zeros(piece.size, np.float32)
                alone[k] = part * np.float32(links.size / sum(seen))
                self.tally.payload_bits += 32 * piece.size if _sendable(array) else 0
            elif _sendable(array):
                sent[k] = array
                runs[k] = self._sender(piece, "up", links.rank).rounds(array, step)
        found = self._all_reduce(links, alone)
        means: dict[int, NDArray[np.float32]] = {}
        while runs:
            messages: dict[int, NDArray[np.float32]] = {}
            for k, run in list(runs.items()):
                message = advance(run, means.get(k))
                if isinstance(message, Averaged):
                    found[k] = message.decoded
                    self._note(vectors.on_host(sent[k]), message.own, "up")
                    del runs[k]
                else:
                    messages[k] = message
                    self.tally.payload_bits += 8 * message.nbytes
            means = self._all_reduce(links, messages)
        for k, decoded in found.items():
            place = whole[k].device
            averages[k] = decoded if place is None else torch.from_numpy(decoded).to(place)
        return [average for average in averages if average is not None]

    @staticmethod
    def _all_reduce(links: Collectives, parts: Mapping[int, NDArray[np.float32]]) -> dict[int, NDArray[np.float32]]:
        """The mean over ranks of each array, all of them in one collective."""
        if not parts:
            return {}
        joined = links.average(np.concatenate([part.reshape(-1) for part in parts.values()]))
        borders = np.cumsum([part.size for part in parts.values()])[:-1]
        cut = np.split(joined, borders)
        return {k: mean.reshape(part.shape) for (k, part), mean in zip(parts.items(), cut, strict=True)}

    def _whole(
        self,
        links: Collectives,
        names: Sequence[str],
        likes: Sequence[Vector],
        shapes: Sequence[tuple[int, ...] | None] | None,
    ) -> list[Piece]:
        """Tensors in one piece each."""
        return [
            Piece(name, links.rank, 0, len(like), self._rules.choose(name, len(like)), vectors.place_of(like), shape)
            for name, like, shape in zip(names, likes, shapes or [None] * len(names), strict=True)
        ]

    def two(
        self,
        links: Collectives,
        names: Sequence[str],
        values: Sequence[Values],
        likes: Sequence[Vector],
        step: int,
        shapes: Sequence[tuple[int, ...] | None] | None = None,
    ) -> list[Vector]:
        """Each rank sums up a piece of every tensor and sends the average on; the same bytes on all ranks.

        Args:
            links: to the other ranks.
            names: of the tensors.
            values: of each, what is to be sent.
            likes: of each, something of the size and of the place that the average is to have.
            step: number of the step.
            shapes: of each, as of :meth:`one`; pieces have none.
        """
        del shapes
        averages = [vectors.filled(like, len(like), 0.0) for like in likes]
        pieces: list[Piece] = []
        parts: list[Values] = []
        targets: list[Any] = []
        for name, array, average in zip(names, values, averages, strict=True):
            for piece in self._split(name, average, links.size):
                pieces.append(piece)
                parts.append(array[piece.start : piece.stop] if _sendable(array) else array)
                targets.append(average[piece.start : piece.stop])
        messages = self._encode(links, pieces, parts, "up", step)
        # Nobody sends a rank its own pieces back, and memory wants to know how they arrived.
        self._settle(pieces, parts, self._decode(pieces, messages, "up", links.rank), "up")
        owned = [[k for k, piece in enumerate(pieces) if piece.owner == rank] for rank in range(links.size)]
        frames = links.scatter([pack([messages[k] for k in chosen]) for chosen in owned])
        mine = [pieces[k] for k in owned[links.rank]]
        gathered = [self._decode(mine, unpack(frame, len(mine)), "up", rank) for rank, frame in enumerate(frames)]
        sums: list[Values] = []
        for piece, arrived in zip(mine, zip(*gathered, strict=True), strict=True):
            total = _mean(piece, arrived)
            sums.append(NOT_FINITE if vectors.count_nonfinite(total) else total)
        onward = self._encode(links, mine, sums, "down", step)
        for rank, frame in enumerate(links.scatter([pack(onward)] * links.size)):
            theirs = [pieces[k] for k in owned[rank]]
            final = self._decode(theirs, unpack(frame, len(theirs)), "down", rank)
            for k, piece, array in zip(owned[rank], theirs, final, strict=True):
                targets[k][:] = _mean(piece, [array])
            if rank == links.rank:
                self._settle(mine, sums, final, "down")
        return averages

    def to_lists(self) -> dict[str, Any]:
        """Codec states and what receivers hold, as numbers, text and tensors."""
        return {
            "senders": [
                [role, name, str(one.codec), as_tensors(one.to_arrays())] for (role, name), one in self._senders.items()
            ],
            "receivers": [
                [role, name, rank, str(one.codec), one.size, torch.frombuffer(bytearray(one.shared), dtype=torch.uint8)]
                for (role, name, rank), one in self._receivers.items()
                if one.shared
            ],
        }

    def load_lists(self, saved: Mapping[str, Any], rank: int) -> None:
        """Undo :meth:`to_lists` on this rank."""
        self._senders, self._receivers = {}, {}
        for role, name, spec, tensors in saved["senders"]:
            arrays = as_arrays(tensors)
            size = int(arrays["state"]["size"])
            self._sender(Piece(name, rank, 0, size, build_codec(spec)), role, rank).load_arrays(arrays)
        for role, name, sender, spec, size, shared in saved["receivers"]:
            receiver = self._receiver(Piece(name, sender, 0, size, build_codec(spec)), role, sender)
            receiver.shared = shared.numpy().tobytes()

    def _split(self, name: str, like: Vector, ranks: int) -> list[Piece]:
        """Pieces of a tensor: whole buckets, nearly as many for each rank; which rank begins depends on the name."""
        size, place = len(like), vectors.place_of(like)
        codec = self._rules.choose(name, size)
        bucket = (codec.needs.bucket_size if codec.needs is not None else None) or 1
        blocks = -(-size // bucket)
        parts = max(1, min(ranks, blocks))
        borders = [min(size, bucket * (blocks * k // parts)) for k in range(parts + 1)]
        first = zlib.crc32(name.encode())
        return [
            Piece(name if parts == 1 else f"{name}[{start}:{stop}]", (first + k) % ranks, start, stop, codec, place)
            for k, (start, stop) in enumerate(pairwise(borders))
        ]

    def _sender(self, piece: Piece, role: Role, rank: int) -> Sender:
        sender = self._senders.get((role, piece.name))
        if sender is None:
            sender = self._senders[role, piece.name] = Sender(
                piece.codec,
                piece.size,
                self._options,
                tensor=piece.name,
                worker=rank,
                shape=piece.shape,
                role=role,
            )
        return sender

    def _receiver(self, piece: Piece, role: Role, rank: int) -> Receiver:
        receiver = self._receivers.get((role, piece.name, rank))
        if receiver is None:
            receiver = self._receivers[role, piece.name, rank] = Receiver(piece.codec, piece.size, vectors.ENGINE)
        return receiver

    def _encode(
        self, links: Collectives, pieces: Sequence[Piece], values: Sequence[Values], role: Role, step: int
    ) -> list[Message | NotFinite | None]:
        start = time.thread_time()
        if self._common and role == "up":
            self._agree(links, pieces, values, step)
        elif self.allocates:
            pairs = zip(pieces, values, strict=True)
            allocate([(self._sender(piece, role, links.rank), one) for piece, one in pairs if _sendable(one)], step)
            self.tally.fit_seconds += time.thread_time() - start
        tally, messages = self.tally, list[Message | NotFinite | None]()
        for piece, array in zip(pieces, values, strict=True):
            if array is None or isinstance(array, NotFinite):
                messages.append(array)
                continue
            sender = self._sender(piece, role, links.rank)
            before = sender.fit_seconds
            message = sender.send(array, step)
            messages.append(message)
            tally.fit_seconds += sender.fit_seconds - before
            if role == "up":
                tally.payload_bits += message.payload_bits
                tally.shared_bits += message.shared_bits
            else:
                tally.down_bits += message.payload_bits + message.shared_bits
            tally.envelope_bits += 8 * ENVELOPE_BYTES
        tally.frame_bits += 8 * HEADER_BYTES * len(pieces)
        return messages

    def _agree(self, links: Collectives, pieces: Sequence[Piece], values: Sequence[Values], step: int) -> None:
        """Fit every codec that is due to the sum of all ranks' sketches; the schedule is the same on all of them."""
        everyone = [
            (piece, array, self._sender(piece, "up", links.rank)) for piece, array in zip(pieces, values, strict=True)
        ]
        due = [
            (piece, array, sender)
            for piece, array, sender in everyone
            if sender.due(step) and (sender.codec.allocates or not sender.codec.fits_itself)
        ]
        if not due:
            return
        totals = self._totals(links, [(sender.summary, array) for _, array, sender in due], step)
        shares: dict[str, float] = {}
        groups = dict(sharing((sender.codec, (piece, array, sender)) for piece, array, sender in everyone))
        for codec in {sender.codec: None for _, _, sender in due}:
            if codec.allocates:
                members = groups[codec]
                found = self._totals(links, [(sender.sketch, array) for _, array, sender in members], step)
                known = {piece.name: one for (piece, _, _), one in zip(members, found, strict=True) if one is not None}
                shares.update(zip(known, codec.allocate(list(known.values())), strict=True))
        for (piece, _, sender), total in zip(due, totals, strict=True):
            if total is None:
                continue
            sender.fit(total, step, agreed=True, share=shares.get(piece.name))
            for rank in range(links.size):
                self._receiver(piece, "up", rank).shared = sender.known

    def _totals(
        self, links: Collectives, items: Sequence[tuple[Callable[[Vector, int], MomentSketch], Values]], step: int
    ) -> list[MomentSketch | None]:
        """The sum of all ranks' sketches of each of some values; None if no rank has any."""
        packed = [pack_sketch(sketch(array, step)) if _sendable(array) else b"" for sketch, array in items]
        frame = join(packed)
        self.tally.shared_bits += 8 * sum(map(len, packed))
        self.tally.frame_bits += 8 * (len(frame) - sum(map(len, packed)))
        gathered = [split(frame, len(items)) for frame in links.scatter([frame] * links.size)]
        totals: list[MomentSketch | None] = []
        for sketches in zip(*gathered, strict=True):
            known = [unpack_sketch(data) for data in sketches if data]
            totals.append(functools.reduce(operator.add, known) if known else None)
        return totals

    def _decode(
        self, pieces: Sequence[Piece], messages: Sequence[Message | NotFinite | None], role: Role, rank: int
    ) -> list[Values]:
        """One rank's messages."""
        return [
            self._receiver(piece, role, rank).receive(message, piece.device)
            if isinstance(message, Message)
            else message
            for piece, message in zip(pieces, messages, strict=True)
        ]

    def _settle(self, pieces: Sequence[Piece], values: Sequence[Values], arrived: Sequence[Values], role: Role) -> None:
        """Tell memory how this rank's own messages arrived, and measure how far off they were."""
        for piece, array, decoded in zip(pieces, values, arrived, strict=True):
            if _sendable(array) and _sendable(decoded):
                self._senders[role, piece.name].settle(array, decoded)
                self._note(array, decoded, role)

    def _note(self, array: Vector, decoded: Vector, role: Role) -> None:
        """Measure how far off a message of this rank's arrived."""
        tally = self.tally
        wide = vectors.widened(array)
        energy = float(wide @ wide)
        wide -= decoded
        error = float(wide @ wide)
        if role == "up":
            tally.worker_energy += energy
            tally.worker_squared_error += error
            tally.zeros += vectors.count_zeros(decoded)
        else:
            tally.down_energy += energy
            tally.down_squared_error += error


def _mean(piece: Piece, arrived: Sequence[Values]) -> Vector:
    """What the codec makes of what arrived from several ranks: NaN where one of them could not send."""
    decoded = [one for one in arrived if _sendable(one)]
    spoilt = any(isinstance(one, NotFinite) for one in arrived)
    if decoded and not spoilt:
        return vectors.aggregate(piece.codec, decoded)
    value = math.nan if spoilt else 0.0
    if piece.device is None:
        return np.full(piece.size, value, np.float32)
    return torch.full((piece.size,), value, device=piece.device)


def _sendable(values: Values) -> TypeGuard[Vector]:
    return values is not None and not isinstance(values, NotFinite)


def ddp_comm_hook(state: State, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send a bucket of gradients through the codec of ``state``, to be registered once with a wrapped model::

        model.register_comm_hook(gtrace.training.State("alq:bits=3"), gtrace.training.ddp_comm_hook)

    Collectives block, so nothing overlaps with the backward pass; what gloo offers would not, either.

    Args:
        state: see :class:`gtrace.training.State`.
        bucket: of torch.

    Returns:
        A completed future of the bucket's buffer, with the average that arrived in the place of the gradients.
    """
    return state.exchange_bucket(bucket)


# torch compares the annotations themselves, not their text.
ddp_comm_hook.__annotations__.update(bucket=GradBucket, **{"return": torch.futures.Future[torch.Tensor]})
