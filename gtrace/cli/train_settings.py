"""What ``gtrace train`` can be told: every option once, for a task, a SCRIPT, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gtrace.cli.cluster import ClusterSettings
from gtrace.cli.completion import complete_spec, complete_specs, complete_task
from gtrace.cli.options import CodecSettings
from gtrace.schedule import DEFAULT_REFIT
from gtrace.settings import nested, option

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_TASK = "digits-cnn"
DEFAULT_WORKERS = 4


@dataclass(frozen=True)
class TrainSettings:
    """The options of ``gtrace train``.

    In the metadata of a field ``only`` says that a task or a SCRIPT alone has the option, and ``call`` lists the calls
    that take it under its own name: ``study`` (:class:`gtrace.training.Study`) and ``script``
    (:class:`gtrace.training.scriptlog.ScriptOptions`).
    """

    codec: str | None = option(
        None, shell_complete=complete_spec, help="A codec or its spec, as in qsgdinf:bits=3,bucket_size=512."
    )
    plans: tuple[Path, ...] = option(
        (),
        names=("--plan",),
        metavar="FILE",
        help="A plan, which names a codec for every tensor; for a task beside --codec or --compare, and again for "
        "more.",
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
    bits: int | None = option(None, help="Nominal bits of a codec that has them; with --quantize, of the weights.")
    sparsity: float | None = option(None, help="Sparsity of a codec that has it, as in 0.8.")
    codecs: CodecSettings = nested(CodecSettings)
    kind: str = option(
        "weight",
        only="task",
        call=("study",),
        choices=("weight", "neural"),
        help="What goes through the codec: the gradients between workers, or those that enter each layer's backward.",
    )
    layers: str = option(
        "inner",
        only="task",
        call=("study",),
        choices=("inner", "all"),
        help="With --kind neural: inner leaves the gradient alone that the last layer gets from the loss.",
    )
    task: str | None = option(
        None,
        only="task",
        metavar="NAME",
        shell_complete=complete_task,
        help=f"What to train, see below, where there is no SCRIPT.  [default: {DEFAULT_TASK}]",
    )
    workers: int | None = option(
        None,
        call=("study",),
        minimum=1,
        help="Simulated workers, each with its own mini-batch; for a SCRIPT, encodings of the same gradient that are "
        "averaged.  [default: 4; 1 for --kind neural and for a SCRIPT]",
    )
    steps: int | None = option(
        None, only="task", call=("study",), minimum=1, help="Optimizer steps.  [default: the task's]"
    )
    batch_size: int | None = option(
        None,
        only="task",
        call=("study",),
        minimum=1,
        help="Samples of one worker in a step.  [default: the task's]",
    )
    lr: float | None = option(
        None, only="task", call=("study",), help="Learning rate at the start.  [default: the task's]"
    )
    seed: int = option(0, call=("study", "script"), minimum=0, help="Of the model, the batches and the rounding.")
    seeds: int = option(
        1,
        call=("study",),
        minimum=1,
        metavar="N",
        help="Train with N seeds, one after the other, and say how sure the differences are; SCRIPT finds its own in "
        "GTRACE_SEED.",
    )
    optimizer: str | None = option(
        None,
        only="task",
        metavar="NAME",
        help="For a task: sgd, momentum, nesterov, adam, amsgrad or adamw instead of its own.",
    )
    clip: float | None = option(
        None,
        only="task",
        call=("study",),
        metavar="NORM",
        help="For a task: largest norm of the averaged gradient.",
    )
    quantize: str | None = option(
        None,
        only="task",
        metavar="PARTS",
        help="For a task: model lets forward and backward see quantized weights, while the optimizer steps float32 "
        "ones.",
    )
    weight_levels: int | None = option(
        None,
        only="task",
        metavar="N",
        help="With --quantize model: levels of a weight, negative ones and zero among them.  [default: 2^bits - 1]",
    )
    cluster: ClusterSettings = nested(ClusterSettings)
    topology: str = option(
        "ring",
        only="task",
        choices=("ring", "allgather", "ps"),
        help="For a task: how gradients travel in simulated steps: ring (all-reduce of exact ones, all-gather of "
        "payloads), all-gather, or a parameter server.",
    )
    compute_time: str | None = option(
        None,
        only="task",
        metavar="TIME",
        help="For a task: computing and coding of a simulated step, as in 5s, in the place of measured times.  "
        "[default: measured; 5s with --policy mqgrad]",
    )
    policies: tuple[str, ...] = option(
        (),
        names=("--policy",),
        metavar="POLICY",
        help="For a task: who chooses the codec's bits: fixed, schedule:0=2,500=4, adaptive or mqgrad, with options as "
        "in mqgrad:period=5,seed=1. Given again: one run with each.  [default: fixed]",
    )
    down: str | None = option(
        None,
        only="task",
        metavar="CODEC",
        help="For a task: a server sends the average back through this codec; same: through the workers'.",
    )
    refit: str = option(
        DEFAULT_REFIT,
        call=("study", "script"),
        help="Steps at which levels and codes are fitted to the gradient; +N repeats. Or: every, once. pooled:STEPS "
        "fits to a decayed mean of up to 10 steps; pooled alone means pooled:0,10,20,50,100,200,500,+1000.",
    )
    nonfinite: str | None = option(
        None,
        choices=("skip", "zero", "error", "pass"),
        help="What to do with a gradient that holds NaN or infinity; pass leaves it to the training.  "
        "[default: skip; for a SCRIPT pass]",
    )
    min_size: int = option(
        0,
        call=("study", "script"),
        minimum=0,
        show_default=False,
        metavar="N",
        help="Tensors with fewer elements go uncompressed.",
    )
    rules: tuple[str, ...] = option(
        (),
        names=("--rule",),
        only="script",
        metavar="GLOB=CODEC",
        help="For a SCRIPT: another codec for some tensors, as in bias=none; the first that fits counts.",
    )
    exchange: str = option(
        "allgather",
        only="script",
        call=("script",),
        choices=("allgather", "two-shot"),
        help="For a SCRIPT whose ranks train together: every payload to all, or to the rank that sums a piece up.",
    )
    levels: str | None = option(
        None,
        metavar="NAME",
        help="For such a SCRIPT: own for each rank's own levels, or common for those that fit the sum of all ranks' "
        "sketches.  [default: own]  With --quantize: where the weights' levels lie: optimal, uniform, xnor, or "
        "several with commas.  [default: optimal]",
    )
    compare_every: int = option(
        100,
        only="script",
        call=("script",),
        minimum=0,
        metavar="N",
        help="For such a SCRIPT: every so many steps all-reduce the gradients in float32 and bfloat16 beside it; "
        "0: never.",
    )
    is_module: bool = option(False, names=("-m",), help="SCRIPT is the name of a module, as in python -m.")
    eval_every: int | None = option(
        None,
        only="task",
        call=("study",),
        minimum=1,
        help="Steps between two tests.  [default: a tenth of the steps]",
    )
    shadow: int | None = option(
        None,
        only="task",
        call=("study",),
        minimum=1,
        metavar="K",
        help="With --kind neural: every K steps run the backward pass exactly too, and compare the weight gradients.",
    )
    measure: int | None = option(
        None,
        only="task",
        call=("study",),
        minimum=1,
        metavar="K",
        help="For a task: every K steps measure all that a sweep measures on the averaged gradient, for gtrace "
        "compare.",
    )
    output: Path | None = option(None, names=("-o", "--output"), help="Run log.  [default: TASK-CODEC.jsonl]")
    force: bool = option(False, help="Overwrite an existing run log.")
    as_json: bool = option(False, names=("--json",), help="Print a JSON summary instead of a table.")
