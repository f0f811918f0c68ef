"""What a sweep says, as numbers. Everything that is drawn or printed about a sweep comes from here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import UsageError, suggest
from gtrace.report.analysis.basis import Basis
from gtrace.report.analysis.equal_bits import PREFERRED_BITS
from gtrace.report.analysis.evidence import (
    LayerChoice,
    PairedComparison,
    Phase,
    StepTable,
    compare_configurations,
)
from gtrace.report.analysis.families import (
    LEVEL,
    MOSTLY,
    Configuration,
    Family,
    Leader,
    Standing,
    decisive,
    ranked,
)
from gtrace.report.analysis.safety import Safety

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gtrace.report.analysis.exchanges import ExchangeError
    from gtrace.report.analysis.families import BDRate
    from gtrace.report.analysis.fits import TensorFit
    from gtrace.report.analysis.rotation import Rotation


#: Tensors that a figure names one by one; more are named in groups, or every few.
MOST_NAMED = 60


@dataclass(frozen=True, slots=True)
class SweepAnalysis:
    """A sweep summed up.

    Attributes:
        name: of the file, for headings.
        rows: rows of the sweep.
        configurations: in the order of families and measured bits.
        families: in the order of their first appearance.
        targets: bits per coordinate of the comparison.
        tensors: names, in natural order; the whole model's own row is not among them unless it is alone.
        elements: (tensors,) number of elements.
        energy_share: (tensors,) part of the total energy over the compared cells.
        steps: (steps,) ascending.
        per_tensor: (configurations, tensors) relative variance summed over steps, NaN where not measured.
        per_step: (configurations, steps) relative variance summed over tensors, NaN where not measured.
        bits_per_step: (configurations, steps) measured bits per coordinate over all tensors, NaN where not known.
        cells: cells that are compared.
        notes: what a reader must know about how the numbers were made, one line each.
        warnings: of the sweep itself.
        provenance: of the sweep.
        fits: levels and what they were fitted to, the largest tensor first; empty where no codec was fitted.
        step_weights: (steps,) part of training that each step represents, adding up to 1.
        per_tensor_bits: (configurations, tensors) measured bits per coordinate, NaN where not known.
        at_layers: (families, targets) as ``Family.at``, layers equally weighted: the mix of configurations is that of
            ``Family.at``, and the geometric mean over layers is taken.
        comparisons: the leader at each target against every other family there; see :class:`PairedComparison`.
        phases: thirds of training that have steps; empty for fewer than three steps.
        bd_rates: of every family against qsgdinf; empty without it.
        layer_choices: tensors that another method than the leader suits better.
        layer_best: (tensors,) label of the method with the least error at the decisive target, at equal bits of the
            tensor itself; empty where fewer than two can be compared.
        layer_at: label -> (tensors,) its error there; empty where fewer than two can be compared.
        safety: errors beside the noise of the gradients.
        table: errors that methods are ranked by, step by step, for further comparisons.
        single: errors of single steps and one worker likewise.
        basis: workers, coder and window of the comparison.
        step_at: (families, targets) error of single steps at equal bits, for the same workers.
        coder_leaders: coder -> who leads when every method uses it.
        rotation: whether to rotate, tensor by tensor; None if that cannot be compared.
        exchanges: errors of averages after exchanges; empty unless the sweep measured some.
    """

    name: str
    rows: int
    configurations: tuple[Configuration, ...]
    families: tuple[Family, ...]
    targets: tuple[float, ...]
    tensors: tuple[str, ...]
    elements: NDArray[np.int64]
    energy_share: NDArray[np.float64]
    steps: NDArray[np.int64]
    per_tensor: NDArray[np.float64]
    per_step: NDArray[np.float64]
    bits_per_step: NDArray[np.float64]
    cells: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    provenance: dict[str, Any]
    fits: tuple[TensorFit, ...]
    step_weights: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    per_tensor_bits: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    at_layers: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    comparisons: tuple[PairedComparison, ...] = ()
    phases: tuple[Phase, ...] = ()
    bd_rates: tuple[BDRate, ...] = ()
    layer_choices: tuple[LayerChoice, ...] = ()
    layer_best: tuple[str, ...] = ()
    layer_at: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    safety: Safety = field(default_factory=Safety)
    table: StepTable | None = field(default=None, repr=False)
    single: StepTable | None = field(default=None, repr=False)
    basis: Basis = field(default_factory=Basis)
    step_at: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    coder_leaders: dict[str, Leader] = field(default_factory=dict)
    rotation: Rotation | None = None
    exchanges: tuple[ExchangeError, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether any configuration has an error that is a number."""
        return any(math.isfinite(c.relative_variance) for c in self.configurations)

    @property
    def decisive(self) -> int:
        """Index of the target where most methods can be compared, the nearest to three bits of those; or -1."""
        return decisive(self.families, self.targets)

    def ranking(self, target: int) -> list[Family]:
        """The families that can be compared at a target (an index), least variance first."""
        return ranked(self.families, target)

    def leaders(self, target: int) -> list[Family]:
        """The families that nobody beats at a target (an index), least variance first.

        A family is beaten when its error is larger than that of the first by more than :data:`LEVEL`, beyond the noise
        of steps. When there is no confidence interval, it must be larger in :data:`MOSTLY` all of training instead.
        """
        found = self.ranking(target)
        return [f for f in found if f is found[0] or not self._beaten(found[0], f, target)]

    def _beaten(self, first: Family, other: Family, target: int) -> bool:
        behind = other.at[target].variance > first.at[target].variance * (1 + LEVEL)
        found = self.comparison(first.label, other.label, self.targets[target])
        if found is None:
            return behind
        return behind and (found.differs if found.by_elements.known else not found.better < MOSTLY)

    def lossless(self, family: Family) -> bool:
        """Whether a family has no error at all, as the uncompressed gradient: there is nothing to compare."""
        values = [self.configurations[i].relative_variance for i in family.members]
        return bool(values) and all(value == 0 for value in values)

    @property
    def fitted_at(self) -> list[int]:
        """The steps whose data levels and codes were fitted on; empty where that is every step."""
        refit = self.provenance.get("refit")
        if refit == "once":
            return [int(step) for step in self.steps[:1]]
        return [step for step in self.steps.tolist() if step in refit] if isinstance(refit, (list, tuple)) else []

    def nearest(self, family: Family, bits: float = PREFERRED_BITS) -> int:
        """Index of the family's configuration with the nearest measured bits, -1 where none is known."""
        known = [i for i in family.members if math.isfinite(self.configurations[i].bits)]
        return min(known, key=lambda i: abs(self.configurations[i].bits - bits), default=-1)

    def view(self, families: Sequence[Family] | None = None) -> list[int]:
        """One configuration of each family, for what is shown by layer or by step: the nearest to three bits."""
        return [i for i in map(self.nearest, self.families if families is None else families) if i >= 0]

    def standings(self, bits: float) -> tuple[Standing, ...]:
        """The methods that can be compared at a target, least error first."""
        if bits not in self.targets:
            return ()
        k = self.targets.index(bits)
        return tuple(
            Standing(f.label, at.variance, at.bias, at.bits, at.outcome, self._specs(at.lower, at.upper))
            for f, at in ((f, f.at[k]) for f in self.ranking(k))
        )

    def _specs(self, *indices: int) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.configurations[i].spec for i in indices))

    def comparison(self, one: str, other: str, bits: float) -> PairedComparison | None:
        """How two families (labels, in any order) were compared at a target, None if they were not."""
        wanted = {one, other}
        return next((c for c in self.comparisons if c.bits == bits and {c.first, c.second} == wanted), None)

    def compare(self, pairs: Sequence[tuple[str, str]]) -> tuple[PairedComparison, ...]:
        """Configurations compared as they are, each at its own bits, with Holm's correction over the pairs.

        Args:
            pairs: specs, the numerator first.

        Raises:
            UsageError: a spec is not in the sweep, or was measured on too few cells to be compared.
        """
        place = {c.spec: i for i, c in enumerate(self.configurations) if not c.partial}
        for spec in (spec for pair in pairs for spec in pair):
            if spec not in place:
                raise UsageError(f"{self.name}: no comparable configuration '{spec}'; {suggest(spec, place)}")
        if self.table is None:
            return ()
        return compare_configurations(self.table, list(place), [(place[a], place[b]) for a, b in pairs])
