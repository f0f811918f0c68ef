"""MQGrad's agent and clock against golden numbers, a plain twin, and what must hold for every sequence."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from gtrace.errors import UsageError
from gtrace.training import MQGrad, ParameterServerClock
from gtrace.training.mqgrad import reward, slope, smooth
from gtrace.types import Key

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "mqgrad.json").read_text())
CLOCK = ParameterServerClock(12, 8e7, 5.0, 16_072_704, 151_882)
NAMES = ("hidden", "hidden_bias", "out", "out_bias")


def losses(count, seed=0):
    """A falling, noisy loss."""
    random = np.random.default_rng(seed)
    return [2.3 * 0.995**k + 0.2 + 0.05 * random.standard_normal() for k in range(count)]


def sequence(agent, values, clock=CLOCK, bits=0):
    """The bits that the agent gives, each iteration timed with the bits before it."""
    found = []
    for loss in values:
        bits = agent.step(loss, clock.iteration(bits))
        found.append(bits)
    return found


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


class Twin:
    """The agent, word by word, on lists of numbers."""

    def __init__(self, weights, seed, period=5, low=2, high=8, discount=0.9):
        for name in NAMES:
            setattr(self, name, weights[name].tolist())
        self.seed, self.period, self.low, self.high, self.discount = seed, period, low, high, discount
        self.node, self.number, self.bits = low, 0, low
        self.losses, self.seconds, self.smoothed = [], [], []

    def q(self, state):
        h = [max(0.0, dot(row, state) + b) for row, b in zip(self.hidden, self.hidden_bias, strict=True)]
        return h, [dot(row, h) + b for row, b in zip(self.out, self.out_bias, strict=True)]

    def step(self, loss, seconds):
        if self.number and len(self.losses) < self.period - 1:
            self.losses.append(loss)
            self.seconds.append(seconds)
            return self.bits
        if not self.number:
            state, r = [loss] * self.period, None
        else:
            state, last = [], self.smoothed[-1]
            for value in [*self.losses, loss]:
                last = 0.01 * value + 0.99 * last
                state.append(last)
            middle = (self.period - 1) / 2
            beta = sum((i - middle) * value for i, value in enumerate(state))
            beta /= sum((i - middle) ** 2 for i in range(self.period))
            r = -300 * beta / (sum([*self.seconds, seconds]) / self.period)
        self.losses, self.seconds = [], []
        _, values = self.q(state)
        at = self.node - self.low
        key = Key.derive(self.seed, tensor="mqgrad/coin", step=self.number, role="sample")
        coin = np.random.default_rng(key).random()
        g = a = 0
        if self.node < self.high:
            g = 1 if values[at + 1] > values[at] else 0
            a = 1 - g if coin < 0.1 else g
        if r is not None:
            self.learn(r + self.discount * values[at + a])
        self.smoothed, self.number = state, self.number + 1
        self.bits, self.node = self.node + a, self.node + g
        return self.bits

    def learn(self, target):
        h, values = self.q(self.smoothed)
        k = self.bits - self.low
        step = 0.1 * (target - values[k])
        for j in range(10):
            gate = step * self.out[k][j] if h[j] > 0 else 0.0
            self.out[k][j] += step * h[j]
            self.hidden_bias[j] += gate
            for i, value in enumerate(self.smoothed):
                self.hidden[j][i] += gate * value
        self.out_bias[k] += step


@pytest.mark.parametrize("entry", GOLDEN["reward"], ids=lambda entry: f"{entry['bits']} bits")
def test_golden_smoothing_slope_and_rewards_which_the_agent_gives_itself(entry):
    smoothed = smooth(entry["losses"], entry["prev_smoothed"], entry["alpha"])
    assert smoothed.tolist() == pytest.approx(entry["smoothed"], rel=1e-15)
    assert slope(smoothed) == pytest.approx(entry["beta"], rel=1e-12)
    assert entry["c_s_per_iter"] == entry["t_comp_s"] + entry["bits"] * entry["t_bit_s"]
    for cost, seconds, name in (
        ("iteration", "c_s_per_iter", "reward_c_s_per_iter"),
        ("period", "c_ms_T_iters", "reward_c_ms_total"),
    ):
        assert reward(slope(smoothed), entry[seconds], entry["gamma_scale"]) == pytest.approx(entry[name], rel=1e-12)
        agent = MQGrad(alpha=entry["alpha"], reward_scale=entry["gamma_scale"], cost=cost)
        for loss in (entry["prev_smoothed"], *entry["losses"]):
            agent.step(loss, entry["c_s_per_iter"])
        assert agent.decision.reward == pytest.approx(entry[name], rel=1e-12)


@pytest.mark.parametrize("entry", GOLDEN["clock"], ids=lambda entry: f"{entry['P']} workers, {entry['K']} bits")
def test_golden_clock(entry):
    clock = ParameterServerClock(entry["P"], 8e7, 5.0, entry["n_quantised"], entry["n_float"])
    assert clock.message_bits(entry["K"]) == entry["bits_per_direction_per_worker"]
    assert clock.communication(entry["K"]) == pytest.approx(entry["comm_s_server_link_10MBps"], rel=1e-14)
    assert clock.iteration(entry["K"]) == 5.0 + clock.communication(entry["K"])
    # The authors' table is rounded: 5 + 5 K seconds for 12 workers, 5 + 7.5 K for 18.
    assert abs(clock.iteration(entry["K"]) - entry["authors_table_s"]) < 0.1 * entry["authors_table_s"]


@pytest.mark.parametrize(("seed", "period", "bits"), [*((seed, 5, (2, 8)) for seed in range(8)), (2, 3, (3, 6))])
def test_the_agent_is_its_twin(seed, period, bits):
    agent = MQGrad(bits=bits, period=period, seed=seed)
    twin = Twin(agent.network.weights, seed, period=period, low=bits[0], high=bits[1])
    values = losses(400, seed)
    assert sequence(agent, values) == sequence(twin, values)
    for name in NAMES:
        assert agent.network.weights[name] == pytest.approx(np.array(getattr(twin, name)), rel=1e-9, abs=1e-12)


def test_the_coin_and_the_network_have_streams_of_their_own():
    explored = []
    for epsilon in (0.1, 0.5):
        agent, found = MQGrad(epsilon=epsilon, constant_reward=0.0, bits=(2, 30), seed=4), set()
        assert np.array_equal(agent.network.weights["out"], MQGrad(bits=(2, 30), seed=4).network.weights["out"])
        for loss in losses(300):
            agent.step(loss, 0.0)
            if agent.decision.explored:
                found.add(agent.decision.number)
        assert agent.decision.reward == 0  # whatever the time
        explored.append(found)
    assert explored[0] < explored[1]


@pytest.mark.parametrize("at", [0, 1, 7, 60])
def test_an_agent_that_was_saved_goes_on_as_if_nothing_had_happened(at):
    values = losses(150)
    whole, first, second = (MQGrad(seed=1) for _ in range(3))
    begun = sequence(first, values[:at])
    saved = first.state_dict()
    sequence(first, values[at:])  # what is saved is no view of what goes on
    second.load_state_dict(saved)
    assert begun + sequence(second, values[at:], bits=begun[-1] if begun else 0) == sequence(whole, values)


def test_an_update_that_is_not_finite_is_left_out_and_told():
    agent = MQGrad(reward_scale=1e308, alpha=1.0)
    for k in range(30):
        agent.step(1e10 * (30 - k), 1e-3)
    assert agent.diverged
    assert all(np.isfinite(array).all() for array in agent.network.weights.values())
    assert 2 <= agent.step(1.0, 1.0) <= 8


OUT_OF_RANGE = [
    *({"bits": (8, 2)}, {"bits": (0, 2)}, {"period": 1}, {"alpha": 2}, {"epsilon": -0.1}, {"discount": 1.1}),
    *({"learning_rate": math.inf}, {"reward_scale": -1}, {"cost": "hours"}, {"constant_reward": math.nan}),
]
IMPOSSIBLE = [{"workers": 0}, {"bandwidth": 0}, {"bandwidth": math.nan}, {"compute_seconds": -1}, {"n_full": -1}]


@pytest.mark.parametrize("wrong", [*OUT_OF_RANGE, *IMPOSSIBLE], ids=str)
def test_parameters_out_of_range_are_refused(wrong):
    clock = {"workers": 1, "bandwidth": 1e6, "compute_seconds": 1, "n_quantized": 1}
    with pytest.raises(UsageError, match="mqgrad" if wrong in OUT_OF_RANGE else "clock"):
        MQGrad(**wrong) if wrong in OUT_OF_RANGE else ParameterServerClock(**{**clock, **wrong})


def test_losses_and_times_that_say_nothing_are_refused():
    agent = MQGrad()
    with pytest.raises(UsageError, match="finite"):
        agent.step(math.nan, 1.0)
    with pytest.raises(UsageError, match="positive time"):
        sequence(agent, losses(6), ParameterServerClock(1, 1.0, 0.0, 0))
