"""``gtrace.compress``: one tensor through a codec."""

import numpy as np
import pytest
import torch
from helpers_codecs import body_bits

import gtrace
from gtrace.errors import UsageError

G = np.random.default_rng(0).standard_normal((30, 7)).astype(np.float32)


@pytest.mark.parametrize("spec", ["qsgdinf:bits=4", "alq:bits=3", "powersgd:rank=2", "ef:topk:ratio=0.1", "topk-prune"])
def test_values_payload_bits_and_error(spec):
    sent = gtrace.compress(G, spec, seed=7)
    assert sent.values.shape == G.shape
    lost = np.square(sent.values.astype(np.float64) - G).sum() / np.square(G.astype(np.float64)).sum()
    assert sent.error == pytest.approx(lost, rel=1e-12)
    # Without the envelope, and with what a receiver needs besides.
    assert sent.bits >= body_bits(sent.payload) / G.size
    assert gtrace.compress(G, gtrace.codec(spec), seed=7).payload == sent.payload


def test_it_is_what_a_sweep_measures():
    rows = gtrace.sweep(gtrace.Trace.from_arrays({"g": {0: G.ravel()}}), ["alq:bits=3"], refit="each", seed=5)
    (draw,) = np.flatnonzero(rows["draw"] == 0)
    sent = gtrace.compress(G.ravel(), "alq:bits=3", seed=5)
    assert sent.bits == pytest.approx(rows["bits_total"][draw], rel=1e-12)
    assert sent.error == pytest.approx(rows["relative_variance"][draw], rel=1e-6)


def test_numbers_beyond_float32_are_refused_in_one_line():
    with pytest.raises(UsageError, match="value 1 is inf; a codec takes finite numbers only"):
        gtrace.compress(np.array([1.0, 1e300]), "qsgd")
    assert gtrace.MomentSketch.of([1.0, 1e300]).nonfinite == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_tensor_stays_a_tensor_of_its_type(dtype):
    given = torch.from_numpy(G).to(dtype).requires_grad_()
    sent = gtrace.compress(given, "qsgdinf:bits=4")
    assert (sent.values.dtype, sent.values.shape, sent.values.device) == (dtype, given.shape, given.device)
    assert not sent.values.requires_grad
    exact = given.detach().double()
    lost = (sent.values.double() - exact).square().sum() / exact.square().sum()
    assert sent.error == pytest.approx(lost.item(), rel=1e-9)
    assert gtrace.compress(given.T, "none").error == 0


@pytest.mark.parametrize("given", [[], [0.0, 0.0], np.float32(2), np.asfortranarray(G.astype(np.float16))], ids=str)
def test_an_array_stays_an_array_of_its_type(given):
    sent = gtrace.compress(given, "none")
    assert sent.bits == (32 if np.size(given) else 0)
    assert (sent.values.shape, sent.values.dtype) == (np.shape(given), np.asarray(given).dtype)
    assert np.array_equal(sent.values, np.asarray(given, np.float32))


def test_what_cannot_be_encoded():
    for given, message in (
        (torch.arange(3), "floating-point values, not int64"),
        (torch.eye(3).to_sparse(), "to_dense"),
    ):
        with pytest.raises(UsageError, match=message):
            gtrace.compress(given, "qsgd")
