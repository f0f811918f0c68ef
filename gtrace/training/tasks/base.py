"""What a training task is: a model by seed, batches by key, a loss, an evaluation; and where the samples' data are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from gtrace.errors import TraceError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

Batch: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a task is trained unless the user says otherwise.

    Attributes:
        steps: of the optimizer.
        batch_size: samples that one worker takes in a step.
        lr: learning rate of the first step.
        decay: ``cosine`` lets the learning rate fall to zero over the steps, ``drop`` to a tenth after three quarters
            of them; ``none`` keeps it.
        clip: largest norm of the averaged gradient; None for no clipping.
    """

    steps: int
    batch_size: int
    lr: float
    decay: Literal["none", "cosine", "drop"] = "none"
    clip: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How good a model is on the held-out data.

    Attributes:
        loss: mean test loss.
        accuracy: fraction of right answers; None where the task has no such thing.
    """

    loss: float
    accuracy: float | None


class Task(ABC):
    """A model, its data and how it is trained. Nothing here draws random numbers but from what it is given."""

    name: ClassVar[str]
    recipe: ClassVar[Recipe]

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model; torch's generator was seeded by the caller."""

    @abstractmethod
    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """The optimizer of a model."""

    @abstractmethod
    def batch(self, random: np.random.Generator, size: int) -> Batch:
        """``size`` independently drawn training samples: inputs and targets."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Mean training loss of a batch, a scalar that can be differentiated."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> Evaluation:
        """Test a model, which is in evaluation mode and records no gradients."""


_PACKAGE = Path(__file__).resolve().parents[2]
_FOLDERS = (_PACKAGE / "workflows" / "samples" / "data", _PACKAGE.parent / "samples" / "data")


def sample_file(name: str) -> Path:
    """The path of a shipped data file.

    Raises:
        TraceError: this installation lacks it.
    """
    for folder in _FOLDERS:
        if (folder / name).is_file():
            return folder / name
    looked = " and ".join(str(folder) for folder in _FOLDERS)
    raise TraceError(f"{name}: the data of the samples are missing (looked in {looked}); install gtrace again")
