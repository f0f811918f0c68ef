"""The rule behind the verdict, case by case, on made candidates; its words, on a small sweep."""

import html
import io
import math
import re

import numpy as np
import pytest
from helpers_trace import write_arrays
from rich.console import Console

import gtrace
from gtrace.costs import Cluster, Network
from gtrace.report import answer, load_report, print_report, to_html, to_json, to_markdown
from gtrace.report.inputs import Asked
from gtrace.report.verdict import CLOSE, ERROR_LIMIT, Candidate, candidates_of, choose, simplicity


def candidate(name, bits, error=0.01, seconds=math.nan, within=True, setting=""):
    return Candidate(name, name, name, bits, error, within, seconds, simplicity(name, setting))


FLOAT32 = candidate("none", 32.0, math.nan, 0.200)
BF16 = candidate("bf16", 16.0, math.nan, 0.190)
QSGDINF = candidate("qsgdinf", 3.6, 0.013, 0.150)


@pytest.mark.parametrize(
    ("candidates", "network", "answer", "codec"),
    [
        pytest.param([QSGDINF], False, "compress", "qsgdinf", id="one codec that is safe"),
        pytest.param(
            [QSGDINF, candidate("qsgd", 2.0, 0.4, within=False)], False, "compress", "qsgdinf", id="fewer bits, unsafe"
        ),
        pytest.param([QSGDINF, candidate("nuqsgd", 3.0)], False, "compress", "nuqsgd", id="the fewest bits"),
        pytest.param([QSGDINF, candidate("alq", 3.55)], False, "compress", "qsgdinf", id="a tie goes to the simpler"),
        pytest.param([QSGDINF, candidate("alq", 3.5)], False, "compress", "alq", id="no tie beyond two percent"),
        pytest.param(
            [QSGDINF, candidate("ef:qsgdinf", 3.6, 0.001)], False, "compress", "qsgdinf", id="wrapped is less simple"
        ),
        pytest.param([QSGDINF, candidate("qsgd", 3.6, 0.005)], False, "compress", "qsgd", id="then the smaller error"),
        pytest.param([candidate("qsgd", 2.0, 0.4, within=False)], False, "nothing is safe", None, id="none is safe"),
        pytest.param([candidate("qsgd", 2.0, math.nan)], False, "not measured", None, id="no error measured"),
        pytest.param([], False, "not measured", None, id="no codec at all"),
        pytest.param([QSGDINF], True, "compress", "qsgdinf", id="a slow network"),
        pytest.param([candidate("qsgdinf", 3.6, 0.013, 0.187)], True, "do not compress", "bf16", id="bf16 is enough"),
        pytest.param([candidate("qsgdinf", 3.6, 0.013, 0.197)], True, "do not compress", "bf16", id="bf16 is faster"),
        pytest.param(
            [candidate("qsgdinf", 3.6, 0.4, 0.150, within=False)], True, "nothing is safe", None, id="fast but unsafe"
        ),
        pytest.param(
            [candidate("topk", 0.3, 0.02, 0.1500, setting="ratio 0.01"), QSGDINF],
            True,
            "compress",
            "qsgdinf",
            id="steps as long: fewer bits do not count",
        ),
    ],
)
def test_the_rule(candidates, network, answer, codec):
    found = choose([*candidates, FLOAT32, BF16], network=network)
    assert (found.answer, found.chosen and found.chosen.codec) == (answer, codec)


def test_a_network_that_is_never_waited_for_needs_no_compression():
    fast = [candidate("none", 32.0, math.nan, 0.18), candidate("bf16", 16.0, math.nan, 0.18)]
    found = choose([candidate("qsgdinf", 3.6, 0.013, 0.179), *fast], network=True)
    assert (found.answer, found.chosen.codec, found.best.codec) == ("do not compress", "none", "qsgdinf")


def test_what_is_too_close_to_call_is_named():
    other = candidate("qsgd", QSGDINF.bits * (1 + CLOSE / 2), QSGDINF.error * (1 + CLOSE / 2))
    found = choose([QSGDINF, other, FLOAT32, BF16], network=False)
    assert (found.chosen.codec, [one.codec for one in found.close]) == ("qsgdinf", ["qsgd"])
    worse = candidate("qsgd", QSGDINF.bits, QSGDINF.error * 1.1)
    assert choose([QSGDINF, worse, FLOAT32, BF16], network=False).close == ()


def test_the_order_of_candidates_does_not_matter():
    several = [QSGDINF, candidate("alq", 3.55), candidate("ef:topk", 3.58, 0.001), FLOAT32, BF16]
    assert {choose(order, network=False).chosen for order in (several, several[::-1])} == {QSGDINF}


@pytest.mark.parametrize(
    ("simpler", "other"),
    [
        (("none", ""), ("bf16", "")),
        (("bf16", ""), ("qsgdinf", "b8")),
        (("qsgdinf", "b4"), ("alq", "b4")),
        (("alq", "b4"), ("topk", "ratio 0.01")),
        (("topk", "ratio 0.01"), ("ef:qsgdinf", "b4")),
    ],
)
def test_simpler_codecs_come_first(simpler, other):
    assert simplicity(*simpler) < simplicity(*other)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of one tensor whose gradient noise is not known."""
    values = zip((0, 10, 20), np.random.default_rng(0).standard_normal((3, 5000)), strict=True)
    path = write_arrays(tmp_path_factory.mktemp("verdict") / "one.zarr", {"w": dict(values)})
    results = path.with_suffix(".sweep.db")
    gtrace.run_sweep(path, ["qsgdinf:bits=4", "qsgdinf:bits=2", "alq:bits=4", "bf16"], output=results)
    return results


def report_of(path, **asked):
    return load_report([path], asked=Asked(**asked))


def test_every_way_out_begins_with_the_same_verdict(swept):
    report = report_of(swept)
    found = to_json(report)
    verdict = found["verdict"]
    configuration = next(c for c in found["sweeps"][0]["configurations"] if c["spec"] == verdict["codec"])
    assert verdict["answer"] == "compress"
    assert (verdict["bits"], verdict["error"]) == (configuration["bits"], configuration["error"])
    assert verdict["error"] <= ERROR_LIMIT
    console = Console(width=80, file=io.StringIO())
    print_report(report, console)
    assert console.file.getvalue().startswith(f"Recommendation   {verdict['recommendation'][:20]}")
    page, markdown, notebook = to_html(report), to_markdown(report), answer(report)._repr_html_()
    for line in ("recommendation", "saves", "costs", "confidence"):
        # A card has the beginning of a line in large letters, and its rest below.
        card = html.unescape(re.search(rf"<dt>{line.capitalize()}</dt>(.*?)</dd>", page)[1])
        said = re.sub(r"<[^>]+>", " ", card).lower()
        assert re.findall(r"[\w.%]+", said) == re.findall(r"[\w.%]+", verdict[line].lower())
        assert f"**{line.capitalize()}**: " in markdown
        assert f"<th>{line.capitalize()}</th><td>{html.escape(verdict[line])}</td>" in notebook


@pytest.mark.parametrize(("network", "answer"), [("1Mbit/s", "compress"), ("1Tbit/s", "do not compress")])
def test_the_network_decides(swept, network, answer):
    cluster = Cluster(Network.parse(network), ranks=8, step_time=0.01)
    verdict = to_json(report_of(swept, cluster=cluster, workers=8))["verdict"]
    assert verdict["answer"] == answer
    (sweep,) = report_of(swept, cluster=cluster, workers=8).sweeps
    found = candidates_of(sweep, report_of(swept, cluster=cluster, workers=8).savings_of(sweep))
    assert all(math.isfinite(one.seconds) for one in found)
    if answer == "do not compress":
        assert verdict["recommendation"].startswith("don't compress: float32 is within 2% of the best codec here")
        # The same digits as in the table of what codecs save.
        pays = re.search(r"it pays below (.*)\)$", verdict["recommendation"])[1]
        assert pays in to_markdown(report_of(swept, cluster=cluster, workers=8)).replace(verdict["recommendation"], "")


def test_a_report_without_sweeps_has_no_verdict(tmp_path):
    assert to_json(report_of(write_arrays(tmp_path / "one.zarr", {"w": np.ones(10)})))["verdict"] is None
