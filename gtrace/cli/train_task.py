"""A built-in task trained with codecs, for ``gtrace train`` and ``gtrace study``."""

from __future__ import annotations

import dataclasses
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtrace.cli.cluster import chosen_cluster, print_savings, savings_of_log
from gtrace.cli.console import echo, step_progress
from gtrace.cli.options import arguments, check_output, file_name, pick, print_json, words
from gtrace.cli.train_settings import DEFAULT_TASK
from gtrace.cli.train_tables import print_seeds, print_table, summarize
from gtrace.costs import parse_network
from gtrace.errors import UsageError
from gtrace.trackers import Tracking, of_record
from gtrace.training.tasks import describe_task

if TYPE_CHECKING:
    from collections.abc import Callable

    from gtrace.cli.train_settings import CompareSettings
    from gtrace.codecs.assignment import Coding
    from gtrace.costs import Cluster
    from gtrace.report.analysis.runs import LoggedRun as Logged
    from gtrace.training import RunResult, Study


def check_task(name: str | None) -> None:
    """Refuse a task that is unknown, before torch takes its seconds to load.

    Raises:
        UsageError: there is no such task.
    """
    if name is not None:
        describe_task(name)


def run_task(settings: CompareSettings, chosen: list[Coding]) -> None:
    """Train a built-in task with each of the codecs.

    Args:
        settings: the options of the command.
        chosen: the codecs and plans.
    """
    network = None if settings.network is None else parse_network(settings.network)
    weights = [] if settings.weights is None else words(settings.weights)
    neural = settings.kind == "neural"
    from gtrace.training.policies import FIXED, PolicySpec
    from gtrace.training.settings import joint_name, run_name

    joint = joint_name(settings.optimizer, settings.every)
    if (neural or joint) and settings.cluster.cluster is not None:
        raise UsageError(
            "--cluster: neural gradients do not travel between workers; use --kind weight."
            if neural
            else f"--cluster: is for gradients that are exchanged at every step; leave out {joint}."
        )
    cluster = None if neural or joint else chosen_cluster(settings.cluster.cluster, timed=True)
    task = settings.task or DEFAULT_TASK

    choosing = [PolicySpec.parse(text) for text in settings.policies or (FIXED,)]
    named = file_name(run_name(chosen[0], choosing[0], joint=joint)) if len(chosen) == len(choosing) == 1 else "compare"
    if weights:
        named = "-".join([*([] if named == "none" else [named]), "weights", *weights])
    path = settings.output or Path(f"{task}-{'neural-' * neural}{named}.jsonl")
    # With a checkpoint beside it, the same study goes on; whether it is the same is known only later.
    check_output(path, force=settings.force or path.with_name(path.name + ".checkpoint").exists())
    from gtrace.training import Study

    study = Study(
        task,
        chosen,
        nonfinite=settings.nonfinite or "skip",
        network=network,
        policies=choosing,
        weights=weights,
        **arguments(settings, "study"),
    )
    if not settings.force and study.can_resume(path):
        echo(f"gtrace: {path}: continues after the interruption", err=True)
    tracking = None if settings.to is None else Tracking(settings.to, lambda error: echo(f"gtrace: {error}", err=True))
    try:
        with step_progress("train", quiet=settings.as_json) as show:
            study.run(path, force=settings.force, on_record=_following(study, show, tracking))
    except KeyboardInterrupt:
        if study.results[0].steps:
            _show(study, path, cluster, as_json=settings.as_json)
        raise
    finally:
        if tracking is not None:
            tracking.close()
    _show(study, path, cluster, as_json=settings.as_json)


def _show(study: Study, path: Path, cluster: Cluster | None = None, *, as_json: bool) -> None:
    """The results so far, and what they save between the machines of ``cluster``, on stdout."""
    settings, savings = study.settings, savings_of_log(path, cluster)
    from gtrace.report import analyze_runs
    from gtrace.report.analysis.runs import chosen_bits, common_loss
    from gtrace.report.sections.savings import savings_json
    from gtrace.report.sections.training import noise_sentences
    from gtrace.runlog import read_runlog

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
        if chosen := chosen_bits(run):
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
    from gtrace.report.analysis.runs import seconds_to_loss

    tally, shadow, worst = result.tally, result.shadow, result.shadow.worst
    compared = {
        **pick(shadow, "steps", "cosine", "seconds"),
        "worst": worst and worst.tensor,
        "worst_cosine": worst and worst.cosine,
        "tensors": [dataclasses.asdict(item) for item in shadow.tensors],
    }
    return {
        **pick(result, "run", "seed", "steps", "finished", "loss", "accuracy", "seconds", "sim_seconds"),
        "seconds_to_common_loss": math.nan if logged is None else seconds_to_loss(logged, target),
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


def _following(
    study: Study, show: Callable[..., None] | None, tracking: Tracking | None
) -> Callable[[dict[str, Any]], None] | None:
    """What keeps a tracker, and a bar and the losses beside it, up to date; None without either."""
    if show is None and tracking is None:
        return None
    losses: dict[str, float] = {}
    shown_seed = [study.settings.seed]
    total = study.settings.steps * len(study.seeds)

    def update(record: dict[str, Any]) -> None:
        if tracking is not None:
            tracking.log(of_record(record))
        if show is not None and record["type"] == "step":
            if record["seed"] != shown_seed[0]:
                shown_seed[0] = record["seed"]
                losses.clear()
            losses[record["run"]] = record["loss"]
            shown = ", ".join(f"{run} {loss:.3f}" for run, loss in losses.items())
            done = (record["seed"] - study.seeds[0]) * study.settings.steps + record["step"] + 1
            show(done, total, f"loss {shown}")

    return update
