"""Policies and MQGrad's agent: specs, choices, golden numbers, a plain twin, and studies whose bits change."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_training import Regression

import gtrace
from gtrace.costs import Network
from gtrace.errors import UsageError
from gtrace.training import Exchange, MQGrad, ParameterServerClock, Study
from gtrace.training.policies import PolicySpec, reward, slope, smooth
from gtrace.types import Key

NETWORK = Network.parse("1kbit/s", "0s", "ps", "2s")


def choose(policy, step=0, loss=1.0, rms=()):
    return policy(step, loss, 1.0, lambda: rms)


def begun(text, seed=0):
    return PolicySpec.parse(text).begin(seed)


def steps(study):
    """run -> its step records."""
    found = {}
    for record in study.records():
        if record["type"] == "step":
            found.setdefault(record["run"], []).append(record)
    return found


@pytest.mark.parametrize(
    "text",
    [
        "fixed",
        "schedule:0=2,500=4,1500=8",
        "adaptive:bits=2-6,divisor=0.001",
        "mqgrad:bits=3-5,period=4,alpha=0.5,epsilon=0.2,learning_rate=0.05,discount=0.5,reward_scale=100.0",
        "mqgrad:seed=7,cost=period,constant_reward=0.5",
    ],
)
def test_specs_come_back(text):
    spec = PolicySpec.parse(text)
    assert str(spec) == text
    assert spec.chooses == (text != "fixed")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mqgard", "mqgrad"),
        ("schedule:5=3", "step 0"),
        ("schedule:0=x", "STEP=BITS"),
        ("adaptive:bits=3", "cannot be read"),
        ("adaptive:bits=8-2", "least and the most"),
        ("mqgrad:perid=5", "period"),
        ("mqgrad:epsilon=2", "out of range"),
    ],
)
def test_what_is_no_policy_is_said(text, said):
    with pytest.raises(UsageError, match=said):
        PolicySpec.parse(text)


def test_a_schedule_holds_each_entry_until_the_next_and_adaptive_is_the_floor_of_the_mean_over_workers():
    policy = begun("schedule:0=2,3=4,5=8")
    assert [choose(policy, step) for step in range(7)] == [2, 2, 2, 4, 4, 8, 8]
    each = {2: [0.0], 3: [0.0005], 6: [0.0024], 8: [1.0], 5: [0.0, 1.0]}
    # 3.8, 3.8 and 6.8: the floor is taken of the mean.
    for bits, rms in (*each.items(), (4, [0.0009, 0.0009, 0.0024]), (3, [math.nan, 0.0005]), (8, [math.nan])):
        assert choose(begun("adaptive"), rms=rms) == bits


WITH_BITS = "minmax qsgd qsgdinf nuqsgd alq amq zipml fp mcgq ef:minmax"


@pytest.mark.parametrize("spec", WITH_BITS.split())
def test_every_codec_with_bits_can_follow_a_schedule(spec):
    study = Study(Regression(), [spec], steps=6, refit="once", policies=["schedule:0=3,3=6"])
    (found,) = (records for run, records in steps(study).items() if run != "none")
    assert [record["codec_bits"] for record in found] == [3, 3, 3, 6, 6, 6]
    # What was fitted is fitted again at the change, and at no other step.
    fitted = [record["fit_seconds"] > 0 for record in found]
    # The scale of floats travels in every payload and follows every gradient.
    assert fitted in ([False] * 6, [True] * 6 if spec == "fp" else [True, False, False, True, False, False])
    assert found[0]["relative_variance"] > 0


def test_a_change_of_bits_keeps_the_residual_and_equals_a_codec_of_those_bits():
    x = np.random.default_rng(0).normal(size=300).astype(np.float32)
    few, more = (gtrace.codec("ef:alq", bits=bits) for bits in (2, 5))
    changed, fresh = Exchange(few, refit="once"), Exchange(more, refit="once")
    first = changed.step(0, [{"w": x}]).gradients["w"]
    changed.use(few.at_bits(5))
    sender, _ = fresh._link("w", 0, x.size)
    sender.state = sender.state.with_arrays(residual=x - first)
    found, wanted = (exchange.step(1, [{"w": x}]).gradients["w"] for exchange in (changed, fresh))
    assert np.array_equal(found, wanted)


def test_the_average_goes_back_through_the_codec():
    random = np.random.default_rng(1)
    tensors = [{"w": random.normal(size=(40, 5)).astype(np.float32), "b": np.ones(3, np.float32)} for _ in range(3)]
    codec = gtrace.codec("minmax:bits=3,coder=fixed")
    rules = gtrace.training.CodecTable.of(codec, min_size=10)
    plain, same = Exchange(rules, 3).step(4, tensors), Exchange(rules, 3, down="same").step(4, tensors)
    average = plain.gradients["w"].reshape(-1)
    wanted = codec.decode(b"", codec.encode(codec.init(200), average, (0, 0)), 200)
    assert np.array_equal(same.gradients["w"].reshape(-1), wanted)
    assert np.array_equal(same.gradients["b"], np.ones(3, np.float32))
    assert same.tally.bits == plain.tally.bits == 3 * (64 + 3 * 200 + 32 * 3)
    assert (plain.tally.down_bits, same.tally.down_bits) == (0, 64 + 3 * 200 + 32 * 3)
    exact = np.mean([tensor["w"].astype(np.float64) for tensor in tensors], axis=0).reshape(-1)
    error, energy = np.sum((wanted - exact) ** 2), np.sum(exact**2) + 3
    assert same.tally.relative_variance == pytest.approx(error / energy, rel=1e-5)
    onward = np.sum((wanted.astype(np.float64) - average) ** 2) / (np.sum(average.astype(np.float64) ** 2) + 3)
    assert same.tally.down_squared_error / same.tally.down_energy == pytest.approx(onward, rel=1e-6)


def test_the_server_has_another_codec_memory_and_keys():
    x = np.random.default_rng(2).normal(size=500).astype(np.float32)
    exchange, again = (Exchange(gtrace.codec("none"), 2, down=gtrace.codec("ef:minmax:bits=2")) for _ in range(2))
    arrived = [exchange.step(k, [{"w": x}, {"w": x}]).gradients["w"] for k in range(40)]
    assert np.linalg.norm(np.mean(arrived, axis=0) - x) < 0.2 * np.linalg.norm(arrived[0] - x)
    again.load_arrays(exchange.to_arrays())
    last, same = (one.step(40, [{"w": x}, {"w": x}]).gradients["w"] for one in (exchange, again))
    assert np.array_equal(last, same)
    random = gtrace.codec("qsgdinf:bits=2")
    up, down = (one.step(0, [{"w": x}]).gradients["w"] for one in (Exchange(random), Exchange("none", down=random)))
    assert not np.array_equal(up, down)


def test_simulated_time_is_bytes_over_bandwidth_and_the_closed_form():
    options = {"policies": ["fixed", "mqgrad"], "min_size": 12, "down": "same", "network": NETWORK}
    study = Study(Regression(), ["minmax"], steps=12, **options)
    found = steps(study)
    clock = ParameterServerClock(4, 1000, 2.0, 12, 1)
    for result in study.results:
        assert sum(record["sim_seconds"] for record in found[result.run]) == pytest.approx(result.sim_seconds)
    for run in ("minmax:bits=8", "minmax@mqgrad"):
        for record in found[run]:
            up = record["bits"] + record["envelope_bits"]
            assert record["sim_seconds"] == pytest.approx(2 + (up + 4 * record["down_bits"]) / 1000)
            # Beside the codes, a payload has a range of 64 bits, an envelope and padding; the closed form has none.
            rest = (2 * 4 * 64 + record["envelope_bits"]) / 1000
            padding = record["sim_seconds"] - rest - clock.iteration(record.get("codec_bits", 8))
            assert -1e-9 <= padding <= 2 * 4 * 7 / 1000
    assert found["none"][0]["sim_seconds"] == pytest.approx(clock.iteration(32))


def test_the_agent_of_a_study_is_the_agent_alone():
    records = steps(Study(Regression(), ["minmax"], steps=40, seed=3, policies=["mqgrad"], network=NETWORK))
    agent, seconds = MQGrad(seed=3), math.nan
    for record in records["minmax@mqgrad"]:
        assert (record["codec_bits"], record["node"]) == (agent.step(record["loss"], seconds), agent.node)
        if record["step"] % 5:
            assert "reward" not in record
        else:
            decided = agent.decision.reward, agent.decision.explored
            assert (record["reward"], record["explored"]) == pytest.approx(decided, nan_ok=True)
        seconds = record["sim_seconds"]


def test_bits_of_a_loop_of_ones_own_can_change():
    model = torch.nn.Linear(50, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sent = []
    with gtrace.training.compress(optimizer, "minmax:bits=2,coder=fixed") as compression:
        for bits in (2, 6):
            compression.use_bits(bits)
            optimizer.zero_grad()
            model(torch.ones(3, 50)).square().mean().backward()
            before = compression.tally.payload_bits
            optimizer.step()
            sent.append(compression.tally.payload_bits - before)
    assert sent == [2 * 64 + 204 * bits for bits in (2, 6)]


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
    sent = 2 * entry["P"] * entry["bits_per_direction_per_worker"]
    assert clock.communication(entry["K"]) == sent / 8e7
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
