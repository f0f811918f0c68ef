"""Policies for the bits of a codec during training: fixed, a schedule, the gradients' size, or MQGrad's agent.

The agent decides by SARSA over smoothed losses when a training gets one more bit: Cui et al., MQGrad: Reinforcement
Learning of Gradient Quantization in Parameter Server (2018). Where the paper contradicts itself, docs/bit-policies.md
names the reading used here. Everything is float64, random numbers are keyed.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from gtrace.codecs import Codec, Identity
from gtrace.errors import UsageError, suggest
from gtrace.types import Key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.training.exchange import Exchange

#: default range of bits that a policy chooses from
DEFAULT_BITS = (2, 8)
FIXED = "fixed"
#: divisor of a reward: seconds of an iteration, or milliseconds of a whole period, as in the paper's text
Cost: TypeAlias = Literal["iteration", "period"]
COSTS: tuple[Cost, ...] = get_args(Cost)
_HIDDEN = 10


def smooth(losses: Sequence[float], before: float, alpha: float) -> NDArray[np.float64]:
    """The moving averages L'_i = alpha L_i + (1 - alpha) L'_(i-1) of Eq. 1, float64[T]; L'_0 is ``before``.

    >>> smooth([1.0, 0.0], 2.0, 0.5).tolist()
    [1.5, 0.75]
    """
    out = np.empty(len(losses))
    for i, loss in enumerate(losses):
        before = alpha * loss + (1 - alpha) * before
        out[i] = before
    return out


def slope(smoothed: NDArray[np.float64]) -> float:
    """The least-squares slope beta of T values over 1, ..., T, in loss per iteration.

    For five values (-2 L'_1 - L'_2 + L'_4 + 2 L'_5) / 10.

    >>> slope(np.array([5.0, 4.0, 3.0, 2.0, 1.0]))
    -1.0
    """
    count = smoothed.size
    doubled = 2 * np.arange(count) - (count - 1)  # twice the distance to the middle: whole numbers
    return float(6 * (doubled @ smoothed) / (count * (count * count - 1)))


def reward(beta: float, cost: float, scale: float) -> float:
    """Eq. 2, -scale beta / cost; ``scale`` is the paper's gamma of that equation, no discount."""
    if not cost > 0:
        raise UsageError(f"mqgrad: iterations that took {cost:g} seconds; rewards need a positive time")
    return -scale * beta / cost


class QNetwork:
    """T inputs, ten rectified units, one linear output for each number of bits; ``weights`` are float64.

    Weights are uniform in +-1 / sqrt(inputs of the layer), biases zero. The paper gives no initialization.
    """

    def __init__(self, inputs: int, outputs: int, key: Key) -> None:
        random = np.random.default_rng(key)
        self.weights: dict[str, NDArray[np.float64]] = {
            "hidden": random.uniform(-1, 1, (_HIDDEN, inputs)) / math.sqrt(inputs),
            "hidden_bias": np.zeros(_HIDDEN),
            "out": random.uniform(-1, 1, (outputs, _HIDDEN)) / math.sqrt(_HIDDEN),
            "out_bias": np.zeros(outputs),
        }

    def __call__(self, state: NDArray[np.float64]) -> NDArray[np.float64]:
        """All outputs for float64[T] of smoothed losses."""
        return self.weights["out"] @ self._rectified(state) + self.weights["out_bias"]

    def _rectified(self, state: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.maximum(self.weights["hidden"] @ state + self.weights["hidden_bias"], 0.0)

    def sarsa(self, state: NDArray[np.float64], output: int, target: float, rate: float) -> bool:
        """v += rate [target - Q] dQ/dv with Q = ``output`` at ``state``; the target is a number (semi-gradient).

        Returns whether it was done: an update that is not finite is skipped.
        """
        w = self.weights
        h = self._rectified(state)
        with np.errstate(over="ignore", invalid="ignore"):
            step = rate * (target - (w["out"][output] @ h + w["out_bias"][output]))
            back = step * w["out"][output] * (h > 0)
            new = {name: array.copy() for name, array in w.items()}
            new["out"][output] += step * h
            new["out_bias"][output] += step
            new["hidden"] += back[:, None] * state
            new["hidden_bias"] += back
        if not all(np.isfinite(array).all() for array in new.values()):
            return False
        self.weights = new
        return True


@dataclass(frozen=True, slots=True)
class Decision:
    """The agent's last decision.

    Attributes:
        number: t, from 0.
        node: n, the bits of the state; it never falls.
        greedy: the action that the Q network prefers; the next node is ``node + greedy``.
        action: the action taken; the other one if it ``explored``.
        explored: the coin chose the other action.
        bits: ``node + action``, in use until the next decision.
        reward: for the decision before; NaN for the first.
    """

    number: int
    node: int
    greedy: int
    action: int
    explored: bool
    bits: int
    reward: float = math.nan


@dataclass(eq=False)
class MQGrad:
    """MQGrad's agent. Call :meth:`step` at every iteration, with the loss that was just computed.

    Args:
        bits: least and most.
        period: T, iterations of a decision, at least 2.
        alpha: weight of a new loss in the moving average.
        epsilon: probability of the action that is not the greedy one.
        learning_rate: of the Q network.
        discount: weight of the next Q value; the paper does not name it.
        reward_scale: the paper's gamma of Eq. 2.
        seed: seed of the Q network's first weights and, separately, of the coin.
        cost: divisor of a reward: ``iteration``, mean seconds of an iteration; ``period``, milliseconds of a
            period, which makes rewards 5,000 times smaller for T = 5.
        constant_reward: replaces every reward; None for Eq. 2.

    Attributes:
        decision: the last one; None before the first call.
        node: n, the bits of the state that the next decision starts from.
        network: the Q network.
        diverged: an update of the Q network was not finite, and was skipped.

    Raises:
        UsageError: a parameter out of range.
    """

    bits: tuple[int, int] = (2, 8)
    period: int = 5
    alpha: float = 0.01
    epsilon: float = 0.1
    learning_rate: float = 0.1
    discount: float = 0.9
    reward_scale: float = 300
    seed: int = 0
    cost: Cost = field(default="iteration", kw_only=True)
    constant_reward: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        low, high = self.low, self.high = self.bits
        if not 1 <= low <= high:
            raise UsageError(f"mqgrad: bits={low}-{high}; write the least and the most, e.g. 2-8")
        if self.period < 2:
            raise UsageError(f"mqgrad: period={self.period}; a slope needs at least 2 losses")
        for name in ("alpha", "epsilon", "discount"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"mqgrad: {name}={getattr(self, name):g} is out of range; it must be 0 to 1")
        for name in ("learning_rate", "reward_scale"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(
                    f"mqgrad: {name}={getattr(self, name):g} is out of range; it must be finite and not negative"
                )
        if self.constant_reward is not None and not math.isfinite(self.constant_reward):
            raise UsageError(f"mqgrad: constant_reward={self.constant_reward:g} is not finite")
        if self.cost not in COSTS:
            raise UsageError(f"mqgrad: cost={self.cost} is unknown; {suggest(str(self.cost), COSTS)}")
        key = Key.derive(self.seed, tensor="mqgrad/network", role="sample")
        self.network = QNetwork(self.period, high - low + 1, key)
        self.node = low
        self.decision: Decision | None = None
        self.diverged = False
        self._state = np.empty(0)
        self._losses: list[float] = []
        self._seconds: list[float] = []

    def step(self, loss: float, seconds: float) -> int:
        """The bits for this iteration's gradients.

        Args:
            loss: of this iteration, mean over the workers.
            seconds: duration of the previous iteration; ignored in the first call.

        Raises:
            UsageError: a loss that is not finite, or a period without a positive time.
        """
        if not math.isfinite(loss):
            raise UsageError(f"mqgrad: a loss of {loss}; the agent needs finite numbers")
        if self.decision is None:
            self._state = np.full(self.period, float(loss))
            self._decide(self._state, None)
        else:
            self._losses.append(float(loss))
            self._seconds.append(float(seconds))
            if len(self._losses) == self.period:
                state = smooth(self._losses, float(self._state[-1]), self.alpha)
                earned = self.constant_reward
                if earned is None:
                    total = sum(self._seconds)
                    cost = total / self.period if self.cost == "iteration" else 1000 * total
                    earned = reward(slope(state), cost, self.reward_scale)
                self._losses, self._seconds = [], []
                self._decide(state, earned)
        assert self.decision is not None
        return self.decision.bits

    def __call__(self, _step: int, loss: float, seconds: float, _rms: object) -> int:
        """The bits of an iteration, as other policies choose them; a loss that is not finite is skipped."""
        if math.isfinite(loss):
            return self.step(loss, seconds)
        return self.low if self.decision is None else self.decision.bits

    def _decide(self, state: NDArray[np.float64], earned: float | None) -> None:
        before, node = self.decision, self.node
        number = 0 if before is None else before.number + 1
        values = self.network(state)[node - self.low :]
        may_grow = node < self.high
        greedy = int(may_grow and values[1] > values[0])
        coin = np.random.default_rng(Key.derive(self.seed, tensor="mqgrad/coin", step=number, role="sample")).random()
        explored = bool(may_grow and coin < self.epsilon)
        action = 1 - greedy if explored else greedy
        if before is not None and earned is not None:
            target = earned + self.discount * float(values[action])
            done = self.network.sarsa(self._state, before.bits - self.low, target, self.learning_rate)
            self.diverged |= not done
        self._state, self.node = state, node + greedy
        bits = node + action
        self.decision = Decision(number, node, greedy, action, explored, bits, math.nan if earned is None else earned)

    def state_dict(self) -> dict[str, Any]:
        """The state for later steps: numbers and arrays."""
        return {
            "node": self.node,
            "decision": None if self.decision is None else asdict(self.decision),
            "diverged": self.diverged,
            "losses": list(self._losses),
            "seconds": list(self._seconds),
            "state": self._state.copy(),
            "weights": {name: array.copy() for name, array in self.network.weights.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, with the same parameters."""
        self.node = int(saved["node"])
        self.decision = None if saved["decision"] is None else Decision(**saved["decision"])
        self.diverged = bool(saved["diverged"])
        self._losses, self._seconds = list(saved["losses"]), list(saved["seconds"])
        self._state = np.asarray(saved["state"], np.float64)
        self.network.weights = {name: np.asarray(array, np.float64) for name, array in saved["weights"].items()}


#: step from 0, loss (mean over the workers; NaN if no worker has a finite one), simulated seconds of the previous step
#: (NaN before the first), and what returns, per worker, the root mean square of the gradients that the codec will
#: encode -> the bits of that step, before its gradients are encoded; called once for each step, in order
Choice: TypeAlias = "Callable[[int, float, float, Callable[[], Sequence[float]]], int]"


def adaptive(bits: tuple[int, int] = DEFAULT_BITS, divisor: float = 0.0005) -> Choice:
    """K = floor(mean over workers of min(most, least + RMS / divisor)), at every step.

    Oeland and Raj, Reducing communication overhead in distributed learning by an order of magnitude (almost), 2015, as
    MQGrad's authors ran it. A worker without finite gradients does not count; without any, it is the most.
    """
    low, high = bits
    if not 1 <= low <= high:
        raise UsageError(f"policy adaptive: bits={low}-{high}; write the least and the most, e.g. 2-8")
    if not 0 < divisor < math.inf:
        raise UsageError(f"policy adaptive: divisor={divisor:g} is out of range; it must be above 0")

    def choose(_step: int, _loss: float, _seconds: float, rms: Callable[[], Sequence[float]]) -> int:
        wanted = [min(float(high), low + one / divisor) for one in rms() if math.isfinite(one)]
        return math.floor(sum(wanted) / len(wanted)) if wanted else high

    return choose


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
    """A policy's name and, as ``given``, its (option, value), or (step, bits) of a schedule, before a run begins."""

    name: str = FIXED
    given: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> PolicySpec:
        """Read ``fixed``, ``schedule:0=2,500=4``, ``adaptive:divisor=0.001``, ``mqgrad:period=5,seed=1``.

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
    def bits(self) -> tuple[int, ...]:
        """Least and most bits that it may choose; none for fixed."""
        given = dict(self.given)
        if self.name == "schedule":
            return min(given.values()), max(given.values())
        return given.get("bits", DEFAULT_BITS) if self.chooses else ()

    def begin(self, seed: int) -> Choice | None:
        """The policy of one run, None for fixed; an option ``seed`` takes precedence over the run's.

        Only MQGrad's agent remembers anything between two steps.
        """
        given = dict(self.given)
        if self.name == "schedule":
            bits = {int(step): one for step, one in given.items()}
            starts = sorted(bits)
            if starts[:1] != [0]:
                raise UsageError("policy schedule: needs the bits of step 0, e.g. schedule:0=2,500=4")
            return lambda step, _loss, _seconds, _rms: bits[starts[bisect_right(starts, step) - 1]]
        if self.name == "adaptive":
            return adaptive(**given)
        return None if self.name == FIXED else MQGrad(**{"seed": seed, **given})

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

    def communication(self, bits: float) -> float:
        """Seconds of all pushes and pulls of an iteration, each of 32 ``n_full`` + bits ``n_quantized`` bits."""
        return 2 * self.workers * (32 * self.n_full + bits * self.n_quantized) / self.bandwidth

    def iteration(self, bits: float) -> float:
        """Seconds of an iteration.

        >>> round(ParameterServerClock(18, 8e7, 5.0, 16_072_704).iteration(1), 2)
        12.23
        """
        return self.compute_seconds + self.communication(bits)


class BitControl:
    """Asks a policy before every exchange."""

    def __init__(self, choose: Choice, codec: Codec, exchange: Exchange) -> None:
        #: simulated duration of the previous step; the caller sets it
        self.seconds = math.nan
        self._choose, self._codec, self._exchange = choose, codec, exchange
        self._agent = choose if isinstance(choose, MQGrad) else None
        self._bits = 0

    def before(self, step: int, loss: float, gradients: Sequence[Mapping[str, NDArray[np.float32]]]) -> dict[str, Any]:
        """Choose the bits of a step, with each worker's float32 gradients; returns the fields for the run log."""
        before = None if self._agent is None else self._agent.decision
        self._use(self._choose(step, loss, self.seconds, lambda: [self._rms(one) for one in gradients]))
        if self._agent is None:
            return {"codec_bits": self._bits}
        found = {"codec_bits": self._bits, "node": self._agent.node}
        now = self._agent.decision
        return found if now is None or now is before else {**found, "reward": now.reward, "explored": now.explored}

    def warning(self) -> str:
        """A warning if the agent's Q network diverged; empty without one."""
        if self._agent is None or not self._agent.diverged:
            return ""
        return (
            "mqgrad's Q network would have left the finite numbers, and stopped learning: rewards are too large; "
            "try a smaller reward_scale or learning_rate"
        )

    def _use(self, bits: int) -> None:
        if bits and bits != self._bits:
            self._bits = bits
            self._exchange.use(self._codec.at_bits(bits))

    def _rms(self, tensors: Mapping[str, NDArray[np.float32]]) -> float:
        choose = self._exchange.rules.choose
        chosen = [array for name, array in tensors.items() if choose(name, array.size) != Identity()]
        count = sum(array.size for array in chosen)
        energy = sum(float(np.vdot(wide := array.astype(np.float64), wide)) for array in chosen)
        return math.sqrt(energy / count) if count else math.nan

    def state_dict(self) -> dict[str, Any]:
        """The state for later choices: numbers and arrays."""
        agent = {} if self._agent is None else self._agent.state_dict()
        return {"seconds": self.seconds, "bits": self._bits, "policy": agent}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`, before the exchange is loaded."""
        self.seconds = saved["seconds"]
        if self._agent is not None:
            self._agent.load_state_dict(saved["policy"])
        self._use(saved["bits"])
