"""Update errors in reports: a column where they are known, and a sentence where they change the order."""

import numpy as np
import pytest

import gtrace
from gtrace.report.analysis import analyze
from gtrace.report.tables import configuration_table
from gtrace.report.updates import update_sentences
from gtrace.report.verdict import sweep_verdict
from gtrace.sweep import run_sweep

SIZES = {"large": 1e3, "small": 1.0}
SPECS = ["qsgdinf:bits=3,bucket_size=64", "fp:e4m0", "signsgd"]


def swept(path, moments):
    rng = np.random.default_rng(0)
    with gtrace.create_trace(path) as writer:
        for step in range(3):
            for name, size in SIZES.items():
                g = (size * rng.standard_normal(512)).astype(np.float32)
                writer.append(step, name, g)
                if moments:
                    v = np.full(512, size**2, np.float32)
                    # Half of the elements hardly ever move: an error there is a large one.
                    v[::2] *= 1e-6
                    writer.append(step, name, v, kind="second_moment", decay=1.0, eps=1e-12)
    with gtrace.open_trace(path) as trace:
        return run_sweep(trace, SPECS)


def test_a_column_and_a_sentence(tmp_path):
    result = swept(tmp_path / "run.zarr", moments=True)
    analysis = analyze(result)
    for c in analysis.configurations:
        chosen = (result["codec"] == c.spec) & (result["draw"] == -1)
        # Tensors of one size weigh alike, and so do steps at equal distances.
        assert c.update_error == pytest.approx(result["update_error"][chosen].mean())
    headings = [column.heading for column in configuration_table(analysis).columns]
    assert "update error" in headings
    (sentence,) = update_sentences(analysis)
    assert "order the configurations as relative variances do" in sentence or "change places" in sentence
    assert sentence in sweep_verdict(analysis)


def test_configurations_that_change_places_are_named(tmp_path):
    analysis = analyze(swept(tmp_path / "run.zarr", moments=True))
    first, second = (c for c in analysis.configurations if c.method != "signsgd")
    object.__setattr__(first, "relative_variance", 0.1)
    object.__setattr__(second, "relative_variance", 0.2)
    for c in analysis.configurations:
        object.__setattr__(c, "update_error", 1.0)
    object.__setattr__(first, "update_error", 0.5)
    object.__setattr__(second, "update_error", 0.25)
    (sentence,) = update_sentences(analysis)
    assert "1 of 3 pairs of configurations change places" in sentence
    assert sentence.index(first.spec) < sentence.index(second.spec)
    object.__setattr__(second, "update_error", 0.75)
    assert "as relative variances do" in update_sentences(analysis)[0]


def test_nothing_is_said_without_second_moments(tmp_path):
    analysis = analyze(swept(tmp_path / "run.zarr", moments=False))
    assert update_sentences(analysis) == []
    assert "update error" not in [column.heading for column in configuration_table(analysis).columns]
