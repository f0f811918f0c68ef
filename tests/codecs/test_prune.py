"""Pruning codecs: the kernel against its twin, thresholds on edges, closed forms, allocation."""

import naive
import numpy as np
import pytest

import gtrace
from gtrace import fitting
from gtrace.kernels import elementwise
from gtrace.testing import fitted

KEY = (0x0123456789ABCDEF, 0xFEDCBA9876543210)


def naive_prune(x, alpha, uniforms):
    """Element by element."""
    out = []
    for v, u in zip(x, uniforms, strict=True):
        if abs(v) > alpha:
            out.append(float(v))
        else:
            out.append(float(np.copysign(alpha, v)) if u < np.float32(abs(v)) / alpha else 0.0)
    return np.array(out, np.float32)


def gradients(n=30_000, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.choice([-1, 1], n) * rng.lognormal(-7, 1.8, n)).astype(np.float32)


def test_the_kernel_is_its_plain_twin():
    x, alpha = gradients(3000), np.float32(2e-3)
    x[::7] = 0
    out = np.empty_like(x)
    elementwise.prune(x, alpha, np.uint64(KEY[0]), np.uint64(KEY[1]), 0, out)
    assert (out == naive_prune(x, alpha, naive.uniforms(*KEY, 0, x.size))).all()
    elementwise.keep_large(x, alpha, out)
    assert (out == np.where(np.abs(x) >= alpha, x, 0)).all()


@pytest.mark.parametrize("rule", ["exact", "lognormal", "normal", "topk"])
def test_the_threshold_is_the_rule_s_on_an_edge_of_the_sketch(rule):
    state, sketch = fitted(gtrace.codec("prune", sparsity=0.7, threshold=rule), gradients())
    alpha = state.arrays["alpha"]
    assert alpha.dtype == np.float32
    assert alpha.view(np.uint32) & 0x1FFF == 0
    assert float(alpha) == pytest.approx(fitting.threshold(rule, 0.7, sketch), rel=1.5e-3)
