"""Update errors are the last column of a sweep's details: no verdict, and no plan, rests on them."""

import click
import numpy as np
import pytest

import gtrace
from gtrace.cli.plan import command
from gtrace.report.analysis.sweep import analyze
from gtrace.report.sections.sweep_tables import configuration_table
from gtrace.report.sections.sweep_words import sweep_verdict
from gtrace.sweep import run_sweep

SIZES = {"large": 1e3, "small": 1.0}
SPECS = ["qsgdinf:bits=3,bucket_size=64", "fp:e4m0", "signsgd"]


def swept(path, *, moments):
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


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return swept(tmp_path_factory.mktemp("known") / "run.zarr", moments=True)


@pytest.fixture(scope="module")
def unknown(tmp_path_factory):
    return swept(tmp_path_factory.mktemp("unknown") / "run.zarr", moments=False)


def test_update_errors_are_the_last_detail_and_no_headline(known):
    analysis = analyze(known)
    for c in analysis.configurations:
        chosen = (known["codec"] == c.spec) & (known["draw"] == -1)
        # Tensors of one size weigh alike, and so do steps at equal distances.
        assert c.update_error == pytest.approx(known["update_error"][chosen].mean())
    columns = configuration_table(analysis).columns
    assert (columns[-1].heading, columns[-1].rank) == ("update error", max(column.rank for column in columns))
    assert "Adam" not in " ".join(sweep_verdict(analysis))


def test_a_verdict_is_the_same_with_and_without_second_moments(known, unknown):
    assert "update error" not in [column.heading for column in configuration_table(analyze(unknown)).columns]
    assert np.isfinite(known["update_error"]).any()
    assert not np.isfinite(unknown["update_error"]).any()
    assert sweep_verdict(analyze(known)) == sweep_verdict(analyze(unknown))


def test_a_plan_cannot_be_made_by_update_errors(tmp_path):
    with pytest.raises(click.BadParameter, match="'cost', 'error'"):
        command.make_context("plan", [str(tmp_path), "--budget", "3bits", "--objective", "update"])
