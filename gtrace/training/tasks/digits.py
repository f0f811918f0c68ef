"""Tasks on the UCI handwritten digits: 1,797 images of 8x8 pixels, every fifth of them held out."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gtrace.training.tasks.base import Batch, Evaluation, Recipe, Task, sample_file

if TYPE_CHECKING:
    from numpy.typing import NDArray


class _Digits(Task):
    """What both networks share: the data, the loss and the test."""

    def __init__(self) -> None:
        table: NDArray[np.float32] = np.loadtxt(sample_file("digits.csv.gz"), delimiter=",", dtype=np.float32)
        images = torch.from_numpy(self.shaped(table[:, :-1] / np.float32(16)))
        digits = torch.from_numpy(table[:, -1].astype(np.int64))
        held_out = torch.arange(len(digits)) % 5 == 4
        self._train = images[~held_out], digits[~held_out]
        self._test = images[held_out], digits[held_out]

    @abstractmethod
    def shaped(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32[n, 64] pixels in [0, 1], in the shape that the network takes."""

    def batch(self, random: np.random.Generator, size: int) -> Batch:
        """Images and their digits, drawn with replacement."""
        chosen = torch.from_numpy(random.integers(len(self._train[1]), size=size))
        return self._train[0][chosen], self._train[1][chosen]

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Cross-entropy."""
        return functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Cross-entropy and accuracy on the held-out images."""
        images, digits = self._test
        scores = model(images)
        right = (scores.argmax(1) == digits).double().mean()
        return Evaluation(functional.cross_entropy(scores, digits).item(), right.item())


class DigitsCNN(_Digits):
    """Two convolutions and two linear layers, 85,066 parameters."""

    name: ClassVar[str] = "digits-cnn"
    recipe: ClassVar[Recipe] = Recipe(steps=200, batch_size=16, lr=0.05, decay="cosine")

    def shaped(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32[n, 1, 8, 8]."""
        return pixels.reshape(-1, 1, 8, 8)

    def model(self) -> nn.Module:
        """A fresh network."""
        layers = OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(1, 32, 3, padding=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3, padding=1),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * 4 * 4, 64),
            relu3=nn.ReLU(),
            fc2=nn.Linear(64, 10),
        )
        return nn.Sequential(layers)

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


class DigitsMLP(_Digits):
    """Two hidden layers of 128 units with dropout, 26,122 parameters."""

    name: ClassVar[str] = "digits-mlp"
    recipe: ClassVar[Recipe] = Recipe(steps=300, batch_size=8, lr=2e-3)

    def shaped(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32[n, 64]."""
        return pixels

    def model(self) -> nn.Module:
        """A fresh network."""
        layers = OrderedDict[str, nn.Module](
            fc1=nn.Linear(64, 128),
            relu1=nn.ReLU(),
            dropout=nn.Dropout(0.1),
            fc2=nn.Linear(128, 128),
            relu2=nn.ReLU(),
            fc3=nn.Linear(128, 10),
        )
        return nn.Sequential(layers)

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(model.parameters(), lr=lr)
