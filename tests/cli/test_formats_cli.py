"""``gtrace formats`` and ``gtrace info --fit``: tables, JSON, TOML, refusals."""

import json
import math
import tomllib

import numpy as np
import pytest
from helpers_laws import LAYERS, STEPS, gradient, write_laws
from helpers_trace import write_arrays

from gtrace.errors import TraceError
from gtrace.fitting.magnitudes import LAWS, fit_magnitudes
from gtrace.trace import Trace, open_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_laws(tmp_path_factory.mktemp("laws") / "run.zarr", kinds=("weight", "neural"))


def test_fit_says_first_which_law_fits(call, trace):
    code, out, err = call("info", trace, "--fit", "--kind", "neural")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{trace}: laws of |g| without zeros, 4 tensors, 3 steps from 0 to 20"
    assert lines[1].startswith("The lognormal law fits best on average: mean KS distance 0.0")
    row = next(line.split() for line in lines if line.startswith("wide"))
    fits = [fit_magnitudes(gradient("wide", step)) for step in STEPS]
    assert row[2] == "lognormal"
    for place, law in enumerate(LAWS):
        assert float(row[3 + place]) == pytest.approx(sum(fit.ks[law] for fit in fits) / 3, abs=6e-4)
    assert float(row[3 + len(LAWS)]) == pytest.approx(sum(fit.mu_log2 for fit in fits) / 3, rel=5e-3)
    assert float(row[4 + len(LAWS)]) == pytest.approx(sum(fit.sigma_log2 for fit in fits) / 3, rel=5e-3)
    assert all(word.startswith("1-") for word in row[-5:])
    assert "weight" not in out


def test_both_kinds_are_told_apart(call, trace):
    _, out, _ = call("info", trace, "--fit", "--tensors", "narrow", "--steps", "0")
    rows = [line.split() for line in out.splitlines() if line.startswith("narrow")]
    assert [row[1] for row in rows] == ["weight", "neural"]


def test_fit_as_json_has_every_step(succeed, trace):
    out, _ = succeed("info", trace, "--fit", "--kind", "neural", "--tensors", "early,tiny", "--json")
    told = json.loads(out)
    early, tiny = told["tensors"]
    assert (early["best"], early["judged"], tiny["judged"]) == ("half-normal", True, False)
    assert [at["step"] for at in early["steps"]] == list(STEPS)
    fit = fit_magnitudes(gradient("early", 10))
    at = early["steps"][1]
    assert (at["nonzero"], at["zeros"]) == (fit.count, fit.zeros)
    assert (at["sigma"], at["sigma_log2"]) == (pytest.approx(fit.sigma), pytest.approx(fit.sigma / math.log(2)))
    assert at["ks"] == pytest.approx(fit.ks)
    assert set(early["formats"]) == {"4", "5", "6", "7", "8"}
    with open_trace(trace) as opened:
        assert told["fingerprint"] == opened.fingerprint


def test_fit_of_zeros_and_equal_values(call, tmp_path):
    write_arrays(tmp_path / "t.zarr", {"zero": [0.0] * 5, "same": [0.5] * 5})
    code, out, err = call("info", tmp_path / "t.zarr", "--fit")
    assert (code, err) == (0, "")
    assert "No tensor has the 100 non-zero elements" in out
    code, out, _ = call("formats", tmp_path / "t.zarr", "--tensors", "zero")
    assert (code, "any format will do" in out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "pass --fit"),
        (["--fit", "--steps", "7"], "none of these steps"),
        (["--fit", "--tensors", "wyde"], "did you mean wide"),
    ],
)
def test_wrong_usage(refuse, trace, arguments, message):
    assert message in refuse("info", trace, *arguments)


def test_formats_as_a_table(call, trace):
    code, out, err = call("formats", trace, "--kind", "neural", "--bits", "4,8", "--scale", "error", "--full")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{trace}: float formats under scale=error, 4 tensors, 3 steps"
    table = [line.split() for line in lines if line[:6].strip() in (*LAYERS, "")]
    assert len([row for row in table if "1-" in " ".join(row)]) == 8


def test_the_largest_layers_and_the_answer_in_25_lines(call, trace):
    code, out, _ = call("formats", trace, "--kind", "neural", "--bits", "4-8")
    lines = out.splitlines()
    assert code == 0
    assert len(lines) <= 25
    assert lines[1].startswith("At 8 bits, 1-")
    assert lines[-1] == f"next: gtrace sweep {trace} --methods fp --bits 4-8"


def test_a_layer_that_is_lost_is_pointed_out(call, trace):
    _, out, _ = call("formats", trace, "--kind", "neural", "--bits", "4", "--tensors", "wide")
    assert "Mind: wide at 4 bits loses up to" in out
    _, out, _ = call("formats", trace, "--kind", "neural", "--bits", "8", "--tensors", "narrow")
    assert "Mind" not in out


def test_a_tail_that_ends_early_is_told(call, tmp_path):
    cut = np.exp(4 * np.minimum(np.random.default_rng(0).standard_normal(5000), 1))
    write_arrays(tmp_path / "t.zarr", {"w": cut})
    _, out, _ = call("formats", tmp_path / "t.zarr", "--bits", "4")
    assert "octaves below the largest that the law expects" in out


def test_formats_as_toml_and_json_are_the_same(call, trace, tmp_path):
    recipe = tmp_path / "recipe.toml"
    code, out, err = call("formats", trace, "--kind", "neural", "--bits", "6", "-o", recipe, "--json")
    assert (code, err) == (0, f"{recipe}\n")
    written, told = tomllib.loads(recipe.read_text()), json.loads(out)
    assert [layer["tensor"] for layer in written["layers"]] == list(LAYERS)
    assert written["provenance"] == told["provenance"]
    assert written["layers"][0]["formats"]["6"] == told["layers"][0]["formats"]["6"]
    assert written["provenance"]["steps"] == list(STEPS)
    assert list(tmp_path.iterdir()) == [recipe]


def test_nothing_is_overwritten_unless_asked(refuse, succeed, trace, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("mine")
    assert "already exists" in refuse("formats", trace, "-o", recipe, code=4)
    assert recipe.read_text() == "mine"
    succeed("formats", trace, "-o", recipe, "--force", "--steps", "0", "--bits", "4")
    assert tomllib.loads(recipe.read_text())["gtrace_formats"] == 1


@pytest.mark.parametrize("bits", ["2", "9", "x"])
def test_impossible_bits(refuse, trace, bits):
    assert "--bits" in refuse("formats", trace, "--bits", bits)


def test_names_that_would_act_are_shown(call, tmp_path):
    write_arrays(tmp_path / "t.zarr", {"a\x1b[31mb": [1.0, 2.0, 3.0]})
    for command in (["info", "--fit"], ["formats"]):
        _, out, _ = call(command[0], tmp_path / "t.zarr", *command[1:])
        assert "\x1b" not in out
        assert "a\\x1b[31mb" in out


def test_info_without_fit_reads_no_gradient(call, trace, monkeypatch):
    def broken(*_arguments, **_keywords):
        raise TraceError("the trace is damaged")

    monkeypatch.setattr(Trace, "read", broken)
    assert call("info", trace)[0] == 0
    for command in (["info", trace, "--fit"], ["formats", trace]):
        code, out, err = call(*command)
        assert (code, out, err) == (3, "", "gtrace: the trace is damaged\n")
