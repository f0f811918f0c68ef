"""Rows of a sweep sorted into cells, which of them are compared by which errors, and weighted sums over them.

M workers see a codec's bias, and an M-th of its variance: every worker rounds for itself, so averaging divides the
variance by their number; a bias stays. A codec with memory sends later what it leaves out now, so a single step says
little about it: what counts is the error of all that has arrived over a window of consecutive steps. One such codec is
enough to compare all of them over windows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gtrace.codecs import codec
from gtrace.errors import UsageError
from gtrace.report.analysis.families import SUMMED, Measure, Source
from gtrace.report.names import natural_order
from gtrace.report.statistics import step_weights
from gtrace.sweep import EXPECTATION, SweepResult
from gtrace.sweep.gradient_noise import NOISE
from gtrace.types import WHOLE_MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from gtrace.kernels import Flags, Floats, Ints


#: Columns of a sweep of which the closed form is preferred, and those of which it is the mean over draws.
EXPECTED = ("relative_bias", "window", "window_error", "window_energy", "noise_ratio")
DRAWN = ("bits_shared", "mean_abs")
_SOURCES: tuple[Source, ...] = ("none", "expected", "measured", "mixed")


def sums_of(table: CellTable) -> tuple[Sums, Flags, Flags]:
    """Sums over what is compared, (cells,) which cells these are, and (configurations,) which are left out.

    Sums over different cells are not comparable. Starting with the best covered configuration, each further
    one may shrink the common set, but not below half of it: one codec that was interrupted early, or that
    fails on most tensors, must not take the others' data away. A step that no codec measured weighs 0.
    """
    covers = table.covers()
    configurations, cells = covers.shape
    partial = np.ones(configurations, dtype=np.bool_)
    common = np.ones(cells, dtype=np.bool_)
    coverage = covers.sum(axis=1)
    enough = coverage.max(initial=0) / 2
    for c in np.argsort(-coverage, kind="stable"):
        smaller = common & covers[c]
        if coverage[c] and smaller.sum() >= enough:
            common, partial[c] = smaller, False
    if table.whole_model[~partial].any() and not table.whole_model[~partial].all():
        # A whole-model row holds every tensor of its step, so a step with a hole cannot be compared with it.
        common &= ~np.isin(table.step, table.step[~common & (table.tensor >= 0)])
    within = np.broadcast_to(common, covers.shape).copy()
    within[table.whole_model] = np.isin(table.step, table.step[common])
    used = table.measured & (within | partial[:, None])
    weights = np.zeros(len(table.steps))
    there = np.unique(table.step[used.any(axis=0)])
    weights[there] = step_weights(table.steps[there])
    return Sums(table, used, weights), common, partial


def divide(top: Floats, bottom: Floats, where: Flags) -> Floats:
    """``top / bottom`` where it is wanted, NaN elsewhere; any shape."""
    out = np.full(top.shape, np.nan)
    np.divide(top, bottom, out=out, where=where)
    return out


class Sums:
    """Weighted sums of a :class:`CellTable` over the cells in use.

    Attributes:
        table: C configurations, K cells.
        used: (C, K) which cells each configuration is summed over.
        weights: (S,) part of training that each step represents.
    """

    def __init__(self, table: CellTable, used: Flags, weights: Floats) -> None:
        self.table = table
        self.used = used
        self.weights = weights
        self._weights = weights[table.step]

    def ratio(self, values: Floats, weights: Floats, *, strict: bool) -> Floats:
        """(C,) ``sum values weights / sum weights``, both (C, K); the weights of steps come on top.

        A missing value in a cell in use makes the sum NaN if ``strict``; otherwise the cell is left out.
        """
        known = np.isfinite(values) & np.isfinite(weights)
        mask = self.used & known
        bottom_terms = np.where(mask, weights * self._weights, 0)
        top = np.where(mask, values * bottom_terms, 0).sum(axis=1)
        bottom = bottom_terms.sum(axis=1)
        incomplete = (self.used & ~known).any(axis=1) if strict else np.zeros(len(top), dtype=np.bool_)
        return divide(top, bottom, (bottom > 0) & ~incomplete)

    def relative(self, error: Floats, energy: Floats) -> Floats:
        """(C,) sum of errors (C, K) over sum of energies, where the cells in use have both."""
        used = self.used & np.isfinite(error) & np.isfinite(energy)
        top = np.where(used, error * self._weights, 0).sum(axis=1)
        bottom = np.where(used, energy * self._weights, 0).sum(axis=1)
        return divide(top, bottom, bottom > 0)

    def totals(self, values: Floats, group: Ints, groups: int) -> Floats:
        """(C, groups) weighted sums of ``values`` (C, K) over the cells in use; a negative group is left out."""
        out = np.zeros((len(self.used), groups))
        for c, used in enumerate(self.used):
            mask = used & (group >= 0)
            out[c] = np.bincount(group[mask], weights=(values[c] * self._weights)[mask], minlength=groups)
        return out

    def by(self, group: Ints, groups: int, what: Literal["error", "bits"]) -> Floats:
        """(C, groups) relative variance or bits per coordinate of each group's cells; a negative group is left out."""
        table = self.table
        top, bottom = (table.squared_error, table.energy) if what == "error" else (table.bits * table.n, table.n)
        below = self.totals(bottom, group, groups)
        return divide(self.totals(top, group, groups), below, below > 0)

    def by_cell(self, values: Floats, tensors: int, steps: int) -> Floats:
        """(C, tensors, steps) ``values`` (C, K) of the cells in use as they are, NaN for holes."""
        c, k = np.nonzero(self.used & (self.table.tensor >= 0))
        out = np.full((len(values), tensors, steps), np.nan)
        out[c, self.table.tensor[k], self.table.step[k]] = values[c, k]
        return out

    def step_ratio(self) -> Floats:
        """(C,) mean over steps of float32 bits over measured bits, NaN where a cell's bits are not known."""
        table = self.table
        out = np.full(len(table.specs), np.nan)
        total = self.totals(32.0 * table.n, table.step, len(table.steps))
        sent = self.totals(table.bits * table.n, table.step, len(table.steps))
        for c in range(len(table.specs)):
            there = total[c] > 0
            if there.any() and (sent[c, there] > 0).all():
                out[c] = float(np.average(total[c, there] / sent[c, there], weights=self.weights[there]))
        return out

    def source(self, closed: Flags, drawn: Flags) -> list[Source]:
        """Where numbers came from: masks (C, K) of closed forms and of draws."""
        has_closed = np.logical_or.reduce(self.used & closed, axis=1)
        has_drawn = np.logical_or.reduce(self.used & drawn, axis=1)
        return [_SOURCES[k] for k in (has_closed + 2 * has_drawn).tolist()]


@dataclass(frozen=True, slots=True)
class CellTable:
    """A sweep with its draws summed up. C configurations, K cells; matrices are (C, K) with NaN for holes.

    Attributes:
        specs: canonical spec of each configuration.
        parameters: parameters of each, None if they cannot be read.
        nominal_bits: of each, NaN where the codec has none.
        whole_model: (C,) the codec ran over the whole model's gradient, while others ran over tensors.
        memory: (C,) the codec keeps memory between steps.
        tensors: names, in natural order.
        elements: (tensors,) number of elements.
        steps: ascending.
        tensor: (K,) index into ``tensors``; -1 for a cell that holds the whole model.
        step: (K,) index into ``steps``.
        energy: squared norm of the gradient.
        squared_error: expected if there is a closed form, else the mean over draws.
        error_drawn: the error is that of draws.
        bits: payload and shared bits per coordinate, mean over draws if there are any, else expected.
        bits_drawn: the bits were measured on encoded bytes.
        columns: further columns of the sweep by their names: those that are summed up to
            :data:`~gtrace.report.analysis.families.SUMMED`, and :data:`EXPECTED` and :data:`DRAWN`.
        noise: (K,) gradient noise, tr Cov(g), NaN where not known.
        signal: (K,) squared norm of the expected gradient, as estimated; may be negative.
        fitted_on: of each configuration, which data its levels and codes came from: ``itself``, ``pooled N steps``,
            ``previous``, ``step N``; where several, the commonest that is not ``itself``; empty if nothing is fitted.
    """

    specs: tuple[str, ...]
    methods: tuple[str, ...]
    parameters: tuple[dict[str, Any] | None, ...]
    nominal_bits: tuple[float, ...]
    whole_model: Flags
    memory: Flags
    tensors: tuple[str, ...]
    elements: Ints
    steps: Ints
    tensor: Ints
    step: Ints
    n: Floats
    energy: Floats
    squared_error: Floats
    error_drawn: Flags
    bits: Floats
    bits_drawn: Flags
    columns: Mapping[str, Floats]
    noise: Floats
    signal: Floats
    fitted_on: tuple[str, ...]

    @property
    def measured(self) -> Flags:
        """(C, K) if there is an error and an energy to relate it to."""
        return np.isfinite(self.squared_error) & np.isfinite(self.energy) & (self.n > 0)

    def under_coder(self, coder: Coder) -> CellTable:
        """The same with ``bits`` under one coder for all configurations.

        A configuration that uses this coder keeps the bits of its payloads. Of any other the column of the coder is
        taken, with what is sent apart from payloads. What sends no symbols has one number of bits, whatever the coder.
        """
        column = self.columns[f"bits_{coder}"] + np.nan_to_num(self.columns["bits_shared"])
        own = np.array([p is not None and p.get("coder") == coder for p in self.parameters], dtype=np.bool_)
        computed = np.isfinite(column) & ~(own[:, None] & np.isfinite(self.bits))
        return replace(self, bits=np.where(computed, column, self.bits), bits_drawn=self.bits_drawn & ~computed)

    def covers(self) -> Flags:
        """(C, K) which tensors at which steps a configuration says something about.

        A whole-model configuration covers every tensor of its steps; its own cells are nobody's.
        """
        covers = self.measured
        for c in np.flatnonzero(self.whole_model):
            covers[c] = np.isin(self.step, self.step[covers[c]]) & (self.tensor >= 0)
        return covers


def read_cells(result: SweepResult) -> CellTable:
    """Sort the rows of a sweep into cells; several draws of a cell become their mean."""
    specs, config = _codes(result["codec"])
    names, tensor = _codes(result["tensor"])
    steps, step = np.unique(np.asarray(result["step"], dtype=np.int64), return_inverse=True)
    first = np.unique(config, return_index=True)[1]

    # The whole model is a cell of its own kind only beside tensors; alone it is the one tensor there is.
    mixed = WHOLE_MODEL in names and len(names) > 1
    tensors = natural_order(name for name in names if not (mixed and name == WHOLE_MODEL))
    place = {name: k for k, name in enumerate(tensors)}
    tensor = np.array([place.get(name, -1) for name in names], dtype=np.int64)[tensor]
    whole_model = np.ones(len(specs), dtype=np.bool_)
    whole_model[config[tensor >= 0]] = False

    keys, cell = np.unique((tensor + 1) * max(len(steps), 1) + step, return_inverse=True)
    pair, is_expectation = config * len(keys) + cell, np.asarray(result["draw"]) == EXPECTATION
    rows = [(rows, pair[rows]) for rows in map(np.flatnonzero, (is_expectation, ~is_expectation))]

    def fill(column: NDArray[Any], *, drawn: bool = False) -> Floats:
        """(C, K) expectations, or means of draws."""
        which, at = rows[drawn]
        values = np.asarray(column, dtype=np.float64)[which]
        known = np.isfinite(values)
        at = at[known]
        mean = np.full(len(specs) * len(keys), np.nan)
        number = np.bincount(at, minlength=len(mean))
        np.divide(np.bincount(at, weights=values[known], minlength=len(mean)), number, out=mean, where=number > 0)
        return mean.reshape(len(specs), len(keys))

    def column(name: str, *, expected: bool = True) -> Floats:
        """The closed form if there is one, else the mean over draws; or the other way round."""
        parts = fill(result[name]), fill(result[name], drawn=True)
        return _prefer(*(parts if expected else parts[::-1]))

    def summed(name: str, measure: Measure) -> Floats:
        if measure.of == "energy":
            return np.where(energy == 0, 0.0, fill(result[name]))
        return column(name, expected=measure.expected)

    n, energy = column("n"), column("energy")
    closed_error, closed_bits = fill(result["squared_error"]), fill(result["bits_total"])
    drawn_error, drawn_bits = fill(result["squared_error"], drawn=True), fill(result["bits_total"], drawn=True)
    cell_tensor = keys // max(len(steps), 1) - 1
    elements = np.zeros(len(tensors), dtype=np.int64)
    largest = np.nan_to_num(n).max(axis=0, initial=0)
    np.maximum.at(elements, cell_tensor[cell_tensor >= 0], largest[cell_tensor >= 0].astype(np.int64))
    return CellTable(
        specs=tuple(specs),
        methods=tuple(str(result["method"][i]) for i in first),
        parameters=tuple(_parameters(result["params"][i]) for i in first),
        nominal_bits=tuple(float(result["bits"][i]) for i in first),
        whole_model=whole_model,
        memory=np.array([_remembers(spec) for spec in specs], dtype=np.bool_),
        tensors=tuple(tensors),
        elements=elements,
        steps=steps,
        tensor=cell_tensor,
        step=keys % max(len(steps), 1),
        n=n,
        energy=energy,
        squared_error=_prefer(closed_error, drawn_error),
        error_drawn=~np.isfinite(closed_error) & np.isfinite(drawn_error),
        bits=_prefer(drawn_bits, _prefer(closed_bits, fill(result["bits_huffman"]))),
        bits_drawn=np.isfinite(drawn_bits),
        columns={
            **{name: summed(name, measure) for name, measure in SUMMED.items()},
            **{name: column(name, expected=name in EXPECTED) for name in (*EXPECTED, *DRAWN)},
        },
        noise=_of_cells(result, tensors, steps, keys, "variance"),
        signal=_of_cells(result, tensors, steps, keys, "signal"),
        fitted_on=_fitted_on(config, result["fitted_on"], len(specs)),
    )


#: What the column ``fitted_on`` holds where nothing is fitted.
NOTHING_FITTED = "-"


def _prefer(first: Floats, second: Floats) -> Floats:
    return np.where(np.isfinite(first), first, second)


def _of_cells(result: SweepResult, tensors: list[str], steps: Ints, keys: Ints, name: str) -> Floats:
    """(K,) a number of the gradient noise of each cell, NaN without one."""
    out = np.full(len(keys), np.nan)
    place = {key: k for k, key in enumerate(keys.tolist())}
    row = {tensor: (k + 1) * max(len(steps), 1) for k, tensor in enumerate(tensors)}
    column = {step: k for k, step in enumerate(steps.tolist())}
    for (tensor, step, what), found in result.details.items():
        if what == NOISE and step in column:
            # The whole model comes before all tensors, where it is not one itself.
            k = place.get(row.get(tensor, 0) + column[step])
            if k is not None and (tensor in row or tensor == WHOLE_MODEL):
                out[k] = found[name]
    return out


def _codes(column: NDArray[Any]) -> tuple[list[str], Ints]:
    """Distinct strings in order of appearance and each row's index into them.

    Hashing takes a tenth of the time of np.unique, which sorts and compares objects.
    """
    values = column.tolist()
    index = {value: place for place, value in enumerate(dict.fromkeys(values))}
    codes = np.fromiter(map(index.__getitem__, values), dtype=np.int64, count=len(values))
    return [str(value) for value in index], codes


def _fitted_on(config: Ints, column: NDArray[Any], configurations: int) -> tuple[str, ...]:
    names, code = _codes(column)
    counts = np.bincount(config * len(names) + code, minlength=configurations * len(names))
    out, nothing = [], ("", "None", NOTHING_FITTED)
    for found in counts.reshape(configurations, len(names)).tolist():
        known = {name: n for name, n in zip(names, found, strict=True) if n and name not in nothing}
        # The first step has nothing before it and is fitted to itself, whatever the others do.
        out.append(max(known, key=lambda name: (name != "itself", known[name]), default=""))
    return tuple(out)


def _remembers(spec: str) -> bool:
    """Whether a codec keeps memory between steps; one that this process does not know counts as one that does not."""
    try:
        return codec(spec).stateful
    except UsageError:  # from a plugin that is not loaded here
        return False


def _parameters(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (TypeError, ValueError):
        return None
    return value if isinstance(value, dict) else None


#: How symbols become bits, in words: the coders that configurations can be compared under.
Coder = Literal["fixed", "huffman", "entropy"]
CODED: dict[Coder, str] = {
    "fixed": "at fixed width",
    "huffman": "with Huffman codes",
    "entropy": "at the entropy of the symbols",
}


@dataclass(frozen=True, slots=True)
class ErrorSplit:
    """Errors of cells in two parts, C configurations by K cells.

    Attributes:
        error: bias and variance of one worker.
        bias: the part that more workers do not shrink.
        energy: that both are related to.
    """

    error: Floats
    bias: Floats
    energy: Floats

    @property
    def variance(self) -> Floats:
        """(C, K) the part that more workers shrink."""
        return self.error - self.bias

    def at(self, workers: int) -> Floats:
        """(C, K) the error of an average over each number of workers."""
        return self.bias + self.variance / workers


def per_step(table: CellTable) -> ErrorSplit:
    """Errors of single steps. Where the bias is not known, all of the error counts as bias."""
    error = table.squared_error
    bias = np.fmin(table.columns["relative_bias"] ** 2 * table.energy, error)
    return ErrorSplit(error, np.where(np.isfinite(bias), bias, error), table.energy)


def over_windows(table: CellTable, steps: ErrorSplit) -> ErrorSplit:
    """Errors over windows of consecutive steps, at the cell where each window ends; NaN elsewhere.

    Draws of different steps are independent, so variances of the steps of a window add up. What is left of the
    window's error is bias: of a codec with memory, all of it.
    """
    window, window_error, window_energy = (table.columns[f"window{of}"] for of in ("", "_error", "_energy"))
    ends = np.isfinite(window) & np.isfinite(window_error) & np.isfinite(window_energy)
    # Sums over the steps before each, tensor by tensor; the steps of a window follow each other in the table.
    shape = (len(table.specs), len(table.tensors) + 1, len(table.steps) + 1)
    sums = []
    for values in (steps.variance, steps.bias):
        by_step = np.zeros(shape)
        by_step[:, table.tensor, table.step + 1] = np.nan_to_num(values)
        sums.append(by_step.cumsum(axis=2))
    c, k = np.nonzero(ends)
    last = table.step[k] + 1
    first = np.maximum(last - window[c, k].astype(np.int64), 0)
    variance, bias = (total[c, table.tensor[k], last] - total[c, table.tensor[k], first] for total in sums)
    error, energy, of_it = (np.full(ends.shape, np.nan) for _ in range(3))
    error[c, k], energy[c, k] = window_error[c, k], window_energy[c, k]
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
