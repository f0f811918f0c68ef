"""Optimizers whose step includes the exchange: what travels between ranks is not the gradient.

Each :class:`JointOptimizer` is one rank's. Its ``step`` is a generator, see :mod:`gtrace.training.ranks`:
:class:`JointWorkers` runs those of one process side by side. :class:`ProgramRounds` does the same for DiLoCo around the
optimizers of a program: ranks train alone, and every H steps what their weights changed is averaged.
"""

from __future__ import annotations

import copy
import time
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from gtrace.errors import UsageError
from gtrace.training import vectors
from gtrace.training.checkpoint import as_arrays, as_tensors
from gtrace.training.compression import own_values
from gtrace.training.ddp import AllReduceComparison, RankExchange, RankOptions
from gtrace.training.exchange import Bad, Exchange, Nonfinite, Tally, without_nonfinite
from gtrace.training.ranks import NOT_FINITE, Piece, RankCodecs, SimulatedRank, lockstep
from gtrace.training.ways import ALL_GATHER, SERVED, averaging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from gtrace.codecs.assignment import CodecTable
    from gtrace.codecs.link import LinkOptions
    from gtrace.training.ranks import Exchanging, Values

    #: name of a parameter -> a tensor of its shape
    Tensors: TypeAlias = dict[str, torch.Tensor]

T = TypeVar("T")
#: Adam's, which the two of one bit keep
_BETAS, _EPSILON = (0.9, 0.999), 1e-8
#: the outer learning rate and Nesterov momentum of DiLoCo's main results
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
#: what an optimizer's state dict calls the state of its outer optimizer
_KEY = "gtrace_outer"


class JointOptimizer(ABC):
    """One rank's optimizer, which exchanges by itself.

    Attributes:
        parameters: name -> each trained parameter of this rank's model.
        weights: the same, without gradients.
        codecs: this rank's codecs; their tally counts what it sends.
        sent: name -> what the last step sent through codecs, float32[n] before encoding.
        arrived: name -> what every rank decoded of it, float32[n].
    """

    #: whether a server averages what goes through codecs, and sends it on through them
    served = False

    def __init__(self, model: nn.Module, codecs: RankCodecs) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weights: Tensors = {name: p.detach() for name, p in self.parameters.items()}
        self.codecs = codecs
        self.steps = 0
        self.sent: dict[str, vectors.Vector] = {}
        self.arrived: dict[str, vectors.Vector] = {}
        self._exchanges = 0
        #: name of a buffer -> its tensors
        self._buffers: dict[str, Tensors] = {}
        #: counters and sums
        self._schedule: dict[str, float] = {}

    def step(self, lr: float, *, last: bool = False) -> Exchanging[None]:
        """One optimizer step of this rank; all ranks run it together.

        Args:
            last: no step follows, so that weights that differ between ranks are joined now.
        """
        self.sent, self.arrived = {}, {}
        self.codecs.tally.float32_bits += 32 * sum(p.numel() for p in self.weights.values())
        yield from self._step(lr, last=last)
        self.steps += 1

    @abstractmethod
    def _step(self, lr: float, *, last: bool) -> Exchanging[None]: ...

    def common(self) -> Tensors:
        """The weights that all ranks have in common: those after the last exchange."""
        return self.weights

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, as numbers, text and tensors; the weights are the model's."""
        return {
            "steps": self.steps,
            "exchanges": self._exchanges,
            "buffers": self._buffers,
            "schedule": dict(self._schedule),
            "codecs": as_tensors(self.codecs.to_lists()),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict` on the same rank."""
        self.steps, self._exchanges = saved["steps"], saved["exchanges"]
        self._buffers, self._schedule = copy.deepcopy(saved["buffers"]), dict(saved["schedule"])
        self.codecs.load_lists(as_arrays(saved["codecs"]))

    def _buffer(self, name: str) -> Tensors:
        """A tensor for each weight, zeros at first."""
        if name not in self._buffers:
            self._buffers[name] = {key: torch.zeros_like(p) for key, p in self.weights.items()}
        return self._buffers[name]

    def _descend(self, lr: float) -> None:
        """Adam's step without bias correction."""
        first, second = self._buffer("exp_avg"), self._buffer("exp_avg_sq")
        for name, weight in self.weights.items():
            weight.sub_(first[name] / _root(second[name]), alpha=lr)

    def _gradients(self) -> Tensors:
        """The gradients; zeros where this rank has none."""
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.parameters.items()}

    def _mean(self, values: Tensors) -> Exchanging[Tensors]:
        """The exact mean over ranks, in float32."""
        arrays = {k: value.reshape(-1).numpy() for k, value in enumerate(values.values())}
        self.codecs.tally.payload_bits += 32 * sum(len(array) for array in arrays.values())
        means = yield from _timed(self.codecs.mean(arrays), self.codecs.tally)
        return {name: torch.from_numpy(means[k]).view_as(value) for k, (name, value) in enumerate(values.items())}

    def _coded(self, values: Tensors) -> Exchanging[Tensors]:
        """The mean over ranks of what arrives through codecs, the same on all; NaN where a rank has NaN or infinity."""
        whole: list[Piece] = []
        sent: list[Values] = []
        for name, value in values.items():
            array = value.detach().reshape(-1).numpy().copy()
            whole.append(Piece(name, self.codecs.rules.choose(name, array.size), array.size, None, tuple(value.shape)))
            if not vectors.count_nonfinite(array):
                self.sent[name] = array
            sent.append(self.sent.get(name, NOT_FINITE))
        way = SERVED if self.served else ALL_GATHER
        exchange = averaging(self.codecs, way, whole, sent, self._exchanges)
        found = yield from _timed(exchange, self.codecs.tally)
        self._exchanges += 1
        self.arrived = dict(zip(values, found, strict=True))
        return {name: torch.as_tensor(self.arrived[name]).view_as(value) for name, value in values.items()}


class OneBitAdam(JointOptimizer):
    """1-bit Adam (Tang et al. 2021, Algorithm 1), with the formulas of DeepSpeed's ``OnebitAdam``.

    For ``warmup`` steps gradients are averaged exactly and Adam runs, without its bias correction. Then the second
    moment is frozen, and each rank sends its momentum beta1 m + (1 - beta1) g through the codec to a server, which
    sends the average back through the codec: with error feedback on both sides if the codec has it. Each tensor has
    one server and one scale; DeepSpeed's server has a scale for each rank's chunk.
    """

    served = True

    def __init__(self, model: nn.Module, codecs: RankCodecs, *, warmup: int) -> None:
        super().__init__(model, codecs)
        self._warmup = warmup

    def _step(self, lr: float, *, last: bool) -> Exchanging[None]:
        first, second = self._buffer("exp_avg"), self._buffer("exp_avg_sq")
        if self.steps < self._warmup:
            gradients = yield from self._mean(self._gradients())
            _follow(first, gradients)
            _follow_squares(second, gradients)
        else:
            _follow(first, self._gradients())
            first.update(_masked((yield from self._coded(first)), second))
        self._descend(lr)


class ZeroOneAdam(JointOptimizer):
    """0/1 Adam (Lu et al. 2022), with the formulas and the schedule of DeepSpeed's ``ZeroOneAdam``.

    In the first ``warmup`` + 1 steps the second moment follows exact averages, at steps that become rarer: after each
    16 of them their interval doubles. At the steps between, gradients go through the codec. Then the second moment
    is frozen: ranks step alone, and at intervals that double after each ``doubling`` steps, up to ``every``, they
    exchange, through the codec, the sum of lr m over these steps. From it all get the same weights, and its mean over
    lr is the momentum. Both ways of the exchange have error feedback if the codec has it; it starts again when the
    second moment is frozen.
    """

    served = True
    #: exact steps with the same interval, kappa of the paper
    KAPPA = 16

    def __init__(self, model: nn.Module, codecs: RankCodecs, *, warmup: int, every: int, doubling: int) -> None:
        super().__init__(model, codecs)
        self._warmup, self._every, self._doubling = warmup, every, doubling
        #: interval and number of exact steps; interval and number of local steps; sum of learning rates
        self._schedule = {"exact": 1, "exacts": 0, "local": 1, "locals": 0, "rates": 0.0}

    def _step(self, lr: float, *, last: bool) -> Exchanging[None]:
        if self.steps <= self._warmup:
            yield from self._adapting(lr)
        else:
            if self.steps == self._warmup + 1:
                # Errors of gradients are not errors of sums of momenta.
                self.codecs.load_lists({"senders": [], "receivers": []})
            yield from self._alone(lr, last=last)

    def _adapting(self, lr: float) -> Exchanging[None]:
        first, second, schedule = self._buffer("exp_avg"), self._buffer("exp_avg_sq"), self._schedule
        gradients = self._gradients()
        if (self.steps + 1) % schedule["exact"] == 0:
            gradients = yield from self._mean(gradients)
            _follow_squares(second, gradients)
            schedule["exacts"] += 1
            if schedule["exacts"] == self.KAPPA:
                schedule["exacts"] = 0
                schedule["exact"] *= 2
        else:
            gradients = _masked((yield from self._coded(gradients)), second)
        _follow(first, gradients)
        self._descend(lr)

    def _alone(self, lr: float, *, last: bool) -> Exchanging[None]:
        first, second, schedule = self._buffer("exp_avg"), self._buffer("exp_avg_sq"), self._schedule
        # Kept, while DeepSpeed undoes its steps: rounding would take the ranks' weights apart.
        if "common" not in self._buffers:
            self._buffers["common"] = {name: weight.clone() for name, weight in self.weights.items()}
        common = self._buffers["common"]
        _follow(first, self._gradients())
        schedule["rates"] += lr
        self._descend(lr)
        if (self.steps + 1) % schedule["local"] == 0 or last:
            moved = {name: (weight - common[name]) * _root(second[name]) for name, weight in self.weights.items()}
            joined = _masked((yield from self._coded(moved)), second)
            for name, weight in self.weights.items():
                weight.copy_(common[name] + joined[name] / _root(second[name]))
                first[name] = joined[name] / -schedule["rates"]
            schedule["rates"] = 0.0
            del self._buffers["common"]
        schedule["locals"] += 1
        if schedule["locals"] == self._doubling:
            schedule["locals"] = 0
            schedule["local"] = min(self._every, 2 * schedule["local"])

    def common(self) -> Tensors:
        """The weights at the beginning of a round in which ranks step alone."""
        return self._buffers.get("common", self.weights)


class OuterNesterov:
    """DiLoCo's outer optimizer (Douillard et al. 2023, Algorithm 1): SGD with Nesterov momentum on averaged changes.

    With the weights a that all ranks had H steps ago, the ``anchors``, and each one's weights w now, it gets the
    average d of a - w: m <- 0.9 m + d, and all go on from a - 0.7 (d + 0.9 m). Between rounds there are no anchors.
    Tensors have no gradients.
    """

    def __init__(self) -> None:
        self.anchors: Tensors = {}
        self.momentum: Tensors = {}

    def begin(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Remember common weights, but for those of a round that has begun."""
        for name, weight in weights.items():
            if name not in self.anchors:
                # In a type in which a difference of weights keeps their digits.
                self.anchors[name] = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)

    def change(self, weights: Mapping[str, torch.Tensor]) -> Tensors:
        """What this rank's steps took from the weights: the outer gradient."""
        # A program may have replaced some meanwhile.
        self.anchors = {name: anchor for name, anchor in self.anchors.items() if name in weights}
        return {name: anchor - weights[name] for name, anchor in self.anchors.items()}

    def end(self, weights: Mapping[str, torch.Tensor], average: Mapping[str, torch.Tensor]) -> None:
        """End the round: write the new common weights."""
        for name, anchor in self.anchors.items():
            mean = average[name].to(anchor)
            momentum = self.momentum.setdefault(name, torch.zeros_like(anchor))
            momentum.mul_(OUTER_MOMENTUM).add_(mean)
            weights[name].copy_(anchor - OUTER_LR * (mean + OUTER_MOMENTUM * momentum))
        self.anchors = {}

    def state_dict(self) -> dict[str, Tensors]:
        """Momentum, and anchors within a round."""
        return {"anchors": self.anchors, "momentum": self.momentum}

    def load_state_dict(self, saved: Mapping[str, Tensors]) -> None:
        """Undo :meth:`state_dict`."""
        self.anchors, self.momentum = copy.deepcopy(saved["anchors"]), copy.deepcopy(saved["momentum"])


class LocalSteps(JointOptimizer):
    """DiLoCo: ranks step alone, each with its ``inner`` optimizer, and exchange at every H-th step, H = ``every``.

    The averaged change of the weights is an outer gradient.
    """

    def __init__(self, model: nn.Module, codecs: RankCodecs, *, inner: Optimizer, every: int) -> None:
        super().__init__(model, codecs)
        self._inner, self._every = inner, every
        self._outer = OuterNesterov()

    def state_dict(self) -> dict[str, Any]:
        """The inner and the outer optimizer's, too."""
        return {**super().state_dict(), "inner": self._inner.state_dict(), "outer": self._outer.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict` on the same rank."""
        super().load_state_dict(saved)
        self._inner.load_state_dict(saved["inner"])
        self._outer.load_state_dict(saved["outer"])

    def _step(self, lr: float, *, last: bool) -> Exchanging[None]:
        self._outer.begin(self.weights)
        for group in self._inner.param_groups:
            group["lr"] = lr
        self._inner.step()
        if (self.steps + 1) % self._every == 0 or last:
            average = yield from self._coded(self._outer.change(self.weights))
            self._outer.end(self.weights, average)

    def common(self) -> Tensors:
        """The weights at the beginning of a round in which ranks step alone."""
        return self._outer.anchors or self.weights


class JointWorkers:
    """Simulated ranks, each with a model and an optimizer of its own."""

    def __init__(
        self,
        model: nn.Module,
        workers: int,
        make: Callable[[nn.Module, RankCodecs], JointOptimizer],
        rules: CodecTable,
        options: LinkOptions,
    ) -> None:
        self.models = [copy.deepcopy(model) for _ in range(workers)]
        places = (SimulatedRank(rank, workers) for rank in range(workers))
        codecs = (RankCodecs(rules, options, place, common=False) for place in places)
        self._ranks = list(map(make, self.models, codecs))

    def step(self, lr: float, *, last: bool) -> Tally:
        """One step of all ranks; returns what they sent."""
        lockstep([rank.step(lr, last=last) for rank in self._ranks])
        tally = Tally()
        for rank in self._ranks:
            tally.add(rank.codecs.tally)
            rank.codecs.tally = Tally()
        # Each rank counts the same averages.
        tally.down_bits //= len(self._ranks)
        for name, arrived in self._ranks[0].arrived.items():
            exact = [rank.sent[name] for rank in self._ranks if name in rank.sent]
            if len(exact) == len(self._ranks):
                energy, error = vectors.error_of(vectors.plain_mean(exact), arrived)
                tally.energy += energy
                tally.squared_error += error
        return tally

    def common_to(self, model: nn.Module) -> None:
        """Give a model the weights that all ranks have in common, and the first rank's buffers."""
        model.load_state_dict({**self.models[0].state_dict(), **self._ranks[0].common()})

    def check(self, step: int, policy: Nonfinite) -> list[Bad]:
        """Handle NaN and infinity in gradients; a rank goes on without a tensor that ``skip`` leaves out."""
        bad: list[Bad] = []
        for worker, rank in enumerate(self._ranks):
            for name, parameter in rank.parameters.items():
                if parameter.grad is None or policy == "pass":
                    continue
                values = parameter.grad.numpy().reshape(-1)
                if count := vectors.count_nonfinite(values):
                    bad.append(Bad(name, worker, count))
                    kept = without_nonfinite(values, count, policy, f"step {step}, worker {worker}, {name}")
                    parameter.grad = None if kept is None else torch.as_tensor(kept).view_as(parameter)
        return bad

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of every rank."""
        pairs = zip(self.models, self._ranks, strict=True)
        return [{"model": model.state_dict(), **rank.state_dict()} for model, rank in pairs]

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Undo :meth:`state_dict`."""
        for model, rank, one in zip(self.models, self._ranks, saved, strict=True):
            model.load_state_dict(one["model"])
            rank.load_state_dict(one)


def _timed(exchange: Exchanging[T], tally: Tally) -> Exchanging[T]:
    """The same exchange; its own CPU time is counted as the codec's, that of other ranks is not."""
    answer: Any = None
    while True:
        start = time.thread_time()
        try:
            asked = exchange.send(answer)
        except StopIteration as end:
            return end.value
        finally:
            tally.codec_seconds += time.thread_time() - start
        answer = yield asked


def _follow(first: Tensors, gradients: Tensors) -> None:
    """Adam's running mean of gradients."""
    for name, gradient in gradients.items():
        first[name].mul_(_BETAS[0]).add_(gradient, alpha=1 - _BETAS[0])


def _follow_squares(second: Tensors, gradients: Tensors) -> None:
    """Adam's running mean of squares."""
    for name, gradient in gradients.items():
        second[name].mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])


def _masked(arrived: Tensors, second: Tensors) -> Tensors:
    """What arrived, without values of weights that never had a gradient: one bit cannot say zero, and v is 0 there.

    DeepSpeed asks its user for this mask.
    """
    return {name: values * (second[name] > 0) for name, values in arrived.items()}


def _root(second: torch.Tensor) -> torch.Tensor:
    return second.sqrt() + _EPSILON


class OuterRounds:
    """The outer optimizer around one optimizer of a program, with an exchange of its own after ``every`` steps.

    Attributes:
        steps: steps so far, those that a gradient scaler left out included.
        comparison: of the last exchange with plain all-reduces; None without one.
    """

    def __init__(self, exchange: RankExchange | Exchange, every: int, names: Iterable[str]) -> None:
        self.steps = 0
        self._names = list(names)
        self.comparison: AllReduceComparison | None = None
        self._exchange, self._every = exchange, every
        self._nesterov = OuterNesterov()

    def begin(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """A step is about to begin, and maybe a round."""
        # A program may add some.
        self._names = list(dict.fromkeys([*self._names, *parameters]))
        self._nesterov.begin({name: own_values(parameter) for name, parameter in parameters.items()})

    def end(self, parameters: Mapping[str, torch.Tensor]) -> Tally:
        """A step is over, or was left out; at the end of a round, exchange. Returns what that cost."""
        self.steps += 1
        self.comparison = None
        values = {name: own_values(parameter) for name, parameter in parameters.items()}
        if self.steps % self._every:
            # A program without local steps would have sent as much as in an exchange.
            copies = 1 if isinstance(self._exchange, RankExchange) else self._exchange.workers
            return Tally(float32_bits=32 * copies * sum(value.numel() for value in values.values()))
        # A gradient scaler may have left out all steps of this rank, while others go on.
        self.begin({name: parameter for name, parameter in parameters.items() if parameter.requires_grad})
        changes = self._nesterov.change(values)
        if isinstance(self._exchange, RankExchange):
            rules = self._exchange.rules
            flat = [vectors.flat(change, rules.choose(name, change.numel())) for name, change in changes.items()]
            found = self._exchange.average(list(changes), flat, [tuple(change.shape) for change in changes.values()])
            self._exchange.end_step()
            self.comparison = self._exchange.comparison
            tally, averages = self._exchange.last, dict(zip(changes, found, strict=True))
        else:
            exchanged = self._exchange.step(self.steps // self._every - 1, [changes] * self._exchange.workers)
            tally, averages = exchanged.tally, exchanged.gradients
        means = {
            # What the exchange left out does not move.
            name: torch.as_tensor(averages[name]).view(change.shape) if name in averages else torch.zeros(change.shape)
            for name, change in changes.items()
        }
        self._nesterov.end(values, means)
        return tally

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint of the optimizer: all ranks have the same but for the codecs' memory."""
        exchange = self._exchange
        codecs = exchange.state_dict() if isinstance(exchange, RankExchange) else as_tensors(exchange.to_arrays())
        return {"steps": self.steps, "names": list(self._names), **self._nesterov.state_dict(), "codecs": codecs}

    def load_state_dict(self, saved: Mapping[str, Any]) -> str:
        """Undo :meth:`state_dict`; returns why codecs start without memory, empty if they have it."""
        self.steps, names, ours = saved["steps"], saved["names"], set(self._names)
        # A program may have frozen some, or no longer.
        same = ours.issubset(names) or ours.issuperset(names)
        if not same and len(names) != len(ours):
            return f"state: saved with other parameters, e.g. {names[0]}, and the outer momentum starts empty, too"
        here = dict(zip(names, names if same else self._names, strict=True))
        self._nesterov.load_state_dict(
            {what: {here[name]: one for name, one in saved[what].items()} for what in ("anchors", "momentum")}
        )
        if not same:
            return f"state: saved with other names, e.g. {names[0]}"
        try:
            if isinstance(self._exchange, Exchange):
                self._exchange.load_arrays(as_arrays(saved["codecs"]))
            else:
                self._exchange.steps = self.steps // self._every
                self._exchange.load_state_dict(saved["codecs"])
        except UsageError as error:
            return str(error)
        return ""


class ProgramRounds:
    """The outer optimizers of a program that knows nothing of them, one around each of its optimizers.

    Their state is saved and loaded with the optimizer's own ``state_dict``.
    """

    def __init__(
        self, rules: CodecTable, options: RankOptions, workers: int, every: int, warn: Callable[[str], None]
    ) -> None:
        self._rules, self._options, self._workers, self._every, self._warn = rules, options, workers, every, warn
        self._rounds: weakref.WeakKeyDictionary[Optimizer, OuterRounds] = weakref.WeakKeyDictionary()
        #: what a checkpoint holds for an optimizer that has not stepped yet
        self._saved: weakref.WeakKeyDictionary[Optimizer, Mapping[str, Any]] = weakref.WeakKeyDictionary()

    def saving(self, original: Any) -> Any:
        """``Optimizer.state_dict`` that has the outer optimizer's state, too."""

        def state_dict(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            found = original(optimizer, *args, **kwargs)
            rounds = self._rounds.get(optimizer)
            return found if rounds is None else {**found, _KEY: rounds.state_dict()}

        return state_dict

    def loading(self, original: Any) -> Any:
        """``Optimizer.load_state_dict`` that takes it back."""

        def load_state_dict(optimizer: Optimizer, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(optimizer, state_dict, *args, **kwargs)
            if _KEY in state_dict:
                self._saved[optimizer] = copy.deepcopy(state_dict[_KEY])
                self._rounds.pop(optimizer, None)
            return result

        return load_state_dict

    def of(self, optimizer: Optimizer, names: Iterable[str], group: ProcessGroup | None) -> OuterRounds:
        """The rounds around an optimizer; parameters of these names are common to the ranks of a group, if any."""
        found = self._rounds.get(optimizer)
        if found is not None:
            return found
        options = self._options
        exchange: RankExchange | Exchange = (
            Exchange(self._rules, self._workers, seed=options.seed, refit=options.refit, nonfinite=options.nonfinite)
            if group is None
            else RankExchange(self._rules, group, options=options)
        )
        found = self._rounds[optimizer] = OuterRounds(exchange, self._every, names)
        saved = self._saved.pop(optimizer, None)
        if saved is not None and (why := found.load_state_dict(saved)):
            self._warn(f"the checkpoint's codecs are not those of this process ({why}): their memory starts empty")
        return found
