"""What a sweep measures for predictions of what noise costs, against plain numpy."""

import dataclasses

import numpy as np
import pytest
from helpers_sweep import write_trace
from scipy import linalg

import gtrace
from gtrace.codecs.link import LinkOptions, Sender
from gtrace.noise import Dynamics
from gtrace.schedule import RefitSchedule
from gtrace.sweep.noise_cost import noise_costs
from gtrace.trace import OptimizerFacts, Trace, open_trace

WINDOWS = ((3, 4, 5, 6, 7), (20, 21, 22))
STEPS = sum(WINDOWS, ())
#: orthonormal contrasts that are blind to a linear drift
CONTRASTS = tuple(linalg.null_space(np.stack([np.ones(len(w)), w])).T for w in WINDOWS)
CODECS = ("qsgdinf:bits=2", "randomk:ratio=0.2", "topk:ratio=0.1", "ef:topk:ratio=0.1")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("noise") / "run.zarr", steps=STEPS)


@pytest.fixture(scope="module")
def costs(path):
    return noise_costs(gtrace.run_sweep(path, CODECS))


def read(path):
    with open_trace(path) as trace:
        return {info.name: {step: trace.read(info.name, step) for step in STEPS} for info in trace.tensors}


def samples_of(gradients):
    """Samples of noise, each window scaled to the same energy, and the factors of the windows."""
    found = [
        contrasts @ np.stack([gradients[step] for step in steps])
        for steps, contrasts in zip(WINDOWS, CONTRASTS, strict=True)
    ]
    energies = np.array([np.square(each).sum() / len(each) for each in found])
    factors = np.sqrt(np.exp(np.log(energies).mean()) / energies)
    return np.concatenate([factor * each for factor, each in zip(factors, found, strict=True)]), factors


def test_samples_of_noise_are_contrasts_of_consecutive_steps(path, costs):
    assert costs.source == "consecutive steps"
    assert (costs.lr, costs.last) == (pytest.approx(0.1), 22)
    every = [samples_of(gradients)[0] for gradients in read(path).values()]
    # Which contrasts span the space is a matter of taste; eigenvalues are not.
    expected = np.linalg.eigvalsh(sum(one @ one.T for one in every))
    np.testing.assert_allclose(np.linalg.eigvalsh(costs.noise), expected, rtol=1e-4)


def test_variances_along_samples_are_those_of_drawn_errors(path, costs):
    """Rounding errors are independent of each other, so many draws have the covariance that two draws estimate."""
    gradients = read(path)["conv.weight"]
    codec = gtrace.codec("randomk:ratio=0.2")
    samples, factors = samples_of(gradients)
    covariance = 0.0
    for factor, steps in zip(factors, WINDOWS, strict=True):
        values = factor * gradients[steps[len(steps) // 2]].astype(np.float64)
        # Kept with probability 0.2 and divided by it: E (Q(g) - g)^2 = 4 g^2.
        covariance = covariance + 4 * values**2 / len(WINDOWS)
    where = costs.codecs.index(str(codec)), costs.tensors.index("conv.weight")
    assert costs.variance[where] == pytest.approx(covariance.sum(), rel=0.25)
    assert np.trace(costs.gram[where]) == pytest.approx(np.trace((samples * covariance) @ samples.T), rel=0.35)


def test_lost_progress_is_the_part_of_the_next_gradient_that_does_not_arrive():
    """With one gradient at all steps, the largest tenth keeps its share of the energy."""
    gradient = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    trace = Trace.from_arrays({"w": dict.fromkeys(range(6), gradient)})
    costs = noise_costs(gtrace.run_sweep(trace, ["topk:ratio=0.1", "qsgdinf:bits=3"]))
    largest = np.sort(gradient.astype(np.float64) ** 2)[-100:].sum()
    energy = float(gradient.astype(np.float64) @ gradient)
    k = costs.codecs.index("topk:ratio=0.1")
    assert costs.signal[0] == pytest.approx(energy, rel=1e-6)
    assert costs.lost[k, 0] == pytest.approx(energy - largest, rel=1e-5)
    assert costs.variance[k, 0] == 0


def test_a_memory_owes_what_did_not_arrive_by_the_end_of_a_window(path, costs):
    codec = gtrace.codec("ef:topk:ratio=0.1")
    where = costs.codecs.index(str(codec)), costs.tensors.index("fc.weight")
    gradients = read(path)["fc.weight"]
    (samples, factors), expected, gram = samples_of(gradients), 0.0, 0.0
    for factor, steps in zip(factors, WINDOWS, strict=True):
        sender = Sender(codec, 700, LinkOptions(RefitSchedule((0,))), tensor="fc.weight")
        owed = np.zeros(700)
        for step in steps:
            arrived = codec.decode(b"", sender.send(gradients[step], step).payload, 700)
            sender.settle(gradients[step], arrived)
            owed += factor * (gradients[step].astype(np.float64) - arrived)
        expected += owed @ owed / len(WINDOWS)
        gram += np.square(samples @ owed).sum() / len(WINDOWS)
    assert costs.variance[where] == pytest.approx(expected, rel=1e-4)
    assert np.trace(costs.gram[where]) == pytest.approx(gram, rel=1e-4)
    assert costs.memory(where[0])


def test_a_sweep_goes_on_where_it_stopped_and_does_not_depend_on_workers(path, costs, tmp_path):
    first = gtrace.run_sweep(path, CODECS[:2], output=tmp_path / "a.db", jobs=2)
    again = gtrace.run_sweep(path, CODECS, output=tmp_path / "a.db", jobs=1)
    found = noise_costs(again)
    assert noise_costs(first).codecs == tuple(sorted(CODECS[:2]))
    for field in dataclasses.fields(found):
        np.testing.assert_equal(getattr(found, field.name), getattr(costs, field.name))


@pytest.mark.parametrize(
    ("steps", "options"), [((0, 1, 5, 6, 9), {}), (STEPS, {"noise": False}), ((0, 1, 2, 3, 4), {})], ids=str
)
def test_without_four_samples_of_noise_nothing_is_predicted(tmp_path, steps, options):
    trace = write_trace(tmp_path / "run.zarr", steps=steps)
    assert noise_costs(gtrace.run_sweep(trace, ["qsgdinf:bits=2"], **options)) is None


@pytest.mark.filterwarnings("error")
def test_what_no_float32_holds_is_unknown():
    steps = {k: np.full(100, 3e38 if k % 2 else -1.0, np.float32) for k in range(13)}
    found = noise_costs(gtrace.run_sweep(Trace.from_arrays({"w": steps}), ["qsgdinf:bits=3", "ef:topk:ratio=0.1"]))
    assert found.codecs == ("qsgdinf:bits=3",)
    assert np.isfinite(found.variance).all()


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"kind": "SGD", "momentum": 0.9, "dampening": 0.5}, {"lr": 0.05, "momentum": 0.9}),
        ({"kind": "SGD", "weight_decay": 0.01, "nesterov": False}, {"lr": 0.1, "weight_decay": 0.01}),
        ({"kind": "AdamW", "betas": (0.8, 0.9), "weight_decay": 0.1}, {"lr": 0.1, "momentum": 0.8, "decay": 0.1}),
        ({"kind": "Adam", "weight_decay": 0.1}, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ],
)
def test_the_dynamics_are_those_of_the_optimizer(facts, expected):
    found = dataclasses.asdict(Dynamics.of(OptimizerFacts(**facts), 0.1))
    assert found == dataclasses.asdict(Dynamics(averaging="Adam" in facts["kind"], **expected))


@pytest.mark.parametrize(("kind", "why"), [("RMSprop", "there is no theory for RMSprop"), (None, "is not known")])
def test_optimizers_without_theory_are_named(kind, why):
    with pytest.raises(ValueError, match=why):
        Dynamics.of(OptimizerFacts(kind=kind), 0.1)
