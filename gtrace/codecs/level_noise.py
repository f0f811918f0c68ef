"""The noise of many level codecs: two encodings of a gradient by each, fitted and made together."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from gtrace.codecs.engine import Composed, level_grid
from gtrace.codecs.level_sets import LevelSets, judged_together
from gtrace.kernels.noise import noise_of_levels
from gtrace.types import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gtrace.codecs.base import Codec
    from gtrace.codecs.grids import LevelGrid
    from gtrace.codecs.scales import BucketNorm
    from gtrace.sketch import MomentSketch
    from gtrace.types import Key


def noisy_together(item: Codec) -> bool:
    """Whether a codec can be in :class:`LevelNoise`: it rounds values as they are, to levels that a norm scales."""
    grid = level_grid(item)
    if grid is None or not isinstance(item, Composed) or item.fits_itself or not judged_together(item):
        return False
    scale = cast("BucketNorm", item.parts.scale)
    return scale.clip is None and scale.tail == "quantized" and grid.rule(State(0)).kind != "powers"


class LevelNoise:
    """Level codecs that want the same sketch; see :func:`noisy_together`.

    Attributes:
        adaptive: whether any of them is fitted.
    """

    def __init__(self, codecs: Sequence[Codec]) -> None:
        self._sets = LevelSets(codecs)
        self._grids = [cast("LevelGrid", level_grid(item)) for item in codecs]
        self._scale = cast("BucketNorm", cast("Composed", codecs[0]).parts.scale)
        self.adaptive = any(grid.adaptive for grid in self._grids)

    def add(
        self,
        sketch: MomentSketch | None,
        values: NDArray[np.float32],
        keys: Sequence[Key],
        near: NDArray[np.float32],
        scale: NDArray[np.float64],
        factor: float,
        variance: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Encode a gradient twice with each codec.

        Args:
            sketch: what they are fitted to; None if none of them is.
            values: finite float32[n], the gradient.
            keys: of the two encodings.
            near: float32[n], another gradient of the same weights.
            scale: float64[n], of each element's coordinate.
            factor: of the gradients, outside of ``scale``.
            variance: float64[codecs, n], half the squared difference of a codec's encodings is added to it.

        Returns:
            float64[codecs], the inner product of a codec's mean error and ``near``, without ``factor``.
        """
        grids = self._sets.grids(None if sketch is None else sketch.alone)
        rules = [grid.rule(State(0, arrays)) for grid, arrays in zip(self._grids, grids.states, strict=True)]
        cut, lost = self._scale.cut(values, State(values.size)), np.empty(len(rules))
        noise_of_levels(
            cut.x,
            cut.bucket,
            cut.scales,
            np.array([(rule.number, rule.mirrored, rule.steps) for rule in rules]),
            grids.levels.astype(np.float32),
            grids.starts,
            np.array(keys, np.uint64),
            near,
            scale,
            factor,
            variance,
            lost,
        )
        return lost
