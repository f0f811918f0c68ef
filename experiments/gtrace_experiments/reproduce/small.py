"""A task that is cheap enough to train with several seeds to the end: Fashion-MNIST made small.

Its class is imported only by experiments that train, since it needs torch.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from gtrace.training.tasks import Recipe
from gtrace.training.tasks.images import FashionCNN

#: every such image of the training set is kept
_EVERY = 10


class SmallFashion(FashionCNN):
    """6,000 of Fashion-MNIST's images, 7 x 7 pixels of 4 x 4 each, and a network of 75,178 parameters.

    A thousand batches of 32 pass over them five times. The test has all 10,000 images.
    """

    name: ClassVar[str] = "small-fashion"
    recipe: ClassVar[Recipe] = Recipe(steps=1000, batch_size=32, lr=0.05, decay="cosine")

    def __init__(self) -> None:
        super().__init__()
        images, classes = self._train
        self._train = images[::_EVERY], classes[::_EVERY]

    def _inputs(self, images: torch.Tensor) -> torch.Tensor:
        return functional.avg_pool2d(super()._inputs(images), 4)

    def model(self) -> nn.Module:
        """A fresh network."""
        layers = OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(1, 32, 3, padding=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3, padding=1),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * 3 * 3, 96),
            relu3=nn.ReLU(),
            fc2=nn.Linear(96, 10),
        )
        return nn.Sequential(layers)

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """SGD with momentum and weight decay (ALQ, Table 3)."""
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
