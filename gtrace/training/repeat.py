"""The command line that repeats a study."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from gtrace.codecs.assignment import CodecTable
from gtrace.training.policy import PolicySpec
from gtrace.training.tasks import task_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.codecs.assignment import Coding
    from gtrace.training.settings import Settings
    from gtrace.training.weights import WeightLevels


def repeat_command(
    task: str,
    codecs: Sequence[Coding],
    settings: Settings,
    seeds: Sequence[int],
    policies: Sequence[PolicySpec],
    weights: Sequence[WeightLevels],
) -> str:
    """As one would type it; empty for a task that is not built in, a table from no file, and mixed levels of weights.

    Args:
        task: its name.
        codecs: the exact one first.
        settings: of all runs.
        seeds: in a row.
        policies: that choose bits.
        weights: levels.
    """
    tables = [item for item in codecs if isinstance(item, CodecTable)]
    named = [str(item) for item in codecs[1:] if item not in tables] or ([] if tables else [str(codecs[0])])
    counts = {item.count for item in weights}
    if task not in task_names() or len(counts) > 1 or not all(item.source for item in tables):
        return ""
    options: dict[str, object] = {
        **({} if not named else {"--codec": named[0]} if len(named) == 1 else {"--compare": ",".join(named)}),
        "--task": task,
        "--workers": settings.workers,
        "--steps": settings.steps,
        "--batch-size": settings.batch_size,
        "--lr": settings.lr,
        "--seed": settings.seed,
        "--refit": settings.refit,
        "--nonfinite": settings.nonfinite,
        "--eval-every": settings.eval_every,
    }
    if len(seeds) > 1:
        options["--seeds"] = len(seeds)
    for name in ("optimizer", "clip"):
        if getattr(settings, name):
            options[f"--{name}"] = getattr(settings, name)
    if weights:
        placements = ",".join(item.placement for item in weights)
        options |= {"--quantize": "model", "--levels": placements, "--weight-levels": counts.pop()}
    if settings.network is not None:
        network = settings.network
        options |= {
            "--network": f"{network.bandwidth:.12g}bit/s",
            "--latency": f"{network.latency:.12g}s",
            "--topology": network.topology,
            **({} if network.compute is None else {"--compute-time": f"{network.compute:.12g}s"}),
        }
    if settings.min_size:
        options["--min-size"] = settings.min_size
    if settings.down:
        options["--down"] = settings.down
    if settings.kind != "weight":
        options |= {"--kind": settings.kind, "--layers": settings.layers}
    for name in ("shadow", "measure"):
        if getattr(settings, name) is not None:
            options[f"--{name}"] = getattr(settings, name)
    chosen = [] if tuple(policies) == (PolicySpec(),) else [("--policy", policy) for policy in policies]
    pairs = [*(("--plan", item.source) for item in tables), *options.items(), *chosen]
    return shlex.join(["gtrace", "train", *(str(word) for pair in pairs for word in pair)])
