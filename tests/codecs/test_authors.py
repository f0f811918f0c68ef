"""Numbers from the authors' own programs: tests/golden/authors.json says which, and how they were made."""

import base64
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from helpers_codecs import once

import gtrace
from gtrace import testing
from gtrace.codecs import expected_on_any, fp
from gtrace.codecs.fp import PRESETS
from gtrace.codecs.parts import Scaled
from gtrace.codecs.thc import lookup_table
from gtrace.coding import ENVELOPE_BYTES, open_envelope, unpack_fixed
from gtrace.training import Exchange

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "authors.json").read_text())


def floats(text):
    return np.frombuffer(base64.b64decode(text), "<f4")


def gradient(step, worker, size):
    k = np.arange(1, 1 + size)
    return ((k * k * (31 + 17 * step + 5 * worker) % 2003 - 1001) / 1000).astype(np.float32)


def errors_of(c, x):
    """The mean share of the energy that is lost, and what was simulated for it."""
    found = [c.simulate(c.init(x.size), x, (1, key)) for key in range(20)]
    return np.mean([np.sum((one.values - x) ** 2) / np.sum(x**2) for one in found]), found


@pytest.mark.parametrize("case", GOLDEN["eden"]["nmse"])
def test_eden_has_the_published_error(case):
    law, bits = case.split()
    rng, n = np.random.default_rng(11), 1 << 15
    x = {
        "normal": rng.normal(size=n),
        "lognormal": np.exp(rng.normal(size=n)),
        "student-3": rng.standard_t(3, n),
    }[law].astype(np.float32)
    assert errors_of(gtrace.codec(f"eden:bits={bits}"), x)[0] == pytest.approx(GOLDEN["eden"]["nmse"][case], rel=0.01)


@pytest.mark.parametrize("block", [2, 8, 64, 1024])
def test_eden_says_that_it_is_biased_if_its_blocks_are_short(block):
    c, x, draws = gtrace.codec(f"eden:bits=1,block={block}"), gradient(0, 0, 4096), 400
    off = [c.simulate(c.init(x.size), x, (1, key)).values - x for key in range(draws)]
    variance, bias = np.mean(np.square(off)), np.mean(np.square(np.mean(off, axis=0)))
    share = bias / variance - 1 / draws
    assert c.unbiased == (block >= 64) == (share < 3 / draws), share


_ROTATED = [
    *itertools.product(["eden:bits=1", "eden:bits=2.5", "eden:bits=3,coder=fixed"], [100, 1 << 15]),
    *itertools.product(["thc", "thc:bits=6,outside=0.001", "thc:bits=3,granularity=7"], [1 << 15]),
]


@pytest.mark.parametrize(("spec", "size"), _ROTATED)
def test_what_is_expected_of_any_rotated_values_happens(spec, size):
    c, rng = gtrace.codec(spec), np.random.default_rng(3)
    expected = expected_on_any(c, size)
    assert expected_on_any(gtrace.codec("qsgdinf"), size) is None
    for x in (rng.normal(size=size), rng.standard_t(3, size)):
        x = x.astype(np.float32)
        error, found = errors_of(c, x)
        # A hundred values are not quite normal after a rotation.
        near = 0.25 if size == 100 else 0.06 if "thc" in spec else 0.03
        assert error == pytest.approx(expected.squared_error, rel=near)
        bits = [8 * (one.payload_bytes - ENVELOPE_BYTES) / size for one in found]
        assert np.mean(bits) == pytest.approx(expected.bits_payload, abs=0.01 + 8 / size)
        assert found[0].coded.entropy <= expected.bits_entropy + 0.01
        if "thc" in spec:
            mean = np.mean([one.values for one in found], axis=0, dtype=np.float64)
            assert 1 - mean @ x / np.sum(np.square(x, dtype=np.float64)) == pytest.approx(
                expected.bias, rel=0.15, abs=0.003
            )
            assert found[0].coded.huffman == pytest.approx(expected.bits_huffman, abs=0.02)


@pytest.mark.parametrize(("size", "seed"), [(0, 0), (1, 0), (1000, 1), (100_001, 2), (3_000_000, 0)])
def test_uniform8_rounds_to_the_nearest_of_its_steps(size, seed):
    """A value at an end between two codes, which float32 does not hold, has the code that float64 gives it."""
    x = (1e-3 * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)
    away = x - np.mean(x, dtype=np.float64) if size else x
    step = 6 * np.sqrt(away @ away / max(1, size - 1)) / 256
    code = np.clip(np.rint(away / step if step else away), -128, 127).astype(int) + 128
    mean = np.bincount(code, x, 256) / np.maximum(1, np.bincount(code, minlength=256))
    np.testing.assert_array_equal(once(gtrace.codec("uniform8"), x), mean.astype(np.float32)[code])


@pytest.mark.parametrize("name", ["nf4", "fp4", "dynamic8"])
def test_tables_are_those_of_bitsandbytes(name):
    table = floats(GOLDEN["bitsandbytes"][name])
    assert np.array_equal(gtrace.codec(name).parts.grid.entries, table)
    # A block that holds its own largest magnitude arrives as it is.
    block = np.resize(table, 256).astype(np.float32)
    assert np.array_equal(once(gtrace.codec(f"{name}:block_size=256"), block * np.float32(4)), block * np.float32(4))


@pytest.mark.parametrize("case", GOLDEN["torchao"]["modes"])
def test_microscaling_follows_torchao(case):
    preset, rule = case.split()
    wanted, x = GOLDEN["torchao"]["modes"][case], floats(GOLDEN["torchao"]["x"]).copy()
    assert list(fp.measure_scales(rule, PRESETS[preset].form, x, 32)) == wanted["scales"]
    assert np.array_equal(once(gtrace.codec(f"fp:{preset},scale={rule}"), x), floats(wanted["decoded"]))


def test_nvfp4_with_nvidias_rotation_has_the_codes_of_torchao():
    golden = GOLDEN["nvfp4"]
    x = np.frombuffer(bytes.fromhex(golden["x"]), np.int8).astype(np.float32)
    c = gtrace.codec("rotate:block=16,signs=fixed:fp:nvfp4,coder=fixed")
    body, _ = open_envelope(c.encode(c.init(x.size), x, (1, 2)), codec=c.name, size=x.size, shared=b"")
    # The tensor's scale, the blocks', the codes; no seed.
    assert bytes(body[4:20]).hex() == golden["scales"]
    assert unpack_fixed(body[20:], x.size, 4, 16).tolist() == [int(digit, 16) for digit in golden["codes"]]


def test_powersgd_takes_the_steps_of_torchs_hook():
    golden, workers, size = GOLDEN["powersgd"], range(2), math.prod(GOLDEN["powersgd"]["shape"])
    c = gtrace.codec("powersgd:rank=2")
    states = [c.init(size, tuple(golden["shape"])) for _ in workers]
    states = [state.with_arrays(q=floats(golden["start"]).reshape(-1, 2)) for state in states]
    for step, wanted in enumerate(golden["steps"]):
        ended, _ = testing.in_rounds(c, states, [gradient(step, worker, size) for worker in workers], (1, 2))
        states = [one.state for one in ended]
        assert ended[0].decoded == pytest.approx(floats(wanted), abs=1e-5)


def test_ef21_has_its_authors_estimates():
    exchange = Exchange("ef21:topk:ratio=0.1", workers=3)
    for step, wanted in enumerate(GOLDEN["ef21"]["steps"]):
        found = exchange.step(step, [{"w": gradient(step, worker, 60)} for worker in range(3)])
        assert found.gradients["w"] == pytest.approx(floats(wanted), abs=1e-6)


@pytest.mark.parametrize("case", GOLDEN["thc"]["tables"])
def test_thc_has_its_authors_tables(case):
    count, top, share = map(int, case.split())
    assert " ".join(map(str, lookup_table(count, top, 1 / share))) == GOLDEN["thc"]["tables"][case]


@pytest.mark.parametrize("case", GOLDEN["thc"]["nmse"])
def test_thc_has_its_authors_error(case):
    count, top, share = map(int, case.split())
    x = np.random.default_rng(3).normal(size=1 << 15).astype(np.float32)
    c = gtrace.codec(f"thc:bits={count.bit_length() - 1},granularity={top},outside={1 / share}")
    assert errors_of(c, x)[0] == pytest.approx(GOLDEN["thc"]["nmse"][case], rel=0.01)


def chosen(codec, values):
    return codec.parts.grid.nearest(None, Scaled(values, values[:0], 1), (0, 0))


def test_demo_sends_the_coefficients_that_its_authors_send():
    golden = GOLDEN["demo"]
    c = gtrace.codec("ef:decay=0.99:dct:chunk=8:topk:ratio=0.078125,chunk=64")
    transform, state = c.inner, c.init(np.prod(golden["shape"]), tuple(golden["shape"]))
    for step in golden["steps"]:
        gradient = floats(step["gradient"]).copy()
        coefficients = transform.given(c.inner_state(state), c.given(state, gradient))
        assert chosen(transform.inner, coefficients).positions.tolist() == step["sent"]
        decoded = once(c, gradient, state)
        assert np.count_nonzero(transform.given(c.inner_state(state), decoded) > 1e-6) <= len(step["sent"])
        state = c.update(state, gradient, decoded)
