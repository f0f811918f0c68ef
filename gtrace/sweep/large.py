"""Tensors beyond a chunk: what is summarized chunk by chunk, what needs all values at once, and what is skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gtrace.codecs import Codec, expecting

if TYPE_CHECKING:
    from collections.abc import Sequence

#: elements of a chunk unless told otherwise
CHUNK = 1 << 24
#: A tensor of more chunks than this is never in memory as a whole.
MOST_CHUNKS = 4


def in_chunks(item: Codec, chunk: int) -> bool:
    """Whether a codec's summary of a tensor is the sum of its chunks' summaries, and the summary is all it needs."""
    if not expecting(item) or item.needs is None or type(item).view is not Codec.view:
        return False
    spec = item.needs
    whole = spec.norm != "none" and (spec.bucket_size is None or chunk % spec.bucket_size != 0)
    return spec.clip is None and not spec.bucket_moments and not whole


class Large:
    """Sorts codecs for tensors beyond a chunk, and keeps account of what is skipped.

    Args:
        chunk: elements of a chunk.
        draws: encodings that were asked for.
    """

    def __init__(self, chunk: int, draws: int) -> None:
        self._chunk = chunk
        self._draws = draws
        self._skipped: dict[str, dict[str, None]] = {}

    def split(self, tensor: str, size: int, codecs: Sequence[Codec]) -> tuple[list[Codec], list[Codec]]:
        """Codecs that get a tensor's values, and those that get sketches of its chunks and give expectations alone."""
        if size <= self._chunk or (self._draws and size <= MOST_CHUNKS * self._chunk):
            return list(codecs), []
        chunked = [item for item in codecs if in_chunks(item, self._chunk)]
        rest = [item for item in codecs if item not in chunked]
        if size <= MOST_CHUNKS * self._chunk:
            return rest, chunked
        where = f"{tensor} has {size} elements, more than {MOST_CHUNKS} chunks of {self._chunk}"
        if self._draws:
            self._skipped[f"{where}: no rows of draws, which need all values at once"] = {}
        lost = {item.name: None for item in rest if self._draws or expecting(item)}
        if lost:
            self._skipped[f"{where}: without"] = lost
        return [], chunked

    def lines(self) -> list[str]:
        """One line for each thing that is skipped."""
        advice = "raise --chunk where there is memory for it"
        return [
            f"{why} {', '.join(names)}, whose summaries need all values at once: {advice}"
            if names
            else f"{why}: {advice}"
            for why, names in self._skipped.items()
        ]
