"""MQGrad's agent: SARSA over smoothed losses decides when a training gets one more bit.

Cui et al., MQGrad: Reinforcement Learning of Gradient Quantization in Parameter Server (2018). Where the paper
contradicts itself, docs/bit-policies.md names the reading used here. Everything is float64, random
numbers are keyed.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from gtrace.errors import UsageError, suggest
from gtrace.types import Key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

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
    """Eq. 2, -scale beta / cost; ``scale`` is the paper's gamma of that equation, no discount.

    Raises:
        UsageError: a cost that is not positive.
    """
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
    """The agent. Call :meth:`step` at every iteration, with the loss that was just computed.

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
