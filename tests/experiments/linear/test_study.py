import numpy as np
import pytest

import gtrace_experiments.linear as linear
from gtrace.errors import UsageError
from gtrace_experiments.linear import TASKS, LinearStudy, Prox, Training, train_linear

SET = linear.synthetic(10, 300, labels=False, seed=3)


def test_bits_are_those_that_move():
    specs = ["double:bits=5,quantize=samples+model+gradients", "naive:bits=3,levels=optimal", "alq:bits=3"]
    plain, whole, optimal, coded = train_linear("linear", specs, data=SET, epochs=3, batch_size=100).results
    k, n, steps = 300, 10, 3
    assert plain.traffic.total == plain.traffic.float32 == 3 * 32 * n * (k + 2 * steps)
    assert whole.traffic.samples == 3 * k * n * 6
    assert whole.traffic.model == whole.traffic.gradients == 3 * steps * (n * 5 + 32)
    assert whole.traffic.shared == n * 32  # one scale a feature, once
    assert (optimal.traffic.samples, optimal.traffic.shared) == (3 * k * n * 3, 7 * n * 32)
    assert coded.traffic.gradients < 3 * steps * n * 8
    assert coded.traffic.shared > 0  # its levels
    assert coded.ratio == pytest.approx(plain.traffic.total / coded.traffic.total)


def test_refetched_and_sketched_samples_are_counted():
    data = linear.synthetic(6, 200, labels=True, seed=1)
    _, bounds, sketches = train_linear(
        "svm", ["naive:refetch=l1", "naive:refetch=jl,rows=4"], data=data, epochs=2
    ).results
    assert bounds.traffic.samples == 2 * 200 * 6 * 5 + round(2 * 200 * bounds.fetched) * 6 * 32
    fetched = round(2 * 200 * sketches.fetched) * 6 * 32
    assert sketches.traffic.samples == 2 * 200 * (6 * 5 + 5 * 32) + fetched
    assert sketches.traffic.model == 2 * 200 * (6 * 32 + 5 * 32)


def test_a_precise_codec_changes_little():
    plain, coded = train_linear("linear", ["fp:e7m8"], data=SET, epochs=1).results
    assert (coded.run, coded.loss) == ("fp:e7m8", pytest.approx(plain.loss, rel=1e-3))
    assert coded.loss != plain.loss


def test_the_average_begins_anew_at_half_time():
    training = Training(TASKS["linear"], SET, linear.FULL, batch_size=300)
    assert (training.average == 0).all()
    models = []
    for _ in range(4):
        training.epoch()
        models.append(training.x.copy())
    np.testing.assert_allclose(training.average, np.mean(models, axis=0))
    training.restart_average()
    training.epoch()
    assert (training.average == training.x).all()


def test_seeds_make_data_of_their_own_and_are_paired():
    study = train_linear("linear", ["naive"], data="synthetic-5x100", epochs=2, rate=0.05, seeds=2, seed=7)
    assert [(r.run, r.seed) for r in study.results] == [(s, seed) for seed in (7, 8) for s in ("none", "naive:bits=5")]
    again = train_linear("linear", ["double", "naive"], data="synthetic-5x100", epochs=2, rate=0.05, seed=8)
    assert again.results[2].losses == study.results[3].losses  # whatever runs beside it


def test_a_ball_holds_the_model():
    plain, ball = (
        train_linear("linear", [], data=SET, epochs=4, prox=prox).results[0] for prox in (Prox(), Prox("ball", 0.5))
    )
    assert np.linalg.norm(plain.model) > 1
    assert np.linalg.norm(ball.model) <= 0.5 + 1e-12
    assert np.isnan(ball.optimum)


def test_a_gradient_that_overflows_ends_a_run_with_a_codec():
    _, coded = train_linear("linear", ["qsgd:bits=2"], data=SET, rate=1e6, epochs=3).results
    assert coded.diverged.startswith("qsgd:bits=2: diverged")
    assert len(coded.losses) < 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"epochs": 0}, "epochs: 0 is below 1"),
        ({"seeds": 0}, "seeds: 0 is below 1"),
        ({"batch_size": 0}, "batch size: 0 is below 1"),
        ({"rate": -1.0}, "lr: must be a positive number, not -1"),
        ({"task": "liner"}, "no linear task 'liner'; did you mean linear"),
    ],
)
def test_settings_out_of_range(settings, said):
    task = settings.pop("task", "linear")
    with pytest.raises(UsageError, match=said):
        LinearStudy(task, [], data=SET, **settings)
