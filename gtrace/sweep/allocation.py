"""Shares that tensors of one step get from codecs that allocate, such as heterogeneous sparsity."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gtrace.codecs import Codec
    from gtrace.sweep.replay import Source


class Allocation:
    """Each codec's allocation at each step, worked out once, when the first tensor asks for it.

    A share depends on the gradients of the step and on nothing else: not on who asks first, nor on what a resumed
    sweep has done. Sketches of one step are in memory at a time.

    Args:
        source: where gradients are read.
        steps: tensor -> steps that it is present at. These tensors share out among them.
        codecs: those of a sweep; the ones that allocate nothing are ignored.
    """

    def __init__(self, source: Source, steps: Mapping[str, Iterable[int]], codecs: Iterable[Codec]) -> None:
        self._source = source
        self._steps = {tensor: frozenset(present) for tensor, present in steps.items()}
        self._codecs = tuple(codec for codec in codecs if codec.allocates)
        self._shares: dict[int, dict[tuple[str, str], float]] = {}
        self._lock = threading.Lock()

    def share(self, codec: Codec, tensor: str, step: int) -> float | None:
        """A tensor's share at the step that a codec is fitted on; None for a codec that allocates nothing."""
        if not codec.allocates:
            return None
        with self._lock:
            if step not in self._shares:
                self._shares[step] = self._allocated(step)
        return self._shares[step][str(codec), tensor]

    def _allocated(self, step: int) -> dict[tuple[str, str], float]:
        tensors = [tensor for tensor, steps in self._steps.items() if step in steps]
        sketches = {}
        for spec in dict.fromkeys(codec.needs for codec in self._codecs):
            if spec is not None:
                sketches[spec] = [self._source.sketch(tensor, step, spec) for tensor in tensors]
        out = {}
        for codec in self._codecs:
            if codec.needs is not None:
                shares = codec.allocate(sketches[codec.needs])
                out.update({(str(codec), tensor): share for tensor, share in zip(tensors, shares, strict=True)})
        return out
