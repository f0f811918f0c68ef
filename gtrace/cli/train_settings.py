"""The options of ``gtrace train`` and of ``gtrace study``: those that both have, and each one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gtrace.cli.groups import complete_spec, complete_specs, complete_task
from gtrace.cli.options import ClusterSettings, CodecSettings
from gtrace.schedule import DEFAULT_REFIT
from gtrace.settings import nested, option
from gtrace.trackers import TO_HELP

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_TASK = "digits-cnn"
#: of options that only ``--help-all`` shows: the calls that take them, and whether a task or a SCRIPT alone has them
_STUDY: dict[str, Any] = {"advanced": True, "call": ("study",)}
_TASK = {**_STUDY, "only": "task"}
_SCRIPT: dict[str, Any] = {"advanced": True, "call": ("script",), "only": "script"}
_BOTH: dict[str, Any] = {"advanced": True, "call": ("study", "script")}


@dataclass(frozen=True)
class CodecChoice:
    """Which codec, or several, and over how many seeds."""

    codec: str | None = option(
        None, shell_complete=complete_spec, help="A codec or its spec, e.g. qsgdinf:bits=3,bucket_size=512."
    )
    compare: str | None = option(
        None,
        metavar="CODECS",
        shell_complete=complete_specs,
        help="Several codecs, each against the uncompressed run: qsgdinf:bits=3,alq:bits=3,terngrad.",
    )
    baseline: bool = option(
        False, only="script", help="Run SCRIPT without the codec, too, and compare the final losses."
    )
    seeds: int = option(
        1,
        call=("study",),
        minimum=1,
        metavar="N",
        help="Train with N seeds, one after the other, and say how sure the differences are; SCRIPT finds its own in "
        "GTRACE_SEED.",
    )


@dataclass(frozen=True)
class RunSettings:
    """What training a task always has, in ``gtrace train`` and in ``gtrace study``.

    In the metadata of a field ``only`` says that a task or a SCRIPT alone has the option, and ``call`` lists the calls
    that take it under its own name: ``study`` (:class:`gtrace.training.Study`) and ``script``
    (:class:`gtrace.training.unmodified.ScriptOptions`).
    """

    bits: int | None = option(None, help="Nominal bits of a codec that has them.")
    plans: tuple[Path, ...] = option(
        (),
        metavar="FILE",
        help="A plan of gtrace plan, which names a codec for every tensor; for a task it may be repeated.",
    )
    task: str | None = option(
        None,
        only="task",
        metavar="NAME",
        shell_complete=complete_task,
        help=f"A built-in task; gtrace study tasks lists them.  [default: {DEFAULT_TASK}]",
    )
    workers: int | None = option(
        None,
        **_STUDY,
        minimum=1,
        help="Simulated workers, each with its own mini-batch; for a SCRIPT, encodings of the same gradient that are "
        "averaged.  [default: 4; 1 for neural gradients and for a SCRIPT]",
    )
    steps: int | None = option(
        None, only="task", call=("study",), minimum=1, help="Optimizer steps of a task.  [default: the task's]"
    )
    cluster: ClusterSettings = nested(ClusterSettings)
    output: Path | None = option(None, help="Run log.  [default: NAME-CODEC.jsonl]")
    to: str | None = option(None, advanced=True, call=("script",), metavar="TRACKER", help=TO_HELP)
    force: bool = option(False, help="Replace an existing run log.")
    codecs: CodecSettings = nested(CodecSettings)
    batch_size: int | None = option(
        None, **_TASK, minimum=1, help="Samples of one worker in a step of a task.  [default: the task's]"
    )
    lr: float | None = option(None, **_TASK, help="Learning rate at the start of a task.  [default: the task's]")
    every: int | None = option(
        None,
        **_BOTH,
        minimum=1,
        metavar="H",
        help="Workers step alone, and every H steps what their weights changed goes through the codec (DiLoCo).",
    )
    seed: int = option(0, **_BOTH, minimum=0, help="Random seed for model, batches and rounding.")
    network: str | None = option(
        None,
        only="task",
        advanced=True,
        metavar="NETWORK",
        help="Simulate the time of a task's steps on links of this speed, e.g. 10MB/s. More parts: latency=50us, "
        "topology=ring, allgather or ps (a parameter server), compute=5s instead of measured times.",
    )
    policies: tuple[str, ...] = option(
        (),
        names=("--policy",),
        only="task",
        advanced=True,
        metavar="POLICY",
        help="Who chooses the codec's bits in a task: fixed, schedule:0=2,500=4, adaptive or mqgrad, with options: "
        "mqgrad:period=5,seed=1. Repeated: one run with each.  [default: fixed]",
    )
    refit: str = option(
        DEFAULT_REFIT,
        **_BOTH,
        help="Steps at which levels and codes are fitted to the gradient; +N repeats. Or: every, once. pooled:STEPS "
        "fits to a decayed mean of up to 10 steps; pooled alone means pooled:0,10,20,50,100,200,500,+1000.",
    )
    nonfinite: str | None = option(
        None,
        advanced=True,
        choices=("skip", "zero", "error", "pass"),
        help="What to do with a gradient that holds NaN or infinity; pass leaves it to the training.  "
        "[default: skip; for a SCRIPT pass]",
    )
    min_size: int = option(
        0, **_BOTH, minimum=0, show_default=False, metavar="N", help="Tensors with fewer elements stay exact."
    )
    measure: int | None = option(
        None,
        **_TASK,
        minimum=1,
        metavar="K",
        help="Every K steps of a task measure the averaged gradient's errors, as a sweep does, and what the codec's "
        "noise costs over the steps that are left.",
    )
    as_json: bool = option(False, advanced=True, help="Print JSON instead of text.")


@dataclass(frozen=True)
class TrainSettings(RunSettings, CodecChoice):
    """The options of ``gtrace train``, those of ``CodecChoice`` first."""

    is_module: bool = option(False, help="SCRIPT is the name of a module, as for python -m.")
    rules: tuple[str, ...] = option(
        (),
        names=("--rule",),
        only="script",
        advanced=True,
        metavar="GLOB=CODEC",
        help="Another codec for some tensors of a SCRIPT, e.g. bias=none; the first that fits counts.",
    )
    exchange: str = option(
        "allgather",
        **_SCRIPT,
        metavar="WAY",
        help="Between the ranks of a SCRIPT: allgather, two-shot, ring, hierarchical:RANKS_OF_A_NODE, shared-scale.",
    )
    levels: str = option(
        "own",
        **_SCRIPT,
        choices=("own", "common"),
        help="Between the ranks of a SCRIPT: each rank's own levels, or those fitted to all ranks' sketches.",
    )
    compare_every: int = option(
        100,
        **_SCRIPT,
        minimum=0,
        metavar="N",
        help="Between the ranks of a SCRIPT: every N steps, also all-reduce in float32 and bfloat16; 0: never.",
    )


@dataclass(frozen=True)
class CompareSettings(RunSettings):
    """The options of ``gtrace study compare``."""

    seeds: int = option(1, call=("study",), minimum=1, metavar="N", help="Train with N seeds, one after the other.")
    kind: str = option(
        "weight",
        call=("study",),
        choices=("weight", "neural"),
        help="What goes through the codec: the gradients between workers, or those that enter each layer's backward.",
    )
    sparsity: float | None = option(None, advanced=True, help="Sparsity of a codec that has it, e.g. 0.8.")
    layers: str = option(
        "inner",
        **_STUDY,
        choices=("inner", "all"),
        help="With --kind neural: inner leaves the gradient alone that the last layer gets from the loss.",
    )
    shadow: int | None = option(
        None,
        **_STUDY,
        minimum=1,
        metavar="K",
        help="With --kind neural: every K steps run the backward pass exactly too, and compare the weight gradients.",
    )
    weights: str | None = option(
        None,
        advanced=True,
        metavar="LEVELS",
        help="Round the weights of forward and backward to levels: optimal5, uniform5, xnor5, or several with commas.",
    )
    optimizer: str = option(
        "",
        **_STUDY,
        metavar="NAME",
        show_default=False,
        help="sgd, momentum, nesterov, adam, amsgrad, adamw; or onebit-adam, zeroone-adam, which send momentum, "
        "e.g. onebit-adam:warmup=100.  [default: the task's]",
    )
    clip: float | None = option(
        None, **_STUDY, metavar="NORM", help="Largest norm of the averaged gradient.  [default: the task's]"
    )
    down: str = option(
        "",
        **_STUDY,
        metavar="CODEC",
        show_default=False,
        help="A server sends the average back through this codec; same: through the workers'.",
    )
    eval_every: int | None = option(
        None, **_STUDY, minimum=1, help="Steps between two tests.  [default: a tenth of the steps]"
    )


@dataclass(frozen=True)
class SeedsSettings(CompareSettings):
    """The options of ``gtrace study seeds``: those of compare, with several seeds."""

    seeds: int = option(5, call=("study",), minimum=2, metavar="N", help="Train with N seeds, one after the other.")
