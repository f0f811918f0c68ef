"""Tables of training runs: one line per run, per rank study, per compressed weight gradient."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from gtrace.report.names import MISSING, number, size
from gtrace.report.policies import chosen_bits, common_loss, seconds_to_loss
from gtrace.report.runs import known_mean
from gtrace.report.tables import Cell, Column, Table, cosine_cell, value_cell

if TYPE_CHECKING:
    from gtrace.report.runs import Run, RunLogAnalysis

_NO_STEP = "No training step was logged."


def run_table(analysis: RunLogAnalysis) -> Table:
    """One line per training run."""
    neural = analysis.neural
    what = "codec on the gradients inside the backward passes" if neural else "codec on the workers' gradients"
    if analysis.linear:
        what = "how samples, model and gradients were quantized"
    tested = any(math.isfinite(run.final_accuracy) for run in analysis.runs)
    columns = [
        Column("run", f"{what}; none: uncompressed", numeric=False),
        Column("seed", rank=4),
        Column("epochs" if analysis.linear else "steps", rank=3),
        Column("training loss", "mean of the last tenth of the steps", rank=1 if tested else 0),
        Column("test accuracy", "at the last test"),
        Column(
            "relative variance",
            f"of {'all neural gradients together' if neural else 'the averaged gradient'}, mean over steps",
            rank=2,
        ),
        Column(
            "encoded per worker" if neural else "sent up per worker",
            "samples, models and gradients over the run"
            if analysis.linear
            else "payload and shared bytes over the run",
            rank=1,
        ),
        Column(
            "float32 / encoded" if neural else "float32 / sent",
            f"bits that float32 would have taken over the bits {'encoded' if neural else 'sent'}",
        ),
    ]
    timed = any(np.isfinite(run.sim_seconds).any() for run in analysis.runs)
    if timed:
        columns.append(Column("simulated time", "of the whole run over the simulated network", rank=1))
    target = common_loss(analysis.runs) if timed else math.nan
    if math.isfinite(target):
        hint = "simulated time until the running mean of the training loss, over a twentieth of the run, is there"
        columns.append(Column(f"time to loss {target:g}", hint))
    chosen = [chosen_bits(run) for run in analysis.runs]
    if any(chosen):
        columns.append(Column("bits chosen", "by the policy, with the step from which on", rank=2, numeric=False))
    rows = tuple(
        (
            Cell(run.spec, hint="" if run.finished else "not finished"),
            Cell(str(run.seed)),
            Cell(f"{len(run.steps):,}"),
            value_cell(run.final_loss),
            _accuracy(run.final_accuracy),
            value_cell(run.mean_relative_variance),
            Cell(size(float(run.sent[-1]) if len(run.sent) else math.nan)),
            value_cell(run.ratio),
            *([Cell(_seconds(run))] if timed else []),
            *([Cell(_in_seconds(seconds_to_loss(run, target)))] if math.isfinite(target) else []),
            *([Cell(bits)] if any(chosen) else []),
        )
        for run, bits in zip(analysis.runs, chosen, strict=True)
    )
    alone = analysis.workers == 1 and not analysis.has_ranks
    whose = "one worker" if alone else "one rank" if analysis.has_ranks else f"all {analysis.averaged}"
    compared = f"Ratio: bits of float32 over bits {'encoded' if neural else 'sent up'}, both by {whose}."
    error = "of the neural gradients" if neural else f"of the mean over {'one worker' if alone else analysis.averaged}"
    if analysis.has_ranks:
        error += ", over the steps at which it was compared with plain all-reduces"
    network = analysis.study.get("network")
    measured = "" if "computing" in str(network) else "computing and coding as measured, "
    simulated = [f"Simulated: {measured}links of {network}."] if network and timed else []
    if math.isfinite(target):
        simulated.append(f"A loss of {target:g} is the least that all finished runs reached.")
    if analysis.linear:
        return Table("Training runs", tuple(columns), rows, ("Ratio: bits of float32 over bits moved.",), _NO_STEP)
    notes = (compared, f"Relative variance: {error}.", *simulated)
    return Table("Training runs", tuple(columns), rows, notes, _NO_STEP)


def rank_table(analysis: RunLogAnalysis) -> Table:
    """One line per run between real ranks: what one rank sent, and the same gradients in a bf16 all-reduce."""
    columns = (
        Column("run", "codec on the gradients of each rank", numeric=False),
        Column("bits up", "per value of one rank's gradient, payload and shared bytes"),
        Column("bits second shot", "per value of the average that is encoded again and sent to all"),
        Column("relative variance", "of the average, over the compared steps"),
        Column("bf16 variance", "relative variance of an all-reduce in bfloat16 of the same gradients"),
        Column("steps compared", rank=2),
        Column("given to collectives", "by one rank, for the others, over the run", rank=1),
    )
    rows = tuple(
        (
            Cell(run.spec),
            value_cell(run.ranks.up_bits),
            value_cell(run.ranks.down_bits),
            value_cell(run.ranks.relative_variance),
            value_cell(run.ranks.bf16_variance),
            Cell(f"{run.ranks.compared:,}"),
            Cell(size(8 * run.ranks.wire_bytes)),
        )
        for run in analysis.runs
        if run.ranks is not None
    )
    notes = (
        f"{analysis.averaged}. Bits are those of the rank that wrote the log; float32 is 32 per value, bf16 is 16.",
        "Relative variance: ||average of decoded - exact average||² / ||exact average||², where both were computed.",
    )
    return Table("Between the ranks", columns, rows, notes, "No ranks trained together.")


def shadow_table(analysis: RunLogAnalysis) -> Table:
    """One line per weight gradient that shadow passes compared, means over the passes."""
    runs = [run for run in analysis.runs if run.shadow]
    several = len(runs) > 1
    columns = (
        *([Column("run", numeric=False), Column("seed")] if several else []),
        Column("weight gradient", "name of the parameter", numeric=False),
        Column("cosine", "to the exact gradient of the same batch, all layers compressed"),
        Column("lowest", "cosine of the worst shadow pass"),
        Column("error", "||compressed - exact|| / ||exact||, all layers compressed"),
        Column("cosine alone", "where only the gradients of this layer's own outputs are compressed", rank=1),
        Column("error alone", "where only the gradients of this layer's own outputs are compressed", rank=2),
    )
    rows = tuple(
        (
            *([Cell(run.spec), Cell(str(run.seed))] if several else []),
            Cell(curve.tensor),
            cosine_cell(known_mean(curve.cosine)),
            cosine_cell(float(np.nanmin(curve.cosine)) if np.isfinite(curve.cosine).any() else math.nan),
            value_cell(known_mean(curve.error)),
            cosine_cell(known_mean(curve.cosine_alone)),
            value_cell(known_mean(curve.error_alone)),
        )
        for run in runs
        for curve in run.shadow
    )
    passes = max((len(curve.steps) for run in runs for curve in run.shadow), default=0)
    notes = (
        f"Means over {passes} shadow passes: the backward pass of one batch with and without compression.",
        "Alone: only the gradients of this layer's own outputs are compressed; otherwise those of all layers.",
    )
    return Table("Weight gradients under compressed neural gradients", columns, rows, notes, "No shadow pass was made.")


def _seconds(run: Run) -> str:
    known = run.sim_seconds[np.isfinite(run.sim_seconds)]
    return _in_seconds(float(known[-1]) if len(known) else math.nan)


def _in_seconds(value: float) -> str:
    return f"{number(value)} s" if math.isfinite(value) else MISSING


def _accuracy(value: float) -> Cell:
    return Cell(MISSING, mark="missing") if math.isnan(value) else Cell(f"{value:.2%}")
