"""Pruning codecs: the kernel against its twin, thresholds on edges, closed forms, allocation."""

import naive
import numpy as np
import pytest
from helpers_codecs import once

import gtrace
from gtrace import fitting
from gtrace.kernels import elementwise
from gtrace.sketch import MomentSketch
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


def test_heterogeneous_pruning_takes_its_share_from_the_state():
    c = gtrace.codec("prune:allocation=heterogeneous,sparsity=0.8")
    assert not gtrace.codec("prune").allocates
    tensors = [gradients(4000), np.random.default_rng(6).normal(size=9000).astype(np.float32)]
    sketches = [MomentSketch.of(x, norm="none") for x in tensors]
    shares = c.allocate(sketches)
    assert np.average(shares, weights=[4000, 9000]) == pytest.approx(0.8)
    assert shares[0] > 0.85
    wrapped = gtrace.codec(f"ef:{c}")
    assert (wrapped.allocates, list(wrapped.allocate(sketches))) == (True, list(shares))
    for x, sketch, share in zip(tensors, sketches, shares, strict=True):
        state = wrapped.fit(wrapped.with_target(wrapped.init(x.size), share), sketch, 0)
        assert np.mean(once(wrapped, x, state) == 0) == pytest.approx(share, abs=0.03)
