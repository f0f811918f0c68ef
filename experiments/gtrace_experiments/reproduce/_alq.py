"""What the experiments on adaptive levels (ALQ, AMQ) have in common: their codecs, and one uncompressed training."""

from __future__ import annotations

import dataclasses
import io
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from gtrace.report.files import put
from gtrace_experiments.reproduce._training import small_task

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path as FilePath

    from numpy.typing import NDArray

    from gtrace.trace import Trace
    from gtrace.training import Task
    from gtrace_experiments.reproduce.experiment import Context

PAPER = "Faghri et al., Adaptive Gradient Quantization for Data-Parallel SGD, NeurIPS 2020"

#: the paper's name -> gtrace's
METHODS = {
    "ALQ": "alq",
    "ALQ-N": "alq-n",
    "AMQ": "amq",
    "AMQ-N": "amq-n",
    "QSGDinf": "qsgdinf",
    "TRN": "terngrad",
    "NUQSGD": "nuqsgd",
}
ADAPTIVE = ("ALQ", "ALQ-N", "AMQ", "AMQ-N")
LAW_NOTE = (
    "ALQ and AMQ are fitted to the gradients themselves. The paper fits them to truncated normals with the gradients' "
    "mean and deviation; alq-fig5 and alq-fig6 show what that changes."
)
GRID_NOTE = "Grids have no level at 0, as in the paper's reference code: 3 bits are plus and minus four magnitudes."
#: shares of the training after which the learning rate falls to a tenth, as 40K and 60K of 80K iterations
DROPS = (0.5, 0.75)


def spec(
    method: str,
    bits: int = 3,
    bucket: int | None = 8192,
    more: str = "scope=model,tail=exact",
    law: str = "",
    *,
    zero: bool = False,
) -> str:
    """A codec in the paper's setting: buckets run across layers, and a short last one goes in full precision.

    Args:
        method: the paper's name, or ``none``.
        bits: of all but TRN, which has three levels.
        bucket: its size; None for the whole model.
        more: further parameters.
        law: that levels are fitted to, for adaptive methods; empty for the gradients themselves.
        zero: whether a level is 0, of all but TRN, which has one.
    """
    if method == "none":
        return method
    first = "" if method == "TRN" else f"bits={bits},zero={str(zero).lower()},"
    fitted = f",law={law}" if law else ""
    return f"{METHODS[method]}:{first}bucket_size={'none' if bucket is None else bucket},{more}{fitted}"


def paper_law(method: str) -> str:
    """The law that the paper fits a method's levels to: one normal of averaged moments for ALQ-N and AMQ-N."""
    return "truncnorm-mean" if method.endswith("-N") else "truncnorm"


@dataclass(frozen=True, slots=True)
class Path:
    """An uncompressed training by one worker, with gradients of several batches at some of its steps.

    Attributes:
        workers: a trace for each batch; the training goes on with the first one's gradient.
        at: the steps at which gradients were kept, rising.
        steps: all of the training.
        drops: steps at which the learning rate fell.
        refits: kept steps at which the paper would fit levels: 100, 2,000 and every 10,000 of 80,000, in proportion.
        data: what was trained on, in words.
    """

    workers: tuple[Trace, ...]
    at: tuple[int, ...]
    steps: int
    drops: tuple[int, ...]
    refits: tuple[int, ...]
    data: str

    def gradients(self, step: int) -> NDArray[np.float32]:
        """The whole model's gradient of every batch, float32[batches, n]."""
        return np.stack([np.concatenate([t.read(info.name, step) for info in t.tensors]) for t in self.workers])


def plain_path(context: Context, seed: int | None = None) -> Path:
    """The training that several experiments look at; made once in a process."""
    chosen = dataclasses.replace(context, seed=context.seed if seed is None else seed)
    return _path(chosen) if context.costs is None else _path.__wrapped__(chosen)


@lru_cache(maxsize=4)
def _path(context: Context) -> Path:
    task, data = small_task(context, "CIFAR-10 and ImageNet")
    steps, batches = (40, 2) if context.quick else (600, 4)
    size, apart = task.recipe.batch_size, 5 if context.quick else 15
    if context.full is not None:
        size = context.full.settings["batch_size"]
        if context.costs is not None:
            context.costs.append(path_cost(task, context.full.steps, size))
        if not context.quick:
            steps, apart = context.full.steps, context.full.steps // 40
    drops = tuple(round(share * steps) for share in DROPS)
    at = sorted({0, 1, 2, 3, steps - 1, *range(5, steps, apart)})
    asked = (0,) if context.quick else (0, steps // 40, *range(steps // 8, steps, steps // 8))
    refits = tuple(min(at, key=lambda step: abs(step - wanted)) for wanted in asked)
    place = context.kept(f"path-{task.name}", (context.seed, steps, size, at, batches))
    workers = record(task, context.seed, steps, at, drops, batch_size=size, batches=batches, place=place)
    return Path(workers, tuple(at), steps, drops, refits, data)


def path_cost(task: Task, steps: int, batch_size: int) -> float:
    """Seconds of CPU of an uncompressed training, by its second step."""
    from gtrace.training import PlainTraining

    training = PlainTraining(task, 0, batch_size)
    training.step()
    start = time.process_time()
    training.step()
    return steps * (time.process_time() - start)


def record(
    task: Task,
    seed: int,
    steps: int,
    at: Sequence[int],
    drops: Sequence[int],
    *,
    batch_size: int,
    batches: int,
    place: FilePath | None = None,
) -> tuple[Trace, ...]:
    """Train one worker without compression, and keep gradients of several batches at some of the steps.

    Args:
        task: what is trained, with its own optimizer and first learning rate.
        seed: of the model and the batches.
        steps: of the optimizer.
        at: steps at which gradients are kept.
        drops: steps at which the learning rate falls to a tenth.
        batch_size: samples in a batch.
        batches: how many at those steps; the training goes on with the first.
        place: folder where the gradients and the state of the training are kept after each of those steps, so that an
            interrupted one goes on; None keeps them in memory.

    Returns:
        a trace in memory for each of the batches.
    """
    from gtrace.trace import Trace
    from gtrace.training import PlainTraining, checkpoint

    training = PlainTraining(task, seed, batch_size)
    kept: list[dict[str, dict[int, NDArray[np.float32]]]] = [{} for _ in range(batches)]
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
        if (place / "training.checkpoint").exists():
            training.load_state_dict(checkpoint.load(place / "training.checkpoint"))
    for step in range(training.steps, steps):
        lr = task.recipe.lr * 0.1 ** sum(step >= drop for drop in drops)
        gradients = training.step(lr, batches if step in at else 1)
        if step not in at:
            continue
        if place is None:
            _keep(kept, step, gradients)
            continue
        with io.BytesIO() as file:
            named = {f"{k}/{name}": values for k, found in enumerate(gradients) for name, values in found.items()}
            np.savez(file, allow_pickle=False, **named)
            put(place / f"{step}.npz", file.getvalue())
        checkpoint.save(place / "training.checkpoint", training.state_dict())
    if place is not None:
        for step in at:
            with np.load(place / f"{step}.npz", allow_pickle=False) as arrays:
                batched: list[dict[str, NDArray[np.float32]]] = [{} for _ in range(batches)]
                for key in arrays.files:
                    batch, _, name = key.partition("/")
                    batched[int(batch)][name] = arrays[key]
            _keep(kept, step, batched)
    return tuple(Trace.from_arrays(tensors) for tensors in kept)


def _keep(
    kept: list[dict[str, dict[int, NDArray[np.float32]]]], step: int, gradients: list[dict[str, NDArray[np.float32]]]
) -> None:
    for tensors, found in zip(kept, gradients, strict=True):
        for name, values in found.items():
            tensors.setdefault(name, {})[step] = values
