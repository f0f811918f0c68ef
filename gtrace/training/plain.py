"""Training without a codec, step by step, to inspect or record gradients."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gtrace.trace import create_trace
from gtrace.training.tasks import Batch, Task, load_task
from gtrace.types import Key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import nn


class PlainTraining:
    """One worker trains a task, with the same model and batches as the first worker of a study with this seed.

    Args:
        task: the task, with its own optimizer.
        seed: seed of the model and the batches.
        batch_size: samples in a batch; by default the task's.

    Attributes:
        model: the model after the steps so far.
        optimizer: its optimizer.
        steps: how many.
    """

    def __init__(self, task: Task, seed: int = 0, batch_size: int | None = None) -> None:
        self._task, self._seed = task, seed
        self._batch_size = task.recipe.batch_size if batch_size is None else batch_size
        self.steps = 0
        self.model = fresh_model(task, seed)
        self.optimizer = task.optimizer(self.model, task.recipe.lr)

    def step(self, lr: float | None = None, batches: int = 1) -> list[dict[str, NDArray[np.float32]]]:
        """One step of the optimizer with the gradient of one batch.

        Args:
            lr: learning rate; by default the task's first.
            batches: number of batches with returned gradients; the step uses the first one's.

        Returns:
            for each batch, tensor -> float32[n], copies.
        """
        found = []
        with one_thread():
            # The first batch comes last, so the optimizer finds its gradient.
            for worker in reversed(range(batches)):
                with seeded_batch(self._task, self._seed, self.steps, worker, self._batch_size) as batch:
                    self.optimizer.zero_grad(set_to_none=True)
                    self._task.loss(self.model, batch).backward()  # type: ignore[no-untyped-call]
                named = self.model.named_parameters()
                found.append({name: p.grad.cpu().numpy().reshape(-1).copy() for name, p in named if p.grad is not None})
            for group in self.optimizer.param_groups:
                group["lr"] = self._task.recipe.lr if lr is None else lr
            self.optimizer.step()
        self.steps += 1
        return found[::-1]

    def state_dict(self) -> dict[str, Any]:
        """What later steps depend on."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "steps": self.steps}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict`, with the same task, seed and size of batches."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.steps = saved["steps"]


def fresh_model(task: Task, seed: int) -> nn.Module:
    """The task's model with the initial weights of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(Key.derive(seed, tensor="model", role="sample").low)
        return task.model().to(task.device)


@contextlib.contextmanager
def seeded_batch(task: Task, seed: int, step: int, worker: int, size: int) -> Iterator[Batch]:
    """One worker's batch; inside, torch's generator uses the batch's seed.

    One key for the batch and for dropout: both are the same in every run, with any codec.
    """
    key = Key.derive(seed, tensor="batch", step=step, worker=worker, role="sample")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key.low)
        inputs, targets = task.batch(np.random.default_rng(key), size)
        yield inputs.to(task.device), targets.to(task.device)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: these models are too small for more, and sums would depend on the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def record_task(name: str, traces: Mapping[Path, Sequence[int]], *, batch_size: int, seed: int) -> None:
    """Train a built-in task with its recipe, and record the gradients of one worker.

    Gradients are taken before clipping, float32, under the parameters' names. One thread computes, so the result does
    not depend on the number of threads; another processor or another PyTorch changes the last digits.

    Args:
        traces: new trace -> its optimizer steps, the first of all is 0; training ends with the last.
    """
    task = load_task(name)
    with one_thread():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = task.model()
        optimizer = task.optimizer(model, task.recipe.lr)
        random = np.random.default_rng(seed)
        writers = {path: create_trace(path) for path in traces}
        for step in range(1 + max(max(steps) for steps in traces.values())):
            optimizer.zero_grad()
            loss = task.loss(model, task.batch(random, batch_size))
            loss.backward()  # type: ignore[no-untyped-call]
            for path, steps in traces.items():
                if step in steps:
                    for key, parameter in model.named_parameters():
                        if parameter.grad is not None:
                            writers[path].append(step, key, parameter.grad.numpy())
                    writers[path].commit(step, loss=loss.item(), lr=task.recipe.lr)
            if task.recipe.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), task.recipe.clip)
            optimizer.step()
        for writer in writers.values():
            writer.close()
