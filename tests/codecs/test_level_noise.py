"""Level codecs that encode a gradient twice together, against each of them alone."""

import numpy as np
import pytest

import gtrace
from gtrace.codecs.level_sets import LevelSets, noisy_together
from gtrace.kernels.noise import noise_of_two
from gtrace.sketch import MomentSketch
from gtrace.types import Key

FIXED = ("qsgdinf:bits=2", "qsgdinf:bits=7,zero=false", "terngrad:clip=none")
FITTED = ("alq:bits=3", "alq:bits=3,zero=false", "alq:bits=8", "nuqsgd:bits=4", "qsgd:bits=3,zero=false")


@pytest.mark.parametrize("specs", [FIXED, FITTED, ("zipml:bits=3,bucket_size=none",)], ids=str)
def test_many_encode_like_each(specs):
    values, near = np.random.default_rng(3).standard_t(3, (2, 9000)).astype(np.float32)
    values[8192:8300] = 0
    codecs = [gtrace.codec(spec) for spec in specs]
    assert all(map(noisy_together, codecs))
    scale, factor, variances = np.linspace(1, 2, values.size), 0.7, np.ones((len(codecs), values.size))
    keys = [Key.derive(5, tensor="w", draw=draw) for draw in (0, 1)]
    together, sketch = LevelSets(codecs), MomentSketch.from_spec(near, codecs[0].needs)
    assert together.adaptive == (specs != FIXED)
    lost = together.add_noise(sketch if together.adaptive else None, values, keys, near, scale, factor, variances)
    for codec, found, variance in zip(codecs, lost, variances, strict=True):
        state = codec.fit(codec.init(values.size), sketch, 0)
        both, expected = [codec.simulate(state, values, key).values for key in keys], np.ones(values.size)
        assert found == pytest.approx(noise_of_two(values, *both, near, scale, factor, expected), rel=1e-9)
        np.testing.assert_array_equal(variance, expected, err_msg=str(codec))
