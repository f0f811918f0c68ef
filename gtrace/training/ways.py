"""Ways of averaging among ranks: generators, see :mod:`gtrace.training.ranks`.

Each runs on all ranks with the same tensors in the same order, and its result has the same bytes on all. Where a sum is
encoded again, its error comes on top of that of the workers' own encodings.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from gtrace.codecs import Codec, Composed
from gtrace.codecs.base import Averaged, advance
from gtrace.codecs.link import Message, on_host
from gtrace.codecs.wrappers import Wrapper
from gtrace.coding import pack_fixed, unpack_fixed, width_for
from gtrace.errors import UsageError
from gtrace.training import vectors
from gtrace.training.exchange import node_of
from gtrace.training.ranks import NOT_FINITE, Exchanging, Piece, join, pack, sendable, split, unpack
from gtrace.types import Role, State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from gtrace.codecs.base import Rounds
    from gtrace.codecs.parts import Parts
    from gtrace.training.ranks import RankCodecs, Values
    from gtrace.training.vectors import Vector

    #: an exchange whose result is float32[n] of each tensor
    Averaging: TypeAlias = Exchanging[list[Vector]]
    #: this rank's codecs, pieces, their values and the step -> averages of all pieces, or of those that it owns
    Averages: TypeAlias = Callable[[RankCodecs, Sequence[Piece], Sequence[Any], int], Averaging]
    #: averages, pieces of all tensors, each one's part of the values, and its target among the averages
    Cut: TypeAlias = tuple[list[Vector], list[Piece], list[Any], list[Any]]


@dataclass(frozen=True, slots=True)
class Way:
    """A way of averaging."""

    #: averages pieces of tensors, each at its owner, which gets those of its own, in order
    scattered: Averages
    #: averages whole tensors at all ranks; None: they are cut into pieces, whose owners send the averages on
    whole: Averages | None = None
    #: whether it needs values of every rank; tensors that a rank cannot send are all-gathered
    complete: bool = False
    #: pieces of a tensor; None for one for each rank
    parts: int | None = None


def averaging(
    codecs: RankCodecs,
    chosen: Way,
    whole: Sequence[Piece],
    values: Sequence[Values],
    step: int,
    *,
    scattered: bool = False,
) -> Averaging:
    """The averages of tensors by the chosen way; those of linear codecs by all-reduces, whatever the way.

    If they are ``scattered``, tensors are pieces with owners, and each owner gets the averages of its own, in order.

    Raises:
        PayloadError: the ranks' models differ.
        UsageError: codecs or a number of ranks that do not fit the way.
    """
    linear = [k for k, piece in enumerate(whole) if piece.codec.linear]
    coded = [k for k, piece in enumerate(whole) if not piece.codec.linear]
    rest: list[int] = []
    if chosen.complete and coded:
        seen = yield from codecs.seen([values[k] for k in coded])
        rest = [k for k, flags in zip(coded, seen, strict=True) if set(flags) != {1}]
        coded = [k for k in coded if k not in rest]
    averages: dict[int, Vector] = {}
    for way, among in ((chosen, coded), (ALL_GATHER, rest), (ALL_REDUCE, linear)):
        if not among:
            continue
        pieces, own = [whole[k] for k in among], [values[k] for k in among]
        if scattered:
            found = yield from way.scattered(codecs, pieces, own, step)
            among = [k for k in among if whole[k].owner == codecs.place.rank]
        elif way.whole is not None:
            found = yield from way.whole(codecs, pieces, own, step)
        else:
            found = yield from _cut_and_sent_on(codecs, way, pieces, own, step)
        averages.update(zip(among, found, strict=True))
    return [averages[k] for k in sorted(averages)]


def all_gather(codecs: RankCodecs, whole: Sequence[Piece], values: Sequence[Values], step: int) -> Averaging:
    """Send every rank's payloads to all."""
    messages = yield from codecs.encode(whole, values, "up", step)
    frames = yield [pack(messages)] * codecs.place.size
    gathered = [codecs.decode(whole, unpack(frame, len(whole)), "up", rank) for rank, frame in enumerate(frames)]
    codecs.settle(whole, values, gathered[codecs.place.rank], "up")
    return [piece.mean(arrived) for piece, arrived in zip(whole, zip(*gathered, strict=True), strict=True)]


def _cut_and_sent_on(
    codecs: RankCodecs, way: Way, whole: Sequence[Piece], values: Sequence[Values], step: int
) -> Averaging:
    """Cut tensors into pieces, average these at their owners, and send the averages to all."""
    rank, size = codecs.place.rank, codecs.place.size
    averages, pieces, parts, targets = cut_up(whole, values, size, way.parts)
    sums = yield from way.scattered(codecs, pieces, parts, step)
    owned = _owned(codecs, pieces)
    mine = [pieces[k] for k in owned[rank]]
    finite: list[Values] = [NOT_FINITE if vectors.count_nonfinite(total) else total for total in sums]
    onward = pack((yield from codecs.encode(mine, finite, "down", step)))
    frames = yield [onward] * size
    for one, frame in enumerate(frames):
        theirs = [pieces[k] for k in owned[one]]
        messages = unpack(frame, len(theirs))
        sent = [message for message in messages if isinstance(message, Message)]
        codecs.tally.down_bits += sum(message.payload_bits + message.shared_bits for message in sent)
        final = codecs.decode(theirs, messages, "down", one)
        for k, piece, array in zip(owned[one], theirs, final, strict=True):
            targets[k][:] = piece.mean([array])
        if one == rank:
            codecs.settle(mine, finite, final, "down")
    return averages


def _owned(codecs: RankCodecs, pieces: Sequence[Piece]) -> list[list[int]]:
    return [[k for k, piece in enumerate(pieces) if piece.owner == one] for one in range(codecs.place.size)]


def to_owners(codecs: RankCodecs, pieces: Sequence[Piece], parts: Sequence[Values], step: int) -> Averaging:
    """Send every piece to its owner."""
    return (yield from _averaged_among(codecs, pieces, parts, step, range(codecs.place.size), _owned(codecs, pieces)))


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


def ring(codecs: RankCodecs, pieces: Sequence[Piece], parts: Sequence[Vector], step: int) -> Averaging:
    """A ring all-reduce: each piece's partial sum goes from rank to rank, encoded again each time.

    The last rank on a piece's way is its owner.
    """
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


def hierarchical(
    codecs: RankCodecs, pieces: Sequence[Piece], parts: Sequence[Vector], step: int, *, node: int
) -> Averaging:
    """Each ``node`` ranks that follow each other average pieces among themselves, then nodes among each other.

    Each value is encoded twice (ZeRO++'s qgZ, Wang et al. 2023), and once more on its way to all ranks.
    """
    rank, size = codecs.place.rank, codecs.place.size
    if size % node:
        raise UsageError(f"hierarchical:{node}: {size} ranks are not whole nodes of {node}")
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
    each = [_adding(piece.codec) for piece in pieces]
    senders = [codecs.sender(piece, "up") for piece in pieces]
    numbers = [sender.common_number(step) for sender in senders]
    arrays = [
        one.turned(np.asarray(sender.codec.view(sender.state, on_host(part)), np.float32), number)
        for one, sender, part, number in zip(each, senders, cuts, numbers, strict=True)
    ]
    norms = [one.parts.scale.measure(array) for one, array in zip(each, arrays, strict=True)]
    frames = yield [join([norm.astype("<f4").tobytes() for norm in norms])] * size
    asked = [split(frame, len(pieces)) for frame in frames]
    scales = [np.max([np.frombuffer(one, "<f4") for one in theirs], axis=0) for theirs in zip(*asked, strict=True)]
    packed = []
    for one, sender, array, scale, number, part in zip(each, senders, arrays, scales, numbers, cuts, strict=True):
        parts, state = one.parts, State(array.size, {"scale": scale})
        codes = parts.rounding.symbols(parts.grid, state, parts.scale.cut(array, state), sender.key(step))
        own = one.turned(_added(parts, _integers(parts)[codes], 1, scale), number, back=True)
        sender.settle(part, own)
        codecs.tally.add_sent(on_host(part), own)
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


def means_of_codes(codecs: RankCodecs, pieces: Sequence[Piece], parts: Sequence[Vector], step: int) -> Averaging:
    """:func:`shared_scale` of pieces, whose owners keep the sums."""
    sums, mean = yield from _sums_of_codes(codecs, pieces, parts, step)
    mine = _owned(codecs, pieces)[codecs.place.rank]
    return [mean(k, total) for k, total in zip(mine, sums, strict=True)]


def shared_scale(codecs: RankCodecs, whole: Sequence[Piece], values: Sequence[Vector], step: int) -> Averaging:
    """All ranks take the largest norm of each bucket, so that codes add without decoding.

    As THC (Li et al. 2024): each rank sends a piece's codes to its owner, who sends their sum to all; both at fixed
    width.
    """
    size = codecs.place.size
    averages, pieces, cuts, targets = cut_up(whole, values, size)
    sums, mean = yield from _sums_of_codes(codecs, pieces, cuts, step)
    owned = _owned(codecs, pieces)
    mine = owned[codecs.place.rank]
    widths = [_wide(_adding(piece.codec).parts, size) for piece in pieces]
    onward = [pack_fixed(total.astype(np.uint16), widths[k]) for total, k in zip(sums, mine, strict=True)]
    frames = yield [join(onward)] * size
    for chosen, frame in zip(owned, frames, strict=True):
        for k, data in zip(chosen, split(frame, len(chosen)), strict=True):
            codecs.tally.down_bits += 8 * len(data)
            total = unpack_fixed(data, pieces[k].size, widths[k], 1 << widths[k]).astype(np.int64)
            targets[k][:] = mean(k, total)
    return averages


def all_reduce(codecs: RankCodecs, whole: Sequence[Piece], values: Sequence[Values], step: int) -> Averaging:
    """Tensors of linear codecs, by all-reduces of their messages.

    A tensor that one rank cannot send is sent uncompressed by the others, and no memory changes.
    """
    size, everyone = codecs.place.size, (yield from codecs.seen(values))
    averages: dict[int, Vector] = {}
    runs: dict[int, tuple[Vector, Rounds]] = {}
    alone: dict[int, NDArray[np.float32]] = {}
    for k, (piece, array, seen) in enumerate(zip(whole, values, everyone, strict=True)):
        if 2 in seen or 1 not in seen:
            averages[k] = piece.mean([NOT_FINITE] if 2 in seen else [])
        elif 0 in seen:
            part = on_host(array) if sendable(array) else np.zeros(piece.size, np.float32)
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
                codecs.note(on_host(array), message.own, "up")
                del runs[k]
            else:
                messages[k] = message
                codecs.tally.payload_bits += 8 * message.nbytes
        means = yield from codecs.mean(messages)
    for k, decoded in found.items():
        averages[k] = vectors.placed(decoded, whole[k].device)
    return [averages[k] for k in range(len(whole))]


def split_tensor(tensor: Piece, ranks: int, most: int | None = None) -> list[Piece]:
    """Pieces of a tensor: whole buckets, nearly as many for each rank; which rank begins depends on the name.

    There are at most ``most`` pieces, by default one for each rank.
    """
    bucket = (tensor.codec.needs.bucket_size if tensor.codec.needs is not None else None) or 1
    blocks = -(-tensor.size // bucket)
    parts = max(1, min(most or ranks, blocks))
    borders = [min(tensor.size, bucket * (blocks * k // parts)) for k in range(parts + 1)]
    first = zlib.crc32(tensor.name.encode())
    pieces = []
    for k, (start, stop) in enumerate(pairwise(borders)):
        name = tensor.name if parts == 1 else f"{tensor.name}[{start}:{stop}]"
        owner = (first + k) % ranks
        pieces.append(replace(tensor, name=name, size=stop - start, shape=None, start=start, owner=owner))
    return pieces


def cut_up(whole: Sequence[Piece], values: Sequence[Values], ranks: int, most: int | None = None) -> Cut:
    """Zeros for the averages; the pieces of all tensors, each one's part of the values, and its target."""
    averages = [tensor.filled(0.0) for tensor in whole]
    pieces: list[Piece] = []
    parts: list[Values] = []
    targets: list[Any] = []
    for tensor, array, average in zip(whole, values, averages, strict=True):
        for piece in split_tensor(tensor, ranks, most):
            place = slice(piece.start, piece.start + piece.size)
            pieces.append(piece)
            parts.append(array[place] if sendable(array) else array)
            targets.append(average[place])
    return averages, pieces, parts, targets


def _adding(codec: Codec) -> Composed:
    """The codec behind memories on the sender's side, which a sum does not concern."""
    inside = codec
    while isinstance(inside, Wrapper) and inside.parts.memory.keeps and not inside.both_ends:
        inside = inside.inner
    if isinstance(inside, Composed) and inside.parts.grid.integers is not None and inside.parts.scale.shares:
        return inside
    raise UsageError(f"shared-scale: {codec} has no codes that add up; take qsgd, qsgdinf or thc")


def _integers(parts: Parts) -> NDArray[np.int64]:
    return cast("NDArray[np.int64]", parts.grid.integers)


def _added(parts: Parts, total: NDArray[np.int64], ranks: int, scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """The mean of ``ranks`` values from the sum of their integers: float32[n]."""
    top = ranks * _integers(parts)[-1]
    each = np.repeat(scales, parts.scale.over(total.size))[: total.size].astype(np.float64)
    return ((2 * total - top) / top * each).astype(np.float32)


def _wide(parts: Parts, ranks: int) -> int:
    """Bits of a sum of the integers of these ranks."""
    width = width_for(ranks * int(_integers(parts)[-1]) + 1)
    if width > 16:
        raise UsageError(f"shared-scale: a sum of {ranks} codes needs {width} bits; take fewer bits or ranks")
    return width


ALL_GATHER = Way(to_owners, all_gather)
ALL_REDUCE = Way(all_reduce, all_reduce)
#: two shots of whole tensors: each has one rank as its server
SERVED = Way(to_owners, parts=1)
#: ways whose names need nothing else
WAYS = {
    "allgather": ALL_GATHER,
    "two-shot": Way(to_owners),
    "ring": Way(ring, complete=True),
    "shared-scale": Way(means_of_codes, shared_scale, complete=True),
}


def way(name: str) -> Way:
    """The way of a name: one of :data:`WAYS`, or ``hierarchical:N`` with N ranks in a node."""
    node = node_of(name)
    return WAYS[name] if node is None else Way(functools.partial(hierarchical, node=node), complete=True)
