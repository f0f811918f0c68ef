"""Fetching exact samples where quantization leaves the side of the hinge open."""

import numpy as np
import pytest
from helpers_linear import gradient, quantized
from hypothesis import given, settings
from hypothesis import strategies as st

from gtrace_experiments.linear import Precision, train_linear


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["naive", "nearest", "double"]),
    st.sampled_from(["uniform", "optimal"]),
    st.integers(2, 8),
    st.sampled_from([0.01, 0.3, 1.0, 5.0]),
)
@settings(max_examples=60, deadline=None)
def test_bounds_never_give_a_wrong_side(seed, sampling, levels, bits, scale):
    random = np.random.default_rng(seed)
    a, b = random.standard_t(3, (30, 5)), np.where(random.random(30) < 0.5, -1.0, 1.0)
    a[:, 4] = 2.0  # a column that quantization leaves alone
    samples = quantized(a, b, bits, levels, nearest=sampling == "nearest")
    precision = Precision(sampling, bits=bits, levels=levels, refetch="l1")
    for x in (scale * random.standard_normal(5), np.eye(5)[seed % 5] / a[0, seed % 5], np.zeros(5)):
        _, counts = gradient(samples, precision, x, np.arange(30), "svm", seed=seed)
        assert counts[1] == 0


def test_without_bounds_sides_are_mistaken():
    random = np.random.default_rng(0)
    a, b = random.standard_normal((2000, 5)), np.where(random.random(2000) < 0.5, -1.0, 1.0)
    x = random.standard_normal(5)
    samples = quantized(a, b, 4)
    counts = {
        refetch: gradient(samples, Precision("naive", bits=4, refetch=refetch), x, np.arange(2000), "svm")[1]
        for refetch in ("none", "l1")
    }
    assert counts["none"][0] == 0
    assert counts["none"][1] > 40
    wrong = counts["none"][1]
    assert wrong < counts["l1"][0] < 1500


def test_a_sure_side_keeps_the_quantized_sample():
    a, b, x = np.full((1, 3), 0.5), np.array([1.0]), np.array([20.0, 0.0, 0.0])
    samples = quantized(np.vstack([a, np.ones((1, 3))]), np.append(b, 1.0), 3)
    precision = Precision("naive", bits=3, refetch="l1")
    found, counts = gradient(samples, precision, -x, [0], "svm")
    assert counts[0] == 0
    assert set(abs(found)) <= set(np.abs(samples.levels).ravel())
    found, counts = gradient(samples, precision, x / 10, [0], "svm")  # a margin of exactly 1, which is none
    assert counts[0] == 1
    assert not found.any()


@pytest.mark.parametrize("failure", [0.2, 0.02])
def test_projections_fail_as_often_as_they_may(failure):
    random = np.random.default_rng(1)
    a = random.standard_normal((6000, 50))
    x = random.standard_normal(50) / 7
    b = np.where(random.random(6000) < 0.5, -1.0, 1.0)
    samples = quantized(a, b, 8)
    fetched, flipped = 0, 0
    precision = Precision("naive", bits=8, refetch="jl", failure=failure, rows=32)
    for step, chosen in enumerate(np.split(np.arange(6000), 600)):
        _, counts = gradient(samples, precision, x, chosen, "svm", step=step)
        fetched, flipped = fetched + counts[0], flipped + counts[1]
    assert 0 < flipped / 6000 <= failure
    assert 0.1 < fetched / 6000 < 0.9


def test_few_samples_are_fetched_at_8_bits():
    """A set of cod-rna's shape: an energy that tells the classes, a length, and six frequencies."""
    from gtrace_experiments.linear import split
    from gtrace_experiments.reproduce._zipml import rna_like

    a, b = rna_like(20_000, np.random.default_rng(0))
    data = split("rna", a, b, labels=True)
    study = train_linear("svm", [f"naive:bits={bits},refetch=l1" for bits in (4, 6, 8)], data=data, epochs=6)
    plain, *found = study.results
    assert [result.fetched for result in found] == sorted((result.fetched for result in found), reverse=True)
    assert 0 < found[-1].fetched < 0.06
    assert all(result.flipped == 0 for result in found)
    assert found[-1].loss == pytest.approx(plain.loss, rel=0.01)
