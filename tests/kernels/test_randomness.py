"""Numbers of one stream and of related streams are as independent as random ones; benchmarks/randomness.py has more."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gtrace.types import Key

#: the script's functions, which its 64 keys and this test's few share
RANDOMNESS = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "randomness.py")))
KEYS = [Key.derive(seed, tensor="fc.weight") for seed in range(4)]


def test_no_lag_up_to_2_to_the_20_is_correlated():
    for chance, scores in RANDOMNESS.lags(KEYS, chances=(None, 0.5, 0.1)).items():
        mean = np.abs(scores[0])
        # Of a million independent lags 0.6 exceed 5, and one in 500 such tests has one above 6.
        assert (mean > 5).sum() <= 4, (chance, 1 + np.flatnonzero(mean > 5))
        assert mean.max() < 6, (chance, 1 + mean.argmax())


@pytest.mark.parametrize("field", ["seed", "draw", "worker", "step", "tensor", "role"])
def test_streams_whose_keys_differ_in_one_field_are_independent(field):
    summed, worst = RANDOMNESS.streams(RANDOMNESS.FIELDS[field], 6, size=1 << 17)
    assert abs(summed) < 4
    assert worst < 6
