"""``gtrace study``: methods compared on built-in tasks, beyond one run."""

from __future__ import annotations

from dataclasses import dataclass

import click

from gtrace.cli.groups import SUBCOMMANDS, LazyGroup, complete_specs
from gtrace.cli.options import JSON, Command, options, print_json
from gtrace.cli.train import chosen_codecs
from gtrace.cli.train_settings import DEFAULT_TASK, CompareSettings, SeedsSettings
from gtrace.errors import UsageError
from gtrace.settings import option
from gtrace.training.settings import JOINT, JOINT_CODEC
from gtrace.training.tasks import describe_task, task_names


@click.group(
    "study",
    cls=LazyGroup,
    table=SUBCOMMANDS["study"],
    epilog="Example: gtrace study compare qsgdinf:bits=3,alq:bits=3 --task digits-cnn",
)
def command() -> None:
    """Compare methods on built-in tasks: side by side, over several seeds, and against what a sweep predicts."""


@dataclass(frozen=True)
class TasksSettings:
    """The options of ``gtrace study tasks``."""

    as_json: bool = option(False, **JSON)


@click.command("tasks", cls=Command, epilog="Example: gtrace study tasks")
@options(TasksSettings)
def tasks(settings: TasksSettings) -> None:
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
    _run(settings, codecs)


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
    _run(settings, codecs)


def _run(settings: CompareSettings, codecs: tuple[str, ...]) -> None:
    from gtrace.cli.train_task import check_task, run_task
    from gtrace.codecs import split_specs

    check_task(settings.task)
    specs = split_specs(",".join(codecs)) if codecs else []
    if not specs and not settings.plans:
        joint = settings.optimizer.partition(":")[0] in JOINT
        if not joint and settings.weights is None:
            raise UsageError("name at least one codec, e.g. gtrace study compare qsgdinf:bits=3,alq:bits=3.")
        specs = [JOINT_CODEC if joint else "none"]
    run_task(settings, chosen_codecs(settings, specs, settings.sparsity))
