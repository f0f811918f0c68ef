import json
import tomllib

import numpy as np
import pytest
from helpers_laws import LAYERS, STEPS, gradient, memory_trace

from gtrace.errors import UsageError
from gtrace.fitting.floats import candidates, placed_error
from gtrace.fitting.magnitudes import fit_magnitudes
from gtrace.planning.toml import dump
from gtrace.sweep.laws import choose_formats, recipe
from gtrace.trace.choose import choose_infos

BITS = (4, 6)


@pytest.fixture(scope="module")
def trace():
    return memory_trace()


@pytest.fixture(scope="module", params=["max", "mean", "error"])
def table(request, trace):
    return request.param, choose_formats(trace, choose_infos(trace), frozenset(STEPS), BITS, request.param)


def test_the_format_has_the_least_mean_error(table):
    rule, layers = table
    assert [layer.info.name for layer in layers] == list(LAYERS)
    for layer in layers:
        fits = [fit_magnitudes(gradient(layer.info.name, step)) for step in STEPS]
        for found in layer.formats:
            errors = {
                form: np.mean([placed_error(form, f.sigma_log2, rule, count=f.count, mu=f.mu_log2) for f in fits])
                for form in candidates(found.bits)
            }
            best, second = sorted(errors, key=errors.get)[:2]
            assert (found.format, found.second) == (best, second)
            assert found.error == pytest.approx(errors[best], rel=1e-9)
            assert found.margin == pytest.approx(errors[second] / errors[best], rel=1e-9)


def test_flushed_and_saturated_are_what_rounding_does(table):
    _, layers = table
    for layer in layers:
        for found in layer.formats:
            for place, step in enumerate(STEPS):
                g = gradient(layer.info.name, step)
                g = g[g != 0].astype(np.float64) * 2.0 ** int(found.scale_exponents[place])
                rounded = found.format.round(g)
                assert found.flushed[place] == pytest.approx(np.mean(rounded == 0), abs=1e-12)
                assert found.saturated[place] == pytest.approx(np.mean(np.abs(g) > found.format.max), abs=1e-12)


def test_the_recipe_is_plain_and_complete(trace):
    layers = choose_formats(trace, choose_infos(trace), frozenset(STEPS), BITS)
    document = recipe(trace, layers, "max", {"bits": list(BITS)})
    assert json.loads(json.dumps(document)) == tomllib.loads(dump(document))
    assert document["provenance"]["fingerprint"] == trace.fingerprint
    assert document["provenance"]["bits"] == [4, 6]
    entry = document["layers"][0]
    assert (entry["tensor"], entry["steps"], entry["steps_seen"]) == ("wide", [0, 20], 3)
    found = layers[0].formats[1]
    assert entry["formats"][6]["format"] == found.format.name
    k = found.scale_exponents.tolist()
    assert entry["formats"][6]["scale_exponent"] == {"first": k[0], "last": k[-1], "min": min(k), "max": max(k)}
    assert entry["formats"][6]["worst_flushed"] == pytest.approx(found.flushed.max(), rel=1e-3)


def test_impossible_bits_are_refused(trace):
    with pytest.raises(UsageError, match="20 bits"):
        choose_formats(trace, choose_infos(trace), frozenset(STEPS), (20,))
