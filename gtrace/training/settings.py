"""What all runs of a study have in common, and the optimizers that they may step with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch

from gtrace.errors import UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable

    from gtrace.costs import Network
    from gtrace.schedule import RefitSchedule
    from gtrace.training.exchange import Nonfinite
    from gtrace.training.neural import Layers

#: what is compressed: weight gradients between workers, or the gradients that enter each layer's backward
Kind: TypeAlias = Literal["weight", "neural"]
KINDS: tuple[Kind, ...] = get_args(Kind)

#: optimizers that the papers train with, by name
OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "nesterov": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True),
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr),
    "amsgrad": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, amsgrad=True),
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What all runs of a study have in common.

    Attributes:
        workers: simulated workers.
        steps: optimizer steps.
        batch_size: samples that one worker takes in a step.
        lr: learning rate of the first step.
        seed: of the model, the batches and the rounding.
        refit: when codecs are fitted.
        nonfinite: what to do with gradients that hold NaN or infinity.
        eval_every: steps between two evaluations; the last step is always followed by one.
        kind: which gradients go through the codec.
        shadow: steps between two shadow passes; None for none.
        layers: whose output gradients go through the codec, for kind neural.
        optimizer: in the place of the task's own; empty for that.
        clip: largest norm of the averaged gradient, in the place of the task's; None for that.
        network: that simulated times are for; None for none.
        min_size: tensors with fewer elements go uncompressed, for kind weight.
        down: codec of the average on its way back, or ``same`` as the workers'; empty for none.
        measure: steps between two at which everything about the averaged gradient is measured; None for none.
    """

    workers: int
    steps: int
    batch_size: int
    lr: float
    seed: int
    refit: RefitSchedule
    nonfinite: Nonfinite
    eval_every: int
    kind: Kind = "weight"
    shadow: int | None = None
    layers: Layers = "inner"
    optimizer: str = ""
    clip: float | None = None
    network: Network | None = None
    min_size: int = 0
    down: str = ""
    measure: int | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "steps", "batch_size", "eval_every", "shadow", "measure"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name.replace('_', ' ')}: {value} is below 1")
        if self.kind not in KINDS:
            raise UsageError(f"kind: '{self.kind}' is unknown; {suggest(str(self.kind), KINDS)}")
        if self.shadow is not None and self.kind != "neural":
            raise UsageError("shadow: compares weight gradients under compressed neural ones; choose kind neural")
        if self.measure is not None and self.kind != "weight":
            raise UsageError("measure: is about gradients between workers; choose kind weight")
        if self.seed < 0:
            raise UsageError(f"seed: {self.seed} is below 0")
        for name, number in (("lr", self.lr), ("clip", self.clip)):
            if number is not None and not (math.isfinite(number) and number > 0):
                raise UsageError(f"{name}: {number:g} is no positive number")
        if self.optimizer and self.optimizer not in OPTIMIZERS:
            raise UsageError(f"optimizer: '{self.optimizer}' is unknown; {suggest(self.optimizer, OPTIMIZERS)}")
        if self.nonfinite == "pass" and self.kind != "weight":
            raise UsageError("nonfinite: pass is for weight gradients; choose skip, zero or error")
        if self.network is not None and self.kind != "weight":
            raise UsageError("network: neural gradients do not travel between workers; choose kind weight")
        if self.kind != "weight" and (self.min_size or self.down):
            raise UsageError("min-size and down: neural gradients do not travel between workers; choose kind weight")
        if self.down and self.network is not None and self.network.topology != "ps":
            raise UsageError(f"down: there is no server in a network of topology {self.network.topology}; choose ps")
