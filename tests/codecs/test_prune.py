"""Pruning codecs: the kernel against its twin, thresholds on edges, wire format, allocation."""

import naive
import numpy as np
import pytest
from helpers_codecs import fitted_once, once

import gtrace
from gtrace import fitting, testing
from gtrace.coding import ENVELOPE_BYTES
from gtrace.kernels import elementwise
from gtrace.sketch import MomentSketch
from gtrace.testing import fitted
from gtrace.types import State

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


@pytest.mark.parametrize("spec", ["prune:sparsity=0.7", "prune:threshold=topk", "topk-prune:sparsity=0.6"])
def test_expectations_are_exact_for_another_tensor_than_the_fitted_one(spec):
    c, x = gtrace.codec(spec, coder="prefix"), gradients(20_000, seed=2)
    state = State(x.size, fitted(c, gradients(seed=1))[0].arrays)
    alpha, m = float(state.arrays["alpha"]), np.abs(x.astype(np.float64))
    expected = c.expect(state, MomentSketch.of(x, norm="none"))
    if spec.startswith("topk"):
        zeros, error, at_alpha = np.mean(m < alpha), np.sum(m[m < alpha] ** 2), 0.0
        assert expected.bias == pytest.approx(np.sqrt(error))
    else:
        small = m[m <= alpha]
        zeros, error = np.sum(1 - small / alpha) / x.size, np.sum(small * (alpha - small))
        at_alpha = np.sum(small / alpha) / x.size
        assert expected.bias == 0
    bits = zeros + 3 * at_alpha + 34 * (1 - zeros - at_alpha)
    assert expected.sparsity == pytest.approx(zeros, abs=1e-12)
    assert expected.squared_error == pytest.approx(error, rel=1e-10)
    assert expected.bits_payload == pytest.approx(bits + 32 / x.size, rel=1e-10)


def test_the_wire_format_is_alpha_once_and_the_prefix_code():
    c, x = gtrace.codec("prune", sparsity=0.5, coder="prefix"), gradients(1000)
    state, _ = fitted(c, x)
    payload, q, alpha = c.encode(state, x, KEY), once(c, x, state, KEY), state.arrays["alpha"]
    assert payload[ENVELOPE_BYTES : ENVELOPE_BYTES + 4] == alpha.tobytes()
    bits = np.where(q == 0, 1, np.where(np.abs(q) == alpha, 3, 34)).sum()
    assert len(payload) == ENVELOPE_BYTES + 4 + -(-int(bits) // 8)
    kept = np.abs(x) > alpha
    assert (q[kept] == x[kept]).all()
    assert set(np.abs(q[~kept]).tolist()) == {0.0, float(alpha)}


def test_denormal_thresholds_do_not_bias():
    tiny = np.finfo(np.float32).smallest_subnormal
    x = np.repeat(np.array([1, 2, 3], np.float32) * tiny, 100_000)
    q = fitted_once(gtrace.codec("prune", sparsity=0.5), x, KEY).astype(np.float64).reshape(3, -1) / float(tiny)
    assert q.mean(axis=1) == pytest.approx([1, 2, 3], rel=0.02)


@pytest.mark.parametrize("spec", ["prune:threshold=topk", "prune:threshold=exact", "topk-prune"])
def test_values_on_the_edges_themselves_are_expected_right(spec):
    rng = np.random.default_rng(3)
    # bfloat16 values are all edges
    x = (rng.standard_t(3, 20_000).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    testing.check_expectation(gtrace.codec(spec), "bfloat16", x)
    testing.check_expectation(gtrace.codec(spec), "grid", rng.integers(-4, 5, 5000).astype(np.float32))


@pytest.mark.parametrize("spec", ["prune:sparsity=0.5", "prune:sparsity=0.5,threshold=lognormal", "topk-prune"])
def test_nothing_is_pruned_where_nothing_needs_to_be(spec):
    c = gtrace.codec(spec)
    x = np.where(np.random.default_rng(5).random(2000) < c.sparsity + 0.1, 0, gradients(2000)).astype(np.float32)
    state, sketch = fitted(c, x)
    assert (once(c, x, state) == x).all()
    assert (once(c, x) == x).all()
    assert c.expect(state, sketch).squared_error == 0
    # Nor does a summary of zeros change a threshold.
    assert c.fit(state, MomentSketch.of(np.zeros(100), norm="none"), 1) is state


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.8, 0.95])
def test_topk_prune_cuts_no_more_than_asked_and_little_less(sparsity):
    for x in (gradients(), gradients(10), np.full(50, 0.3, np.float32)):
        q = fitted_once(gtrace.codec("topk-prune", sparsity=sparsity), x)
        zeros = np.mean(q == 0)
        assert zeros <= sparsity + 1e-9
        if np.unique(x).size == x.size:
            assert zeros >= sparsity - 1 / x.size - 2e-3
        assert (np.abs(x[q == 0]).max(initial=0)) <= np.abs(q[q != 0]).min(initial=np.inf)


def test_heterogeneous_pruning_takes_its_share_from_the_state():
    c = gtrace.codec("prune:allocation=heterogeneous,sparsity=0.8")
    assert not gtrace.codec("prune").allocates
    tensors = [gradients(4000), np.random.default_rng(6).normal(size=9000).astype(np.float32)]
    sketches = [MomentSketch.of(x, norm="none") for x in tensors]
    shares = c.allocate(sketches)
    assert np.average(shares, weights=[4000, 9000]) == pytest.approx(0.8)
    assert shares[0] > 0.85
    for codec in (c, gtrace.codec(f"ef:{c}")):
        assert codec.allocates
        assert list(codec.allocate(sketches)) == list(shares)
        for x, sketch, share in zip(tensors, sketches, shares, strict=True):
            state = codec.fit(codec.with_target(codec.init(x.size), share), sketch, 0)
            assert np.mean(once(codec, x, state) == 0) == pytest.approx(share, abs=0.03)
    assert np.mean(fitted_once(c, tensors[0]) == 0) == pytest.approx(0.8, abs=0.03)
    everything = c.fit(c.with_target(c.init(4000), 1.0), sketches[0], 0)
    assert np.isfinite(float(everything.arrays["alpha"]))
