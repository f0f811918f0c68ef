"""Tasks on images: the UCI handwritten digits and Fashion-MNIST.

The digits, 1,797 images of 8x8 pixels, ship with gtrace; every fifth of them is held out. Fashion-MNIST, 60,000
training and 10,000 test images of 28x28 pixels in ten classes, does not. It is searched in the folder in the
environment variable ``GTRACE_FASHION_MNIST``, or else in the folder of Debian's package
``dataset-fashion-mnist``.
"""

from __future__ import annotations

import gzip
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gtrace.errors import TraceError
from gtrace.training.tasks import Batch, Evaluation, Recipe, Task, sample_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

VARIABLE = "GTRACE_FASHION_MNIST"
_INSTALLED = Path("/usr/share/datasets/fashion-mnist")
#: dimensions and their sizes -> the first bytes of such a file (IDX format, bytes)
IMAGES, LABELS = 0x00000803, 0x00000801
_TEST_BATCH = 500


def fashion_folder() -> Path:
    """The folder with the four files of Fashion-MNIST."""
    given = os.environ.get(VARIABLE)
    folder = Path(given) if given else _INSTALLED
    if not (folder / "train-images-idx3-ubyte.gz").is_file():
        raise TraceError(
            f"Fashion-MNIST: no train-images-idx3-ubyte.gz in {folder}; install Debian's dataset-fashion-mnist, or set "
            f"{VARIABLE} to the folder that holds it"
        )
    return folder


def read_idx(path: Path, magic: int) -> NDArray[np.uint8]:
    """The bytes of a gzipped IDX file in their shape."""
    try:
        with gzip.open(path) as file:
            data = file.read(1 << 27)
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: cannot be read ({error})") from None
    dimensions = magic & 0xFF
    shape = tuple(int(size) for size in np.frombuffer(data[4 : 4 + 4 * dimensions], ">u4"))
    start = 4 + 4 * dimensions
    if int.from_bytes(data[:4], "big") != magic or len(data) - start != int(np.prod(shape)):
        raise TraceError(f"{path}: not an IDX file of {dimensions} dimensions, or a damaged one")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


class _Images(Task):
    """Images and their classes, drawn with replacement."""

    _train: tuple[torch.Tensor, torch.Tensor]
    _test: tuple[torch.Tensor, torch.Tensor]
    #: of SGD
    _momentum: ClassVar[float] = 0.9
    _weight_decay: ClassVar[float] = 0.0

    def _inputs(self, images: torch.Tensor) -> torch.Tensor:
        return images

    def batch(self, random: np.random.Generator, size: int) -> Batch:
        chosen = torch.from_numpy(random.integers(len(self._train[1]), size=size))
        return self._inputs(self._train[0][chosen]), self._train[1][chosen]

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs, targets)

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=self._momentum, weight_decay=self._weight_decay)


class _Digits(_Images):
    """The data and the test of both networks."""

    #: of the pixels, in [0, 1], as the network takes them
    _shape: ClassVar[tuple[int, ...]]

    def __init__(self) -> None:
        table: NDArray[np.float32] = np.loadtxt(sample_file("digits.csv.gz"), delimiter=",", dtype=np.float32)
        images = torch.from_numpy(table[:, :-1] / np.float32(16)).reshape(self._shape)
        digits = torch.from_numpy(table[:, -1].astype(np.int64))
        held_out = torch.arange(len(digits)) % 5 == 4
        self._train = images[~held_out], digits[~held_out]
        self._test = images[held_out], digits[held_out]

    def evaluate(self, model: nn.Module) -> Evaluation:
        images, digits = self._test
        scores = model(images)
        right = (scores.argmax(1) == digits).double().mean()
        return Evaluation(functional.cross_entropy(scores, digits).item(), right.item())


class DigitsCNN(_Digits):
    """Two convolutions and two linear layers, 85,066 parameters."""

    name: ClassVar[str] = "digits-cnn"
    recipe: ClassVar[Recipe] = Recipe(steps=200, batch_size=16, lr=0.05, decay="cosine")
    _shape = (-1, 1, 8, 8)

    def model(self) -> nn.Module:
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


class DigitsMLP(_Digits):
    """Two hidden layers of 128 units with dropout, 26,122 parameters."""

    name: ClassVar[str] = "digits-mlp"
    recipe: ClassVar[Recipe] = Recipe(steps=300, batch_size=8, lr=2e-3)
    _shape = (-1, 64)

    def model(self) -> nn.Module:
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
        return torch.optim.Adam(model.parameters(), lr=lr)


class _Fashion(_Images):
    """Both networks' data and loss. Fewer ``test_images``, evenly spread, make a test faster and less precise."""

    def __init__(self, test_images: int | None = None) -> None:
        folder = fashion_folder()
        self._train, self._test = (
            (
                torch.from_numpy(read_idx(folder / f"{part}-images-idx3-ubyte.gz", IMAGES).copy()),
                torch.from_numpy(read_idx(folder / f"{part}-labels-idx1-ubyte.gz", LABELS).astype(np.int64)),
            )
            for part in ("train", "t10k")
        )
        there = len(self._test[1])
        if test_images is not None and test_images < there:
            chosen = torch.arange(test_images) * there // test_images
            self._test = self._test[0][chosen], self._test[1][chosen]
        sample = self._train[0][::10].float()
        self._mean, self._scale = float(sample.mean()), float(sample.std())

    def _inputs(self, images: torch.Tensor) -> torch.Tensor:
        return ((images.float() - self._mean) / self._scale)[:, None]

    def evaluate(self, model: nn.Module) -> Evaluation:
        loss = right = 0.0
        for images, classes in zip(*(torch.split(part, _TEST_BATCH) for part in self._test), strict=True):
            scores = model(self._inputs(images))
            loss += functional.cross_entropy(scores, classes, reduction="sum").item()
            right += int((scores.argmax(1) == classes).sum())
        count = len(self._test[1])
        return Evaluation(loss / count, right / count)


class _Block(nn.Module):
    """Two convolutions and a shortcut without parameters: every other pixel, and zeros as further channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self._stride, self._more = stride, outputs - inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        shortcut = x[:, :, :: self._stride, :: self._stride]
        return functional.relu(y + functional.pad(shortcut, (0, 0, 0, 0, 0, self._more)))


class ResNet(nn.Module):
    """The residual networks of CIFAR: three stages of width 16, 32 and 64, 6 ``blocks`` + 2 layers in all.

    1 block a stage makes ResNet-8, 5 ResNet-32, 18 ResNet-110.
    """

    def __init__(self, channels: int = 1, blocks: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        stages = ((16, 16, 1), (16, 32, 2), (32, 64, 2))
        self.blocks = nn.Sequential(
            *(
                _Block(outputs if k else inputs, outputs, 1 if k else stride)
                for inputs, outputs, stride in stages
                for k in range(blocks)
            )
        )
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, channels, H, W) to scores (N, 10)."""
        features = self.blocks(functional.relu(self.bn1(self.conv1(x))))
        return self.fc(features.mean((2, 3)))


class FashionResNet8(_Fashion):
    """ResNet-8 of widths 16, 32 and 64, 75,002 parameters: the least of the family that ALQ was tested on."""

    name: ClassVar[str] = "fashion-resnet8"
    recipe: ClassVar[Recipe] = Recipe(steps=500, batch_size=32, lr=0.1, decay="drop")
    #: ALQ, Table 3
    _weight_decay = 1e-4

    def model(self) -> nn.Module:
        return ResNet()


def mqgrad_network(conv1: nn.Module, width: int, last: int) -> nn.Module:
    """MQGrad's five layers: ``conv1`` to 64 channels of 28 x 28, another convolution, and three linear layers.

    These have ``width``, ``last`` and 10 outputs.
    """
    layers = OrderedDict[str, nn.Module](
        conv1=conv1,
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(64, 64, 5, padding=2),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64 * 7 * 7, width),
        relu3=nn.ReLU(),
        fc2=nn.Linear(width, last),
        relu4=nn.ReLU(),
        fc3=nn.Linear(last, 10),
    )
    return nn.Sequential(layers)


class FashionCNN(_Fashion):
    """MQGrad's five-layer network with smaller linear layers: 941,386 parameters, nine tenths of them in these."""

    name: ClassVar[str] = "fashion-cnn"
    recipe: ClassVar[Recipe] = Recipe(steps=500, batch_size=32, lr=0.05)
    _momentum = 0.0

    def model(self) -> nn.Module:
        return mqgrad_network(nn.Conv2d(1, 64, 5, padding=2), 256, 128)
