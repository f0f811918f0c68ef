"""A built-in task trained with codecs, for ``gtrace train`` and ``gtrace study``, and its tables."""

from __future__ import annotations

import math
import shlex
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from gtrace.cli.console import echo, print_results, print_savings, savings_of_log, step_progress
from gtrace.cli.options import arguments, file_name, pick, print_json, words
from gtrace.cli.train_settings import DEFAULT_TASK, CompareSettings
from gtrace.costs import Cluster, parse_network
from gtrace.errors import UsageError, check_output
from gtrace.report import analyze_runs
from gtrace.report.analysis.runs import common_loss
from gtrace.report.names import duration, size
from gtrace.report.sections.savings import savings_json
from gtrace.report.sections.training import noise_sentences
from gtrace.report.statistics import Interval, student
from gtrace.runlog import read_runlog
from gtrace.trackers import Tracking, of_record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gtrace.codecs.assignment import Coding
    from gtrace.report.analysis.runs import LoggedRun as Logged
    from gtrace.training import RunResult, Study


def run_task(settings: CompareSettings, chosen: list[Coding]) -> None:
    """Train a built-in task with each of the codecs and plans."""
    network = None if settings.network is None else parse_network(settings.network)
    weights = [] if settings.weights is None else words(settings.weights)
    neural = settings.kind == "neural"
    from gtrace.training.policies import FIXED, PolicySpec
    from gtrace.training.settings import RunPlan, joint_name

    joint = joint_name(settings.optimizer, settings.every)
    if (neural or joint) and settings.cluster.cluster is not None:
        raise UsageError(
            "--cluster: neural gradients do not travel between workers; use --kind weight."
            if neural
            else f"--cluster: is for gradients that are exchanged at every step; leave out {joint}."
        )
    cluster = None if neural or joint else settings.cluster.chosen(timed=True)
    task = settings.task or DEFAULT_TASK

    choosing = [PolicySpec.parse(text) for text in settings.policies or (FIXED,)]
    plan = RunPlan(chosen[0], choosing[0], joint=joint)
    named = file_name(plan.name) if len(chosen) == len(choosing) == 1 else "compare"
    if weights:
        named = "-".join([*([] if named == "none" else [named]), "weights", *weights])
    path = settings.output or Path(f"{task}-{'neural-' * neural}{named}.jsonl")
    # With a checkpoint beside it, the same study goes on; whether it is the same is known only later.
    inputs = (*settings.plans, *settings.codecs.plugin)
    check_output(path, *inputs, force=settings.force or path.with_name(path.name + ".checkpoint").exists())
    from gtrace.training import Study

    read: dict[str, Any] = {"network": network, "policies": choosing, "weights": weights}
    study = Study(task, chosen, nonfinite=settings.nonfinite or "skip", **read, **arguments(settings, "study"))
    if not settings.force and study.can_resume(path):
        echo(f"gtrace: {path}: continues after the interruption", err=True)
    tracking = Tracking(settings.to, lambda error: echo(f"gtrace: {error}", err=True))
    try:
        with step_progress("train", quiet=settings.as_json) as show:
            study.run(path, force=settings.force, on_record=_following(study, show, tracking))
    except KeyboardInterrupt:
        if study.results[0].steps:
            _show(study, path, cluster, as_json=settings.as_json)
        raise
    finally:
        tracking.close()
    _show(study, path, cluster, as_json=settings.as_json)


def _show(study: Study, path: Path, cluster: Cluster | None = None, *, as_json: bool) -> None:
    settings, savings = study.settings, savings_of_log(path, cluster)
    log = analyze_runs(read_runlog(path))
    logged = {(run.spec, run.seed): run for run in log.runs}
    target = math.nan if settings.network is None else common_loss(list(logged.values()))
    if as_json:
        print_json(
            {
                "output": str(path),
                "task": study.task.name,
                **pick(settings, "kind", "workers", "steps", "seed"),
                "seeds": list(study.seeds),
                "codecs": summarize(study) if len(study.seeds) > 1 else None,
                "common_loss": target,
                "weights": study.quantized,
                "savings": savings_json(savings) if savings is not None else None,
                "runs": [
                    _as_dict(result, settings.workers, logged.get((result.run, result.seed)), target)
                    for result in study.results
                ],
                "warnings": study.warnings,
            }
        )
        return
    for text in study.warnings:
        echo(f"gtrace: warning: {text}", err=True)
    if len(study.seeds) > 1:
        print_seeds(study)
    else:
        print_table(study, logged, target)
    for (spec, of_seed), run in logged.items():
        if chosen := run.chosen_bits:
            echo(f"bits of {spec}{f', seed {of_seed}' if len(study.seeds) > 1 else ''}: {chosen}")
    for sentence in noise_sentences(log):
        echo(sentence)
    print_savings(savings)
    unfinished = [result for result in study.results if not result.finished]
    if unfinished:
        seed = f" of seed {unfinished[-1].seed}" if len(study.seeds) > 1 else ""
        echo(f"interrupted after {unfinished[-1].steps} of {settings.steps} steps{seed}")
    echo(f"{path}\nnext: gtrace report {shlex.quote(str(path))}")


def _as_dict(result: RunResult, workers: int, logged: Logged | None, target: float) -> dict[str, Any]:
    tally, shadow, worst = result.tally, result.shadow, result.shadow.worst
    compared = {
        **pick(shadow, "steps", "cosine", "seconds"),
        "worst": worst and worst.tensor,
        "worst_cosine": worst and worst.cosine,
        "tensors": [asdict(item) for item in shadow.tensors],
    }
    return {
        **pick(result, "run", "seed", "steps", "finished", "loss", "accuracy", "seconds", "sim_seconds"),
        "seconds_to_common_loss": math.nan if logged is None else logged.seconds_to_loss(target),
        "codec_bits": [] if logged is None else _changes(logged),
        "diverged": bool(result.diverged),
        **pick(tally, "bits", "down_bits", "shared_bits", "envelope_bits", "ratio", "sparsity", "nonfinite"),
        "bits_per_value": tally.bits_per_element,
        "bits_per_worker_and_step": tally.bits / (workers * max(1, result.steps)),
        **pick(result, "relative_variance", "worker_variance", "weight_error"),
        **pick(tally, "codec_seconds", "fit_seconds"),
        "shadow": compared if shadow.steps else None,
    }


def _changes(run: Logged) -> list[list[int]]:
    """[step, bits] wherever a policy chose other bits than before."""
    found: list[list[int]] = []
    for step, bits in zip(run.steps.tolist(), run.codec_bits.tolist(), strict=True):
        if math.isfinite(bits) and not (found and found[-1][1] == bits):
            found.append([step, int(bits)])
    return found


def _following(study: Study, show: Callable[..., None] | None, tracking: Tracking) -> Callable[[dict[str, Any]], None]:
    """What keeps a tracker, and a bar and the losses beside it, up to date."""
    #: of each seed
    losses: dict[int, dict[str, float]] = {seed: {} for seed in study.seeds}
    total = study.settings.steps * len(study.seeds)

    def update(record: dict[str, Any]) -> None:
        tracking.log(of_record(record))
        if show is not None and record["type"] == "step":
            seed = record["seed"]
            losses[seed][record["run"]] = record["loss"]
            shown = ", ".join(f"{run} {loss:.3f}" for run, loss in losses[seed].items())
            done = (seed - study.seeds[0]) * study.settings.steps + record["step"] + 1
            show(done, total, f"loss {shown}")

    return update


#: what is below the table: column -> what it says, and what it says of neural gradients if that differs
_MEANINGS = {
    "loss": ("held-out data, as accuracy",),
    "bits": ("per value", "per value of the gradients of layers' outputs"),
    "a step": ("bytes of them, one worker",),
    "sent": ("by one worker in a step",),
    "smaller": ("than float32",),
    "variance": (
        "squared error of the averaged gradient over its energy, mean over the steps",
        "their squared error over their energy, mean over the steps",
    ),
    "codec CPU": ("its part of the steps' CPU time",),
}
#: longest spec that is shown on one line
_NAME = 16
#: with fewer seeds an interval is printed, and called what it is
_ENOUGH = 5


def mean_deviation(values: Sequence[float | None]) -> tuple[float, float, int]:
    """Mean and sample deviation of the finite values, and how many they are; NaN of too few."""
    known = np.asarray([value for value in values if value is not None and math.isfinite(value)], np.float64)
    mean = float(known.mean()) if known.size else math.nan
    return mean, float(known.std(ddof=1)) if known.size > 1 else math.nan, known.size


def paired(study: Study, spec: str, number: Callable[[RunResult], float | None]) -> Interval:
    """Difference to the uncompressed run of the same seed, mean over the seeds; of one seed without an interval."""
    by_seed = {(result.run, result.seed): number(result) for result in study.results}
    pairs = [(by_seed.get((spec, seed)), by_seed.get(("none", seed))) for seed in study.seeds]
    mean, deviation, n = mean_deviation([ours - none for ours, none in pairs if ours is not None and none is not None])
    return Interval(mean) if n < 2 else student(mean, deviation / math.sqrt(n), n - 1, steps=n, blocks=n)


def summarize(study: Study) -> list[dict[str, Any]]:
    """One entry a codec, for JSON: what the table shows."""
    entries = []
    for spec in dict.fromkeys(result.run for result in study.results):
        runs = [result for result in study.results if result.run == spec]
        entry: dict[str, Any] = {"run": spec, "seeds": len(runs)}
        for name, number in _NUMBERS.items():
            entry[name], entry[f"{name}_deviation"], _ = mean_deviation([number(one) for one in runs])
        for name in ("accuracy", "loss"):
            change = paired(study, spec, _NUMBERS[name])
            entry |= {f"{name}_change": change.estimate}
            entry |= {f"{name}_change_low": change.low, f"{name}_change_high": change.high}
        entries.append(entry)
    return entries


_NUMBERS: dict[str, Callable[[RunResult], float | None]] = {
    "accuracy": lambda result: result.accuracy,
    "loss": lambda result: result.loss,
    "bits_per_value": lambda result: result.tally.bits_per_element,
    "relative_variance": lambda result: result.relative_variance,
    "worker_variance": lambda result: result.worker_variance,
    "weight_error": lambda result: result.weight_error,
    "step_seconds": lambda result: result.sim_seconds / max(1, result.steps),
}


def print_seeds(study: Study) -> None:
    """The table on stdout, with what its numbers mean."""
    entries = summarize(study)
    accurate = any(math.isfinite(entry["accuracy"]) for entry in entries)
    timed = any(math.isfinite(entry["step_seconds"]) for entry in entries)
    name, scale, form = ("accuracy", 100, ".2f") if accurate else ("loss", 1, ".4f")

    def changed(entry: dict[str, Any]) -> str:
        reach = entry[f"{name}_change_high"] - entry[f"{name}_change"]
        return "" if entry["run"] == "none" else _with(entry[f"{name}_change"], reach, scale, f"+{form}")

    def of(number: str, scale: float, form: str) -> list[str]:
        return [_with(entry[number], entry[f"{number}_deviation"], scale, form) for entry in entries]

    columns = {
        "codec": [entry["run"] for entry in entries],
        name: of(name, scale, form),
        "against none": [changed(entry) for entry in entries],
        "bits": [f"{entry['bits_per_value']:.2f}" for entry in entries],
        "variance": of("relative_variance", 1, ".3g"),
    }
    if study.quantized:
        columns["weights"] = of("weight_error", 1, ".3g")
    if timed:
        columns["a step"] = [_number(entry["step_seconds"], duration) for entry in entries]
    console = print_results(columns)
    settings, seeds = study.settings, study.seeds
    workers = f"{settings.workers} worker{'s' * (settings.workers > 1)}"
    text = (
        f"{study.task.name}: {workers} with {settings.batch_size} samples each, {settings.steps} steps, "
        f"seeds {seeds[0]} to {seeds[-1]}.\n"
        f"{'accuracy, in percent' if accurate else 'loss'}: of held-out data, mean and standard deviation over seeds. "
        "against none: difference to\nthe uncompressed run of the same seed, mean and 95 % t-interval. variance: "
        "squared error of the average of\nall workers over its energy."
    )
    if timed:
        assert settings.network is not None
        computed = "measured CPU time, " if settings.network.compute is None else ""
        text += f" a step: over {settings.network}; {computed}simulated links."
    if len(seeds) < _ENOUGH:
        text += f"\n{len(seeds)} seeds describe what happened; differences inside of an interval are noise."
    if study.quantized:
        text += f"\n{explain_weights(study)}"
    console.print(text, soft_wrap=True)


def _with(value: float, spread_of: float, scale: float, form: str) -> str:
    if not math.isfinite(value):
        return "-"
    shown = format(scale * value, form)
    return shown if not math.isfinite(spread_of) else f"{shown} ± {format(scale * spread_of, form.lstrip('+'))}"


def print_table(study: Study, logged: dict[tuple[str, int], Logged], target: float) -> None:
    """The table of one seed on stdout, with what its numbers mean."""
    settings = study.settings
    columns = _columns(study, logged, target)
    print_results(columns)
    workers = f"{settings.workers} workers with {settings.batch_size} samples each"
    workers = workers if settings.workers > 1 else f"1 worker with {settings.batch_size} samples"
    click.echo(f"{study.task.name}: {workers}, {settings.steps} steps, seed {settings.seed}.")
    neural = settings.kind == "neural"
    said = [f"{name}: {texts[-1] if neural else texts[0]}." for name, texts in _MEANINGS.items() if name in columns]
    click.echo(textwrap.fill(" ".join(said), 104))
    if study.quantized:
        click.echo(explain_weights(study))
    if settings.network is not None:
        computed = "measured CPU time, " if settings.network.compute is None else ""
        click.echo(
            f"time: of a step over {settings.network}; {computed}simulated links. A bf16 all-reduce: "
            f"{_number(_bf16(study), duration)}."
        )
    if math.isfinite(target):
        click.echo(f"to loss: simulated time to a training loss of {target:g}, the least that all runs reached.")
    for result in study.results:
        if result.shadow.worst is not None:
            click.echo(
                "cosine: of weight gradients to the exact ones of the same batch, mean over tensors and shadow\n"
                f"passes ({result.shadow.steps}). worst: the tensor with the lowest, {result.shadow.worst.tensor}."
            )


def _columns(study: Study, logged: dict[tuple[str, int], Logged], target: float) -> dict[str, list[str]]:
    settings, results = study.settings, study.results
    timed, aimed = settings.network is not None, math.isfinite(target)
    columns = {"codec": [r.run if len(r.run) <= _NAME else r.run.replace(",", ",\n") for r in results]}
    if any(r.accuracy is not None for r in results):
        columns["accuracy"] = ["-" if r.accuracy is None else f"{100 * r.accuracy:.1f} %" for r in results]
    columns["loss"] = [_number(r.loss, "{:.4f}".format) for r in results]
    columns["bits"] = [_number(r.tally.bits_per_element, "{:.2f}".format) for r in results]
    # A terminal of 80 columns has no room for everything.
    if not aimed:
        sent = [r.tally.bits / (settings.workers * max(1, r.steps)) for r in results]
        columns["a step" if settings.kind == "neural" else "sent"] = [size(one) for one in sent]
    if not timed and not study.quantized:
        columns["smaller"] = [_number(r.tally.ratio, "{:.1f}x".format) for r in results]
    columns["variance"] = [_number(r.relative_variance, "{:.3g}".format) for r in results]
    if any(r.shadow.steps for r in results):
        columns["cosine"] = ["-" if r.shadow.worst is None else f"{r.shadow.cosine:.4f}" for r in results]
        columns["worst"] = ["-" if (w := r.shadow.worst) is None else f"{w.cosine:.4f}" for r in results]
    if study.quantized:
        columns["weights"] = [_number(r.weight_error, "{:.3g}".format) for r in results]
    else:
        shares = [100 * r.tally.codec_seconds / r.seconds if r.seconds else math.nan for r in results]
        columns["codec CPU"] = [_number(share, "{:.0f} %".format) for share in shares]
    if timed:
        columns["time"] = [_number(r.sim_seconds / max(1, r.steps), duration) for r in results]
    if aimed:
        columns["to loss"] = [_number(logged[r.run, r.seed].seconds_to_loss(target), duration) for r in results]
    return columns


def _bf16(study: Study) -> float:
    """Seconds of a step in which half of float32's bits travelled and nothing else cost anything."""
    network, plain = study.settings.network, study.results[0]
    assert network is not None
    steps, workers = max(1, plain.steps), study.settings.workers
    values = plain.tally.float32_bits // 32 // workers // steps
    measured = (plain.seconds - plain.tally.codec_seconds) / workers / steps
    computed = measured if network.compute is None else network.compute
    return computed + network.transfer(workers, 16.0 * values, values, exact=True)


def _number(value: float, form: Callable[[float], str]) -> str:
    return form(value) if math.isfinite(value) else "-"


def explain_weights(study: Study) -> str:
    """What the column on quantized weights says, in words."""
    total = sum(study.describe()["tensors"].values())
    first = study.quantized[0]
    bits = "/".join(dict.fromkeys(f"{one['bits']:.3g}" for one in study.quantized))
    return (
        f"weights: squared error of the quantized ones over their energy, in the last step; {bits} bits each,\n"
        f"{100 * first['elements'] / total:.0f} % of the parameters ({', '.join(first['tensors'])}). The first and the "
        "last layer,\nbiases and norms are exact, and so is what the optimizer steps."
    )
