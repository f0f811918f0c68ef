"""What optimizers and their learning-rate schedulers say about a training: the update rule, and how long it goes on."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import statistics
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import lr_scheduler

from gtrace.torch_hooks.unstepped import HandedStream, HandStream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from gtrace.torch_hooks.steps import Rounds

#: classes of torch.optim whose weight decay enters the gradient, unless their group says otherwise
_COUPLED = frozenset({"SGD", "Adam", "AMSGrad", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD"})
#: keyword under which the schedules of Hugging Face's transformers keep the length of a training
_PLANNED = "num_training_steps"
#: share of the steps that must have had the same number of samples
_SAME = 0.9
#: different settings of one optimizer that are kept apart; a schedule may change them at every step
_MOST_SETTINGS = 1000
#: what the facts of a group are made of
_SETTINGS = ("momentum", "dampening", "weight_decay", "eps", "nesterov", "betas", "decoupled_weight_decay")


def undivided(optimizer: Optimizer) -> Optimizer:
    """The optimizer that ZeroRedundancyOptimizer divides among processes; any other one itself."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def kind_of(optimizer: Optimizer | Rounds) -> str:
    """The class of torch.optim whose rule an optimizer follows; see ``gtrace.trace.OptimizerFacts``."""
    if isinstance(optimizer, (HandStream, HandedStream)):
        return "by hand"
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = next(iter(optimizer.members.values()))
    own = type(undivided(optimizer))
    rule = inspect.unwrap(own.step)
    for base in own.__mro__:
        if base.__module__.startswith("torch.optim.") and inspect.unwrap(base.step) is rule:  # type: ignore[attr-defined]
            amsgrad = base.__name__ in ("Adam", "AdamW") and optimizer.param_groups[0].get("amsgrad")
            return "AMSGrad" if amsgrad else base.__name__
    return f"{own.__module__}.{own.__name__}" if hasattr(torch.optim, own.__name__) else own.__name__


def group_facts(kind: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of ``gtrace.trace.OptimizerFacts`` that a parameter group has, as JSON values."""
    numbers = {name: _number(group.get(name)) for name in ("momentum", "dampening", "weight_decay", "eps")}
    found: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    if isinstance(group.get("nesterov"), bool):
        found["nesterov"] = group["nesterov"]
    betas = group.get("betas")
    if isinstance(betas, (tuple, list)) and len(betas) == 2:
        found["betas"] = [_number(beta) for beta in betas]
    decoupled = group.get("decoupled_weight_decay", False if kind in _COUPLED else True if kind == "AdamW" else None)
    return found if decoupled is None else {**found, "decoupled": bool(decoupled)}


def differing_groups(optimizer: Optimizer | Rounds) -> dict[int, dict[str, Any]]:
    """``id(parameter)`` -> the facts in which its group differs from the first one, for parameters of such groups."""
    first, *others = optimizer.param_groups
    kind = kind_of(optimizer)
    usual = group_facts(kind, first)
    out = {}
    for group in others:
        differing = {name: value for name, value in group_facts(kind, group).items() if value != usual.get(name)}
        # A warm-up from 0 hides the ratio; a scheduler keeps the rates that it starts from.
        rates = [_number(one.get("initial_lr", one.get("lr"))) for one in (group, first)]
        if rates[0] and rates[1] and rates[0] != rates[1]:
            differing["lr_ratio"] = rates[0] / rates[1]
        if differing:
            out.update({id(parameter): differing for parameter in group["params"]})
    return out


def _number(value: object) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


class Schedulers:
    """Remembers learning-rate schedulers, by weak reference."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[LRScheduler]] = []

    def saw(self, scheduler: LRScheduler, *_: object) -> None:
        """A scheduler is being made."""
        self._seen = [one for one in self._seen if one() is not None]
        self._seen.append(weakref.ref(scheduler))

    def of(self, optimizer: Optimizer | Rounds) -> LRScheduler | None:
        """The scheduler that drives an optimizer; None without one, or if there are several."""
        seen = [one() for one in self._seen]
        if not any(getattr(one, "optimizer", None) is optimizer for one in seen):
            if not any("initial_lr" in group for group in optimizer.param_groups):
                return None
            # It was made before anyone watched. The search takes some hundredths of a second, once per optimizer.
            seen = [one for one in gc.get_referrers(optimizer) if isinstance(one, lr_scheduler.LRScheduler)]
        own = {id(one): one for one in seen if one is not None and getattr(one, "optimizer", None) is optimizer}
        inner = {id(part) for one in own.values() for part in getattr(one, "_schedulers", ())}
        outer = [one for key, one in own.items() if key not in inner]
        return outer[0] if len(outer) == 1 else None


def scheduled_steps(scheduler: LRScheduler) -> int | None:
    """Calls of ``scheduler.step()`` until its learning rate has fallen; None if it has no such end.

    A rise or a constant factor is a warm-up, and says nothing about the end.
    """
    planned: object = None
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        last = scheduled_steps(scheduler._schedulers[-1])
        planned = None if last is None else scheduler._milestones[-1] + last
    elif isinstance(scheduler, lr_scheduler.ChainedScheduler):
        planned = max((steps for part in scheduler._schedulers if (steps := scheduled_steps(part))), default=None)
    elif isinstance(scheduler, lr_scheduler.LinearLR):
        planned = scheduler.total_iters if scheduler.end_factor < scheduler.start_factor else None
    elif isinstance(scheduler, lr_scheduler.LambdaLR):
        first = scheduler.lr_lambdas[0]
        planned = first.keywords.get(_PLANNED) if isinstance(first, functools.partial) else None
    else:
        planned = next((getattr(scheduler, name) for kind, name in _ENDS if isinstance(scheduler, kind)), None)
    return planned if isinstance(planned, int) and planned > 0 else None


_ENDS = (
    (lr_scheduler.OneCycleLR, "total_steps"),
    (lr_scheduler.CosineAnnealingLR, "T_max"),
    (lr_scheduler.PolynomialLR, "total_iters"),
)


class OptimizerHistory:
    """The settings, batch sizes and progress of one optimizer over a training. Keeps nothing of it alive."""

    def __init__(self, optimizer: Optimizer | Rounds, scheduler: LRScheduler | None) -> None:
        #: step and the scheduler's count at the last look
        self._looked = -1, -1
        #: recorded steps in a row, at most
        self.burst = 0
        self._run = self._next = 0
        self._kind = kind_of(optimizer)
        self._settings: Counter[str] = Counter()
        self._values: tuple[Any, ...] = ()
        #: one of them is a tensor, which may have another value at each step
        self._varies = False
        self._text = ""
        self._batches: Counter[int] = Counter()
        self._tokens = 1
        self._scheduler = None if scheduler is None else weakref.ref(scheduler)
        self._end = None if scheduler is None else scheduled_steps(scheduler)
        #: whether a scheduler says how long the training is, so that :meth:`look` has something to do
        self.scheduled = self._end is not None
        #: step and the scheduler's count: at first, at its first and its last change
        self._progress: list[tuple[int, int]] = []

    def look(self, step: int) -> LRScheduler | None:
        """A step begins.

        Returns the scheduler whose ``last_epoch`` may change in any step; None if it changes in all of them.
        """
        scheduler = self._scheduler() if self.scheduled and self._scheduler is not None else None
        if scheduler is None:
            return None
        # A chain counts in its parts; the counter of a sequence's part starts again with the part.
        counter = scheduler._schedulers[0] if isinstance(scheduler, lr_scheduler.ChainedScheduler) else scheduler
        if not self._progress or self._progress[-1][1] != counter.last_epoch:
            self._progress[2:] = []
            self._progress.append((step, counter.last_epoch))
        (earlier, count), self._looked = self._looked, (step, counter.last_epoch)
        return counter if earlier < 0 or counter.last_epoch - count < step - earlier else None

    def note(self, step: int, group: Mapping[str, Any], samples: int, tokens: int = 1) -> None:
        """A step is recorded; ``group`` is the optimizer's first one, and 0 samples are an unknown number."""
        self._run = self._run + 1 if step == self._next else 1
        self._next = step + 1
        self.burst = max(self.burst, self._run)
        if samples:
            self._batches[samples] += 1
            self._tokens = tokens
        values = tuple(map(group.get, _SETTINGS))
        if self._varies or values != self._values:
            self._values, self._text = values, json.dumps(group_facts(self._kind, group))
            self._varies = any(isinstance(value, torch.Tensor) for value in values)
        if self._text in self._settings or len(self._settings) < _MOST_SETTINGS:
            self._settings[self._text] += 1

    def facts(self, steps: int) -> dict[str, Any]:
        """What is known after this many steps, as JSON values; names are those of ``gtrace.trace.OptimizerFacts``."""
        known = {text: json.loads(text) for text in self._settings}
        every = [known[text] for text in self._settings.elements()]
        values = {name: [found[name] for found in every if name in found] for name in every[0]} if every else {}
        varies = [name for name, found in values.items() if any(value != found[0] for value in found)]
        facts = {"kind": self._kind, **{name: statistics.median_low(found) for name, found in values.items()}}
        batches = list(self._batches.elements())
        if batches:
            facts["batch_size"] = statistics.median_low(batches)
            facts |= {"tokens": self._tokens} if self._tokens > 1 else {}
            if self._batches[facts["batch_size"]] < _SAME * len(batches):
                varies.append("batch_size")
        facts |= {"steps_seen": steps, "planned_steps": self._planned(steps), "varies": varies}
        return {name: value for name, value in facts.items() if value not in (None, [])}

    def _planned(self, steps: int) -> int | None:
        """Steps until the scheduler's end: it may count steps, epochs, or, with several processes, all of theirs."""
        if self._end is None or len(self._progress) < 2:
            return None
        first, last = self._progress[-2:]
        # From change to change, because the first look may be in the middle of an epoch, or of a resumed training.
        rate = (last[0] - first[0]) / (last[1] - first[1]) if last[1] > first[1] else 0.0
        planned = round(last[0] + (self._end - last[1]) * rate)
        return planned if rate > 0 and planned >= steps - max(rate, 1.0) else None
