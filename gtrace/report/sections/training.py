"""Training runs in words and tables: each run, seeds, ranks, weight gradients."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from gtrace.report.analysis.evidence import SIGNIFICANT
from gtrace.report.analysis.families import method_of, short_spec
from gtrace.report.analysis.runs import BASELINE, WINDOW, RankCosts, common_loss, known_mean, last_known, running_mean
from gtrace.report.names import MISSING, count, listed, number, pick, size
from gtrace.report.section import FEW_ROWS, Cell, Chart, Numbers, Panel, Section, Table, column, flat, value_cell, words
from gtrace.report.sections import charts
from gtrace.report.statistics import FEWEST_SEEDS, Interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gtrace.kernels import Floats
    from gtrace.report.analysis.runs import FinalLoss, LoggedRun, RunLogAnalysis, SeedGroup, ShadowCurve
    from gtrace.report.section import Curve, FigureSpec, Record, Shows


#: More curves than this cannot be told apart.
_MOST_SHADOWS = 8


def runs_section(log: RunLogAnalysis) -> Section:
    """A run log."""
    facts = [log.task, log.averaged]
    if isinstance(log.study.get("parameters"), int):
        facts.append(count(log.study["parameters"], "parameter"))
    said = (*runs_verdict(log), *noise_sentences(log))
    study = {key: value for key, value in log.study.items() if key not in ("type", "tensors")}
    table, seeds = run_table(log), seed_table(log) if log.several_seeds else None
    first = seeds or table
    return Section(
        kind="Training",
        name=log.name,
        sentences=said,
        blocks=(
            *([seeds] if seeds is not None else []),
            *([table] if log.runs else []),
            *([rank_table(log)] if log.has_ranks else []),
            *([shadow_table(log)] if any(run.shadow for run in log.runs) else []),
            *run_figures(log),
        ),
        place="training",
        # The first codecs or runs, without notes.
        brief=dataclasses.replace(first, rows=first.rows[:FEW_ROWS], notes=()) if log.runs else None,
        notes=log.notes,
        warnings=log.warnings,
        facts=", ".join(filter(None, facts)),
        provenance={"results": log.name, **study},
        numbers=partial(_numbers, log),
    )


def pooled_section(logs: tuple[str, ...], pool: RunLogAnalysis) -> Section:
    """A task with several run logs."""
    return Section(
        kind="Training",
        name=f"put together: {', '.join(logs)}",
        sentences=tuple(seeds_verdict(pool)) or ("No run was finished.",),
        blocks=(seed_table(pool, pool.notes),),
        place="training",
        together=True,
        numbers=partial(_pooled_numbers, logs, pool),
    )


def seed_table(log: RunLogAnalysis, notes: Sequence[str] = ()) -> Table:
    """One line per codec: mean over seeds, deviation, interval, and the paired difference to the uncompressed runs."""
    metric = log.groups[0].metric if log.groups else "test accuracy"
    sent = "encoded" if log.neural else "sent"
    against = "mean difference to uncompressed runs with the same seed; pp: percentage points; gray: not sure (Holm)"
    said = [f"{log.averaged}; finished runs only. Differences to the uncompressed runs are paired by seed."]
    if any(len(group.seeds) < FEWEST_SEEDS for group in log.groups):
        said.append(f"Fewer than {FEWEST_SEEDS} seeds: no interval; this describes what happened.")

    def span(of: Interval, show: Callable[[str, float], str]) -> str:
        return f"{show(metric, of.low)} to {show(metric, of.high)}" if of.known else MISSING

    columns: list[Shows[SeedGroup]] = [
        words("codec", lambda g: g.spec),
        column("seeds", lambda g: Cell(str(len(g.seeds)), hint=", ".join(map(str, g.seeds))), rank=3),
        column(f"mean {metric}", lambda g: metric_text(metric, g.mean), "over seeds"),
        column("deviation", lambda g: metric_text(metric, g.deviation), "standard deviation over seeds", 2),
        column("95% interval", lambda g: span(g.interval, metric_text), "of the mean, by Student's t", 3),
        column(
            "against none",
            lambda g: Cell(_points(metric, g.difference.estimate), mark="quiet" if g.p_holm >= SIGNIFICANT else ""),
            against,
        ),
        column("its 95% interval", lambda g: span(g.difference, _points), "by Student's t over seeds", 1),
        column(f"float32 / {sent}", lambda g: number(g.ratio), "bits, mean over seeds", 1),
    ]
    return Table.of("Over seeds", log.groups, columns, notes=(*said, *notes), empty="No run was finished.")


def _signed(metric: str, value: float) -> str:
    return f"{100 * value:+.2f}" if metric == "test accuracy" else f"{value:+.3g}"


def _points(metric: str, value: float) -> str:
    return MISSING if math.isnan(value) else _signed(metric, value) + " pp" * (metric == "test accuracy")


def run_table(analysis: RunLogAnalysis) -> Table:
    """One line per training run."""
    neural = analysis.neural
    what = "codec on the gradients inside the backward passes" if neural else "codec on the workers' gradients"
    what = f"{'how samples, model and gradients were quantized' if analysis.linear else what}; none: uncompressed"
    tested = any(math.isfinite(run.final_accuracy) for run in analysis.runs)
    verb, done = ("encoded", "encoded") if neural else ("sent up", "sent")
    sent = "samples, models and gradients" if analysis.linear else "payload and shared bytes"
    error = f"of {'all neural gradients together' if neural else 'the averaged gradient'}, mean over steps"
    columns: list[Shows[LoggedRun]] = [
        words("run", lambda run: Cell(run.spec, hint="" if run.finished else "not finished"), what),
        column("seed", lambda run: str(run.seed), rank=4),
        column("epochs" if analysis.linear else "steps", lambda run: f"{len(run.steps):,}", rank=3),
        column("training loss", lambda run: run.final_loss, "mean of the last tenth of the steps", 1 if tested else 0),
        column("test accuracy", lambda run: value_cell(run.final_accuracy, ".2%"), "at the last test"),
        column("relative variance", lambda run: run.mean_relative_variance, error, 2),
        column(f"{verb} per worker", lambda run: size(_last(run.sent)), f"{sent} over the run", 1),
        column(f"float32 / {done}", lambda run: run.ratio, f"bits that float32 would have taken over the bits {done}"),
    ]
    timed = any(np.isfinite(run.sim_seconds).any() for run in analysis.runs)

    def in_seconds(value: float) -> str:
        return f"{number(value)} s" if math.isfinite(value) else MISSING

    target = math.nan
    if timed:
        target, whole = common_loss(analysis.runs), "of the whole run over the simulated network"
        columns.append(column("simulated time", lambda run: in_seconds(last_known(run.sim_seconds)), whole, 1))
    if math.isfinite(target):
        hint = "simulated time until the running mean of the training loss, over a twentieth of the run, is there"
        columns.append(column(f"time to loss {target:g}", lambda run: in_seconds(run.seconds_to_loss(target)), hint))
    if any(run.chosen_bits for run in analysis.runs):
        columns.append(
            words("bits chosen", lambda run: run.chosen_bits, "by the policy, with the step from which on", 2)
        )
    notes = _about_runs(analysis, target) if not analysis.linear else ["Ratio: bits of float32 over bits moved."]
    return Table.of("Training runs", analysis.runs, columns, notes=tuple(notes), empty="No training step was logged.")


def _about_runs(analysis: RunLogAnalysis, target: float) -> list[str]:
    neural, alone = analysis.neural, analysis.workers == 1 and not analysis.has_ranks
    whose = "one worker" if alone else "one rank" if analysis.has_ranks else f"all {analysis.averaged}"
    compared = f"Ratio: bits of float32 over bits {'encoded' if neural else 'sent up'}, both by {whose}."
    error = "of the neural gradients" if neural else f"of the mean over {'one worker' if alone else analysis.averaged}"
    if analysis.has_ranks:
        error += ", over the steps at which it was compared with plain all-reduces"
    notes = [compared, f"Relative variance: {error}."]
    network = analysis.study.get("network")
    if network and any(np.isfinite(run.sim_seconds).any() for run in analysis.runs):
        measured = "" if "computing" in str(network) else "computing and coding as measured, "
        notes.append(f"Simulated: {measured}links of {network}.")
    if math.isfinite(target):
        notes.append(f"A loss of {target:g} is the least that all finished runs reached.")
    return notes


def rank_table(analysis: RunLogAnalysis) -> Table:
    """One line per run between real ranks: what one rank sent, and the same gradients in a bf16 all-reduce."""
    notes = (
        f"{analysis.averaged}. Bits are those of the rank that wrote the log; float32 is 32 per value, bf16 is 16.",
        "Relative variance: ||average of decoded - exact average||² / ||exact average||², where both were computed.",
    )
    second = "per value of the average that is encoded again and sent to all"
    bf16 = "relative variance of an all-reduce in bfloat16 of the same gradients"
    given = "by one rank, for the others, over the run"
    columns: list[Shows[tuple[str, RankCosts]]] = [
        words("run", lambda own: own[0], "codec on the gradients of each rank"),
        column("bits up", lambda own: own[1].up_bits, "per value of one rank's gradient, payload and shared bytes"),
        column("bits second shot", lambda own: own[1].down_bits, second),
        column("relative variance", lambda own: own[1].relative_variance, "of the average, over the compared steps"),
        column("bf16 variance", lambda own: own[1].bf16_variance, bf16),
        column("steps compared", lambda own: f"{own[1].compared:,}", rank=2),
        column("given to collectives", lambda own: size(8 * own[1].wire_bytes), given, 1),
    ]
    found = [(run.spec, run.ranks) for run in analysis.runs if run.ranks is not None]
    return Table.of("Between the ranks", found, columns, notes=notes)


def shadow_table(analysis: RunLogAnalysis) -> Table:
    """One line per weight gradient that shadow passes compared, means over the passes."""
    runs = [run for run in analysis.runs if run.shadow]

    def mean(name: str, form: str = ".4f") -> Callable[[tuple[LoggedRun, ShadowCurve]], Cell]:
        return lambda one: value_cell(known_mean(getattr(one[1], name)), form)

    def lowest(one: tuple[LoggedRun, ShadowCurve]) -> Cell:
        cosine = one[1].cosine
        return value_cell(float(np.nanmin(cosine)) if np.isfinite(cosine).any() else math.nan, ".4f")

    alone = "where only the gradients of this layer's own outputs are compressed"
    columns: list[Shows[tuple[LoggedRun, ShadowCurve]]] = [
        words("weight gradient", lambda one: one[1].tensor, "name of the parameter"),
        column("cosine", mean("cosine"), "to the exact gradient of the same batch, all layers compressed"),
        column("lowest", lowest, "cosine of the worst shadow pass"),
        column("error", mean("error", ""), "||compressed - exact|| / ||exact||, all layers compressed"),
        column("cosine alone", mean("cosine_alone"), alone, 1),
        column("error alone", mean("error_alone", ""), alone, 2),
    ]
    if len(runs) > 1:
        columns.insert(0, words("run", lambda one: one[0].spec))
        columns.insert(1, column("seed", lambda one: str(one[0].seed)))
    passes = max((len(curve.steps) for run in runs for curve in run.shadow), default=0)
    notes = (
        f"Means over {passes} shadow passes: the backward pass of one batch with and without compression.",
        "Alone: only the gradients of this layer's own outputs are compressed; otherwise those of all layers.",
    )
    curves = [(run, curve) for run in runs for curve in run.shadow]
    title = "Weight gradients under compressed neural gradients"
    return Table.of(title, curves, columns, notes=notes, empty="No shadow pass was made.")


def runs_verdict(analysis: RunLogAnalysis) -> list[str]:
    """What each codec reached, what the uncompressed run reached, what was sent; over seeds if there are several."""
    if not analysis.runs:
        return ["No training step was logged."]
    if analysis.several_seeds:
        return seeds_verdict(analysis)
    fewer = f"fewer bits {'for the neural gradients' if analysis.neural else 'sent up'} than with float32"
    sentences = _leading(analysis.groups)
    for run in analysis.runs:
        if run.spec == BASELINE and len(analysis.runs) > 1:
            continue
        baseline = analysis.baseline(run)
        until = "" if run.finished else f", until step {run.last_step}"
        parts = [f"Trained with {run.spec} on {analysis.averaged}{until}: {_reached(run)}"]
        # An accuracy is not compared with a loss.
        if baseline is not None and len({math.isfinite(one.final_accuracy) for one in (run, baseline)}) == 1:
            tested = (run.final_accuracy, run.final_eval_loss, baseline.final_eval_loss)
            by_loss = not any(map(math.isfinite, tested)) and math.isfinite(run.final_loss - baseline.final_loss)
            more = f" ({loss_difference(run.final_difference(baseline))})" if by_loss else ""
            parts.append(f"uncompressed {_reached(baseline, name=False)}{more}")
        if math.isfinite(run.ratio) and run.spec != BASELINE:
            parts.append(f"{number(run.ratio)} times {fewer}")
        sentences.append("; ".join(parts) + ".")
        if run.ranks is not None:
            sentences += _between_ranks(run.ranks)
        cosines = {curve.tensor: known_mean(curve.cosine) for curve in run.shadow}
        known = {tensor: value for tensor, value in cosines.items() if math.isfinite(value)}
        if known:
            worst = min(known, key=known.__getitem__)
            mean = sum(known.values()) / len(known)
            sentences.append(
                f"Its weight gradients have a mean cosine of {mean:.4f} to the exact ones; "
                f"the worst is {worst} with {known[worst]:.4f}."
            )
    return sentences


def noise_sentences(analysis: RunLogAnalysis) -> Iterator[str]:
    """What each codec's noise costs, as batches: the median over the measured steps, all seeds together."""
    batch = analysis.study.get("batch_size")
    for spec in dict.fromkeys(run.spec for run in analysis.runs if run.spec != BASELINE):
        every = np.concatenate([run.equivalent_batch for run in analysis.runs if run.spec == spec])
        known = every[np.isfinite(every)]
        if not known.size or not isinstance(batch, int):
            continue
        low, middle, high = (number(value) for value in np.quantile(known, (0, 0.5, 1)))
        spread = f"median of {known.size} measured steps, {low} to {high}" if known.size > 1 else "one measured step"
        yield (
            f"With the noise of {spec}, a batch of {batch * analysis.workers:,} is as noisy as {middle} uncompressed "
            f"over the steps that are left ({spread})."
        )


def _between_ranks(costs: RankCosts) -> list[str]:
    up = f"{number(costs.up_bits)} bits per value from each rank"
    second = f" and {number(costs.down_bits)} for the average sent on" if math.isfinite(costs.down_bits) else ""
    if not costs.compared:
        return [f"It takes {up}{second}."]
    beside = f"a bf16 all-reduce takes 16 and has {number(costs.bf16_variance, 2)}"
    average = f"the average has relative variance {number(costs.relative_variance)}"
    return [f"It takes {up}{second}, and {average}; {beside} ({count(costs.compared, 'step')} compared)."]


def seeds_verdict(log: RunLogAnalysis) -> list[str]:
    """One sentence per codec over seeds: its mean, its difference to the uncompressed runs, and how sure that is."""
    sentences = _leading(log.groups)
    for group in log.groups:
        if group.spec == BASELINE and len(log.groups) > 1:
            continue
        spread = f" ± {metric_text(group.metric, group.deviation)}" if math.isfinite(group.deviation) else ""
        about = f"Trained with {group.spec} on {log.averaged}, {count(len(group.seeds), 'seed')}"
        about += f", of which {group.diverged} diverged" if group.diverged else ""
        parts = [f"{about}: {group.metric} {metric_text(group.metric, group.mean)}{spread}"]
        if math.isfinite(group.difference.estimate):
            parts.append(f"against uncompressed {difference_text(group.metric, group.difference, group.p_holm)}")
        if math.isfinite(group.ratio) and group.spec != BASELINE:
            sent = "for the neural gradients" if log.neural else "sent up"
            parts.append(f"{number(group.ratio)} times fewer bits {sent} than with float32")
        sentences.append("; ".join(parts) + ".")
    return sentences


def _leading(groups: Sequence[SeedGroup]) -> list[str]:
    """Several codecs in one sentence, the best first; nothing about a single one, or without uncompressed runs."""
    baseline = next((group for group in groups if group.spec == BASELINE), None)
    compared = [group for group in groups if math.isfinite(group.difference.estimate)]
    if baseline is None or len(compared) < 2:
        return []
    metric = baseline.metric
    sign, unit = (-1, " points") if metric == "test accuracy" else (1, "")
    compared.sort(key=lambda group: sign * group.difference.estimate)
    named = [f"{group.spec} {_signed(metric, group.difference.estimate)}{unit}" for group in compared]
    seeds = max(len(group.seeds) for group in compared)
    about = f"{metric} against {metric_text(metric, baseline.mean)} uncompressed ({count(seeds, 'seed')})"
    lost = [f"{g.spec} ({g.diverged} of {count(len(g.seeds), 'seed')})" for g in groups if g.diverged]
    diverged = f"; diverged: {listed(lost)}" if lost else ""
    return [f"{about[:1].upper()}{about[1:]}, best first: {listed(named)}{diverged}."]


def difference_text(metric: str, difference: Interval, p_holm: float) -> str:
    """A paired difference with how sure it is: ``-0.31 points (95%: -0.52 to -0.10)``."""
    said = _signed(metric, difference.estimate) + " points" * (metric == "test accuracy")
    if not difference.known:
        return f"{said} (descriptive: {difference.why})"
    within = difference.low <= 0 <= difference.high
    unsure = ", within the noise of seeds" if within else ", but not sure with several codecs compared"
    sure = "" if p_holm < SIGNIFICANT else unsure
    return f"{said} (95%: {_signed(metric, difference.low)} to {_signed(metric, difference.high)}){sure}"


def loss_difference(difference: Interval) -> str:
    """How much higher a loss is, with half the width of its interval: ``+0.042 +- 0.023``."""
    digits, reach = loss_digits(difference), (difference.high - difference.low) / 2
    sure = f" +- {reach:.{digits}f}" if difference.known else f"; {difference.why}"
    return f"{difference.estimate:+.{digits}f}{sure}"


def loss_digits(difference: Interval) -> int:
    """Decimals of losses that show their difference: two digits of what is not sure of it."""
    reach = (difference.high - difference.low) / 2 if difference.known else abs(difference.estimate)
    return min(max(1 - math.floor(math.log10(reach)), 2), 9) if math.isfinite(reach) and reach > 0 else 4


def comparison_lines(compared: Sequence[FinalLoss], own_seed: bool) -> list[str]:
    """Final losses of codecs against the uncompressed runs: a sentence for one codec, a line each for several.

    ``own_seed``: the program sets its own seed, so that further seeds were left out.
    """
    if len(compared) == 1:
        lines = [f"{compared[0].spec}: {_final_loss(compared[0])}."]
    else:
        rows = [("codec", "final loss", "against none", "bits per value")]
        rows += [("none", number(compared[0].baseline, 4), "", "32")]
        for one in compared:
            known = math.isfinite(one.difference.estimate) and not one.went_wrong
            difference = loss_difference(one.difference) if known else ""
            rows.append((one.spec, one.went_wrong or number(one.loss, 4), difference, number(32 / one.ratio)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    first = compared[0]
    basis = f"Final loss: mean over the last {count(first.last, 'step')} of {first.steps:,}"
    if any(one.difference.known for one in compared):
        over = "these steps of one seed; --seeds 5 adds what the seed does" if first.seeds == 1 else "seeds"
        basis += f"; +- is half a 95% interval over {over}"
    lines.append(f"{basis}.")
    if own_seed:
        lines.append("The script sets its own seed: runs with other seeds are the same run, and were left out.")
    return lines


def _final_loss(one: FinalLoss) -> str:
    if one.went_wrong:
        return one.went_wrong + (f"; uncompressed {number(one.baseline, 4)}" if math.isfinite(one.baseline) else "")
    digits = loss_digits(one.difference)
    fewer = f", with {number(one.ratio)} times fewer bits than float32" if math.isfinite(one.ratio) else ""
    return (
        f"final loss {one.loss:.{digits}f} against {one.baseline:.{digits}f} uncompressed "
        f"({loss_difference(one.difference)}){fewer}"
    )


def metric_text(metric: str, value: float) -> str:
    """A value of a metric of training: accuracies in percent."""
    return f"{value:.2%}" if metric == "test accuracy" and math.isfinite(value) else number(value)


def _reached(run: LoggedRun, *, name: bool = True) -> str:
    if math.isfinite(run.final_accuracy):
        return f"test accuracy {run.final_accuracy:.2%}" if name else f"{run.final_accuracy:.2%}"
    if run.divergence and not math.isfinite(run.final_eval_loss):
        return run.divergence
    for word, value in (("test loss", run.final_eval_loss), ("training loss", run.final_loss)):
        if math.isfinite(value):
            return f"{word} {number(value)}" if name else number(value)
    return "no finite loss"


def run_figures(log: RunLogAnalysis) -> Iterator[FigureSpec]:
    """The figures of a run log that have something to show."""
    neural = log.neural
    done = "encoded" if neural else "sent"
    up = done if neural else "sent up"
    over: tuple[tuple[Literal["steps", "bits", "time"], str, str], ...] = (
        ("steps", "steps", "Running mean of the loss. Does the codec cost steps?"),
        (
            "bits",
            f"bytes {done}",
            f"The same curves against what one worker has {up}, payload and shared bytes: further left is cheaper.",
        ),
        (
            "time",
            "simulated time",
            "The same curves against the time that steps would take with the simulated network: further left is "
            "sooner.",
        ),
    )
    for against, what, caption in over:
        chart = training_curves(log, against)
        # A program's loss may be unseen, and time need not be simulated.
        if chart.panels:
            yield charts.charted(f"training-over-{against}", f"Training against {what}", caption, chart)
    if any((run.bits > 0).any() for run in log.runs):
        curves: list[Curve] = []
        for run, name, point in _named(log):
            curves += charts.thinned(name, run.steps, run.bits, point, form="plain", method=method_of(run.spec))
            at, label = np.isin(run.steps, run.updates), f"{name}, {charts.FITTED}"
            curves += charts.thinned(label, run.steps[at], run.bits[at], point, form="points")
        yield charts.charted(
            "training-bits",
            "Bits over training",
            f"Bits per value that one worker {up} in each step, payload and shared bytes. Points on a curve: its "
            "levels or codes were fitted.",
            charts.one_panel(curves, "", log.step_name, charts.BITS, log_y=True),
        )
    if any(np.isfinite(run.relative_variance).any() and (run.relative_variance > 0).any() for run in log.runs):
        curves = []
        for run, name, point in _named(log):
            error = _smooth(run.relative_variance)
            curves += charts.thinned(name, run.steps, error, point, form="plain", method=method_of(run.spec))
        yield charts.charted(
            "neural-gradients" if neural else "averaged-gradient",
            "Error of the neural gradients" if neural else "Error of the averaged gradient",
            "The codec's error on the gradients that enter the layers' backward passes, all layers together."
            if neural
            else "What is left of the codec's error after the workers' decoded gradients are averaged.",
            charts.one_panel(curves, "", log.step_name, charts.LOST, log_y=True, percent=True),
        )
    for k, run in enumerate(run for run in log.runs if run.shadow):
        yield _shadow_figure(run, f"weight-gradients{f'-{k + 1}' if k else ''}")


def _shadow_figure(run: LoggedRun, name: str) -> FigureSpec:
    """Cosine of each weight gradient to the exact one: its layer compressed alone, and all layers."""
    # The lowest means, in the order of the model; those that have none come last.
    order = sorted(run.shadow, key=lambda curve: float(np.nan_to_num(known_mean(curve.cosine), nan=2.0)))
    kept = {curve.tensor for curve in order[:_MOST_SHADOWS]}
    panels = []
    for part, title in (("cosine_alone", "this layer alone"), ("cosine", "all layers")):
        curves: list[Curve] = []
        for shadow in (curve for curve in run.shadow if curve.tensor in kept):
            curves += charts.thinned(shadow.tensor, shadow.steps, getattr(shadow, part), positive=False)
        panels.append(Panel(tuple(curves), title, charts.STEP, "cosine to the exact gradient"))
    most = len(run.shadow) > _MOST_SHADOWS
    left_out = f" The {_MOST_SHADOWS} with the lowest mean of {len(run.shadow)}." if most else ""
    return charts.charted(
        name,
        f"Weight gradients with {run.spec}",
        "Cosine to the exact weight gradient of the same batch. Left: only the gradients of this layer's own "
        "outputs are compressed. Right: those of all layers, as in training, so errors accumulate towards the "
        f"first layer.{left_out}",
        Chart(tuple(panels)),
    )


def training_curves(log: RunLogAnalysis, against: Literal["steps", "bits", "time"]) -> Chart:
    """Running mean of the training loss, and the tests, against steps, bytes that one worker has sent, or seconds."""
    losses: list[Curve] = []
    tests: list[Curve] = []
    accuracy = any(np.isfinite(run.accuracy).any() for run in log.runs)
    for run, name, point in _named(log):
        x = {"steps": run.steps, "bits": run.sent / 8, "time": run.sim_seconds}[against]
        at = {"steps": run.eval_steps, "bits": run.eval_sent / 8, "time": run.eval_sim_seconds}[against]
        losses += charts.thinned(name, x, _smooth(run.loss), point, form="plain", method=method_of(run.spec))
        tests += charts.thinned(
            name, at, run.accuracy if accuracy else run.eval_loss, point, method=method_of(run.spec)
        )
    what = "encoded" if log.neural else "sent"
    x_label = {"steps": log.step_name, "bits": f"bytes {what} by one worker", "time": "simulated seconds"}[against]
    log_x, tested = against == "bits", "accuracy" if accuracy else "loss"
    panels = [
        Panel(tuple(losses), "Training loss, running mean", x_label, "loss", log_x=log_x, log_y=True),
        Panel(tuple(tests), f"Test {tested}", x_label, tested, log_x=log_x, percent=accuracy),
    ]
    return Chart(tuple(panel for panel in panels if panel.curves))


def _named(log: RunLogAnalysis) -> list[tuple[LoggedRun, str, list[str]]]:
    """Each run with the name that all runs of its codec share, and what its points are called if there are seeds."""
    short = {run.spec: "uncompressed" if run.spec == BASELINE else short_spec(run.spec) for run in log.runs}
    names = {spec: name if list(short.values()).count(name) == 1 else spec for spec, name in short.items()}
    seeds = len({run.seed for run in log.runs}) > 1
    return [
        (run, name, [f"{name}, seed {run.seed}"] if seeds else []) for run in log.runs for name in [names[run.spec]]
    ]


def _smooth(values: Floats) -> Floats:
    smooth = np.full(len(values), math.nan)
    known = np.isfinite(values)
    smooth[known] = running_mean(values[known], max(int(known.sum() * WINDOW), 1))
    return smooth


def _last(values: Floats) -> float:
    return float(values[-1]) if len(values) else math.nan


def _numbers(log: RunLogAnalysis) -> Numbers:
    common = {"results": log.name, **pick(log, "workers", "averaged")}
    ends, groups = [run_row(run) for run in log.runs], [flat(group) for group in log.groups]
    records = [{"record": "run", **common, **row} for row in ends]
    records += [{"record": "seeds", **common, **group} for group in groups]
    runs = [{**row, **dataclasses.asdict(run)} for row, run in zip(ends, log.runs, strict=True)]
    about = {"verdict": runs_verdict(log), **pick(log, "task", "workers", "averaged"), "runs": runs}
    said = {"notes": list(log.notes), "warnings": list(log.warnings)}
    json = {"name": log.name, **about, **said, "study": log.study, "seeds": groups}
    return Numbers({"runs": json}, records, {"runs": [{"results": log.name, **row} for row in ends]})


def _pooled_numbers(logs: tuple[str, ...], pool: RunLogAnalysis) -> Numbers:
    groups = [flat(group) for group in pool.groups]
    common = {"results": list(logs), **pick(pool, "workers", "averaged")}
    about = {**pick(pool, "task", "workers", "averaged", "neural"), "logs": logs, "groups": groups}
    records = [{"record": "pooled_seeds", **common, **group} for group in groups]
    return Numbers({"pooled_runs": {**about, "notes": pool.notes}}, records)


def run_row(run: LoggedRun) -> Record:
    """The ends of a training run."""
    return {
        "run": run.spec,
        "seed": run.seed,
        "steps_done": len(run.steps),
        **pick(run, "final_loss", "final_accuracy", "final_eval_loss", "mean_relative_variance"),
        "bits_per_worker": _last(run.sent),
        **pick(run, "ratio", "finished", "diverged"),
        "simulated_seconds": _last(run.sim_seconds),
        # What runs between ranks cost; missing for others.
        **{f"rank_{own.name}": getattr(run.ranks, own.name, math.nan) for own in dataclasses.fields(RankCosts)},
    }
