"""Shares that tensors of one step get from codecs that allocate, such as heterogeneous sparsity."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gtrace.codecs import Codec
    from gtrace.sketch import MomentSketch
    from gtrace.sweep.jobs import Among, Source
    from gtrace.types import SummarySpec


class Allocation:
    """Each codec's allocation at each step, worked out once, when the first tensor asks for it.

    A share depends on the gradients of the step and on nothing else: not on who asks first, nor on what a resumed
    sweep has done. Sketches of one step are in memory at a time.

    Args:
        source: where gradients are read.
        steps: tensor -> steps that it is present at.
        codecs: those of a sweep, with the tensors that share out among them; the ones that allocate nothing are
            ignored.
    """

    def __init__(
        self, source: Source, steps: Mapping[str, Iterable[int]], codecs: Iterable[tuple[Codec, Among]]
    ) -> None:
        self._source = source
        self._steps = {tensor: frozenset(present) for tensor, present in steps.items()}
        self._codecs = tuple((codec, among) for codec, among in codecs if codec.allocates)
        self._shares: dict[int, dict[tuple[str, Among, str], float]] = {}
        self._lock = threading.Lock()

    def share(self, codec: Codec, tensor: str, step: int, among: Among = None) -> float | None:
        """A tensor's share at the step that a codec is fitted on; None for a codec that allocates nothing."""
        if not codec.allocates:
            return None
        with self._lock:
            if step not in self._shares:
                self._shares[step] = self._allocated(step)
        return self._shares[step][str(codec), among, tensor]

    def _allocated(self, step: int) -> dict[tuple[str, Among, str], float]:
        present = [tensor for tensor, steps in self._steps.items() if step in steps]
        sketches: dict[tuple[SummarySpec, str], MomentSketch] = {}
        out = {}
        for codec, among in self._codecs:
            spec = codec.needs
            tensors = [tensor for tensor in present if among is None or tensor in among]
            if spec is None or not tensors:
                continue
            for tensor in tensors:
                if (spec, tensor) not in sketches:
                    sketches[spec, tensor] = self._source.sketch(tensor, step, spec)
            shares = codec.allocate([sketches[spec, tensor] for tensor in tensors])
            out.update({(str(codec), among, tensor): share for tensor, share in zip(tensors, shares, strict=True)})
        return out
