"""Codecs in training: simulated workers, and hooks into your own training loop.

    study = gtrace.training.train("digits-cnn", ["qsgdinf:bits=3"], workers=4)

    with gtrace.training.compress(optimizer, "qsgdinf:bits=3") as compression:
        ...  # any training loop
    print(compression.tally.ratio)

    model = DistributedDataParallel(model)  # or fully_shard(model): real ranks exchange real bytes
    gtrace.training.State("alq:bits=3").register(model)

Importing this package imports nothing heavy; PyTorch is imported with the first name that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gtrace.training.tasks import require_torch

if TYPE_CHECKING:
    from gtrace.codecs.assignment import CodecTable as CodecTable
    from gtrace.schedule import RefitSchedule as RefitSchedule
    from gtrace.training.comparison import Study as Study
    from gtrace.training.comparison import train as train
    from gtrace.training.compression import Compression as Compression
    from gtrace.training.compression import compress as compress
    from gtrace.training.ddp import RankExchange as RankExchange
    from gtrace.training.ddp import RankOptions as RankOptions
    from gtrace.training.ddp import State as State
    from gtrace.training.ddp import ddp_comm_hook as ddp_comm_hook
    from gtrace.training.exchange import Exchange as Exchange
    from gtrace.training.exchange import Exchanged as Exchanged
    from gtrace.training.exchange import NonfiniteGradientError as NonfiniteGradientError
    from gtrace.training.exchange import Tally as Tally
    from gtrace.training.plain import PlainTraining as PlainTraining
    from gtrace.training.policies import MQGrad as MQGrad
    from gtrace.training.policies import ParameterServerClock as ParameterServerClock
    from gtrace.training.run import RunResult as RunResult
    from gtrace.training.settings import StudyOptions as StudyOptions
    from gtrace.training.tasks import Evaluation as Evaluation
    from gtrace.training.tasks import Recipe as Recipe
    from gtrace.training.tasks import Task as Task
    from gtrace.training.tasks import load_task as load_task
    from gtrace.training.tasks import task_names as task_names

#: module -> what comes from it
_HOMES = {
    "gtrace.codecs.assignment": ("CodecTable",),
    "gtrace.schedule": ("RefitSchedule",),
    "gtrace.training.comparison": ("Study", "train"),
    "gtrace.training.compression": ("Compression", "compress"),
    "gtrace.training.ddp": ("RankExchange", "RankOptions", "State", "ddp_comm_hook"),
    "gtrace.training.exchange": ("Exchange", "Exchanged", "NonfiniteGradientError", "Tally"),
    "gtrace.training.plain": ("PlainTraining",),
    "gtrace.training.policies": ("MQGrad", "ParameterServerClock"),
    "gtrace.training.run": ("RunResult",),
    "gtrace.training.settings": ("StudyOptions",),
    "gtrace.training.tasks": ("Evaluation", "Recipe", "Task", "load_task", "task_names"),
}
_NEED_TORCH = ("comparison", "compression", "ddp", "plain", "run")

__all__ = sorted(name for names in _HOMES.values() for name in names)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'gtrace.training' has no attribute {name!r}")
    if home.endswith(_NEED_TORCH):
        require_torch()
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
