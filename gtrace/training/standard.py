"""Short seeded trainings of built-in tasks that leave nothing but their gradients at chosen steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from gtrace.trace import create_trace
from gtrace.training.tasks import load_task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def record_task(name: str, traces: Mapping[Path, Sequence[int]], *, batch_size: int, seed: int) -> None:
    """Train a built-in task as its recipe says, and write what one worker would send.

    Gradients are taken before clipping, float32, under the parameters' names. One thread computes, so the result does
    not depend on how many there are; on another processor or with another PyTorch it differs in the last digits.

    Args:
        name: of the task.
        traces: new trace -> its optimizer steps, the first of all is 0; training ends with the last.
        batch_size: samples a step.
        seed: of the weights and of the batches.

    Raises:
        UsageError: no such task, or no PyTorch.
        TraceError: its data are missing.
    """
    task = load_task(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
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
    finally:
        torch.set_num_threads(threads)
