"""Gradients from formulas, for machines without PyTorch: what linear layers of such shapes and batches would have.

The gradient of a linear layer is a sum over the batch of outer products of errors and activations. Both are drawn here:
activations are rectified normal, errors have heavy tails, neurons have gains of their own, and late in training few
samples of a batch have most of the error. That gives matrices with the low rank, the heavy tails and the rows of
different size that trained networks show; it is no network, and results say so.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from gtrace.trace import create_trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

#: task -> tensor -> shape; of an embedding only the rows of a batch's words have gradients
LAYERS: dict[str, dict[str, tuple[int, int]]] = {
    "digits-cnn": {
        "conv1.weight": (32, 9),
        "conv2.weight": (64, 288),
        "fc1.weight": (64, 1024),
        "fc2.weight": (10, 64),
    },
    "char-lstm": {
        "embedding.weight": (61, 32),
        "lstm.weight_ih": (512, 32),
        "lstm.weight_hh": (512, 128),
        "head.weight": (61, 128),
    },
    "char-transformer": {
        "embedding.weight": (61, 64),
        "attention.qkv": (192, 64),
        "attention.out": (64, 64),
        "up.weight": (256, 64),
        "down.weight": (64, 256),
        "head.weight": (61, 64),
    },
}


def make_trace(task: str, path: Path, steps: Sequence[int], *, late: bool, batch_size: int, seed: int) -> None:
    """Write a trace of made gradients, float32."""
    rng = np.random.default_rng([seed, zlib.crc32(task.encode()), late])
    spread = 2.0 if late else 0.5
    gains = {
        name: (rng.lognormal(-4, 1, (rows, 1)), rng.lognormal(0, 0.7, (1, columns)))
        for name, (rows, columns) in LAYERS[task].items()
    }
    with create_trace(path) as writer:
        for step in steps:
            for name, (rows, columns) in LAYERS[task].items():
                weight = rng.lognormal(0, spread, (batch_size, 1))
                errors = weight * rng.standard_t(4, (batch_size, rows))
                if name.startswith("embedding"):
                    errors *= rng.random((batch_size, rows)) < 1 / batch_size
                active = np.maximum(rng.normal(0.2, 1, (batch_size, columns)), 0)
                out, inside = gains[name]
                gradient: NDArray[np.float64] = out * (errors.T @ active) * inside / weight.sum()
                writer.append(step, name, gradient.astype(np.float32))
            writer.commit(step)
