"""The exchange of simulated workers: bytes, averages, memory, and shares of codecs that allocate among tensors."""

from typing import ClassVar

import numpy as np
import pytest
from helpers_training import heavy

import gtrace
from gtrace.codecs import codec
from gtrace.codecs.link import LinkOptions, Receiver, Sender
from gtrace.coding import ENVELOPE_BYTES
from gtrace.errors import UsageError
from gtrace.fitting import allocate_sparsity
from gtrace.fitting.pooling import pooled
from gtrace.schedule import RefitSchedule
from gtrace.sketch import MomentSketch
from gtrace.training import Exchange, NonfiniteGradientError
from gtrace.training.checkpoint import as_arrays, as_tensors
from gtrace.types import Key


def gradients(workers, step=0):
    return [{"w": heavy((40, 25), [1, worker, step]), "b": heavy(25, [2, worker, step])} for worker in range(workers)]


def fitted(made, values, step=0):
    return made.fit(made.init(values.size), MomentSketch.from_spec(values, made.needs), step)


def same_levels(made, state, expected):
    np.testing.assert_array_equal(made.parts.grid.levels(state), made.parts.grid.levels(expected))


@pytest.mark.parametrize(
    "spec",
    ["none", "qsgd:bits=4", "qsgdinf:bits=3", "terngrad", "nuqsgd:bits=3", "natural", "ef:alq:bits=3", "signsgd"],
)
def test_averages_and_bits_are_those_of_the_codec_driven_by_hand(spec):
    """Fit, encode, shared bytes, decode from bytes alone, update: for every tensor of every worker."""
    made, workers = codec(spec), 3
    exchange = Exchange(made, workers, seed=9, refit="0,2")
    states = {}
    for step in range(4):
        found = exchange.step(step, gradients(workers, step))
        payload = shared = 0
        arrived = {"w": [], "b": []}
        for worker, tensors in enumerate(gradients(workers, step)):
            for name, array in tensors.items():
                values = array.reshape(-1)
                state, known = states.get((name, worker), (made.init(values.size), b""))
                if step in (0, 2) and made.needs:
                    # A fit depends on what is encoded, and not on what was fitted before.
                    sketch = MomentSketch.from_spec(made.view(state, values), made.needs)
                    state = made.fit(state if made.stateful else made.init(values.size), sketch, step)
                data = made.encode(state, values, Key.derive(9, tensor=name, step=step, worker=worker))
                payload += 8 * (len(data) - ENVELOPE_BYTES)
                shared += 8 * len(made.shared(state)) if made.shared(state) != known else 0
                arrived[name].append(made.decode(made.shared(state), data, values.size))
                states[name, worker] = made.update(state, values, arrived[name][-1]), made.shared(state)
        for name, decoded in arrived.items():
            np.testing.assert_array_equal(found.gradients[name].reshape(-1), made.aggregate(decoded))
        tally = found.tally
        assert (tally.payload_bits, tally.shared_bits) == (payload, shared)
        assert (tally.bits, tally.envelope_bits) == (payload + shared, 8 * ENVELOPE_BYTES * 2 * workers)
        assert tally.float32_bits == 32 * 1025 * workers
    assert spec in ("none", "signsgd") or any(known for _, known in states.values())


def test_a_pooled_fit_looks_at_this_step_and_those_before():
    made = codec("alq:bits=4")
    sending = Sender(made, 300, LinkOptions(RefitSchedule.parse("pooled:0,12,15"), 3), tensor="w")
    sketches = [MomentSketch.from_spec(heavy(300, step), made.needs) for step in range(16)]
    for step in range(16):
        sending.send(heavy(300, step), step)
        if step in (0, 12, 15):
            # What is watched without a pause stays in the pool, its weight below a tenth after ten steps.
            first = {0: 0, 12: 3, 15: 3}[step]
            same_levels(made, sending.state, made.fit(made.init(300), pooled(sketches[first : step + 1]), step))


@pytest.mark.parametrize("until", [0, 5, 12, 14])
@pytest.mark.parametrize("spec", ["alq:bits=4", "ef:alq:bits=4", "powersgd"])
def test_training_goes_on_from_arrays_also_in_the_middle_of_a_pool(spec, until):
    steps = [[{"w": heavy((30, 10), [step, worker])} for worker in range(2)] for step in range(16)]
    whole, first, second = (Exchange(codec(spec), 2, seed=3, refit="pooled:0,12,15") for _ in range(3))
    for step in range(until + 1):
        whole.step(step, steps[step])
        first.step(step, steps[step])
    second.load_arrays(as_arrays(as_tensors(first.to_arrays())))
    for step in range(until + 1, 16):
        one, two = (exchange.step(step, steps[step]) for exchange in (whole, second))
        np.testing.assert_array_equal(one.gradients["w"], two.gradients["w"])
        assert (one.tally.payload_bits, one.tally.shared_bits) == (two.tally.payload_bits, two.tally.shared_bits)


def test_without_a_codec_the_exchange_is_the_mean():
    result = Exchange(codec("none"), 4).step(0, gradients(4))
    for name in ("w", "b"):
        mean = np.mean([g[name].astype(np.float64) for g in gradients(4)], axis=0).astype(np.float32)
        np.testing.assert_array_equal(result.gradients[name], mean)
        assert (result.gradients[name].shape, result.gradients[name].dtype) == (mean.shape, np.float32)
    assert (result.tally.relative_variance, result.tally.worker_variance, result.tally.ratio) == (0.0, 0.0, 1.0)
    assert result.tally.bits_per_element == 32.0
    # A tensor that a worker lacks is averaged over the others.
    result = Exchange(codec("none"), 2).step(0, [{"w": heavy(4)}, {"w": heavy(4), "b": heavy(2)}])
    np.testing.assert_array_equal(result.gradients["b"], heavy(2))
    assert list(result.gradients) == ["w", "b"]


def test_errors_are_those_of_the_mean_and_of_single_workers():
    result = Exchange(codec("qsgdinf:bits=3"), 2, seed=1).step(0, gradients(2))
    exact = [np.concatenate([g["w"].ravel(), g["b"]]).astype(np.float64) for g in gradients(2)]
    got = np.concatenate([result.gradients["w"].ravel(), result.gradients["b"]]).astype(np.float64)
    mean = (exact[0] + exact[1]) / 2
    assert result.tally.relative_variance == pytest.approx(np.sum((got - mean) ** 2) / np.sum(mean**2), rel=1e-5)
    single = Exchange(codec("qsgdinf:bits=3"), seed=1).step(0, gradients(1)).gradients
    error = sum(float(np.sum((single[n].astype(np.float64) - gradients(1)[0][n]) ** 2)) for n in ("w", "b"))
    assert 0 < error < result.tally.worker_squared_error
    assert result.tally.worker_energy == pytest.approx(sum(float(x @ x) for x in exact), rel=1e-12)
    # Of zeros and of nothing there is no relative error.
    tally = Exchange(codec("qsgdinf"), 2).step(0, [{"w": np.zeros(10, np.float32)}] * 2).tally
    assert tally.relative_variance == 0.0
    tally = Exchange(codec("none")).step(0, [{}]).tally
    assert tally.bits == 0
    assert np.isnan([tally.ratio, tally.bits_per_element]).all()


def poisoned(*workers):
    batch = gradients(3)
    for worker in workers:
        batch[worker]["w"][3, :2] = np.nan, np.inf
    return batch


def test_skipping_leaves_a_workers_tensor_out():
    result, clean = Exchange(codec("none"), 3).step(7, poisoned(1)), gradients(3)
    mean = ((clean[0]["w"].astype(np.float64) + clean[2]["w"]) / 2).astype(np.float32)
    np.testing.assert_array_equal(result.gradients["w"], mean)
    np.testing.assert_array_equal(result.gradients["b"], Exchange(codec("none"), 3).step(7, clean).gradients["b"])
    assert [(b.tensor, b.worker, b.count) for b in result.bad] == [("w", 1, 2)]
    tally = result.tally
    assert (tally.nonfinite, tally.payload_bits, tally.float32_bits) == (2, *[32 * (2 * 1000 + 3 * 25)] * 2)
    # One that no worker can send is missing.
    result = Exchange(codec("qsgd"), 3).step(0, poisoned(0, 1, 2))
    assert (list(result.gradients), result.tally.nonfinite) == (["b"], 6)


def test_zeros_are_sent_or_an_error_raised_where_the_user_says_so():
    batch, clean = poisoned(0), gradients(3)
    result = Exchange(codec("none"), 3, nonfinite="zero").step(0, batch)
    clean[0]["w"][3, :2] = 0
    np.testing.assert_array_equal(result.gradients["w"], Exchange(codec("none"), 3).step(0, clean).gradients["w"])
    assert result.tally.nonfinite == 2
    assert np.isnan(batch[0]["w"][3, 0])
    with pytest.raises(NonfiniteGradientError, match=r"step 7, worker 2, w: 2 of 1000 ") as error:
        Exchange(codec("qsgd"), 3, nonfinite="error").step(7, poisoned(2))
    assert error.value.exit_code == 3


def test_a_fit_that_was_missed_happens_at_the_next_chance():
    exchange, shared = Exchange("alq:bits=3", refit="0,5"), []
    for step in range(9):
        bad = np.full(80, np.nan, np.float32)
        shared.append(exchange.step(step, [{"w": bad if step in (0, 5) else heavy(80, step)}]).tally.shared_bits > 0)
    assert [step for step in range(9) if shared[step]] == [1, 6]


def test_a_codec_over_the_whole_model_sees_one_tensor_and_needs_all_of_it():
    made = codec("qsgd:bits=4,bucket_size=256,scope=model")
    batch, exchange = gradients(2), Exchange(made, 2, seed=4, refit="once")
    result = exchange.step(3, batch)
    total, decoded = 0, []
    for worker, tensors in enumerate(batch):
        whole = np.concatenate([tensors["w"].ravel(), tensors["b"]])
        state = fitted(made, whole, 3)
        payload = made.encode(state, whole, Key.derive(4, tensor="*", step=3, worker=worker))
        total += 8 * (len(payload) - ENVELOPE_BYTES + len(made.shared(state)))
        decoded.append(made.decode(made.shared(state), payload, whole.size))
    assert result.tally.bits == total
    mean = made.aggregate(decoded)
    np.testing.assert_array_equal(result.gradients["w"], mean[:1000].reshape(40, 25))
    np.testing.assert_array_equal(result.gradients["b"], mean[1000:])
    with pytest.raises(UsageError, match="b differs from the first step"):
        exchange.step(4, [{"w": one["w"]} for one in batch])
    bad = [{**one, "w": np.full((40, 25), np.nan, np.float32)} for one in batch]
    assert exchange.step(6, bad).gradients == {}


def test_bad_arguments_are_refused():
    with pytest.raises(UsageError, match="of 1 workers; expected 2"):
        Exchange(codec("none"), 2).step(0, [{}])
    exchange = Exchange(codec("qsgd"))
    exchange.step(0, [{"w": heavy(6)}])
    with pytest.raises(UsageError, match="7 values for a state of 6"):
        exchange.step(1, [{"w": heavy(7)}])


def test_workers_parts_of_a_linear_codec_are_what_is_measured_and_a_server_sends_factors_on():
    seen = {}
    workers = [{"w": heavy((30, 20), worker), "b": heavy(7, worker)} for worker in range(4)]
    tally = Exchange("powersgd", 4).step(0, workers, lambda name, *found: seen.update({name: found})).tally
    exact, own, aggregated = seen["w"]
    np.testing.assert_allclose(np.mean(own, axis=0), aggregated, atol=1e-7)
    error = sum(np.sum((x.astype(float) - y) ** 2) for x, y in zip(exact, own, strict=True))
    assert tally.worker_squared_error == pytest.approx(error)
    mean = np.mean([w["w"] for w in workers], axis=0).reshape(-1)
    assert tally.squared_error == pytest.approx(np.sum((mean.astype(float) - aggregated) ** 2), rel=1e-4)
    assert tally.payload_bits == 4 * 32 * (2 * 50 + 7)
    assert tally.envelope_bits == tally.shared_bits == 0
    tally = Exchange("powersgd", 2, down="same").step(0, [{"w": one["w"]} for one in workers[:2]]).tally
    assert tally.down_bits == 32 * 2 * 50 + 32  # and the number of rows


class Shaped(type(codec("none"))):
    """Notes the shapes that it is given."""

    name: ClassVar[str] = "test-shaped"
    seen: ClassVar[list] = []

    def init(self, size, shape=None):
        self.seen.append((size, shape))
        return super().init(size, shape)


def test_codecs_get_the_true_shapes():
    exchange = Exchange(Shaped(), 2, down="same")
    tensors = {"conv": heavy((4, 3, 2, 2)), "bias": heavy(4), "scale": heavy(())}
    for step in range(2):
        exchange.step(step, [tensors, tensors])
    assert sorted(Shaped.seen, key=str) == sorted([(48, (4, 3, 2, 2)), (4, (4,)), (1, ())] * 3, key=str)
    again = Exchange(Shaped(), 2, down="same")
    again.load_arrays(exchange.to_arrays())
    assert [link[2]["state"].get("shape") is not None for link in again.to_arrays()["links"]] == [True] * 9


@pytest.mark.parametrize(
    ("spec", "off"),
    [
        ("fp:e4m3", 1e-3),
        ("fp:bits=8", 1e-3),
        ("fp:e4m3,scale=absmax", 1e-3),
        ("topk-prune:sparsity=0.5", 0.05),
        ("ef:fp:e4m3", 1e-2),
        ("fp:e4m3,scale=max", None),
    ],
)
def test_what_travels_in_every_payload_follows_every_gradient(spec, off):
    """Fitted once, then sent gradients that grow and shrink: scales and thresholds are those of each gradient."""
    made = codec(spec)
    sending, receiver, lost = (
        Sender(made, 1000, LinkOptions(RefitSchedule((0,)), 3), tensor="w"),
        Receiver(made, 1000),
        [],
    )
    for step, size in enumerate((1.0, 300.0, 1e-4)):
        x = np.float32(size) * heavy(1000, [4, step])
        decoded = receiver.receive(sending.send(x, step))
        sending.settle(x, decoded)
        # What memory adds to a tiny gradient after a large one is not of this gradient.
        lost.append(np.sum((decoded - x.astype(np.float64)) ** 2) / np.sum(x.astype(np.float64) ** 2))
    kept = lost[:2] if spec.startswith("ef:") else lost
    assert (max(kept) < off) if off else (max(kept) > 0.2)


MIXED = "prune:sparsity=0.8,allocation=heterogeneous"


SIZES = {"heavy": 6000, "light": 2000, "bias": 30}


SPREAD = {"heavy": 2.5, "light": 0.5, "bias": 0.2}


NAMES = tuple(SIZES)


def unlike(seed=0):
    """Tensors of unlike spread, so that equal sparsities lose much more than shares."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.choice([-1, 1], n) * rng.lognormal(0, SPREAD[name], n)).astype(np.float32)
        for name, n in SIZES.items()
    }


def shares(tensors, sparsity=0.8):
    return allocate_sparsity([MomentSketch.of(x, norm="none") for x in tensors.values()], sparsity)


def targets(senders):
    """What each tensor's sender was given, whether its codec is wrapped or not."""
    return [float(next(v for k, v in one.state.arrays.items() if k.endswith("target"))) for one in senders]


def allocated(exchange, *names, worker=0):
    return targets(exchange._links[name, worker][0] for name in names or NAMES)


def test_a_server_allocates_from_the_averages():
    workers = [unlike(1), unlike(2)]
    exchange = Exchange("none", 2, down=gtrace.codec(MIXED))
    averages = {name: (workers[0][name] + workers[1][name]) / 2 for name in NAMES}
    exchange.step(0, workers)
    assert allocated(exchange, worker=-1) == pytest.approx(list(shares(averages)), rel=1e-6)


def test_a_tensor_whose_random_numbers_would_repeat_is_refused():
    size = 2**32 + 1
    values = np.broadcast_to(np.float32(1), size)  # four bytes
    options = LinkOptions(RefitSchedule.parse("once"))
    with pytest.raises(UsageError, match=r"^w: has 4294967297, and random numbers of terngrad repeat after 2\^32"):
        Sender(codec("terngrad"), size, options, tensor="w").send(values, 0)
