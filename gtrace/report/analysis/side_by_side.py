"""Two sweeps side by side: what the same codecs do in both, on the tensors and steps that both have."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from gtrace.report.analysis.evidence import KEY, SIGNIFICANT, StepTable, log_of_mean
from gtrace.report.analysis.safety import whose_gradient
from gtrace.report.statistics import Interval, bootstrap, holm, step_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.kernels import Ints
    from gtrace.report.analysis.sweep import SweepAnalysis


@dataclass(frozen=True, slots=True)
class ConfigurationRatio:
    """One configuration in two sweeps. Ratios are second over first.

    Attributes:
        first: relative variance in the first sweep, over what is paired, or over all of it where nothing is;
            ``second`` in the second.
        first_bits: measured bits per coordinate in the first sweep, over all of it.
        cells: tensors at steps that are paired.
        by_elements: log of ``ratio`` over what is paired, with its interval over steps.
        p_holm: corrected for all configurations, NaN without one.
    """

    spec: str
    first: float
    second: float
    ratio: float
    first_bits: float
    second_bits: float
    cells: int
    by_elements: Interval
    p_holm: float

    @property
    def differs(self) -> bool:
        """Whether the difference is beyond the noise of steps, corrected for the number of configurations."""
        return self.p_holm < SIGNIFICANT


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Two sweeps.

    Attributes:
        first: name of the sweep in the denominators.
        second: name of the one in the numerators.
        shared: configurations that both have, in the order of the first.
        only_first: specs that the second lacks.
        only_second: specs that the first lacks.
        tensors: names that both have.
        steps: captured steps that both have.
        same_trace: both measured the same trace; None where a sweep does not say which.
        whose: gradients they measured, in words.
    """

    first: str
    second: str
    shared: tuple[ConfigurationRatio, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    tensors: int
    steps: int
    same_trace: bool | None
    whose: str


def compare_sweeps(first: SweepAnalysis, second: SweepAnalysis) -> SideBySide:
    """Configurations that two sweeps share, on the tensors and steps that both have."""
    a = {c.spec: i for i, c in enumerate(first.configurations)}
    b = {c.spec: i for i, c in enumerate(second.configurations)}
    place = {tensor: j for j, tensor in enumerate(second.tensors)}
    tensors = [i for i, tensor in enumerate(first.tensors) if tensor in place]
    others = np.array([place[first.tensors[i]] for i in tensors], dtype=np.int64)
    steps, in_first, in_second = np.intersect1d(first.steps, second.steps, return_indices=True)
    # Indices of tensors and of steps.
    pick = (np.array(tensors, dtype=np.int64), in_first), (others, in_second)
    shared = []
    for spec in (spec for spec in a if spec in b):
        one, two = first.configurations[a[spec]], second.configurations[b[spec]]
        found = _paired([(first.single, a[spec], pick[0]), (second.single, b[spec], pick[1])], steps)
        if found is None:
            found = one.relative_variance, two.relative_variance, 0, Interval(math.nan, why="nothing is in both")
        x, y, cells, interval = found
        ratio = y / x if x > 0 else math.nan
        shared.append(ConfigurationRatio(spec, x, y, ratio, one.bits, two.bits, cells, interval, math.nan))
    corrected = holm([found.by_elements.p for found in shared])
    prints = [sweep.provenance.get("trace_fingerprint") for sweep in (first, second)]
    whose = list(dict.fromkeys(whose_gradient(sweep.provenance) for sweep in (first, second)))
    return SideBySide(
        first=first.name,
        second=second.name,
        shared=tuple(replace(found, p_holm=float(p)) for found, p in zip(shared, corrected, strict=True)),
        only_first=tuple(spec for spec in a if spec not in b),
        only_second=tuple(spec for spec in b if spec not in a),
        tensors=len(tensors),
        steps=len(steps),
        same_trace=None if None in prints else prints[0] == prints[1],
        whose=whose[0] if len(whose) == 1 else f"{whose[1]} over {whose[0]}",
    )


def _paired(
    sides: Sequence[tuple[StepTable, int, tuple[Ints, Ints]]], steps: Ints
) -> tuple[float, float, int, Interval] | None:
    """Relative variances over the cells that both have, how many these are, and the interval of the log ratio."""
    cells = [[values[c][np.ix_(*own)] for values in (table.error, table.energy)] for table, c, own in sides]
    known = np.logical_and.reduce([np.isfinite(part) for table in cells for part in table])
    if not known.any():
        return None
    # Steps in rows, each summed over the tensors that both have there.
    error, energy = (np.array([np.where(known, table[k], 0).sum(axis=0) for table in cells]) for k in (0, 1))
    there = known.any(axis=0)
    weights = np.zeros(len(steps))
    weights[there] = step_weights(steps[there])
    top, bottom = error @ weights, energy @ weights
    if not (bottom > 0).all():
        return None
    logs = np.full((2, len(steps)), np.nan)
    for k in range(2):
        logs[k, there] = np.subtract(*(log_of_mean(one[k, there], weights[there]) for one in (error, energy)))
    x, y = (top / bottom).tolist()
    return x, y, int(known.sum()), bootstrap(logs[1] - logs[0], weights, KEY)
