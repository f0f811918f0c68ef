"""Ways of averaging among ranks: generators, see :mod:`gtrace.training.frames`.

Each runs on all ranks with the same tensors in the same order, and its result has the same bytes on all. Where a sum is
encoded again, its error comes on top of that of the workers' own encodings.
"""

from __future__ import annotations

import functools
import re
import zlib
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import numpy as np

from gtrace.codecs import Composed
from gtrace.codecs.base import Averaged, advance
from gtrace.codecs.parts import Parts
from gtrace.codecs.wrappers import Wrapper
from gtrace.coding import pack_fixed, unpack_fixed, width_for
from gtrace.errors import UsageError, suggest
from gtrace.training import vectors
from gtrace.training.frames import NOT_FINITE, Exchanging, join, pack, split, unpack
from gtrace.training.ranks import Piece, sendable
from gtrace.types import State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from gtrace.codecs import Codec
    from gtrace.codecs.base import Rounds
    from gtrace.training.ranks import RankCodecs, Values
    from gtrace.training.vectors import Vector
    from gtrace.types import Role

    #: an exchange whose result is float32[n] of each tensor
    Averaging: TypeAlias = Exchanging[list[Vector]]
    #: pieces, their values and the step -> averages of all or some of them
    Half: TypeAlias = Callable[[RankCodecs, Sequence[Piece], Any, int], Averaging]
    #: averages, pieces of all tensors, each one's part of the values, and its target among the averages
    Cut: TypeAlias = tuple[list[Vector], list[Piece], list[Any], list[Any]]

#: bits of a sum of codes at most
_SUM_BITS = 16


class Way(Protocol):
    """A way of averaging."""

    def __call__(
        self,
        codecs: RankCodecs,
        whole: Sequence[Piece],
        values: Sequence[Values],
        step: int,
        *,
        scattered: bool = False,
    ) -> Averaging:
        """The averages of tensors.

        Args:
            codecs: this rank's.
            whole: the tensors.
            values: the values of each to send.
            step: number of the step.
            scattered: the tensors are pieces with owners, and each owner gets the averages of its own, in order.
        """


def all_gather(
    codecs: RankCodecs, whole: Sequence[Piece], values: Sequence[Values], step: int, *, scattered: bool = False
) -> Averaging:
    """Send every rank's payloads to all, or to the owner; returns the averages. Arguments are those of `Way`."""
    if scattered:
        return (yield from _first_shot(codecs, whole, values, step))
    messages = yield from codecs.encode(whole, values, "up", step)
    frames = yield [pack(messages)] * codecs.place.size
    gathered = [codecs.decode(whole, unpack(frame, len(whole)), "up", rank) for rank, frame in enumerate(frames)]
    codecs.settle(whole, values, gathered[codecs.place.rank], "up")
    return [piece.mean(arrived) for piece, arrived in zip(whole, zip(*gathered, strict=True), strict=True)]


def two_shot(
    codecs: RankCodecs, whole: Sequence[Piece], values: Sequence[Values], step: int, *, scattered: bool = False
) -> Averaging:
    """Each rank sums up a piece of every tensor and sends the average on. Arguments are those of `Way`."""
    return (yield from _form(_first_shot, scattered)(codecs, whole, values, step))


def served(codecs: RankCodecs, whole: Sequence[Piece], values: Sequence[Values], step: int) -> Averaging:
    """Two shots of whole tensors: each has one rank as its server. Arguments are those of `Way`."""
    size = codecs.place.size
    averages, pieces, parts, targets = cut_up(whole, values, 1)
    pieces = [replace(piece, owner=zlib.crc32(piece.name.encode()) % size) for piece in pieces]
    return (yield from _sent_on(codecs, (averages, pieces, parts, targets), step, _first_shot))


def _form(half: Half, scattered: bool) -> Half:
    """Averages of pieces at their owners, or of whole tensors: cut into pieces that their owners then send on."""
    return half if scattered else functools.partial(_cut_and_sent_on, half=half)


def _cut_and_sent_on(
    codecs: RankCodecs, whole: Sequence[Piece], values: Sequence[Any], step: int, *, half: Half
) -> Averaging:
    return (yield from _sent_on(codecs, cut_up(whole, values, codecs.place.size), step, half))


def _sent_on(codecs: RankCodecs, cut: Cut, step: int, half: Half) -> Averaging:
    averages, pieces, parts, targets = cut
    means = yield from half(codecs, pieces, parts, step)
    yield from _send_on(codecs, pieces, means, targets, step)
    return averages


def _owned(codecs: RankCodecs, pieces: Sequence[Piece]) -> list[list[int]]:
    """The places of each rank's own pieces."""
    return [[k for k, piece in enumerate(pieces) if piece.owner == one] for one in range(codecs.place.size)]


def _first_shot(codecs: RankCodecs, pieces: Sequence[Piece], parts: Sequence[Values], step: int) -> Averaging:
    """Send every piece to its owner; returns the averages of this rank's own pieces, in order."""
    everyone = range(codecs.place.size)
    return (yield from _averaged_among(codecs, pieces, parts, step, everyone, _owned(codecs, pieces)))


def _averaged_among(
    codecs: RankCodecs,
    pieces: Sequence[Piece],
    parts: Sequence[Values],
    step: int,
    among: Sequence[int],
    places: Sequence[Sequence[int]],
    counted: Role = "up",
) -> Averaging:
    """Send each of some ranks the pieces at its places; returns the averages of those of this rank, in order."""
    rank, size = codecs.place.rank, codecs.place.size
    messages = yield from codecs.encode(pieces, parts, "up", step)
    # Nobody sends a rank its own pieces back, but its memory needs the decoded values.
    own = codecs.decode(pieces, messages, "up", rank)
    codecs.settle(pieces, parts, own, "up", counted=counted)
    frames = yield [pack([messages[k] for k in places[one]]) if one in among else b"" for one in range(size)]
    mine = [pieces[k] for k in places[rank]]
    # A receiver takes each message once: it may add it to what it holds.
    gathered = [
        [own[k] for k in places[rank]]
        if one == rank
        else codecs.decode(mine, unpack(frames[one], len(mine)), "up", one)
        for one in among
    ]
    return [piece.mean(arrived) for piece, arrived in zip(mine, zip(*gathered, strict=True), strict=True)]


def _send_on(
    codecs: RankCodecs, pieces: Sequence[Piece], sums: Sequence[Vector], targets: Sequence[Any], step: int
) -> Exchanging[None]:
    """Send the averages of this rank's own pieces to all, and write those of all into ``targets``."""
    rank, size = codecs.place.rank, codecs.place.size
    owned = _owned(codecs, pieces)
    mine = [pieces[k] for k in owned[rank]]
    finite: list[Values] = [NOT_FINITE if vectors.count_nonfinite(total) else total for total in sums]
    onward = pack((yield from codecs.encode(mine, finite, "down", step)))
    frames = yield [onward] * size
    for one, frame in enumerate(frames):
        theirs = [pieces[k] for k in owned[one]]
        final = codecs.decode(theirs, unpack(frame, len(theirs)), "down", one)
        for k, piece, array in zip(owned[one], theirs, final, strict=True):
            targets[k][:] = piece.mean([array])
        if one == rank:
            codecs.settle(mine, finite, final, "down")


def ring(
    codecs: RankCodecs, whole: Sequence[Piece], values: Sequence[Values], step: int, *, scattered: bool = False
) -> Averaging:
    """A ring all-reduce: each piece's partial sum goes from rank to rank, encoded again each time.

    The last rank on a piece's way sends the average to all. Tensors that a rank cannot send are all-gathered.
    Arguments are those of `Way`.
    """
    return (yield from _among_complete(codecs, _form(_ring, scattered), whole, values, step, scattered))


def hierarchical(
    codecs: RankCodecs,
    whole: Sequence[Piece],
    values: Sequence[Values],
    step: int,
    *,
    node: int,
    scattered: bool = False,
) -> Averaging:
    """Ranks of a node average pieces among themselves, then nodes among each other, then all get all averages.

    Each value is encoded three times; scattered, it is encoded twice (ZeRO++'s qgZ, Wang et al. 2023). Tensors that a
    rank cannot send are all-gathered.

    Args:
        codecs, whole, values, step, scattered: as for `Way`.
        node: ranks of a node, which follow each other.

    Raises:
        UsageError: the ranks are not whole nodes.
    """
    if codecs.place.size % node:
        raise UsageError(f"hierarchical:{node}: {codecs.place.size} ranks are not whole nodes of {node}")
    half = functools.partial(_hierarchical, node=node)
    return (yield from _among_complete(codecs, _form(half, scattered), whole, values, step, scattered))


def shared_scale(
    codecs: RankCodecs, whole: Sequence[Piece], values: Sequence[Values], step: int, *, scattered: bool = False
) -> Averaging:
    """All ranks take the largest norm of each bucket, so that codes add without decoding.

    As THC (Li et al. 2024): each rank sends a piece's codes to its owner, who sends their sum to all; both at fixed
    width. Tensors that a rank cannot send are all-gathered. Arguments are those of `Way`.

    Raises:
        UsageError: a codec without integers that add up and scales that can be shared.
    """
    for piece in whole:
        inside = _inside(piece.codec)
        parts = inside.parts if isinstance(inside, Composed) else Parts()
        if parts.grid.integers is None or not parts.scale.shares:
            raise UsageError(f"shared-scale: {piece.codec} has no codes that add up; take qsgd, qsgdinf or thc")
    way = _means_of_codes if scattered else _shared_scale
    return (yield from _among_complete(codecs, way, whole, values, step, scattered))


def _among_complete(
    codecs: RankCodecs, way: Half, whole: Sequence[Piece], values: Sequence[Values], step: int, scattered: bool
) -> Averaging:
    """Tensors that all ranks can send go one way; the others are all-gathered, or go to their owners."""
    averages: dict[int, Vector] = {}
    seen = yield from codecs.seen(values)
    complete = [k for k, flags in enumerate(seen) if all(flag == 1 for flag in flags)]
    rest = [k for k in range(len(whole)) if k not in complete]
    for among, one in ((complete, way), (rest, functools.partial(all_gather, scattered=scattered))):
        if among:
            found = yield from one(codecs, [whole[k] for k in among], [values[k] for k in among], step)
            kept = [k for k in among if not scattered or whole[k].owner == codecs.place.rank]
            averages.update(zip(kept, found, strict=True))
    return [averages[k] for k in sorted(averages)]


def _ring(codecs: RankCodecs, pieces: Sequence[Piece], parts: Sequence[Vector], step: int) -> Averaging:
    rank, size = codecs.place.rank, codecs.place.size
    sums: list[Any] = list(parts)
    for hop in range(size - 1):
        # The way of a piece ends at its owner, and begins at the rank after it.
        leaving = [k for k, piece in enumerate(pieces) if piece.owner == (rank - 1 - hop) % size]
        coming = [k for k, piece in enumerate(pieces) if piece.owner == (rank - 2 - hop) % size]
        outgoing, incoming = (
            [replace(pieces[k], name=f"{pieces[k].name}+{hop}") for k in ks] for ks in (leaving, coming)
        )
        partial = [sums[k] for k in leaving]
        messages = yield from codecs.encode(outgoing, partial, "up", step)
        own = codecs.decode(outgoing, messages, "up", rank)
        codecs.settle(outgoing, partial, own, "up", counted="down" if hop else "up")
        frames = yield [pack(messages) if one == (rank + 1) % size else b"" for one in range(size)]
        before = (rank - 1) % size
        arrived = codecs.decode(incoming, unpack(frames[before], len(incoming)), "up", before)
        for k, decoded in zip(coming, arrived, strict=True):
            sums[k] = sums[k] + decoded
    return [total / np.float32(size) for total, piece in zip(sums, pieces, strict=True) if piece.owner == rank]


def _hierarchical(
    codecs: RankCodecs, pieces: Sequence[Piece], parts: Sequence[Vector], step: int, *, node: int
) -> Averaging:
    rank, size = codecs.place.rank, codecs.place.size
    beside = range(rank - rank % node, rank - rank % node + node)
    places = [[k for k, piece in enumerate(pieces) if piece.owner % node == one % node] for one in range(size)]
    sums = yield from _averaged_among(codecs, pieces, parts, step, beside, places)
    nodes = [replace(pieces[k], name=f"{pieces[k].name}+nodes") for k in places[rank]]
    across = range(rank % node, size, node)
    return (yield from _averaged_among(codecs, nodes, sums, step, across, _owned(codecs, nodes), "down"))


def _sums_of_codes(
    codecs: RankCodecs, pieces: Sequence[Piece], cuts: Sequence[Vector], step: int
) -> Exchanging[tuple[list[NDArray[np.int64]], Callable[[int, NDArray[np.int64]], Vector]]]:
    """The sums of this rank's own pieces; the mean of a piece (its place among ``pieces``) from such a sum."""
    size = codecs.place.size
    each = [cast("Composed", _inside(piece.codec)) for piece in pieces]
    senders = [codecs.sender(piece, "up") for piece in pieces]
    numbers = [sender.common_number(step) for sender in senders]
    arrays = [
        one.turned(np.asarray(sender.codec.view(sender.state, vectors.on_host(part)), np.float32), number)
        for one, sender, part, number in zip(each, senders, cuts, numbers, strict=True)
    ]
    norms = [one.parts.scale.measure(array, State(array.size)) for one, array in zip(each, arrays, strict=True)]
    frames = yield [join([norm.astype("<f4").tobytes() for norm in norms])] * size
    asked = [split(frame, len(pieces)) for frame in frames]
    scales = [np.max([np.frombuffer(one, "<f4") for one in theirs], axis=0) for theirs in zip(*asked, strict=True)]
    packed = []
    for one, sender, array, scale, number, part in zip(each, senders, arrays, scales, numbers, cuts, strict=True):
        parts, state = one.parts, State(array.size, {"scale": scale})
        codes = parts.rounding.symbols(parts.grid, state, parts.scale.cut(array, state), sender.key(step))
        own = one.turned(_added(parts, _integers(parts)[codes], 1, scale), number, back=True)
        sender.settle(part, own)
        codecs.tally.add_sent(vectors.on_host(part), own)
        packed.append(pack_fixed(codes, width_for(_integers(parts).size)))
        codecs.tally.payload_bits += 8 * (len(packed[-1]) + scale.nbytes)
    owned = _owned(codecs, pieces)
    frames = yield [join([packed[k] for k in chosen]) for chosen in owned]
    mine = owned[codecs.place.rank]
    sums = [np.zeros(pieces[k].size, np.int64) for k in mine]
    for frame in frames:
        for total, k, data in zip(sums, mine, split(frame, len(mine)), strict=True):
            table = _integers(each[k].parts)
            total += table[unpack_fixed(data, total.size, width_for(table.size), table.size)]

    def mean(k: int, total: NDArray[np.int64]) -> Vector:
        found = each[k].turned(_added(each[k].parts, total, size, scales[k]), numbers[k], back=True)
        return vectors.placed(found, pieces[k].device)

    return sums, mean


def _means_of_codes(codecs: RankCodecs, pieces: Sequence[Piece], parts: Sequence[Vector], step: int) -> Averaging:
    sums, mean = yield from _sums_of_codes(codecs, pieces, parts, step)
    mine = _owned(codecs, pieces)[codecs.place.rank]
    return [mean(k, total) for k, total in zip(mine, sums, strict=True)]


def _shared_scale(codecs: RankCodecs, whole: Sequence[Piece], values: Sequence[Vector], step: int) -> Averaging:
    size = codecs.place.size
    averages, pieces, cuts, targets = cut_up(whole, values, size)
    sums, mean = yield from _sums_of_codes(codecs, pieces, cuts, step)
    owned = _owned(codecs, pieces)
    mine = owned[codecs.place.rank]
    widths = [_wide(cast("Composed", _inside(piece.codec)).parts, size) for piece in pieces]
    onward = [pack_fixed(total.astype(np.uint16), widths[k]) for total, k in zip(sums, mine, strict=True)]
    codecs.tally.down_bits += 8 * sum(map(len, onward))
    frames = yield [join(onward)] * size
    for chosen, frame in zip(owned, frames, strict=True):
        for k, data in zip(chosen, split(frame, len(chosen)), strict=True):
            total = unpack_fixed(data, pieces[k].size, widths[k], 1 << widths[k]).astype(np.int64)
            targets[k][:] = mean(k, total)
    return averages


def all_reduce(codecs: RankCodecs, whole: Sequence[Piece], values: Sequence[Values], step: int) -> Averaging:
    """Tensors of linear codecs, by all-reduces of their messages. Arguments are those of `Way`.

    A tensor that one rank cannot send is sent uncompressed by the others, and no memory changes.

    Raises:
        PayloadError: the ranks' models differ.
    """
    size, everyone = codecs.place.size, (yield from codecs.seen(values))
    averages: dict[int, Vector] = {}
    runs: dict[int, tuple[Vector, Rounds]] = {}
    alone: dict[int, NDArray[np.float32]] = {}
    for k, (piece, array, seen) in enumerate(zip(whole, values, everyone, strict=True)):
        if 2 in seen or 1 not in seen:
            averages[k] = piece.mean([NOT_FINITE] if 2 in seen else [])
        elif 0 in seen:
            part = vectors.on_host(array) if sendable(array) else np.zeros(piece.size, np.float32)
            alone[k] = part * np.float32(size / sum(seen))
            codecs.tally.payload_bits += 32 * piece.size if sendable(array) else 0
        elif sendable(array):
            runs[k] = array, codecs.sender(piece, "up").rounds(array, step)
    found = yield from codecs.mean(alone)
    means: dict[int, NDArray[np.float32]] = {}
    while runs:
        messages: dict[int, NDArray[np.float32]] = {}
        for k, (array, run) in list(runs.items()):
            message = advance(run, means.get(k))
            if isinstance(message, Averaged):
                found[k] = message.decoded
                codecs.note(vectors.on_host(array), message.own, "up")
                del runs[k]
            else:
                messages[k] = message
                codecs.tally.payload_bits += 8 * message.nbytes
        means = yield from codecs.mean(messages)
    for k, decoded in found.items():
        averages[k] = vectors.placed(decoded, whole[k].device)
    return [averages[k] for k in range(len(whole))]


def split_tensor(tensor: Piece, ranks: int) -> list[Piece]:
    """Pieces of a tensor: whole buckets, nearly as many for each rank; which rank begins depends on the name."""
    bucket = (tensor.codec.needs.bucket_size if tensor.codec.needs is not None else None) or 1
    blocks = -(-tensor.size // bucket)
    parts = max(1, min(ranks, blocks))
    borders = [min(tensor.size, bucket * (blocks * k // parts)) for k in range(parts + 1)]
    first = zlib.crc32(tensor.name.encode())
    return [
        replace(
            tensor,
            name=tensor.name if parts == 1 else f"{tensor.name}[{start}:{stop}]",
            size=stop - start,
            shape=None,
            start=start,
            owner=(first + k) % ranks,
        )
        for k, (start, stop) in enumerate(pairwise(borders))
    ]


def cut_up(whole: Sequence[Piece], values: Sequence[Values], ranks: int) -> Cut:
    """Zeros for the averages; the pieces of all tensors, each one's part of the values, and its target."""
    averages = [tensor.filled(0.0) for tensor in whole]
    pieces: list[Piece] = []
    parts: list[Values] = []
    targets: list[Any] = []
    for tensor, array, average in zip(whole, values, averages, strict=True):
        for piece in split_tensor(tensor, ranks):
            place = slice(piece.start, piece.start + piece.size)
            pieces.append(piece)
            parts.append(array[place] if sendable(array) else array)
            targets.append(average[place])
    return averages, pieces, parts, targets


def _inside(codec: Codec) -> Codec:
    """The codec behind memories on the sender's side, which a sum does not concern."""
    while isinstance(codec, Wrapper) and codec.parts.memory.keeps and not codec.both_ends:
        codec = codec.inner
    return codec


def _integers(parts: Parts) -> NDArray[np.int64]:
    """The integers that codes mean, of a grid that :func:`shared_scale` takes."""
    return cast("NDArray[np.int64]", parts.grid.integers)


def _added(parts: Parts, total: NDArray[np.int64], ranks: int, scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """The mean of ``ranks`` values from the sum of their integers: float32[n]."""
    top = ranks * _integers(parts)[-1]
    each = np.repeat(scales, parts.scale.over(total.size))[: total.size].astype(np.float64)
    mean: NDArray[np.float32] = ((2 * total - top) / top * each).astype(np.float32)
    return mean


def _wide(parts: Parts, ranks: int) -> int:
    """Bits of a sum of the integers of these ranks.

    Raises:
        UsageError: more than 16.
    """
    width = width_for(ranks * int(_integers(parts)[-1]) + 1)
    if width > _SUM_BITS:
        raise UsageError(f"shared-scale: a sum of {ranks} codes needs {width} bits; take fewer bits or ranks")
    return width


#: the names of ways that need nothing else
NAMES = ("allgather", "two-shot", "ring", "shared-scale")
_WAYS: dict[str, Way] = {
    "allgather": all_gather,
    "two-shot": two_shot,
    "ring": ring,
    "shared-scale": shared_scale,
}


def averaging(
    codecs: RankCodecs, chosen: Half, whole: Sequence[Piece], values: Sequence[Values], step: int
) -> Averaging:
    """The averages of tensors by the chosen way; those of linear codecs by all-reduces, whatever the way."""
    averages: dict[int, Vector] = {}
    for one, linear in ((chosen, False), (all_reduce, True)):
        among = [k for k, piece in enumerate(whole) if piece.codec.linear is linear]
        if among:
            found = yield from one(codecs, [whole[k] for k in among], [values[k] for k in among], step)
            averages.update(zip(among, found, strict=True))
    return [averages[k] for k in range(len(whole))]


def way(name: str) -> Way:
    """The way of a name: one of :data:`NAMES`, or ``hierarchical:N`` with N ranks in a node.

    Raises:
        UsageError: no such way.
    """
    if found := re.fullmatch(r"hierarchical:([1-9][0-9]{0,5})", name):
        return functools.partial(hierarchical, node=int(found[1]))
    if name not in _WAYS:
        raise UsageError(f"exchange: '{name}' is unknown; {suggest(name, (*NAMES, 'hierarchical:8'))}")
    return _WAYS[name]
