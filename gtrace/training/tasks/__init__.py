"""Built-in training tasks, by name. Only :func:`load_task` imports torch."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from gtrace.errors import UsageError, suggest

if TYPE_CHECKING:
    from gtrace.training.tasks.base import Task

#: name -> (module, class, one line about it)
_TASKS = {
    "digits-cnn": (
        "gtrace.training.tasks.digits",
        "DigitsCNN",
        "convolutional network on the UCI handwritten digits, SGD with momentum",
    ),
    "digits-mlp": (
        "gtrace.training.tasks.digits",
        "DigitsMLP",
        "multilayer perceptron with dropout on the UCI handwritten digits, Adam",
    ),
    "char-lstm": (
        "gtrace.training.tasks.text",
        "CharLSTM",
        "character-level LSTM on Shakespeare's sonnets, AdamW, clipped gradients",
    ),
    "char-transformer": (
        "gtrace.training.tasks.text",
        "CharTransformer",
        "character-level transformer on Shakespeare's sonnets, AdamW, clipped gradients",
    ),
    "word-lstm": (
        "gtrace.training.tasks.text",
        "WordLSTM",
        "word-level LSTM on Shakespeare's sonnets, SGD, clipped gradients",
    ),
    "ptb-lstm": (
        "gtrace.training.tasks.text",
        "TreebankLSTM",
        "word-level LSTM on the Penn Treebank, where that is at hand, SGD, clipped gradients",
    ),
    "fashion-resnet8": (
        "gtrace.training.tasks.fashion",
        "FashionResNet8",
        "ResNet-8 on Fashion-MNIST, where that is installed, SGD with momentum",
    ),
    "fashion-cnn": (
        "gtrace.training.tasks.fashion",
        "FashionCNN",
        "convolutional network with large linear layers on Fashion-MNIST, SGD",
    ),
}


def require_torch() -> None:
    """Check that PyTorch is there, without importing it.

    Raises:
        UsageError: it is not.
    """
    if importlib.util.find_spec("torch") is None:
        raise UsageError("training needs PyTorch, which is not installed: pip install 'gtrace[torch]'")


def task_names() -> tuple[str, ...]:
    """All built-in tasks."""
    return tuple(_TASKS)


def describe_task(name: str) -> str:
    """One line about a task.

    Raises:
        UsageError: unknown; the nearest names are suggested.
    """
    if name not in _TASKS:
        raise UsageError(f"no task '{name}'; {suggest(name, _TASKS)}")
    return _TASKS[name][2]


def load_task(name: str) -> Task:
    """Build a task; its data are read here.

    Raises:
        UsageError: unknown (the nearest names are suggested), or PyTorch is not installed.
        TraceError: its data are missing.
    """
    describe_task(name)
    require_torch()
    module, kind, _ = _TASKS[name]
    task: Task = getattr(importlib.import_module(module), kind)()
    return task
