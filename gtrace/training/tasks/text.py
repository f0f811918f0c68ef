"""Tasks on text: predict the next character of Shakespeare's sonnets, the last tenth of them held out."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gtrace.training.tasks.base import Batch, Evaluation, Recipe, Task
from gtrace.training.tasks.data import sample_file

if TYPE_CHECKING:
    from torch import Tensor

#: characters in a training window
LENGTH = 64


class _Network(nn.Module):
    """Characters to the scores of the next one."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 32)
        self.lstm = nn.LSTM(32, 128, batch_first=True)
        self.head = nn.Linear(128, characters)

    def forward(self, codes: Tensor) -> Tensor:
        """int64[n, t] -> float32[n, t, characters]."""
        states, _ = self.lstm(self.embedding(codes))
        scores: Tensor = self.head(states)
        return scores


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
        scores: Tensor = self.head(self.norm(x))
        return scores


class _Characters(Task):
    """The text and the loss, in nats per character; there is no accuracy."""

    def __init__(self) -> None:
        raw = sample_file("sonnets.txt").read_text(encoding="ascii")
        self._alphabet, codes = np.unique(np.array(list(raw)), return_inverse=True)
        text = torch.from_numpy(codes.astype(np.int64))
        held_out = len(text) // 10
        self._train, self._test = text[:-held_out], text[-held_out:]

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=lr)

    def batch(self, random: np.random.Generator, size: int) -> Batch:
        """Pieces of the text and the same pieces one character later, both int64[size, LENGTH]."""
        starts = torch.from_numpy(random.integers(len(self._train) - LENGTH, size=(size, 1)))
        places = starts + torch.arange(LENGTH)
        return self._train[places], self._train[places + 1]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy in nats per character."""
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class CharLSTM(_Characters):
    """One LSTM layer of 128 units."""

    name: ClassVar[str] = "char-lstm"
    recipe: ClassVar[Recipe] = Recipe(steps=200, batch_size=4, lr=4e-3, clip=1.0)

    def model(self) -> nn.Module:
        """A fresh network."""
        return _Network(len(self._alphabet))

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Nats per character over the held-out text, read in one piece."""
        scores = model(self._test[None, :-1])[0]
        return Evaluation(functional.cross_entropy(scores, self._test[1:]).item(), None)


class CharTransformer(_Characters):
    """Two blocks of attention, four heads each, on 64 features."""

    name: ClassVar[str] = "char-transformer"
    recipe: ClassVar[Recipe] = Recipe(steps=300, batch_size=8, lr=2e-3, clip=1.0)

    def model(self) -> nn.Module:
        """A fresh network."""
        return _Transformer(len(self._alphabet))

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Nats per character over the held-out text, in windows of their own."""
        count = (len(self._test) - 1) // LENGTH
        codes, targets = (self._test[k : k + count * LENGTH].view(count, LENGTH) for k in (0, 1))
        return Evaluation(functional.cross_entropy(model(codes).flatten(0, 1), targets.flatten()).item(), None)
