"""Policies for the bits of a codec during training: fixed, a schedule, the gradients' size, or MQGrad's agent."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.codecs import Identity
from gtrace.errors import UsageError, suggest
from gtrace.training.mqgrad import MQGrad

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.codecs import Codec
    from gtrace.training.exchange import Exchange

#: default range of bits that a policy chooses from
DEFAULT_BITS = (2, 8)
#: RMS of a gradient for which ``adaptive`` adds one bit
DEFAULT_DIVISOR = 0.0005
FIXED = "fixed"


class BitPolicy(ABC):
    """Chooses bits step by step, and can be saved between two steps; this class remembers nothing."""

    @abstractmethod
    def choose(self, step: int, loss: float, seconds: float, rms: Callable[[], Sequence[float]]) -> int:
        """The bits of a step, before its gradients are encoded; called once for each, in order.

        Args:
            step: number of the step, from 0.
            loss: its loss, mean over the workers; NaN if no worker has a finite one.
            seconds: simulated duration of the previous step; NaN before the first.
            rms: returns, per worker, the root mean square of the gradients that the codec will encode.
        """

    def record(self) -> dict[str, Any]:
        """The fields of the run log about the last choice, besides its bits."""
        return {}

    def warning(self) -> str:
        """A warning for the user at the end; empty without one."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """The state for later choices: numbers and arrays."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`, for a policy with the same parameters."""
        del saved


class BitSchedule(BitPolicy):
    """Bits from a fixed schedule: step -> bits from that step on.

    Raises:
        UsageError: no bits for step 0.
    """

    def __init__(self, bits: Mapping[int, int]) -> None:
        if 0 not in bits:
            raise UsageError("policy schedule: needs the bits of step 0, e.g. schedule:0=2,500=4")
        self._starts = sorted(bits)
        self._bits = [bits[start] for start in self._starts]

    def choose(self, step: int, loss: float, seconds: float, rms: Callable[[], Sequence[float]]) -> int:
        """The bits of the last entry up to this step."""
        return self._bits[bisect_right(self._starts, step) - 1]


class Adaptive(BitPolicy):
    """K = floor(mean over workers of min(most, least + RMS / divisor)), at every step.

    Oeland and Raj, Reducing communication overhead in distributed learning by an order of magnitude (almost), 2015, as
    MQGrad's authors ran it. A worker without finite gradients does not count; without any, it is the most.

    Raises:
        UsageError: a parameter out of range.
    """

    def __init__(self, bits: tuple[int, int] = DEFAULT_BITS, divisor: float = DEFAULT_DIVISOR) -> None:
        self._low, self._high = bits
        self._divisor = divisor
        if not 1 <= self._low <= self._high:
            raise UsageError(f"policy adaptive: bits={self._low}-{self._high}; write the least and the most, e.g. 2-8")
        if not 0 < divisor < math.inf:
            raise UsageError(f"policy adaptive: divisor={divisor:g} is out of range; it must be above 0")

    def choose(self, step: int, loss: float, seconds: float, rms: Callable[[], Sequence[float]]) -> int:
        """More bits for larger gradients."""
        wanted = [min(float(self._high), self._low + one / self._divisor) for one in rms() if math.isfinite(one)]
        return math.floor(sum(wanted) / len(wanted)) if wanted else self._high


class Learned(BitPolicy):
    """MQGrad's agent as a policy."""

    def __init__(self, agent: MQGrad) -> None:
        self.agent = agent
        self._new = False

    def choose(self, step: int, loss: float, seconds: float, rms: Callable[[], Sequence[float]]) -> int:
        """The agent's bits; skips a loss that is not finite."""
        before = self.agent.decision
        if math.isfinite(loss):
            bits = self.agent.step(loss, seconds)
        else:
            bits = self.agent.low if before is None else before.bits
        self._new = self.agent.decision is not before
        return bits

    def record(self) -> dict[str, Any]:
        """``node``, and at the steps of a decision ``reward`` and ``explored``."""
        decision = self.agent.decision
        new = {} if not self._new or decision is None else {"reward": decision.reward, "explored": decision.explored}
        return {"node": self.agent.node, **new}

    def warning(self) -> str:
        """A warning if the Q network diverged."""
        if not self.agent.diverged:
            return ""
        return (
            "mqgrad's Q network would have left the finite numbers, and stopped learning: rewards are too large; "
            "try a smaller reward_scale or learning_rate"
        )

    def state_dict(self) -> dict[str, Any]:
        """The agent's state."""
        return self.agent.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the agent's state."""
        self.agent.load_state_dict(saved)


def _range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    if found is None:
        raise ValueError
    return int(found[1]), int(found[2])


#: name -> options with their parsers, and an example
_POLICIES: dict[str, tuple[dict[str, Callable[[str], Any]], str]] = {
    FIXED: ({}, FIXED),
    "schedule": ({}, "schedule:0=2,500=4"),
    "adaptive": ({"bits": _range, "divisor": float}, "adaptive:divisor=0.001"),
    "mqgrad": (
        {
            "bits": _range,
            "cost": str,
            **dict.fromkeys(("period", "seed"), int),
            **dict.fromkeys(("alpha", "epsilon", "learning_rate", "discount"), float),
            **dict.fromkeys(("reward_scale", "constant_reward"), float),
        },
        "mqgrad:period=5,seed=1",
    ),
}


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy's name and options, before a run begins.

    Attributes:
        name: fixed, schedule, adaptive or mqgrad.
        given: (option, value), or (step, bits) of a schedule, in the order of the text.
    """

    name: str = FIXED
    given: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> PolicySpec:
        """Read ``fixed``, ``schedule:0=2,500=4``, ``adaptive:divisor=0.001``, ``mqgrad:period=5,seed=1``.

        Raises:
            UsageError: none of these, or values that are not allowed.

        >>> PolicySpec.parse("adaptive:bits=2-6,divisor=0.001").given
        (('bits', (2, 6)), ('divisor', 0.001))
        """
        name, _, rest = text.strip().partition(":")
        if name not in _POLICIES:
            raise UsageError(f"policy: '{name}' is unknown; {suggest(name, _POLICIES)}")
        given: dict[str, Any] = {}
        for part in filter(None, (piece.strip() for piece in rest.split(","))):
            key, equals, value = part.partition("=")
            if not (equals and value):
                raise UsageError(f"policy {name}: '{part}' is not key=value, e.g. {_POLICIES[name][1]}")
            if key in given:
                raise UsageError(f"policy {name}: {key} is given twice")
            given[key] = _value(name, key, value)
        spec = cls(name, tuple(given.items()))
        spec.begin(0)
        return spec

    @property
    def chooses(self) -> bool:
        """Whether bits may change."""
        return self.name != FIXED

    @property
    def timed(self) -> bool:
        """Whether it uses the simulated time, which must then be the same in every run."""
        return self.name == "mqgrad"

    @property
    def bits(self) -> tuple[int, ...]:
        """Least and most bits that it may choose; none for fixed."""
        given = dict(self.given)
        if self.name == "schedule":
            return min(given.values()), max(given.values())
        return given.get("bits", DEFAULT_BITS) if self.chooses else ()

    def begin(self, seed: int) -> BitPolicy | None:
        """The policy of one run, None for fixed; an option ``seed`` takes precedence over the run's."""
        given = dict(self.given)
        if self.name == "schedule":
            return BitSchedule({int(step): bits for step, bits in given.items()})
        if self.name == "adaptive":
            return Adaptive(**given)
        return Learned(MQGrad(**{"seed": seed, **given})) if self.name == "mqgrad" else None

    def __str__(self) -> str:
        shown = [
            f"{key}={'-'.join(map(str, value)) if isinstance(value, tuple) else value}" for key, value in self.given
        ]
        return f"{self.name}:{','.join(shown)}" if shown else self.name


def _value(name: str, key: str, text: str) -> Any:
    options, example = _POLICIES[name]
    if name == "schedule":
        if not (key.isdecimal() and text.isdecimal() and int(text) > 0):
            raise UsageError(f"policy schedule: '{key}={text}' is not STEP=BITS, e.g. {example}")
        return int(text)
    if key not in options:
        hint = suggest(key, options) if options else f"{name} has none"
        raise UsageError(f"policy {name}: no option '{key}'; {hint}")
    try:
        return options[key](text)
    except ValueError:
        raise UsageError(f"policy {name}: {key}={text} cannot be read, e.g. {example}") from None


@dataclass(frozen=True, slots=True)
class ParameterServerClock:
    """A server with a single link that carries every worker's push, and then every worker's pull.

    Computing and communicating do not overlap. :class:`~gtrace.costs.Network` with the topology ``ps`` does the
    same for the actual bytes.

    Attributes:
        workers: P.
        bandwidth: bandwidth of the server's link, in bits per second.
        compute_seconds: computing time of an iteration.
        n_quantized: number of elements sent in ``bits`` each.
        n_full: number of elements sent in 32 bits each.

    Raises:
        UsageError: a number out of range.
    """

    workers: int
    bandwidth: float
    compute_seconds: float
    n_quantized: int
    n_full: int = 0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"clock: {self.workers} workers; it must be at least 1")
        if not 0 < self.bandwidth < math.inf:
            raise UsageError(f"clock: bandwidth must be above 0 bit/s, not {self.bandwidth:g}")
        for name in ("compute_seconds", "n_quantized", "n_full"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"clock: {name}={getattr(self, name):g} is out of range; it must not be negative")

    def message_bits(self, bits: float) -> float:
        """V, bits of one message from or to a worker in an iteration: 32 ``n_full`` + bits ``n_quantized``."""
        return 32 * self.n_full + bits * self.n_quantized

    def communication(self, bits: float) -> float:
        """Seconds of all pushes and pulls of an iteration: 2 P V / bandwidth."""
        return 2 * self.workers * self.message_bits(bits) / self.bandwidth

    def iteration(self, bits: float) -> float:
        """Seconds of an iteration.

        >>> round(ParameterServerClock(18, 8e7, 5.0, 16_072_704).iteration(1), 2)
        12.23
        """
        return self.compute_seconds + self.communication(bits)


class BitControl:
    """Asks a policy before every exchange."""

    def __init__(self, policy: BitPolicy, codec: Codec, exchange: Exchange) -> None:
        #: simulated duration of the previous step; the caller sets it
        self.seconds = math.nan
        self.policy, self._codec, self._exchange = policy, codec, exchange
        self._bits = 0

    def before(self, step: int, loss: float, gradients: Sequence[Mapping[str, NDArray[np.float32]]]) -> dict[str, Any]:
        """Choose the bits of a step, with each worker's float32 gradients; returns the fields for the run log."""
        self._use(self.policy.choose(step, loss, self.seconds, lambda: [self._rms(one) for one in gradients]))
        return {"codec_bits": self._bits, **self.policy.record()}

    def _use(self, bits: int) -> None:
        if bits and bits != self._bits:
            self._bits = bits
            self._exchange.use(self._codec.at_bits(bits))

    def _rms(self, tensors: Mapping[str, NDArray[np.float32]]) -> float:
        """RMS of all values that go through the codec; NaN without any."""
        choose = self._exchange.rules.choose
        chosen = [array for name, array in tensors.items() if choose(name, array.size) != Identity()]
        count = sum(array.size for array in chosen)
        energy = sum(float(np.vdot(wide := array.astype(np.float64), wide)) for array in chosen)
        return math.sqrt(energy / count) if count else math.nan

    def state_dict(self) -> dict[str, Any]:
        """The state for later choices: numbers and arrays."""
        return {"seconds": self.seconds, "bits": self._bits, "policy": self.policy.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`, before the exchange is loaded."""
        self.seconds = saved["seconds"]
        self.policy.load_state_dict(saved["policy"])
        self._use(saved["bits"])
