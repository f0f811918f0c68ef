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


def test_fit_says_first_which_law_fits(succeed, trace):
    out, err = succeed("info --fit --kind neural", trace)
    assert err == ""
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
    out, _ = succeed("info --fit --tensors narrow --steps 0", trace)
    rows = [line.split() for line in out.splitlines() if line.startswith("narrow")]
    assert [row[1] for row in rows] == ["weight", "neural"]


def test_fit_as_json_has_every_step(succeed, trace):
    out, _ = succeed("info --fit --kind neural --tensors early,tiny --json", trace)
    said = json.loads(out)
    early, tiny = said["tensors"]
    assert (early["best"], early["judged"], tiny["judged"]) == ("half-normal", True, False)
    assert [at["step"] for at in early["steps"]] == list(STEPS)
    fit, at = fit_magnitudes(gradient("early", 10)), early["steps"][1]
    assert (at["nonzero"], at["zeros"]) == (fit.count, fit.zeros)
    assert (at["sigma"], at["sigma_log2"]) == (pytest.approx(fit.sigma), pytest.approx(fit.sigma / math.log(2)))
    assert at["ks"] == pytest.approx(fit.ks)
    assert set(early["formats"]) == {"4", "5", "6", "7", "8"}
    with open_trace(trace) as opened:
        assert said["fingerprint"] == opened.fingerprint


def test_zeros_equal_values_and_a_tail_that_ends_early(succeed, tmp_path):
    cut = np.exp(4 * np.minimum(np.random.default_rng(0).standard_normal(5000), 1))
    write_arrays(tmp_path / "t.zarr", {"zero": [0.0] * 5, "same": [0.5] * 5})
    write_arrays(tmp_path / "cut.zarr", {"w": cut})
    out, err = succeed("info t.zarr --fit")
    assert err == ""
    assert "No tensor has the 100 non-zero elements" in out
    assert "any format will do" in succeed("formats t.zarr --tensors zero")[0]
    assert "octaves below the largest that the law expects" in succeed("formats cut.zarr --bits 4")[0]


def test_formats_as_a_table_and_its_answer_in_25_lines(succeed, trace):
    out, err = succeed("formats --kind neural --bits 4,8 --scale error --full", trace)
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == f"{trace}: float formats under scale=error, 4 tensors, 3 steps"
    table = [line for line in lines if line[:6].strip() in (*LAYERS, "")]
    assert len([row for row in table if "1-" in row]) == 8
    lines = succeed("formats --kind neural --bits 4-8", trace)[0].splitlines()
    assert len(lines) <= 25
    assert lines[1].startswith("At 8 bits, 1-")
    assert lines[-1] == f"next: gtrace sweep {trace} --methods fp --bits 4-8"
    assert "Mind: wide at 4 bits loses up to" in succeed("formats --kind neural --bits 4 --tensors wide", trace)[0]
    assert "Mind" not in succeed("formats --kind neural --bits 8 --tensors narrow", trace)[0]


def test_formats_as_toml_and_json_are_the_same(succeed, refuse, trace, folder):
    out, err = succeed("formats --kind neural --bits 6 -o recipe.toml --json", trace)
    assert err == "recipe.toml\n"
    written, said = tomllib.loads((folder / "recipe.toml").read_text()), json.loads(out)
    assert written["gtrace_formats"] == 1
    assert [layer["tensor"] for layer in written["layers"]] == list(LAYERS)
    assert written["provenance"] == said["provenance"]
    assert written["layers"][0]["formats"]["6"] == said["layers"][0]["formats"]["6"]
    assert written["provenance"]["steps"] == list(STEPS)
    assert list(folder.iterdir()) == [folder / "recipe.toml"]
    (folder / "recipe.toml").write_text("mine")
    assert "already exists" in refuse("formats -o recipe.toml", trace, code=4)
    assert (folder / "recipe.toml").read_text() == "mine"
    succeed("formats -o recipe.toml --force --steps 0 --bits 4", trace)
    assert tomllib.loads((folder / "recipe.toml").read_text())["provenance"]["steps"] == [0]


def test_info_without_fit_reads_no_gradient(succeed, refuse, trace, monkeypatch):
    def broken(*_arguments, **_keywords):
        raise TraceError("the trace is damaged")

    monkeypatch.setattr(Trace, "read", broken)
    succeed("info", trace)
    for command in ("info --fit", "formats"):
        assert refuse(command, trace, code=3) == "gtrace: the trace is damaged\n"
