"""Level codecs whose magnitudes are fitted to the gradient: what ALQ, AMQ and ZipML share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from gtrace.codecs.base import parameter
from gtrace.codecs.levels import LevelCodec
from gtrace.errors import UsageError
from gtrace.fitting import expected_variance, moment_mixture

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.distributions import TruncatedNormalMixture
    from gtrace.sketch import MomentSketch
    from gtrace.types import State, SummarySpec

LawName = Literal["empirical", "truncnorm", "truncnorm-mean"]
LAWS: tuple[LawName, ...] = ("empirical", "truncnorm", "truncnorm-mean")


@dataclass(frozen=True)
class AdaptiveCodec(LevelCodec):
    """Levels that follow the data; until the first fit they are powers of one half.

    The state holds ``levels`` (float32[m]) and, under a parametric law, ``model`` (float64[1]): the objective that
    the law itself promised, a mean per value of weight 1, for comparison with the true one.
    """

    #: values count by the squared norm of their bucket
    weighted: ClassVar[bool] = True

    bits: int = parameter(4, "2^(bits - 1) magnitudes and a sign", minimum=2, maximum=8)
    zero: bool = parameter(True, "0 is a level; without it the grid is mirrored around 0")
    law: LawName = parameter(
        "empirical",
        "fit to the data itself, to the papers' mixture of truncated normals, or to one of averaged moments",
        choices=LAWS,
    )
    components: int | None = parameter(
        20, "buckets sampled for the mixture; none for all of them", minimum=1, optional=True
    )
    sampling_seed: int = parameter(0, "of the sampling of buckets", minimum=0)

    @property
    def has_zero(self) -> bool:
        """Whether 0 is a level."""
        return self.zero

    @property
    def needs(self) -> SummarySpec:
        """The sketch under this codec's buckets, with each bucket's mean and sigma where the law wants them."""
        return super().needs._replace(bucket_moments=self.law != "empirical")

    @abstractmethod
    def fit_to(self, law: MomentSketch | TruncatedNormalMixture) -> NDArray[np.float64]:
        """The method itself: the best ascending magnitudes, in units of r."""

    def levels(self, state: State) -> NDArray[np.float32]:
        """The fitted magnitudes, float32[m]; fewer than 2^(bits - 1) where the data has fewer values."""
        fitted = state.arrays.get("levels")
        if fitted is not None:
            return fitted
        count = 2 ** (self.bits - 1) - int(self.zero)
        powers = 2.0 ** np.arange(max(1 - count, -126), 1)
        return np.concatenate([[0.0], powers] if self.zero else [powers]).astype(np.float32)

    def fit_levels(self, state: State, summary: MomentSketch, step: int) -> State:
        """Fit to the summary; one without any weight leaves the levels as they are."""
        del step
        if not summary.sums.size:
            return state
        law: MomentSketch | TruncatedNormalMixture = summary
        if self.law != "empirical":
            if summary.bucket_moments is None:
                raise UsageError(f"{self}: wants a sketch with bucket moments; build it from the codec's needs")
            law = moment_mixture(
                summary.bucket_moments,
                components=self.components,
                seed=self.sampling_seed,
                weighted=self.weighted,
                mean_only=self.law == "truncnorm-mean",
            )
        fitted = self.fit_to(law)
        grid = self._grid(fitted)
        state = state.with_arrays(levels=grid)
        if self.law != "empirical":
            model = expected_variance(law, grid.astype(np.float64), self.zero, self.weighted)
            state = state.with_arrays(model=np.array([model]))
        return state

    def _grid(self, fitted: NDArray[np.float64]) -> NDArray[np.float32]:
        """Fitted magnitudes as they are used: float32, ascending, 0 the first of them or none."""
        grid = np.unique(fitted.astype(np.float32))
        # Powers below the smallest normal float32 would decode to the same few denormals.
        grid = grid[(grid == 0) | (grid >= np.finfo(np.float32).tiny)]
        if self.zero and (grid.size == 0 or grid[0] != 0):
            return np.concatenate([np.zeros(1, np.float32), grid])
        return grid if self.zero else np.asarray(grid[grid > 0])

    def model_error(self, state: State, sketch: MomentSketch) -> float:
        """What the law promised per value, times the weight of all values that are rounded."""
        model = state.arrays.get("model")
        weight = float(sketch.sums[:, 3].sum()) + sketch.zero_weight
        return float("nan") if model is None else float(model[0]) * weight
