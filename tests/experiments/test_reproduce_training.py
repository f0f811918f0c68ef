"""What the experiments on training and on MCGQ compute themselves."""

import math

import numpy as np
import pytest

from gtrace.errors import TraceError
from gtrace.training.tasks.images import VARIABLE
from gtrace_experiments.reproduce._mcgq import Logistic
from gtrace_experiments.reproduce._training import DATA, deviation, first_task, smoothed, spread, trained
from gtrace_experiments.reproduce.experiment import Context


@pytest.fixture(scope="module")
def problem():
    return Logistic.planted(Context(quick=True))


def test_the_objective_is_the_papers(problem):
    x = np.random.default_rng(3).normal(size=20)
    n = len(problem.labels)
    by_hand = sum(math.log1p(math.exp(-b * float(a @ x))) for a, b in zip(problem.samples, problem.labels, strict=True))
    assert problem.objective(x) == pytest.approx(by_hand / n + float(x @ x) / (2 * n), rel=1e-6)
    np.testing.assert_allclose(np.linalg.norm(problem.samples, axis=1), 1, rtol=1e-6)
    assert set(problem.labels) == {-1, 1}


def test_the_minimum_is_below_what_descent_finds(problem):
    best = problem.minimum()
    curve, _ = problem.descend("none", 0, epochs=40)
    assert curve[0] == pytest.approx(math.log(2))
    assert best < curve[-1] < best + 0.02
    assert len(curve) == 401


def test_descent_without_a_codec_is_plain_sgd(problem):
    """In float64 and by numerical differences of one sample's loss."""
    n, d = problem.samples.shape
    x = np.zeros(d)

    def loss(x, k):
        margin = float(problem.labels[k]) * float(problem.samples[k].astype(np.float64) @ x)
        return math.log1p(math.exp(-margin)) + float(x @ x) / (2 * n)

    for t, k in enumerate(np.random.default_rng(5).permutation(n)[:20]):
        gradient = [(loss(x + h, k) - loss(x - h, k)) / 2e-6 for h in 1e-6 * np.eye(d)]
        x = x - np.array(gradient) / (1 + t / n)
    curve, bits = problem.descend("none", 5, epochs=1)
    assert curve[1] == pytest.approx(problem.objective(x), rel=1e-5)
    assert bits == 32


def test_accumulation_helps_where_few_are_sampled(problem):
    plain, kept = (problem.descend(f"mcgq:amount=0.1{rest}", 0)[0][-1] for rest in ("", ",accumulate=true"))
    assert kept < plain


def test_runs_over_seeds_by_name():
    task, data = first_task(Context(quick=True), "fashion-cnn", "digits-cnn")
    assert (task.name, data) == ("digits-cnn", DATA["digits-cnn"])
    said = []
    found = trained(Context(seed=3, say=said.append), task, ["signsgd"], steps=3, batch_size=2, seeds=2)
    assert list(found.results) == ["none", "signsgd"]
    assert [result.seed for result in found.results["signsgd"]] == [3, 4]
    assert found.losses["none"].shape == (2, 3)
    assert found.accuracy("none").tolist() == [100 * result.accuracy for result in found.results["none"]]
    assert found.ratio("none") == 1
    assert 25 < found.ratio("signsgd") < 32
    assert len(said) == 4


def test_without_data_the_next_task_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    said = []
    task, _ = first_task(Context(say=said.append), "fashion-cnn", "digits-mlp", "digits-cnn")
    assert task.name == "digits-mlp"
    assert said[0].endswith("going on with digits-mlp")
    with pytest.raises(TraceError):
        first_task(Context(), "fashion-cnn")


def test_numbers_over_seeds():
    assert deviation(np.array([1.0, 3.0])) == pytest.approx(math.sqrt(2))
    assert spread(np.array([1.0, 3.0])) == "2.00 ± 1.41"
    assert spread(np.array([-1.0]), "+.1f") == "-1.0"
    steps, losses = smoothed(np.array([[4.0, 2.0, 1.0], [2.0, 2.0, np.nan]]), 3)
    assert steps == (0.5, 1.5, 2.5)
    assert losses[:2] == (3.0, 2.0)
    assert math.isnan(losses[2])
