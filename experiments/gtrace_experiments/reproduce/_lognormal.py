"""What the experiments on near-lognormal gradients have in common: how they record and how they train."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from gtrace_experiments.reproduce._training import Runs, train_each

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gtrace.trace import Trace
    from gtrace.training import Task
    from gtrace_experiments.reproduce.experiment import Check, Context

PAPER = "Chmiel et al., Neural gradients are near-lognormal, ICLR 2021"
#: the trainings of these experiments: one worker, inside whose backward pass gradients are compressed
TRAINING = "one worker with 16 images, 150 steps, learning rate 0.05, laws fitted every 20 steps"
#: those whose ends are compared, with their settings
TO_THE_END = (
    "one worker with 16 images, 400 steps, learning rate 0.05 falling to 0 by a cosine, laws fitted every 20 steps, 3 "
    "seeds"
)
LONGER = {"steps": 400, "seeds": 3}
#: how a layer's values are scaled
RULES = {"max": "the paper's scale", "mean": "the scale of the authors' code", "best": "our scale"}
#: what :data:`RULES` mean, as notes of a page
RULE_NOTES = {
    "max": "The paper's scale (scale=max) puts the largest value that a fitted lognormal law expects below the largest "
    "number of the format.",
    "mean": "The scale of the authors' code (scale=mean) is 2^(-mean log2|g| - 3).",
    "best": "Our scale (scale=best) is the power of two with the least expected squared error for the values "
    "themselves, chosen at every step.",
}


def by_rule(found: Mapping[str, Sequence[Check]]) -> tuple[tuple[Check, ...], tuple[str, ...]]:
    """The same claims under several rules for a scale: all checks, and notes that say which failed, claim or rule.

    Args:
        found: of each of :data:`RULES` that was tried, the checks, in the same order.
    """
    checks = tuple(
        dataclasses.replace(check, claim=f"{check.claim} ({RULES[rule]})")
        for same in zip(*found.values(), strict=True)
        for rule, check in zip(found, same, strict=True)
    )
    notes = []
    for same in zip(*found.values(), strict=True):
        held = [RULES[rule] for rule, check in zip(found, same, strict=True) if check.holds]
        failed = [RULES[rule] for rule, check in zip(found, same, strict=True) if not check.holds]
        claim = f"The claim: {same[0].claim}"
        if not failed:
            notes.append(f"Holds under every scale. {claim}.")
        elif not held:
            notes.append(f"Fails under every scale: the claim fails and not a scale. {claim}.")
        else:
            blame = (
                "the scale fails and not the claim"
                if RULES["best"] in held
                else "the claim depends on the paper's scale"
            )
            notes.append(f"Holds with {' and '.join(held)}, fails with {' and '.join(failed)}: {blame}. {claim}.")
    return checks, tuple(notes)


def neural_trace(task: Task, seed: int, at: Iterable[int], batch_size: int | None = None) -> Trace:
    """Train up to the last of some steps without compression, and record the gradients of layer outputs there.

    Args:
        task: what is trained, with its own optimizer and learning rate.
        seed: of the model and the batches.
        at: recorded steps.
        batch_size: samples in a step; by default the task's.

    Returns:
        a trace in memory of the layers that have a matrix of weights, as convolutions do, without the last one.
    """
    import gtrace
    from gtrace.trace import Trace
    from gtrace.training import PlainTraining

    wanted = sorted(at)
    training = PlainTraining(task, seed, batch_size)
    layers = [
        name
        for name, module in training.model.named_modules()
        if any(p.dim() > 1 for p in module.parameters(recurse=False))
    ][:-1]
    with tempfile.TemporaryDirectory(prefix="gtrace-") as folder:
        path = Path(folder) / "neural.zarr"
        steps, tensors = ",".join(map(str, wanted)), [f"{name}*" for name in layers]
        with gtrace.capture.record(
            training.model, training.optimizer, path, steps=steps, kind="neural", tensors=tensors
        ):
            for _ in range(wanted[-1] + 1):
                training.step()
        with gtrace.open_trace(path) as kept:
            values = {
                info.name: {
                    int(step): kept.read(info.name, int(step), kind="neural")
                    for step in kept.steps(info.name, kind="neural")
                }
                for info in kept.tensors
            }
    return Trace.from_arrays(values, kind="neural")


def train_neural(
    context: Context, task: Task, codecs: Mapping[str, str], *, steps: int = 150, seeds: int = 2
) -> dict[str, Runs]:
    """Train as :data:`TRAINING` says with neural gradients compressed by each codec; label -> runs."""
    return train_each(
        context,
        task,
        codecs,
        kind="neural",
        seeds=1 if context.quick else seeds,
        steps=3 if context.quick else steps,
        batch_size=16,
        lr=0.05,
        refit="0,10,+20",
    )
