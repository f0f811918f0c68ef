"""``gtrace train`` and ``gtrace study``: a codec on the gradients of a program of one's own, or of a built-in task.

A study compares methods on built-in tasks, beyond one run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gtrace.cli.groups import SUBCOMMANDS, LazyGroup, complete_specs, use_instead
from gtrace.cli.options import Command, codecs_with, load_plugins, options, print_json, refuse
from gtrace.cli.train_settings import DEFAULT_TASK, CompareSettings, RunSettings, SeedsSettings, TrainSettings
from gtrace.errors import UsageError
from gtrace.schedule import RefitSchedule
from gtrace.settings import option
from gtrace.trackers import check_tracker
from gtrace.training.tasks import describe_task, require_torch, task_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.codecs.assignment import CodecTable, Coding


#: models that have a command of their own
_LINEAR = ("linear", "lssvm", "logistic", "svm")


class _Train(Command):
    """Knows which options of a task are only in ``gtrace study``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if any(error.option_name in param.opts for param in compare.params):
                raise UsageError(
                    f"{error.option_name}: is an option of gtrace study compare, which trains built-in tasks."
                ) from None
            raise


@click.command("train", cls=_Train, context_settings={"allow_interspersed_args": False})
@options(TrainSettings)
@click.argument("script", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(settings: TrainSettings, script: str | None, args: tuple[str, ...]) -> int | None:
    """Train with a codec on the gradients: your own SCRIPT with its ARGS, or a built-in task.

    A SCRIPT runs unchanged. Each gradient goes through the codec before the optimizer uses it; between the ranks of
    DistributedDataParallel payloads are exchanged instead of gradients. With --baseline it runs without the codec, too,
    and the end compares the losses. With --every H each rank steps alone, and every H steps what its weights changed
    is exchanged. Options come before SCRIPT.

    A task is trained with the codec on every worker's gradients and, beside it, without. Each worker's gradient travels
    as bytes, is decoded from them alone, and one optimizer step with the average follows. gtrace study has more options
    for tasks.

    If --cluster has a compute time, the end says what the codec saves between such machines.

    \b
    Examples:
      gtrace train --codec qsgdinf --bits 3 train.py --epochs 3
      gtrace train --plan plan.toml train.py
      gtrace train --codec ef:topk:ratio=0.01 --rule bias=none train.py
      gtrace train --codec qsgdinf:bits=4 --baseline train.py --epochs 3
      gtrace train --codec eden:bits=2 --every 16 train.py
      gtrace train --compare alq:bits=3,qsgdinf:bits=4 --seeds 5 train.py
      gtrace train --codec alq --bits 3 --task digits-cnn --workers 8 --cluster 8x1Gbit/s,20ms
      gtrace train --codec minmax --policy mqgrad --network 10MB/s
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
    refuse(settings, "script", "is for a SCRIPT")
    if settings.is_module:
        raise UsageError("-m: name the module to run, e.g. gtrace train --codec alq -m package.train.")
    # First, because a mistake is to be answered before what follows is imported.
    describe_task(DEFAULT_TASK if settings.task is None else settings.task)
    chosen = chosen_codecs(settings, _specs(settings))
    from gtrace.cli.train_task import run_task

    shared = {field.name: getattr(settings, field.name) for field in fields(RunSettings)}
    run_task(CompareSettings(seeds=settings.seeds, **shared), chosen)


def _train_script(settings: TrainSettings, script: str, args: tuple[str, ...]) -> int:
    chosen = chosen_codecs(settings, _specs(settings))
    if settings.policies:
        raise UsageError(
            f"--policy is for built-in tasks: {script} computes its loss where it likes; in a loop of your own ask "
            "gtrace.training.MQGrad for the bits"
        )
    refuse(settings, "task", f"is for built-in tasks; {script} has its own")
    if settings.every is not None and settings.cluster.cluster is not None:
        raise UsageError("--cluster: is for gradients that are exchanged at every step; leave out --every.")
    require_torch()
    from gtrace.cli.train_script import compare_script, run_script

    if settings.baseline or settings.compare or settings.seeds > 1 or len(chosen) > 1:
        return compare_script(settings, chosen, script, args)
    return run_script(settings, chosen[0], script, args)


def _specs(settings: TrainSettings) -> list[str]:
    spec, several = settings.codec, settings.compare
    if (spec is not None and several is not None) or not (spec or several or settings.plans):
        raise UsageError(
            "give one of --codec and --compare, not both."
            if spec
            else "name a codec before SCRIPT, e.g. --codec qsgdinf --bits 3 (gtrace codecs lists them), or a --plan."
        )
    if several is None:
        return [] if spec is None else [spec]
    from gtrace.codecs import split_specs

    return split_specs(several)


def chosen_codecs(settings: RunSettings, specs: Sequence[str], sparsity: float | None = None) -> list[Coding]:
    """The codecs of the specs, with the settings' bits and error feedback, and the plans of the settings."""
    # Whatever can be wrong in the arguments is said before torch takes its seconds to load.
    load_plugins(settings.codecs.plugin)
    if settings.to is not None:
        check_tracker(settings.to)
    RefitSchedule.parse(settings.refit)
    planned: list[CodecTable] = []
    if settings.plans:
        from gtrace.planning import load_plan

        planned = [load_plan(path).table for path in settings.plans]
    feedback = settings.codecs.error_feedback
    given = {"bits": settings.bits, "sparsity": sparsity}
    if not specs:
        for name, value in {"error-feedback": feedback or None, **given}.items():
            if value is not None:
                raise UsageError(f"--{name} is for codecs; a plan has its own.")
    return [*codecs_with([f"ef:{one}" if feedback and one != "none" else one for one in specs], given), *planned]


@click.group(
    "study",
    cls=LazyGroup,
    table=SUBCOMMANDS["study"],
    epilog="Example: gtrace study compare qsgdinf:bits=3,alq:bits=3 --task digits-cnn",
)
def study() -> None:
    """Compare methods on built-in tasks: side by side, over several seeds, and against what a sweep predicts."""


@dataclass(frozen=True)
class _TasksSettings:
    as_json: bool = option(False, help="Print JSON instead of text.")


@click.command("tasks", cls=Command, epilog="Example: gtrace study tasks")
@options(_TasksSettings)
def tasks(settings: _TasksSettings) -> None:
    """List the built-in tasks: a model, its data, and how it is trained."""
    described = {name: describe_task(name) for name in task_names()}
    if settings.as_json:
        print_json(described)
        return
    width = max(map(len, described))
    for name, line in described.items():
        click.echo(f"{name:{width}}  {line}{' (default)' if name == DEFAULT_TASK else ''}")


@click.command("compare", cls=Command)
@click.argument("codecs", nargs=-1, metavar="[CODECS]...", shell_complete=complete_specs)
@options(CompareSettings)
def compare(settings: CompareSettings, codecs: tuple[str, ...]) -> None:
    """Train a built-in task with each of CODECS side by side, and without any.

    With --kind neural the gradient with respect to each layer's output goes through the codec inside the backward pass,
    and weight gradients are averaged exactly. --network adds what a step would take over simulated links. If --cluster
    has a compute time, the end says what each codec saves between such machines.

    \b
    Examples:
      gtrace study compare qsgdinf:bits=3,alq:bits=3,terngrad --seeds 5
      gtrace study compare int8 --kind neural --shadow 10
      gtrace study compare --weights optimal5,uniform5 --task fashion-cnn
      gtrace study compare minmax --policy mqgrad --policy adaptive --network 10MB/s,topology=ps --down same
      gtrace study compare qsgdinf:bits=3 --plan plan.toml --task digits-cnn
      gtrace study compare --optimizer onebit-adam --task digits-mlp
      gtrace study compare eden:bits=2 --every 16 --task char-transformer
    """
    _run_study(settings, codecs)


@click.command("seeds", cls=Command)
@click.argument("codecs", nargs=-1, metavar="[CODECS]...", shell_complete=complete_specs)
@options(SeedsSettings)
def seeds(settings: SeedsSettings, codecs: tuple[str, ...]) -> None:
    """Train a built-in task with each of CODECS over several seeds, and say how sure the differences are.

    It is gtrace study compare with 5 seeds instead of one: every number is a mean with its deviation, and accuracy and
    loss are compared with the uncompressed run of the same seed.

    \b
    Example:
      gtrace study seeds qsgdinf:bits=3,alq:bits=3,terngrad --task digits-cnn
    """
    _run_study(settings, codecs)


def _run_study(settings: CompareSettings, codecs: tuple[str, ...]) -> None:
    describe_task(DEFAULT_TASK if settings.task is None else settings.task)
    from gtrace.codecs import split_specs
    from gtrace.training.settings import JOINT, JOINT_CODEC

    specs = split_specs(",".join(codecs)) if codecs else []
    if not specs and not settings.plans:
        joint = settings.optimizer.partition(":")[0] in JOINT
        if not joint and settings.weights is None:
            raise UsageError("name at least one codec, e.g. gtrace study compare qsgdinf:bits=3,alq:bits=3.")
        specs = [JOINT_CODEC if joint else "none"]
    chosen = chosen_codecs(settings, specs, settings.sparsity)
    from gtrace.cli.train_task import run_task

    run_task(settings, chosen)
