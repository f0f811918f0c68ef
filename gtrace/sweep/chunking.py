"""Tensors beyond a chunk: what is done chunk by chunk, what needs all values at once, and what is skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gtrace.codecs import Codec, PartwiseCodec, expecting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.types import SummarySpec

#: elements of a chunk unless told otherwise
CHUNK = 1 << 24
#: A tensor of more chunks than this is never in memory as a whole.
MOST_CHUNKS = 4


def spec_in_chunks(spec: SummarySpec, chunk: int) -> bool:
    """Whether a tensor's sketch is a sum over its chunks, given the norm of the whole where it is one bucket."""
    return spec.clip is None and not spec.bucket_moments and chunk % (spec.bucket_size or 1) == 0


def in_chunks(item: Codec, chunk: int) -> bool:
    """Whether a codec has expectations, and from the sum of the chunks' sketches."""
    return expecting(item) and _obstacle(item, chunk) is None


def drawn_in_chunks(item: Codec, chunk: int) -> bool:
    """Whether a codec encodes a tensor chunk by chunk as it does the whole."""
    return _draw_obstacle(item, chunk) is None


def _obstacle(item: Codec, chunk: int) -> str | None:
    """Why a codec cannot be fitted to, or judged from, the sum of the chunks' sketches."""
    needs = item.needs
    if type(item).view is not Codec.view:
        return "is fitted to values that are known as a whole"
    if needs is None or spec_in_chunks(needs, chunk):
        return None
    if needs.clip is not None:
        return "clips by the deviation of all values"
    if needs.bucket_moments:
        return "is fitted to moments of every bucket"
    return f"has buckets of {needs.bucket_size}, which do not divide the chunk"


def _draw_obstacle(item: Codec, chunk: int) -> str | None:
    """Why a codec cannot encode a tensor chunk by chunk."""
    if item.stateful:
        return "remembers every value"
    obstacle = _obstacle(item, chunk)
    if obstacle is not None:
        return obstacle
    if not isinstance(item, PartwiseCodec) or item.part_multiple is None:
        return "looks at all values at once"
    return f"has blocks of {item.part_multiple}, which do not divide the chunk" if chunk % item.part_multiple else None


class Split(NamedTuple):
    """Codecs of one tensor.

    Attributes:
        whole: those that get all values at once.
        parts: those that get a chunk at a time, and have all their rows.
        expected: those of which a chunk at a time gives expectations alone.
    """

    whole: list[Codec]
    parts: list[Codec]
    expected: list[Codec]


class Large:
    """Sorts codecs for tensors beyond a chunk, and keeps account of what is skipped.

    Args:
        chunk: elements of a chunk.
        draws: encodings that were asked for.
    """

    def __init__(self, chunk: int, draws: int) -> None:
        self._chunk = chunk
        self._draws = draws
        #: what is missing and why -> names of codecs
        self._skipped: dict[tuple[str, str], dict[str, None]] = {}
        self._tensors: dict[str, dict[str, None]] = {}

    def split(self, tensor: str, size: int, codecs: Sequence[Codec]) -> Split:
        """How each of the codecs goes over a tensor of this size."""
        if size <= self._chunk:
            return Split(list(codecs), [], [])
        found = Split([], [], [])
        for item in codecs:
            if self._draws and drawn_in_chunks(item, self._chunk):
                found.parts.append(item)
            elif not self._draws and in_chunks(item, self._chunk):
                found.expected.append(item)
            elif size <= MOST_CHUNKS * self._chunk:
                # Without draws there is nothing to do for a codec that expects nothing.
                found.whole.append(item)
            else:
                if in_chunks(item, self._chunk):
                    found.expected.append(item)
                self._skip(tensor, item)
        return found

    def _skip(self, tensor: str, item: Codec) -> None:
        expected = in_chunks(item, self._chunk)
        if not (self._draws or expecting(item)):
            return
        why = _draw_obstacle(item, self._chunk) if self._draws else _obstacle(item, self._chunk)
        what = "no rows of draws of" if expected else "without"
        self._skipped.setdefault((what, why or ""), {})[item.name] = None
        self._tensors.setdefault(tensor, {})

    def lines(self) -> list[str]:
        """One line for each thing that is skipped."""
        names = list(self._tensors)
        where = (
            names[0]
            if len(names) == 1
            else f"{len(names)} tensors ({', '.join(names[:3])}{', ...' * (len(names) > 3)})"
        )
        verb = "has" if len(names) == 1 else "have"
        beyond = f"{where} {verb} more than {MOST_CHUNKS} chunks of {self._chunk} values"
        return [
            f"{beyond}: {what} {', '.join(codecs)}, which {why}: raise --chunk where there is memory for it"
            for (what, why), codecs in self._skipped.items()
        ]
