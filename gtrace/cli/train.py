"""``gtrace train``: train with a codec on the gradients: a built-in task, or a program of one's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gtrace.cli import use_instead
from gtrace.cli.cluster import CLUSTER, chosen_cluster, cluster_options, simulated_network, simulation_options
from gtrace.cli.completion import complete_task
from gtrace.cli.options import check_output, codec_options, load_plugins
from gtrace.cli.train_choice import choice_options
from gtrace.cli.train_measures import measure_options
from gtrace.cli.train_options import script_options
from gtrace.cli.train_weights import chosen_levels
from gtrace.errors import UsageError
from gtrace.schedule import DEFAULT_REFIT, RefitSchedule
from gtrace.training.tasks import describe_task, task_names

if TYPE_CHECKING:
    from gtrace.codecs import Codec
    from gtrace.codecs.assignment import CodecTable, Coding
    from gtrace.costs import Cluster, Network
    from gtrace.training.neural import Layers
    from gtrace.training.settings import Kind

DEFAULT_TASK = "digits-cnn"
DEFAULT_WORKERS = 4
_TASKS = "".join(f"  {name:17}{describe_task(name)}\n" for name in task_names())
#: models that have a command of their own
_LINEAR = ("linear", "lssvm", "logistic", "svm")


@click.command("train", context_settings={"allow_interspersed_args": False}, epilog=f"\b\nTasks:\n{_TASKS}")
@choice_options
@codec_options
@click.option(
    "--kind",
    type=click.Choice(["weight", "neural"]),
    default="weight",
    show_default=True,
    help="What goes through the codec: the gradients between workers, or those that enter each layer's backward.",
)
@click.option(
    "--layers",
    type=click.Choice(["inner", "all"]),
    default="inner",
    show_default=True,
    help="With --kind neural: inner leaves the gradient alone that the last layer gets from the loss.",
)
@click.option(
    "--task",
    metavar="NAME",
    shell_complete=complete_task,
    help=f"What to train, see below, where there is no SCRIPT.  [default: {DEFAULT_TASK}]",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=None,
    help="Simulated workers, each with its own mini-batch; for a SCRIPT, encodings of the same gradient that are "
    "averaged.  [default: 4; 1 for --kind neural and for a SCRIPT]",
)
@click.option("--steps", type=click.IntRange(min=1), default=None, help="Optimizer steps.  [default: the task's]")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=None,
    help="Samples of one worker in a step.  [default: the task's]",
)
@click.option("--lr", type=float, default=None, help="Learning rate at the start.  [default: the task's]")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of the model, the batches and the rounding.",
)
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="For a task: train with N seeds, one after the other, and say how sure the differences are.",
)
@click.option(
    "--optimizer",
    metavar="NAME",
    help="For a task: sgd, momentum, nesterov, adam, amsgrad or adamw instead of its own.",
)
@click.option("--clip", type=float, metavar="NORM", help="For a task: largest norm of the averaged gradient.")
@click.option(
    "--quantize",
    metavar="PARTS",
    help="For a task: model lets forward and backward see quantized weights, while the optimizer steps float32 ones.",
)
@click.option(
    "--weight-levels",
    type=int,
    default=None,
    metavar="N",
    help="With --quantize model: levels of a weight, negative ones and zero among them.  [default: 2^bits - 1]",
)
@cluster_options
@simulation_options
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="POLICY",
    help="For a task: who chooses the codec's bits: fixed, schedule:0=2,500=4, adaptive or mqgrad, with options as in "
    "mqgrad:period=5,seed=1. Given again: one run with each.  [default: fixed]",
)
@click.option(
    "--down",
    metavar="CODEC",
    help="For a task: a server sends the average back through this codec; same: through the workers'.",
)
@click.option(
    "--refit",
    default=DEFAULT_REFIT,
    show_default=True,
    help="Steps at which levels and codes are fitted to the gradient; +N repeats. Or: every, once. pooled:STEPS fits "
    "to a decayed mean of up to 10 steps; pooled alone means pooled:0,10,20,50,100,200,500,+1000.",
)
@click.option(
    "--nonfinite",
    type=click.Choice(["skip", "zero", "error", "pass"]),
    default=None,
    help="What to do with a gradient that holds NaN or infinity; pass leaves it to the training.  "
    "[default: skip; for a SCRIPT pass]",
)
@click.option(
    "--min-size",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Tensors with fewer elements go uncompressed.",
)
@script_options
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
@measure_options
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=None, help="Run log.  [default: TASK-CODEC.jsonl]"
)
@click.option("--force", is_flag=True, help="Overwrite an existing run log.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON summary instead of a table.")
@click.argument("script", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(script: str | None, args: tuple[str, ...], *, is_module: bool, **options: Any) -> int | None:
    """Train with a codec on the gradients: a built-in task, or your own SCRIPT with its ARGS.

    A task is trained twice, with the codec on every worker's gradients and without, beside each other. Every gradient
    travels as bytes: each worker encodes its own, they are decoded from the bytes alone, averaged, and one optimizer
    step follows. With --kind neural the gradient with respect to each layer's output takes that way inside the backward
    pass, and weight gradients are averaged exactly.

    A SCRIPT runs unchanged. Each gradient goes through the codec before the optimizer uses it; between the ranks of
    DistributedDataParallel payloads are exchanged in the place of gradients. Options come before SCRIPT.

    For a task, --network says what its steps would take over simulated links. With --step-time, and --ranks where they
    are not the workers, the end says what the codec saves between such machines.

    \b
    Examples:
      gtrace train --codec qsgdinf --bits 3 --workers 4 --task digits-cnn
      gtrace train --codec nuqsgd:bits=4,bucket_size=512 --task char-lstm --steps 100
      gtrace train --codec int8 --kind neural --shadow 10
      gtrace train --quantize model --levels optimal,uniform --weight-levels 5 --task fashion-cnn
      gtrace train --compare qsgdinf:bits=3,alq:bits=3,terngrad --seeds 5 --network 1Gbit/s
      gtrace train --codec minmax --policy mqgrad --policy adaptive --network 10MB/s --topology ps --down same
      gtrace train --codec alq --bits 3 --workers 8 --network 1Gbit/s --step-time 20ms
      gtrace train --plan plan.yaml --compare qsgdinf:bits=3 --task digits-cnn
      gtrace train --codec ef:topk:ratio=0.01 --rule bias=none train.py --epochs 3
      torchrun --nproc-per-node 2 -m -- gtrace train --codec alq --bits 3 train.py
    """
    if options["task"] in _LINEAR or (script in _LINEAR and not Path(script).exists()):
        remedy = use_instead("linear", f"--task {script or options['task']}")
        raise UsageError(f"linear models have a command of their own; {remedy}")
    if script is None and options["task"] is not None:
        describe_task(options["task"])
    weights = chosen_levels(options) if script is None else []
    chosen = _chosen(options)
    if script is not None and len(chosen) > 1:
        raise UsageError(f"--compare is for built-in tasks; run {script} with one --codec or --plan at a time")
    if script is None:
        if options["levels"] is not None:
            raise UsageError("--levels is for a SCRIPT, or for --quantize")
        _refuse(options, _OF_SCRIPTS, "is for a SCRIPT")
        if is_module:
            raise UsageError("-m: name the module that is to be run")
        network, cluster = simulated_network(options), chosen_cluster(options, options["workers"] or DEFAULT_WORKERS)
        if cluster is not None and options["kind"] != "weight":
            raise UsageError("--step-time: neural gradients do not travel between workers; choose --kind weight")
        left = {k: v for k, v in options.items() if k not in (*_OF_SCRIPTS, *CLUSTER, "topology", "compute_time")}
        run(chosen, weights=weights, network=network, cluster=cluster, **left)
        return None
    if options["policies"]:
        raise UsageError(
            f"--policy is for built-in tasks: {script} computes its loss where it likes; in a loop of your own ask "
            "gtrace.training.MQGrad for the bits"
        )
    _refuse(options, _OF_TASKS, f"is for built-in tasks; {script} has its own")
    options["levels"] = options["levels"] or "own"
    if options["levels"] not in ("own", "common"):
        raise UsageError(f"--levels {options['levels']}: between the ranks of a SCRIPT, choose own or common")
    from gtrace.cli.train_script import run_script

    cluster = chosen_cluster(options)
    left = {name: value for name, value in options.items() if name not in (*_OF_TASKS, *CLUSTER)}
    return run_script(chosen[0], script, args, is_module=is_module, cluster=cluster, **left)


#: options that only one of the two kinds of training has, with the values that mean "not given"
_OF_SCRIPTS: dict[str, Any] = {
    "rules": (),
    "exchange": "allgather",
    "levels": None,
    "compare_every": 100,
}
_OF_TASKS: dict[str, Any] = {
    "kind": "weight",
    "layers": "inner",
    "task": None,
    "steps": None,
    "batch_size": None,
    "lr": None,
    "eval_every": None,
    "shadow": None,
    "measure": None,
    "seeds": 1,
    "optimizer": None,
    "clip": None,
    "topology": "ring",
    "compute_time": None,
    "policies": (),
    "down": None,
    "quantize": None,
    "weight_levels": None,
}


#: options that may be given again, by the name that stands for all
_REPEATED = {"rules": "rule", "policies": "policy", "plans": "plan"}


def _refuse(options: dict[str, Any], names: dict[str, Any], why: str) -> None:
    for name, default in names.items():
        if options[name] != default:
            raise UsageError(f"--{_REPEATED.get(name, name.replace('_', '-'))} {why}")


def _chosen(options: dict[str, Any]) -> list[Coding]:
    """The codecs and plans of the options, which are taken out."""
    # Whatever can be wrong in the arguments is said before torch takes its seconds to load.
    plugin = options["plugin"]
    load_plugins(plugin)
    spec, given = options.pop("codec"), {name: options.pop(name) for name in ("bits", "sparsity")}
    RefitSchedule.parse(options["refit"])
    several, feedback = options.pop("compare"), options.pop("error_feedback")
    planned = _planned(options.pop("plans"))
    if (spec is not None and several is not None) or not (spec or several or planned):
        raise UsageError("--codec, --compare or --plan: give one of them" + (", not both" if spec else ""))
    if several is None:
        specs = [] if spec is None else [spec]
    else:
        from gtrace.codecs import split_specs

        specs = split_specs(several)
        given = {"bits": None, "sparsity": None} if len(specs) > 1 and not any(given.values()) else given
    if planned and not specs:
        _refuse(
            {"error_feedback": feedback, **given}, {"error_feedback": False, **dict.fromkeys(given)}, "is for --codec"
        )
    return [*(codec_with(f"ef:{one}" if feedback and one != "none" else one, given) for one in specs), *planned]


def _planned(paths: tuple[Path, ...]) -> list[CodecTable]:
    """The tables of the plans, one a file."""
    if not paths:
        return []
    from gtrace.planning import load_plan

    return [load_plan(path).table for path in paths]


def run(
    chosen: list[Coding],
    *,
    weights: list[str],
    plugin: tuple[Path, ...],
    kind: Kind,
    layers: Layers,
    task: str | None,
    workers: int | None,
    steps: int | None,
    batch_size: int | None,
    lr: float | None,
    seed: int,
    refit: str,
    nonfinite: str | None,
    eval_every: int | None,
    shadow: int | None,
    measure: int | None,
    seeds: int,
    optimizer: str | None,
    clip: float | None,
    network: Network | None,
    cluster: Cluster | None,
    policies: tuple[str, ...],
    min_size: int,
    down: str | None,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Train a built-in task."""
    del plugin
    task = task or DEFAULT_TASK
    describe_task(task)
    from gtrace.training.policies import FIXED, PolicySpec
    from gtrace.training.settings import run_name

    choosing = [PolicySpec.parse(text) for text in policies or (FIXED,)]
    named = file_name(run_name(chosen[0], choosing[0])) if len(chosen) == len(choosing) == 1 else "compare"
    if weights:
        named = "-".join([*([] if named == "none" else [named]), "weights", *weights])
    path = output or Path(f"{task}-{'neural-' if kind == 'neural' else ''}{named}.jsonl")
    # With a checkpoint beside it, the same study goes on; whether it is the same is known only later.
    check_output(path, force=force or path.with_name(path.name + ".checkpoint").exists())

    from gtrace.cli.train_task import progress, show
    from gtrace.training import Study

    study = Study(
        task,
        chosen,
        kind=kind,
        layers=layers,
        workers=workers,
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        seed=seed,
        refit=refit,
        nonfinite=nonfinite or "skip",  # type: ignore[arg-type]
        eval_every=eval_every,
        shadow=shadow,
        measure=measure,
        seeds=seeds,
        optimizer=optimizer or "",
        clip=clip,
        network=network,
        policies=choosing,
        min_size=min_size,
        down=down or "",
        weights=weights,
    )
    if not force and study.can_resume(path):
        click.echo(f"gtrace: {path}: going on where it was interrupted", err=True)
    try:
        with progress(study, as_json=as_json) as on_record:
            study.run(path, force=force, on_record=on_record)
    except KeyboardInterrupt:
        if study.results[0].steps:
            show(study, path, cluster, as_json=as_json)
        raise
    show(study, path, cluster, as_json=as_json)


def codec_with(spec: str, options: dict[str, float | None]) -> Codec:
    """The codec of a spec, with the parameters that have options of their own."""
    from gtrace.codecs import codec
    from gtrace.codecs.spec import parse_spec

    chosen, given = codec(spec), {}
    for name, value in options.items():
        if value is None:
            continue
        if name not in chosen.parameters:
            click.echo(f"gtrace: {spec} has no {name} to choose; --{name} {value:g} is ignored", err=True)
        elif name in parse_spec(spec).given:
            raise UsageError(f"--{name} {value:g}: the codec '{spec}' names its {name} already; give it once")
        else:
            given[name] = value
    return codec(spec, **given) if given else chosen


def file_name(spec: str) -> str:
    """A spec as a part of a file name: ``qsgdinf:bits=3`` becomes ``qsgdinf-bits3``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", spec.replace("=", ""))
