"""Tasks that are cheap enough to train with several seeds to the end: Fashion-MNIST and the Penn Treebank made small.

Their classes are imported only by experiments that train, since they need torch.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from gtrace.training.tasks import Recipe
from gtrace.training.tasks.images import FashionCNN
from gtrace.training.tasks.text import Words, treebank

#: every such image of the training set is kept
_EVERY = 10
#: part of the training text that is kept, and how many different words
_PART, _WORDS = 3, 2000


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


class SmallTreebank(Words):
    """The first third of the Penn Treebank's training text, 309,863 words, and one LSTM layer of 100 units.

    All but the third's 2,000 most frequent words are ``<unk>``, in the test, too. 2,000 batches of 20 windows pass over
    the third 4.5 times. 482,800 parameters.
    """

    name: ClassVar[str] = "small-ptb"
    recipe: ClassVar[Recipe] = Recipe(steps=2000, batch_size=20, lr=20.0, decay="cosine", clip=0.25)
    _width, _layers = 100, 1

    def __init__(self) -> None:
        train, test = (text.replace("\n", " <eos> ").split() for text in treebank())
        train = train[: len(train) // _PART]
        frequent = {word for word, _ in Counter(train).most_common(_WORDS)}
        super().__init__(*([word if word in frequent else "<unk>" for word in text] for text in (train, test)))
