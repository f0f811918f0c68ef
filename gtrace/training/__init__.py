"""Codecs at work in training: simulated workers, and hooks into a loop of one's own.

    study = gtrace.training.train("digits-cnn", ["qsgdinf:bits=3"], workers=4)

    with gtrace.training.compress(optimizer, "qsgdinf:bits=3") as compression:
        ...  # any training loop
    print(compression.tally.ratio)

    model = DistributedDataParallel(model)  # real ranks exchange real bytes
    model.register_comm_hook(gtrace.training.State("alq:bits=3"), gtrace.training.ddp_comm_hook)

Importing this package imports nothing heavy; PyTorch is imported with the first name that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gtrace.training.tasks import require_torch

if TYPE_CHECKING:
    from gtrace.codecs.assignment import CodecTable
    from gtrace.schedule import RefitSchedule
    from gtrace.training.comparison import Study, train
    from gtrace.training.compression import Compression, compress
    from gtrace.training.ddp import RankOptions, State, ddp_comm_hook
    from gtrace.training.exchange import Exchange, Exchanged, NonfiniteGradientError, Tally
    from gtrace.training.mqgrad import MQGrad
    from gtrace.training.plain import PlainTraining
    from gtrace.training.policies import ParameterServerClock
    from gtrace.training.run import RunResult
    from gtrace.training.settings import StudyOptions
    from gtrace.training.tasks import Evaluation, Recipe, Task, load_task, task_names

_HOMES = {
    "CodecTable": "gtrace.codecs.assignment",
    "Evaluation": "tasks",
    "Exchange": "exchange",
    "Exchanged": "exchange",
    "MQGrad": "mqgrad",
    "NonfiniteGradientError": "exchange",
    "ParameterServerClock": "policies",
    "Recipe": "tasks",
    "RefitSchedule": "gtrace.schedule",
    "StudyOptions": "settings",
    "Tally": "exchange",
    "Task": "tasks",
    "load_task": "tasks",
    "task_names": "tasks",
}
_TORCH_HOMES = {
    "Compression": "compression",
    "PlainTraining": "plain",
    "RankOptions": "ddp",
    "RunResult": "run",
    "State": "ddp",
    "Study": "comparison",
    "compress": "compression",
    "ddp_comm_hook": "ddp",
    "train": "comparison",
}

__all__ = [
    "CodecTable",
    "Compression",
    "Evaluation",
    "Exchange",
    "Exchanged",
    "MQGrad",
    "NonfiniteGradientError",
    "ParameterServerClock",
    "PlainTraining",
    "RankOptions",
    "Recipe",
    "RefitSchedule",
    "RunResult",
    "State",
    "Study",
    "StudyOptions",
    "Tally",
    "Task",
    "compress",
    "ddp_comm_hook",
    "load_task",
    "task_names",
    "train",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name) or _TORCH_HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gtrace.training' has no attribute {name!r}")
    if name in _TORCH_HOMES:
        require_torch()
    return getattr(importlib.import_module(home if "gtrace." in home else f"gtrace.training.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
