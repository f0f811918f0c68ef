"""Made-up results that many tests look at."""

import pytest
from helpers_report import PROVENANCE, result_of, rows_of, write_runs

from gtrace.report import analyze, make_report


@pytest.fixture(scope="session")
def whole():
    """A sweep of five methods with rows of every kind."""
    return result_of(rows_of(), ["fc1: 2 NaN"], PROVENANCE)


@pytest.fixture(scope="session")
def sweep(whole):
    """The same, summed up."""
    return analyze(whole)


@pytest.fixture(scope="session")
def sweep_report(whole):
    return make_report([whole])


@pytest.fixture(scope="session")
def log(tmp_path_factory):
    """A run log of an uncompressed run and one with a codec."""
    return write_runs(tmp_path_factory.mktemp("runs") / "train.jsonl")


@pytest.fixture(scope="session")
def run_report(log):
    return make_report(runs=[log])
