"""Training tasks (a model by seed, batches by key, a loss, an evaluation), and the built-in ones by name.

Only :func:`load_task` imports torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from gtrace.errors import TraceError, UsageError, suggest

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

Batch: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a task is trained by default.

    Attributes:
        steps: number of optimizer steps.
        batch_size: samples per worker and step.
        lr: learning rate of the first step.
        decay: ``cosine`` lets the learning rate fall to zero over the steps, ``drop`` to a tenth after each part of
            them in ``drops``; ``none`` keeps it.
        clip: largest norm of the averaged gradient; None for no clipping.
        drops: for ``drop``, rising parts of the steps, in (0, 1).
    """

    steps: int
    batch_size: int
    lr: float
    decay: Literal["none", "cosine", "drop"] = "none"
    clip: float | None = None
    drops: tuple[float, ...] = (0.75,)

    def rate(self, lr: float, step: int, steps: int) -> float:
        """The learning rate of a step, from that of the first one."""
        if self.decay == "drop":
            return lr * 0.1 ** sum(step >= part * steps for part in self.drops)
        return lr if self.decay == "none" else lr * (1 + math.cos(math.pi * step / steps)) / 2


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model's quality on the held-out data.

    Attributes:
        loss: mean test loss.
        accuracy: fraction of right answers; None if the task has no accuracy.
    """

    loss: float
    accuracy: float | None


class Task(ABC):
    """A model, its data and how it is trained. Random numbers come only from the arguments."""

    name: ClassVar[str]
    recipe: ClassVar[Recipe]
    #: where simulated workers compute, as torch names it; codecs work on the processor
    device: ClassVar[str] = "cpu"

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model; the caller has seeded torch's generator."""

    @abstractmethod
    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """The optimizer of a model."""

    @abstractmethod
    def batch(self, random: np.random.Generator, size: int) -> Batch:
        """``size`` independently drawn training samples: inputs and targets."""

    @abstractmethod
    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean training loss of a batch, a scalar that can be differentiated, from what the model says about it."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The criterion of the model's outputs."""
        return self.criterion(model(batch[0]), batch[1])

    @abstractmethod
    def evaluate(self, model: nn.Module) -> Evaluation:
        """Test a model; it is in evaluation mode and records no gradients."""


#: name -> module and class, and one line about it
_TASKS = {
    "digits-cnn": ("images:DigitsCNN", "convolutional network on the UCI handwritten digits, SGD with momentum"),
    "digits-mlp": ("images:DigitsMLP", "multilayer perceptron with dropout on the UCI handwritten digits, Adam"),
    "char-lstm": ("text:CharLSTM", "character-level LSTM on Shakespeare's sonnets, AdamW, clipped gradients"),
    "char-transformer": (
        "text:CharTransformer",
        "character-level transformer on Shakespeare's sonnets, AdamW, clipped gradients",
    ),
    "word-lstm": ("text:WordLSTM", "word-level LSTM on Shakespeare's sonnets, SGD, clipped gradients"),
    "ptb-lstm": ("text:TreebankLSTM", "word-level LSTM on the Penn Treebank (not included), SGD, clipped gradients"),
    "fashion-resnet8": ("images:FashionResNet8", "ResNet-8 on Fashion-MNIST (not included), SGD with momentum"),
    "fashion-cnn": ("images:FashionCNN", "convolutional network with large linear layers on Fashion-MNIST, SGD"),
}


def require_torch() -> None:
    """Raise UsageError unless PyTorch is installed; imports nothing."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError("training needs PyTorch, which is not installed: pip install torch")


def task_names() -> tuple[str, ...]:
    """All built-in tasks."""
    return tuple(_TASKS)


def describe_task(name: str) -> str:
    """One line about a task, if there is one of that name."""
    if name not in _TASKS:
        raise UsageError(f"no task '{name}'; {suggest(name, _TASKS)}")
    return _TASKS[name][1]


def load_task(name: str) -> Task:
    """Build a task; its data are read here.

    Raises:
        UsageError: unknown (the nearest names are suggested), or PyTorch is not installed.
        TraceError: its data are missing.
    """
    describe_task(name)
    require_torch()
    module, _, kind = _TASKS[name][0].partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), kind)()


_PACKAGE = Path(__file__).resolve().parents[2]
#: where the shipped samples are: in an installation inside the package, in a checkout beside it
_SAMPLES = (_PACKAGE / "workflows" / "samples", _PACKAGE.parent / "samples")


def sample_file(name: str) -> Path:
    """The path of a shipped script, or data file."""
    for folder in _SAMPLES:
        for path in (folder / "data" / name, folder / name):
            if path.is_file():
                return path
    looked = " and ".join(map(str, _SAMPLES))
    raise TraceError(f"{name}: the samples are missing (looked in {looked}); install gtrace again")
