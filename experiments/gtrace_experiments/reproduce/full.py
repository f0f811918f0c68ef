"""The papers' own sizes, for ``gtrace reproduce --full``: model, data, length and workers of each experiment.

What a recipe compares and by which criteria it is judged stays as it is in miniature; a row here replaces what it is
trained on and for how long.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gtrace.errors import UsageError, suggest
from gtrace_experiments.reproduce.datasets import REAL

if TYPE_CHECKING:
    from gtrace.training import Task


@dataclass(frozen=True, slots=True)
class Full:
    """An experiment at the size of its paper.

    Attributes:
        task: class in :mod:`gtrace_experiments.reproduce.tasks`; empty for linear models.
        data: network and data in words, with what still differs from the paper.
        steps: of the optimizer.
        settings: further settings of the study that replace the miniature's.
    """

    task: str
    data: str
    steps: int
    settings: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Task:
        """The task.

        Raises:
            TraceError: its data are missing.
        """
        task: Task = getattr(importlib.import_module("gtrace_experiments.reproduce.tasks"), self.task)()
        return task


#: ALQ, Table 3 and Appendix K
_ALQ: dict[str, Any] = {"batch_size": 128, "seeds": 1, "refit": "0,100,2000,+10000"}
_PATH = Full("CifarResNet32", "ResNet-32 on CIFAR-10, one worker, batches of 128, 80,000 steps", 80_000, _ALQ)
_NEURAL = Full(
    "CifarResNet18",
    "ResNet-18 on CIFAR-10 (no package has CIFAR-100 or ImageNet), batches of 128, 200 epochs",
    78_125,
    {"batch_size": 128, "seeds": 1, "lr": 0.1, "refit": "0,100,+1000"},
)
_MQGRAD = Full(
    "CifarCNN",
    "the paper's network on CIFAR-10, 12 workers with batches of 32; 40 hours at its fixed 8 bits",
    3_200,
    {"workers": 12, "batch_size": 32, "seeds": 3},
)
#: experiments with a second size
FULL: dict[str, Full] = {
    "alq-fig1": _PATH,
    "alq-fig5": _PATH,
    "alq-fig6": _PATH,
    "alq-fig7": Full("CifarResNet8", "ResNet-8 on CIFAR-10, batches of 128, 80,000 steps", 80_000, _ALQ),
    "alq-fig14": Full(
        "CifarResNet32",
        "ResNet-32 on CIFAR-10, 4 workers, batches of 128, 80,000 steps",
        80_000,
        {**_ALQ, "workers": 4},
    ),
    "alq-table1": Full(
        "CifarResNet32",
        "ResNet-32 on CIFAR-10, 4 workers, batches of 128, 80,000 steps",
        80_000,
        {**_ALQ, "workers": 4},
    ),
    "alq-table2": Full(
        "CifarResNet32",
        "ResNet-32 on CIFAR-10, 32 workers, batches of 128, 80,000 steps",
        80_000,
        {**_ALQ, "workers": 32},
    ),
    "lognormal-table3": _NEURAL,
    "lognormal-table4": _NEURAL,
    "mcgq-fig3": Full(
        "CifarResNet110",
        "ResNet-110 on CIFAR-10, batches of 128, 64,000 steps",
        64_000,
        {"batch_size": 128, "seeds": 1, "lr": 0.1},
    ),
    "mcgq-tables1-2": Full(
        "CifarResNet18",
        "ResNet-18 on CIFAR-10 (no package has CIFAR-100), batches of 128, 100 epochs",
        39_062,
        {"batch_size": 128},
    ),
    "mcgq-ptb": Full(
        "WideTreebankLSTM",
        "two layers of 1,500 units on the Penn Treebank, batches of 80, 40 epochs",
        13_280,
        {"batch_size": 80},
    ),
    "mcgq-shakespeare": Full(
        "WideCharLSTM",
        "two layers of 512 units on Shakespeare's sonnets (the paper: all his works), batches of 10, 45 epochs",
        6_000,
        {"batch_size": 10},
    ),
    "mqgrad-fig4": _MQGRAD,
    "mqgrad-tables1-3": _MQGRAD,
    "zipml-fig4": Full("", "; ".join(REAL.values()), 0),
    "zipml-fig6": Full("", REAL[784], 0),
    "zipml-fig9": Full("", f"{REAL[784]}; {REAL[9]}", 0),
    "zipml-fig7b": Full(
        "CifarCNN", "a network of five layers on CIFAR-10, batches of 128, 64 epochs", 25_000, {"batch_size": 128}
    ),
}


def full_size(name: str) -> Full:
    """The paper's size of an experiment.

    Raises:
        UsageError: it has none.
    """
    if name not in FULL:
        raise UsageError(
            f"--full: {name} has one size: it trains no network, or its data are in no package; {suggest(name, FULL)}"
        )
    return FULL[name]
