import math

import numpy as np
import pytest

from gtrace.errors import UsageError
from gtrace.metrics import Reference


def test_by_hand():
    found = Reference([3.0, -4.0, 0.0, 0.0]).compare([3.0, 0.0, 1.0, 0.0])
    assert (found.squared_error, found.relative_variance, found.mean_abs_error) == (17, 17 / 25, 5 / 4)
    assert found.mean_relative_error == 0.5
    assert math.isclose(found.cosine, 9 / (5 * math.sqrt(10)))
    assert math.isclose(found.snr_db, 10 * math.log10(25 / 17))
    # sorted: -4 0 0 3 against 0 0 1 3
    assert (found.w1, found.w1_normalized) == (5 / 4, (5 / 4) / (7 / 4))
    # -4/7 0 0 3/7 against 0 0 1/4 3/4
    assert math.isclose(found.w1_mcgq, (4 / 7 + 1 / 4 + 3 / 4 - 3 / 7) / 4)
    assert found.sparsity == 0.5


def test_wasserstein_is_blind_to_permutations_and_bounded_by_the_error():
    rng = np.random.default_rng(0)
    g = rng.standard_normal(1000).astype(np.float32)
    reference = Reference(g)
    assert reference.compare(rng.permutation(g)).w1 == 0
    for _ in range(5):
        found = reference.compare(g + rng.normal(0, 0.1, 1000))
        assert found.w1 <= found.mean_abs_error


def test_what_has_no_denominator_is_nan_or_infinite():
    zero = Reference(np.zeros(4))
    found = zero.compare(np.zeros(4))
    assert found.squared_error == 0
    assert math.isnan(found.relative_variance)
    assert math.isnan(found.cosine)
    assert math.isnan(found.w1_mcgq)
    assert Reference([1.0]).compare([1.0]).snr_db == math.inf
    assert Reference([]).compare([]).squared_error == 0


def test_sizes_must_agree():
    with pytest.raises(UsageError, match="2 decoded values against 3"):
        Reference([1, 2, 3]).compare([1, 2])
