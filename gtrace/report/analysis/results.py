"""What a sweep says, as numbers. Everything that is drawn or printed about a sweep comes from here.

M workers see a codec's bias, and an M-th of its variance: every worker rounds for itself, so averaging divides the
variance by their number; a bias stays. A codec with memory sends later what it leaves out now, so a single step says
little about it: what counts is the error of all that has arrived over a window of consecutive steps. One such codec is
enough to compare all of them over windows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import UsageError, suggest
from gtrace.report.analysis.equal_bits import PREFERRED_BITS
from gtrace.report.analysis.evidence import LayerChoice, PairedComparison, Phase, StepTable, compare_mixes
from gtrace.report.analysis.families import LEVEL, MOSTLY, Configuration, Family, Leader, Standing, decisive, ranked
from gtrace.report.analysis.safety import Safety, captured, trace_attrs, workers_of
from gtrace.report.names import count, listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.report.analysis.cells import CellTable, Coder
    from gtrace.report.analysis.details import ExchangeError, Rotation, TensorFit
    from gtrace.report.analysis.families import BDRate


#: How symbols become bits, in words.
CODED = {"fixed": "at fixed width", "huffman": "with Huffman codes", "entropy": "at the entropy of the symbols"}


@dataclass(frozen=True, slots=True)
class ErrorSplit:
    """Errors of cells in two parts, C configurations by K cells.

    Attributes:
        error: bias and variance of one worker.
        bias: the part that more workers do not shrink.
        energy: that both are related to.
    """

    error: NDArray[np.float64]
    bias: NDArray[np.float64]
    energy: NDArray[np.float64]

    @property
    def variance(self) -> NDArray[np.float64]:
        """(C, K) the part that more workers shrink."""
        return self.error - self.bias

    def at(self, workers: int) -> NDArray[np.float64]:
        """(C, K) the error of an average over each number of workers."""
        return self.bias + self.variance / workers


def per_step(table: CellTable) -> ErrorSplit:
    """Errors of single steps. Where the bias is not known, all of the error counts as bias."""
    error = table.squared_error
    bias = np.fmin(table.relative_bias**2 * table.energy, error)
    return ErrorSplit(error, np.where(np.isfinite(bias), bias, error), table.energy)


def over_windows(table: CellTable, steps: ErrorSplit) -> ErrorSplit:
    """Errors over windows of consecutive steps, at the cell where each window ends; NaN elsewhere.

    Draws of different steps are independent, so variances of the steps of a window add up. What is left of the
    window's error is bias: of a codec with memory, all of it.
    """
    ends = np.isfinite(table.window) & np.isfinite(table.window_error) & np.isfinite(table.window_energy)
    # Sums over the steps before each, tensor by tensor; the steps of a window follow each other in the table.
    shape = (len(table.specs), len(table.tensors) + 1, len(table.steps) + 1)
    sums = []
    for values in (steps.variance, steps.bias):
        by_step = np.zeros(shape)
        by_step[:, table.tensor, table.step + 1] = np.nan_to_num(values)
        sums.append(by_step.cumsum(axis=2))
    c, k = np.nonzero(ends)
    last = table.step[k] + 1
    first = np.maximum(last - table.window[c, k].astype(np.int64), 0)
    variance, bias = (total[c, table.tensor[k], last] - total[c, table.tensor[k], first] for total in sums)
    error, energy, of_it = (np.full(ends.shape, np.nan) for _ in range(3))
    error[c, k], energy[c, k] = table.window_error[c, k], table.window_energy[c, k]
    # A draw of an unbiased codec is off by variance alone, by more or by less than what is expected.
    of_it[c, k] = np.where(bias == 0, 0.0, np.maximum(error[c, k] - variance, 0.0))
    return ErrorSplit(error, of_it, energy)


@dataclass(frozen=True, slots=True)
class Basis:
    """What the methods of a sweep are compared by.

    Attributes:
        workers: whose average the errors are of.
        coder: that turns symbols into bits.
        window: fewest and most steps of the windows that errors are summed over; None for single steps.
    """

    workers: int = 1
    coder: Coder = "huffman"
    window: tuple[int, int] | None = None

    @property
    def steps_in_words(self) -> str:
        """``7 consecutive steps``, empty for single steps."""
        if self.window is None:
            return ""
        fewest, most = self.window
        return f"{most} consecutive steps" if fewest == most else f"{fewest} to {most} consecutive steps"


def ranked_by(
    table: CellTable, steps: ErrorSplit, windows: ErrorSplit, partial: NDArray[np.bool_], workers: int, coder: Coder
) -> tuple[CellTable, ErrorSplit, Basis]:
    """The table with the errors and energies that methods are compared by, these in two parts, and what they are."""
    remembers = table.memory & ~partial & np.isfinite(windows.error).any(axis=1)
    split, span = steps, None
    if remembers.any():
        split = windows
        lengths = table.window[np.isfinite(windows.error)]
        span = int(lengths.min()), int(lengths.max())
    ranked = replace(table, squared_error=split.at(workers), energy=split.energy)
    return ranked, split, Basis(workers, coder, span)


def sweep_notes(
    table: CellTable, common: NDArray[np.bool_], configurations: tuple[Configuration, ...], basis: Basis
) -> tuple[str, ...]:
    """What a reader must know about how the numbers of a sweep came to be, one line each."""
    if not table.measured.any():
        return ("The column 'note' of the results says why errors are missing.",) if table.specs else ()
    return (
        *_compared(table, common, configurations),
        *_errors(configurations, basis),
        *_sources(table, configurations, basis),
    )


def _compared(table: CellTable, common: NDArray[np.bool_], configurations: tuple[Configuration, ...]) -> Iterator[str]:
    is_tensor = table.tensor >= 0
    covered = table.covers().any(axis=0)
    holes = int((is_tensor & ~covered).sum())
    if holes:
        yield (
            f"{holes:,} of {int(is_tensor.sum()):,} tensor-steps could not be measured with any codec and "
            "are left out (non-finite gradients, or skipped)."
        )
    yield from _naming("No error that is a number", [c.spec for c in configurations if c.partial and not c.cells])
    partial = [c.spec for c in configurations if c.partial and c.cells]
    if partial:
        yield (
            f"Not compared, because measured on too few of the tensors and steps: {listed(partial)}. "
            "Their lines are summed over what they have."
        )
    if common.sum() < covered.sum():
        yield (
            f"Compared over the {int(common.sum()):,} tensor-steps, of {int(covered.sum()):,}, "
            "that every compared codec has."
        )


def _errors(configurations: tuple[Configuration, ...], basis: Basis) -> Iterator[str]:
    """What errors are when they are not those of single steps of one worker."""
    if basis.window is not None:
        yield (
            f"Some codecs have memory, so all are compared by the error of what has arrived over "
            f"{basis.steps_in_words}. The memory's part of it counts as bias."
        )
        without = [c.spec for c in configurations if c.cells and math.isnan(c.error)]
        yield from _naming("Not measured over several steps, so not compared", without)
    if basis.workers > 1:
        unknown = [c.spec for c in configurations if c.cells and not c.bias_known]
        said = "Bias not known, so all of the error counts as bias, which is the most it can be"
        yield from _naming(said, unknown, len(configurations))


def _sources(table: CellTable, configurations: tuple[Configuration, ...], basis: Basis) -> Iterator[str]:
    expected = [c.spec for c in configurations if c.bits_source in ("expected", "mixed")]
    said = f"Bits {CODED[basis.coder]} are computed, not counted on encoded bytes"
    yield from _naming(said, expected, len(configurations))
    lacking = [c.spec for c in configurations if math.isnan(c.bits) and c.cells]
    yield from _naming("No bits known, so not compared at equal bits", lacking)
    drawn = [c.spec for c in configurations if c.error_source in ("measured", "mixed")]
    said = "Error of the draws, rounding noise included, if there is no closed form"
    yield from _naming(said, drawn, len(configurations))
    unreadable = [spec for spec, found in zip(table.specs, table.parameters, strict=True) if found is None]
    yield from _naming("Parameters could not be read from the results", unreadable)


def _naming(sentence: str, specs: Sequence[str], every: int | None = None) -> Iterator[str]:
    """The sentence and the specs it is about, nothing if there are none; ``every`` spec is "all codecs"."""
    if specs:
        yield f"{sentence}: {'all codecs' if len(specs) == every else listed(specs)}."


def averaged_over(provenance: Mapping[str, Any]) -> int:
    """Ranks whose average the gradients of a sweep were, 1 for those of each rank itself or where nobody says."""
    stages = provenance.get("stages")
    if not isinstance(stages, list):
        stages = [captured(provenance).get("stage")]
    return workers_of(provenance) if "reduced" in stages else 1


def whose_gradient(provenance: Mapping[str, Any]) -> str:
    """Whose gradient the errors of a sweep are about: ``one worker's gradient``."""
    ranks = averaged_over(provenance)
    return "one worker's gradient" if ranks == 1 else f"the average of {count(ranks, 'rank')}' gradients"


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
    step_weights: NDArray[np.float64]
    per_tensor_bits: NDArray[np.float64]
    at_layers: NDArray[np.float64]
    comparisons: tuple[PairedComparison, ...]
    phases: tuple[Phase, ...]
    bd_rates: tuple[BDRate, ...]
    layer_choices: tuple[LayerChoice, ...]
    layer_best: tuple[str, ...]
    layer_at: dict[str, NDArray[np.float64]]
    safety: Safety
    table: StepTable = field(repr=False)
    single: StepTable = field(repr=False)
    basis: Basis
    step_at: NDArray[np.float64]
    coder_leaders: dict[str, Leader]
    rotation: Rotation | None
    exchanges: tuple[ExchangeError, ...]

    @property
    def measured(self) -> bool:
        """Whether any configuration has an error that is a number."""
        return any(math.isfinite(c.relative_variance) for c in self.configurations)

    @property
    def trace_attrs(self) -> dict[str, Any]:
        """What the trace says of its run; empty if the results do not hold it."""
        return trace_attrs(self.provenance)

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
        found = self.comparison(first.label, other.label, self.targets[target])
        sure = found is None or (found.differs if found.by_elements.known else not found.better < MOSTLY)
        return sure and other.at[target].variance > first.at[target].variance * (1 + LEVEL)

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
        k, found = self.targets.index(bits), []
        for family in self.ranking(k):
            at = family.at[k]
            specs = tuple(dict.fromkeys(self.configurations[i].spec for i in (at.lower, at.upper)))
            found.append(Standing(family.label, at.variance, at.bias, at.bits, at.outcome, specs))
        return tuple(found)

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
        return compare_mixes(self.table, [(a, b, math.nan, [(place[a], 1.0)], [(place[b], 1.0)]) for a, b in pairs])
