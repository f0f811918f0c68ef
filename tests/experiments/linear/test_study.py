"""Studies of linear models, and the data that they read or make."""

import numpy as np
import pytest

import gtrace_experiments.linear as linear
from gtrace.errors import TraceError, UsageError
from gtrace_experiments.linear import TASKS, Prox, Training, load, split, train_linear

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


RANDOM = np.random.default_rng(0)
A = np.round(RANDOM.standard_normal((40, 3)) * [1, 10, 100], 4)
B = np.round(A @ [1.0, 0.1, 0.01], 4)


def check(data):
    wanted = split("made", A, B, labels=False)
    np.testing.assert_allclose(data.a, wanted.a, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(data.test_b, wanted.test_b, rtol=1e-9)
    assert (data.a.dtype, data.a.shape) == (np.float32, (32, 3))
    assert data.test_a.shape == (8, 3)
    np.testing.assert_allclose(data.a.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(data.a.std(axis=0), 1, atol=1e-5)


def test_csv_with_and_without_names(tmp_path):
    rows = "\n".join(",".join(map(str, [*a, b])) for a, b in zip(A, B, strict=True))
    (tmp_path / "plain.csv").write_text(rows + "\n")
    (tmp_path / "first.csv").write_text(
        "y, u,v,w\n" + "\n".join(",".join(map(str, [b, *a])) for a, b in zip(A, B, strict=True))
    )
    check(load(str(tmp_path / "plain.csv"), labels=False))
    check(load(str(tmp_path / "first.csv"), labels=False, target="y"))
    with pytest.raises(UsageError, match="no column 'z' among y, u"):
        load(str(tmp_path / "first.csv"), labels=False, target="z")
    (tmp_path / "broken.csv").write_text("1,2,3\n4,,6\n")
    with pytest.raises(TraceError, match="row 2 does not hold 3 numbers"):
        load(str(tmp_path / "broken.csv"), labels=False)


def test_libsvm_and_npz(tmp_path):
    lines = [f"{b} " + " ".join(f"{i + 1}:{v}" for i, v in enumerate(a) if v) for a, b in zip(A, B, strict=True)]
    (tmp_path / "a.libsvm").write_text("\n".join(lines) + " # the last\n\n")
    np.savez(tmp_path / "a.npz", X=A, y=B)
    check(load(str(tmp_path / "a.libsvm"), labels=False))
    check(load(str(tmp_path / "a.npz"), labels=False))
    (tmp_path / "b.svm").write_text("1 0:3\n")
    with pytest.raises(TraceError, match="line 1 is not of the form"):
        load(str(tmp_path / "b.svm"), labels=False)
    (tmp_path / "c.svm").write_text("1 400000000:3\n2 1:1\n")
    with pytest.raises(UsageError, match="too many to be written out"):
        load(str(tmp_path / "c.svm"), labels=False)
    np.savez(tmp_path / "b.npz", X=A)
    (tmp_path / "c.npz").write_bytes(b"no archive")
    for name in ("b", "c"):
        with pytest.raises(TraceError, match=f"{name}.npz"):
            load(str(tmp_path / f"{name}.npz"), labels=False)


def test_what_is_no_data_is_said(tmp_path):
    for name, error, said in [
        ("synthetic", UsageError, "write synthetic-100"),
        ("a.txt", UsageError, "'a.txt' is unknown"),
        (str(tmp_path / "a.csv"), TraceError, "no such file"),
        ("synthetic-0", UsageError, "no samples"),
    ]:
        with pytest.raises(error, match=said):
            load(name, labels=False)
    with pytest.raises(UsageError, match="row 3 holds a value that is not finite"):
        split("s", np.where(np.arange(40)[:, None] == 2, np.nan, A), B, labels=False)
    with pytest.raises(UsageError, match="40 different targets where two labels"):
        split("s", A, B, labels=True)
    with pytest.raises(UsageError, match="too few"):
        split("s", A[:5], B[:5], labels=False)


def test_labels_and_constant_columns():
    data = split("s", np.column_stack([A, np.full(40, 0.1)]), np.where(B > 0, 7, 3), labels=True)
    assert set(np.unique(data.b)) == {-1.0, 1.0}
    assert (data.b > 0).tolist() == (B[np.arange(40) % 5 != 4] > 0).tolist()
    assert not data.a[:, 3].any()
    assert not data.test_a[:, 3].any()


def test_made_data_depend_on_the_seed_alone():
    first, again, other = (load("synthetic-5x50", labels=False, seed=seed) for seed in (1, 1, 2))
    assert (first.a == again.a).all()
    assert (first.b == again.b).all()
    assert not (first.a == other.a).any()
    assert first.a.shape == first.test_a.shape == (50, 5)
