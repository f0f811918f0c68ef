"""Local steps: ranks train alone, and every H steps what their weights changed is averaged (DiLoCo)."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

import torch

from gtrace.errors import UsageError
from gtrace.training import vectors
from gtrace.training.checkpoint import as_arrays, as_tensors
from gtrace.training.compression import own_values
from gtrace.training.ddp import RankExchange
from gtrace.training.exchange import Exchange, Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import TypeAlias

    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from gtrace.codecs.assignment import CodecTable
    from gtrace.training.ddp import AllReduceComparison, RankOptions

    #: name of a parameter -> a tensor of its shape
    Tensors: TypeAlias = dict[str, torch.Tensor]

#: the outer learning rate and Nesterov momentum of the paper's main results
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
#: what an optimizer's state dict calls the state of its outer optimizer
_KEY = "gtrace_outer"


class OuterNesterov:
    """DiLoCo's outer optimizer (Douillard et al. 2023, Algorithm 1): SGD with Nesterov momentum on averaged changes.

    Tensors have no gradients. Weights of less than float32 are remembered in float32.

    With the weights a that all ranks had H steps ago and each one's weights w now, it gets the average d of a - w:
    m <- 0.9 m + d, and all go on from a - 0.7 (d + 0.9 m).

    Attributes:
        anchors: name -> the common weights at the beginning of a round; empty between rounds.
        momentum: name -> m.
    """

    def __init__(self) -> None:
        self.anchors: Tensors = {}
        self.momentum: Tensors = {}

    def begin(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Remember common weights, unless a round has begun."""
        if not self.anchors:
            # In a type in which a difference of weights keeps their digits.
            self.anchors = {
                name: weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
                for name, weight in weights.items()
            }

    def change(self, weights: Mapping[str, torch.Tensor]) -> Tensors:
        """What this rank's steps took from the weights: the outer gradient."""
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


class OuterRounds:
    """The outer optimizer around one optimizer of a program.

    Args:
        exchange: between ranks, or simulated in a single process; only these rounds use it.
        every: steps of a round, H.

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
        self._nesterov.begin({name: own_values(parameter) for name, parameter in parameters.items()})

    def end(self, parameters: Mapping[str, torch.Tensor]) -> Tally:
        """A step is over, or was left out; at the end of a round, exchange. Returns what that cost.

        Raises:
            NonfiniteGradientError: weights are not finite, and the policy is ``error``.
            PayloadError: received bytes are damaged, or the ranks' models differ.
        """
        self.steps += 1
        self.comparison = None
        values = {name: own_values(parameter) for name, parameter in parameters.items()}
        if self.steps % self._every:
            # A program without local steps would have sent as much as in an exchange.
            copies = 1 if isinstance(self._exchange, RankExchange) else self._exchange.workers
            return Tally(float32_bits=32 * copies * sum(value.numel() for value in values.values()))
        # A gradient scaler may have left out all steps of this rank, while others go on.
        self._nesterov.begin(values)
        tally, averages = self._averaged(self._nesterov.change(values))
        self._nesterov.end(values, averages)
        return tally

    def _averaged(self, changes: Tensors) -> tuple[Tally, Tensors]:
        """The averages of outer gradients; zeros for one that the exchange left out."""
        shapes = {name: tuple(change.shape) for name, change in changes.items()}
        if isinstance(self._exchange, RankExchange):
            rules = self._exchange.rules
            flat = [vectors.flat(change, rules.choose(name, change.numel())) for name, change in changes.items()]
            found: Any = self._exchange.average(list(changes), flat, list(shapes.values()))
            self._exchange.end_step()
            self.comparison = self._exchange.comparison
            tally, averages = self._exchange.last, dict(zip(changes, found, strict=True))
        else:
            exchanged = self._exchange.step(
                self.steps // self._every - 1,
                [changes] * self._exchange.workers,
            )
            tally, averages = exchanged.tally, exchanged.gradients
        return tally, {
            name: torch.as_tensor(averages[name]).view(shape) if name in averages else torch.zeros(shape)
            for name, shape in shapes.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint of the optimizer: all ranks have the same but for the codecs' memory."""
        codecs = (
            self._exchange.state_dict()
            if isinstance(self._exchange, RankExchange)
            else {"codec": str(self._exchange.rules), **as_tensors(self._exchange.to_arrays())}
        )
        return {"steps": self.steps, "names": list(self._names), **self._nesterov.state_dict(), "codecs": codecs}

    def load_state_dict(self, saved: Mapping[str, Any]) -> str:
        """Undo :meth:`state_dict`; returns why codecs start without memory, empty if they have it.

        Raises:
            UsageError: saved of other parameters.
        """
        if len(saved["names"]) != len(self._names):
            raise UsageError(
                f"state: saved with {len(saved['names'])} parameters, and here the optimizer has {len(self._names)}"
            )
        self.steps = saved["steps"]
        here = dict(zip(saved["names"], self._names, strict=True))
        self._nesterov.load_state_dict(
            {what: {here[name]: one for name, one in saved[what].items()} for what in ("anchors", "momentum")}
        )
        if saved["names"] != self._names:
            return f"state: saved with other names, e.g. {saved['names'][0]}"
        rules, codecs = str(self._exchange.rules), saved["codecs"]
        if isinstance(self._exchange, Exchange):
            if codecs.get("codec") != rules:
                return f"state: saved with codec {codecs.get('codec')}, and here it is {rules}"
            self._exchange.load_arrays(as_arrays({name: codecs[name] for name in ("layout", "links")}))
            return ""
        try:
            self._exchange.load_state_dict(codecs)
        except UsageError as error:
            self._exchange.steps = self.steps // self._every
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
