"""A short look at a trace: what it holds, and which laws its gradients follow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gtrace.fitting.magnitudes import LAWS, Fit, Magnitudes
from gtrace.fitting.sparsity import RULES
from gtrace.report.names import count, listed
from gtrace.settings import KINDS
from gtrace.sweep.laws import ASKED, FormatTrial, LayerFormats, PruningTrial, follow_laws, judge, verdict_sentences
from gtrace.trace import TensorInfo, Trace, open_trace
from gtrace.trace.choose import choose_infos, choose_steps, steps_of

if TYPE_CHECKING:
    from pathlib import Path

    from gtrace.fitting.floats import ScaleRule
    from gtrace.kernels import Floats, Ints, Singles
    from gtrace.sweep.laws import Cosines, LawVerdict, LayerLaws, PruningCell


#: Bits for which float formats are chosen, and the scale rule that places values: the codec's own default.
BITS = (4, 5, 6, 7, 8)
SCALE: ScaleRule = "max"
_Found = tuple["Singles", "Magnitudes", "Fit"]
#: The most steps a report looks at, the most tensors (the largest), and about how many elements in all.
MOST_STEPS, MOST_TENSORS, MOST_ELEMENTS = 12, 40, 100_000_000
#: The number of these steps at which pruning is tried.
PRUNED_STEPS = 3
#: Points of a Q-Q plot, evenly spaced in probability with more in both tails.
_QUANTILES = 120
#: Bins of a histogram.
_BINS = 60


@dataclass(frozen=True, slots=True)
class Picture:
    """The magnitudes of one gradient, ready to be drawn.

    Attributes:
        fit: the laws fitted to it.
        linear_edges: float64[m + 1], from 0 to the 99.5 % quantile.
        linear_counts: int64[m].
        log2_edges: float64[m + 1], of log2 |g|.
        log2_counts: int64[m].
        probabilities: float64[q] of the quantiles.
        quantiles: float64[q] of |g|.
    """

    tensor: str
    step: int
    fit: Fit
    linear_edges: Floats
    linear_counts: Ints
    log2_edges: Floats
    log2_counts: Ints
    probabilities: Floats
    quantiles: Floats


@dataclass(frozen=True, slots=True)
class LawSection:
    """Everything about one kind of gradient.

    Attributes:
        kind: ``weight`` or ``neural``.
        steps: analysed steps, rising.
        recorded: how many steps there are.
        layers: fits per tensor.
        formats: the best float formats per tensor, and what they lose.
        cells: gradients that were pruned.
        cosines: pruning allocated evenly and by data, per step.
        picture: a representative gradient, None without any to draw.
    """

    kind: str
    steps: tuple[int, ...]
    recorded: int
    layers: tuple[LayerLaws, ...]
    verdict: LawVerdict
    formats: tuple[LayerFormats, ...]
    cells: tuple[PruningCell, ...]
    cosines: tuple[Cosines, ...]
    picture: Picture | None
    notes: tuple[str, ...]

    @property
    def sentences(self) -> list[str]:
        """The answer in plain words, then which steps it is about."""
        if len(self.steps) < self.recorded:
            span = f"{len(self.steps)} of {count(self.recorded, 'recorded step')}"
        else:
            span = f"all {count(self.recorded, 'recorded step')}"
        said = verdict_sentences(self.verdict)
        steps, means = mean_over_layers(self)
        if len(steps) > 1:
            # How the mean distances to the two laws of the question changed over training.
            ends = {name: (means[0, LAWS.index(name)], means[-1, LAWS.index(name)]) for name in ("lognormal", "normal")}
            found = ", ".join(f"{name} {first:.3f} to {last:.3f}" for name, (first, last) in ends.items())
            said = [*said, f"From step {steps[0]} to {steps[-1]}: {found}."]
        return [*said, f"Looked at: {span}, {listed(map(str, self.steps), MOST_STEPS)}.", *self.notes]

    def deviations(self, rule: str) -> Floats:
        """|expected sparsity - what can be had| of a threshold rule, float64[cells, asked]."""
        place = RULES.index(rule)
        off: Floats = np.array([np.abs(cell.expected[place] - cell.wanted) for cell in self.cells])
        return off.reshape(-1, len(ASKED))


def law_sections(trace: Trace) -> tuple[LawSection, ...]:
    """One section per kind of gradient; the lowest rank stands for all. One gradient is held at a time.

    Raises:
        TraceError: a gradient is damaged.
    """
    of = {kind: [info for info in trace.tensors if info.kind == kind] for kind in KINDS}
    return tuple(_section(trace, kind, infos) for kind, infos in of.items() if not all(info.sketches for info in infos))


def _section(trace: Trace, kind: str, infos: list[TensorInfo]) -> LawSection:
    notes = []
    ranks = sorted({info.rank for info in infos})
    if len(ranks) > 1:
        infos = choose_infos(trace, kind=kind, rank=ranks[0])
        notes.append(f"Of {len(ranks)} ranks, rank {ranks[0]}.")
    kept = [info for info in infos if not info.sketches]
    if len(kept) < len(infos):
        left = f"{len(infos) - len(kept)} of {len(infos)} tensors"
        notes.append(f"{left} are kept as sketches; laws are fitted to values.")
        infos = kept
    if len(infos) > MOST_TENSORS:
        largest = sorted(infos, key=lambda info: -info.size)[:MOST_TENSORS]
        notes.append(f"The {MOST_TENSORS} largest of {len(infos)} tensors; `gtrace info --fit` looks at all.")
        infos = [info for info in infos if info in largest]
    elements = sum(info.size for info in infos)
    steps = choose_steps(trace, infos, most=min(MOST_STEPS, max(2, MOST_ELEMENTS // max(elements, 1))))
    recorded = np.unique(np.concatenate([steps_of(trace, info) for info in infos])).size
    ordered = sorted(steps)
    places = np.unique(np.linspace(0, max(len(ordered) - 1, 0), min(PRUNED_STEPS, len(ordered))).round().astype(int))
    pruning = PruningTrial(frozenset(ordered[place] for place in places))
    trials = {(info.name, info.optimizer): FormatTrial(BITS, SCALE) for info in infos}
    largest_info = max(infos, key=lambda info: info.size)
    picture: Picture | None = None

    def look(info: TensorInfo, step: int, *found: *_Found) -> None:
        nonlocal picture
        trials[info.name, info.optimizer](info, step, *found)
        pruning(info, step, *found)
        _, magnitudes, fit = found
        if info is largest_info and fit.sigma > 0:
            picture = _picture(info.name, step, magnitudes, fit)

    layers = tuple(follow_laws(trace, infos, steps, look=look))
    formats = (trials[info.name, info.optimizer].formats(info) for info in infos)
    known, pruned, cosines = tuple(filter(None, formats)), tuple(pruning.cells), tuple(pruning.cosines())
    parts = (layers, judge(layers), known, pruned, cosines, picture, tuple(notes))
    return LawSection(kind, tuple(ordered), int(recorded), *parts)


def _picture(tensor: str, step: int, magnitudes: Magnitudes, fit: Fit) -> Picture:
    logistic = 1 / (1 + np.exp(-np.linspace(-6, 6, _QUANTILES)))
    # No quantile beyond the data: its law would be compared with the largest element over and over.
    inside = logistic[(logistic > 0.5 / fit.count) & (logistic < 1 - 0.5 / fit.count)]
    low, high, top = magnitudes.quantiles([0.001, 0.999, 0.995]).tolist()
    linear = np.linspace(0, top, _BINS + 1)
    log2 = np.linspace(np.log2(low), np.log2(high) + 1e-9, _BINS + 1)
    histograms = (linear, magnitudes.histogram(linear), log2, magnitudes.histogram(2.0**log2))
    return Picture(tensor, step, fit, *histograms, inside, magnitudes.quantiles(inside))


def mean_over_layers(section: LawSection) -> tuple[Ints, Floats]:
    """Mean distance to each law at each step, over the layers that have enough elements there.

    Returns:
        steps (int64[s]) and distances (float64[s, laws]).
    """
    at: dict[int, list[Floats]] = {}
    for layer in section.layers:
        distances = layer.distances
        for place in np.flatnonzero(layer.judged):
            at.setdefault(int(layer.steps[place]), []).append(distances[place])
    steps = np.array(sorted(at), np.int64)
    return steps, np.array([np.mean(at[step], axis=0) for step in steps.tolist()]).reshape(len(steps), len(LAWS))


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One recorded tensor: name, shape and number of recorded steps."""

    name: str
    shape: tuple[int, ...]
    steps: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What a trace holds, and which laws its gradients follow: a section per kind of gradient."""

    name: str
    tensors: tuple[TensorSummary, ...]
    laws: tuple[LawSection, ...] = ()
    path: str = ""

    @property
    def sentence(self) -> str:
        """One line of plain words."""
        elements = sum(t.elements for t in self.tensors)
        steps = max((t.steps for t in self.tensors), default=0)
        return (
            f"{count(len(self.tensors), 'tensor')}, {count(elements, 'element')}, "
            f"up to {count(steps, 'step')} each. No codec is measured on it here; gtrace sweep does that."
        )


def summarize_trace(path: Path, name: str) -> TraceSummary:
    """Read the table of contents of a trace, and the gradients of a few steps.

    Raises:
        TraceError: missing, not a trace, damaged, or from a newer version.
    """
    with open_trace(path) as trace:
        found = (TensorSummary(t.name, tuple(map(int, t.shape)), len(steps_of(trace, t))) for t in trace.tensors)
        return TraceSummary(name, tuple(found), law_sections(trace), str(path))
