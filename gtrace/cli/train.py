"""``gtrace train``: train with a codec on the gradients: a built-in task, or a program of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gtrace.cli import use_instead
from gtrace.cli.options import codec_with, load_plugins, options, refuse
from gtrace.cli.train_settings import TrainSettings
from gtrace.errors import UsageError
from gtrace.schedule import RefitSchedule
from gtrace.training.tasks import describe_task, task_names

if TYPE_CHECKING:
    from gtrace.codecs.assignment import CodecTable, Coding

_TASKS = "".join(f"  {name:17}{describe_task(name)}\n" for name in task_names())
#: models that have a command of their own
_LINEAR = ("linear", "lssvm", "logistic", "svm")


@click.command("train", context_settings={"allow_interspersed_args": False}, epilog=f"\b\nTasks:\n{_TASKS}")
@options(TrainSettings)
@click.argument("script", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(settings: TrainSettings, script: str | None, args: tuple[str, ...]) -> int | None:
    """Train with a codec on the gradients: a built-in task, or your own SCRIPT with its ARGS.

    A task is trained twice, with the codec on every worker's gradients and without, beside each other. Every gradient
    travels as bytes: each worker encodes its own, they are decoded from the bytes alone, averaged, and one optimizer
    step follows. With --kind neural the gradient with respect to each layer's output takes that way inside the backward
    pass, and weight gradients are averaged exactly.

    A SCRIPT runs unchanged. Each gradient goes through the codec before the optimizer uses it; between the ranks of
    DistributedDataParallel payloads are exchanged instead of gradients. With --baseline it runs without the codec, too,
    and the end compares the losses. Options come before SCRIPT.

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
      gtrace train --codec qsgdinf:bits=4 --baseline train.py --epochs 3
      gtrace train --compare alq:bits=3,qsgdinf:bits=4 --seeds 5 train.py
      torchrun --nproc-per-node 2 -m -- gtrace train --codec alq --bits 3 train.py
    """
    if settings.task in _LINEAR or (script in _LINEAR and not Path(script).exists()):
        remedy = use_instead("linear", f"--task {script or settings.task}")
        raise UsageError(f"linear models have a command of their own; {remedy}")
    if script is None:
        _train_task(settings)
        return None
    return _train_script(settings, script, args)


def _train_task(settings: TrainSettings) -> None:
    if settings.task is not None:
        describe_task(settings.task)
    from gtrace.cli.train_task import chosen_levels, run_task

    settings, weights = chosen_levels(settings)
    chosen = _chosen(settings)
    if settings.levels is not None:
        raise UsageError("--levels is for a SCRIPT, or for --quantize")
    refuse(settings, "script", "is for a SCRIPT")
    if settings.is_module:
        raise UsageError("-m: name the module that is to be run")
    run_task(settings, chosen, weights)


def _train_script(settings: TrainSettings, script: str, args: tuple[str, ...]) -> int:
    chosen = _chosen(settings)
    if settings.policies:
        raise UsageError(
            f"--policy is for built-in tasks: {script} computes its loss where it likes; in a loop of your own ask "
            "gtrace.training.MQGrad for the bits"
        )
    refuse(settings, "task", f"is for built-in tasks; {script} has its own")
    if settings.levels not in (None, "own", "common"):
        raise UsageError(f"--levels {settings.levels}: between the ranks of a SCRIPT, choose own or common")
    from gtrace.cli.train_script import compare_script, run_script

    if settings.baseline or settings.compare or settings.seeds > 1 or len(chosen) > 1:
        return compare_script(settings, chosen, script, args)
    return run_script(settings, chosen[0], script, args)


def _chosen(settings: TrainSettings) -> list[Coding]:
    """The codecs and plans that the settings name."""
    # Whatever can be wrong in the arguments is said before torch takes its seconds to load.
    load_plugins(settings.codecs.plugin)
    RefitSchedule.parse(settings.refit)
    planned = _planned(settings.plans)
    spec, several, feedback = settings.codec, settings.compare, settings.codecs.error_feedback
    if (spec is not None and several is not None) or not (spec or several or planned):
        raise UsageError("--codec, --compare or --plan: give one of them" + (", not both" if spec else ""))
    given: dict[str, float | None] = {"bits": settings.bits, "sparsity": settings.sparsity}
    if several is None:
        specs = [] if spec is None else [spec]
    else:
        from gtrace.codecs import split_specs

        specs = split_specs(several)
        given = {"bits": None, "sparsity": None} if len(specs) > 1 and not any(given.values()) else given
    if planned and not specs:
        for name, value in {"error-feedback": feedback or None, **given}.items():
            if value is not None:
                raise UsageError(f"--{name} is for --codec")
    return [*(codec_with(f"ef:{one}" if feedback and one != "none" else one, given) for one in specs), *planned]


def _planned(paths: tuple[Path, ...]) -> list[CodecTable]:
    """The tables of the plans, one a file."""
    if not paths:
        return []
    from gtrace.planning import load_plan

    return [load_plan(path).table for path in paths]
