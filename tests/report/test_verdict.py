"""The rule behind the verdict, case by case, on made candidates; its words, on a small sweep."""

import html
import math
import re

import numpy as np
import pytest
from helpers_report import result_of, rows_of
from helpers_trace import write_arrays

import gtrace
from gtrace.costs import Cluster, Network
from gtrace.report import answer, load_report, to_html, to_json, to_markdown
from gtrace.report.analysis.savings import savings_of_sweep
from gtrace.report.analysis.sweep import analyze
from gtrace.report.inputs import Asked, make_report
from gtrace.report.sections import sections
from gtrace.report.sections.sweep_tables import choice_table
from gtrace.report.verdict import CLOSE, ERROR_LIMIT, Candidate, candidates_of, choose, simplicity, verdict_of
from gtrace.units import parse_bandwidth


def candidate(name, bits, error=0.01, seconds=math.nan, within=True, setting=""):
    return Candidate(name, name, name, bits, error, within, seconds, simplicity(name, setting))


FLOAT32 = candidate("none", 32.0, math.nan, 0.200)
BF16 = candidate("bf16", 16.0, math.nan, 0.190)
QSGDINF = candidate("qsgdinf", 3.6, 0.013, 0.150)
UNSAFE = candidate("qsgd", 2.0, 0.4, within=False)
#: what is chosen from without a network, besides float32 and bf16 -> the answer and its codec
BY_BITS = {
    "one codec that is safe": ([QSGDINF], "compress", "qsgdinf"),
    "fewer bits, unsafe": ([QSGDINF, UNSAFE], "compress", "qsgdinf"),
    "the fewest bits": ([QSGDINF, candidate("nuqsgd", 3.0)], "compress", "nuqsgd"),
    "a tie goes to the simpler": ([QSGDINF, candidate("alq", 3.55)], "compress", "qsgdinf"),
    "no tie beyond two percent": ([QSGDINF, candidate("alq", 3.5)], "compress", "alq"),
    "wrapped is less simple": ([QSGDINF, candidate("ef:qsgdinf", 3.6, 0.001)], "compress", "qsgdinf"),
    "then the smaller error": ([QSGDINF, candidate("qsgd", 3.6, 0.005)], "compress", "qsgd"),
    "none is safe": ([UNSAFE], "nothing is safe", None),
    "no error measured": ([candidate("qsgd", 2.0, math.nan)], "not measured", None),
    "no codec at all": ([], "not measured", None),
}
#: the same with one
BY_TIME = {
    "a slow network": ([QSGDINF], "compress", "qsgdinf"),
    "bf16 is enough": ([candidate("qsgdinf", 3.6, 0.013, 0.187)], "do not compress", "bf16"),
    "bf16 is faster": ([candidate("qsgdinf", 3.6, 0.013, 0.197)], "do not compress", "bf16"),
    "fast but unsafe": ([candidate("qsgdinf", 3.6, 0.4, 0.150, within=False)], "nothing is safe", None),
    "steps as long: fewer bits do not count": (
        [candidate("topk", 0.3, 0.02, 0.1500, setting="ratio 0.01"), QSGDINF], "compress", "qsgdinf",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [*BY_BITS, *BY_TIME])
def test_the_rule(case):
    candidates, answer, codec = (BY_BITS | BY_TIME)[case]
    for several in ([*candidates, FLOAT32, BF16], [BF16, FLOAT32, *candidates[::-1]]):
        found = choose(several, network=case in BY_TIME)
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


@pytest.mark.parametrize(("times", "said"), [(1, "early, middle and late agree"), (3, "late steps lose 3.0 times")])
def test_early_and_late_are_thirds_of_training_and_not_of_what_was_captured(times, said):
    # Ten steps in a row, then one in a hundred: the last third of training is one step of twelve.
    rows = [dict(row) for row in rows_of(("qsgd",), [6, 7, 8], ("w",), (*range(10), 100, 200))]
    for row in rows:
        row["squared_error"] = row["energy"] * 0.01 * (times if row["step"] == 200 else 1)
    assert said in verdict_of(analyze(result_of(rows)), None).confidence


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of one tensor whose gradient noise is not known."""
    values = zip((0, 10, 20), np.random.default_rng(0).standard_normal((3, 5000)), strict=True)
    path = write_arrays(tmp_path_factory.mktemp("verdict") / "one.zarr", {"w": dict(values)})
    results = path.with_suffix(".sweep.db")
    gtrace.run_sweep(path, ["qsgdinf:bits=4", "qsgdinf:bits=2", "alq:bits=4", "bf16"], output=results)
    return results


def test_every_way_out_begins_with_the_same_verdict(swept):
    report = load_report([swept])
    found = to_json(report)
    verdict = found["verdict"]
    configuration = next(c for c in found["sweeps"][0]["configurations"] if c["spec"] == verdict["codec"])
    assert verdict["answer"] == "compress"
    assert (verdict["bits"], verdict["error"]) == (configuration["bits"], configuration["error"])
    assert verdict["error"] <= ERROR_LIMIT
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
    report = load_report([swept], asked=Asked(cluster=cluster, workers=8))
    said, (sweep,) = to_json(report)["verdict"], report.sweeps
    assert said["answer"] == answer
    assert all(math.isfinite(one.seconds) for one in candidates_of(sweep, report.savings_of(sweep)))
    if answer == "do not compress":
        assert said["recommendation"].startswith("don't compress: float32 is within 2% of the best codec here")
        # The same digits as in the table of what codecs save.
        pays = re.search(r"it pays below (.*)\)$", said["recommendation"])[1]
        assert pays in to_markdown(report).replace(said["recommendation"], "")
        # bf16 is measured already.
        assert next(sections(report)).following == ""


def test_bf16_takes_part_whether_it_was_measured_or_not(tmp_path):
    """Of gradients that are noise alone nobody knows what a bias costs, not even bf16's."""
    random, layers = np.random.default_rng(0), {"a": 4000, "b": 900}
    noise = {name: {k: random.standard_normal(size) for k in range(24)} for name, size in layers.items()}
    path = write_arrays(tmp_path / "noise.zarr", noise)
    every = [f"qsgdinf:bits={bits}" for bits in range(2, 9)]
    sweeps = [analyze(gtrace.run_sweep(path, [*every, *more])) for more in ((), ("bf16",))]
    assert sweeps[1].safety.judged["bf16"].verdict == "cannot tell"
    answers = []
    for speed in (1e9, 4e9, 6e9, 8e9, 1e12):
        cluster = Cluster(Network(speed, 0.0), ranks=8, step_time=0.001)
        found = [verdict_of(one, savings_of_sweep(one, cluster)) for one in sweeps]
        assert found[0].recommendation == found[1].recommendation
        answers.append(found[0].recommendation.partition(" is within")[0])
    assert "don't compress: bf16" in answers


def test_what_needs_no_codec_is_the_same_measured_or_not(tmp_path):
    """Also by another rounding."""
    rng = np.random.default_rng(0)
    with gtrace.create_trace(tmp_path / "one.zarr") as writer:
        for step in range(3):
            writer.append(step, "w", rng.standard_normal(5000).astype(np.float32))
            writer.commit(step)
    cluster = Cluster(Network.parse("1Gbit/s"), ranks=8, step_time=0.01)
    found = {}
    for plain in ("", "bf16", "bf16:rounding=stochastic", "fp16", "none"):
        result = gtrace.run_sweep(tmp_path / "one.zarr", ["qsgdinf:bits=2", *filter(None, [plain])])
        sweep = analyze(result)
        savings = savings_of_sweep(sweep, cluster)
        for one in candidates_of(sweep, savings):
            found.setdefault(one.method, set()).add((one.bits, one.within, one.seconds))
        table = choice_table(sweep, savings)
        rows = {row[0].text: row[-1].text for row in table.rows}
        assert rows["float32"] == "exact"
        assert rows["bf16"] == ("cannot tell" if "bf16" in plain else "not measured")
    assert {method: len(rows) for method, rows in found.items()} == dict.fromkeys(found, 1)
    assert {rows.pop()[2] for method, rows in found.items() if method != "qsgdinf"} == {
        savings.plain[0].step.seconds, savings.plain[1].step.seconds
    }  # fmt: skip


def test_steps_without_any_error_are_no_divisor():
    rows = [dict(row) for row in rows_of(("qsgd",), [6], ("w",), range(0, 60, 5))]
    for row in rows:
        row["squared_error"] = 0.01 * row["energy"] * (20 <= row["step"] < 40)
    assert "12 steps, 1 tensor (middle steps lose most)" in verdict_of(analyze(result_of(rows)), None).confidence


def test_a_codec_pays_on_slower_networks_than_the_one_that_it_is_not_worth_it_on(swept):
    (sweep,) = load_report([swept]).sweeps
    kinds = set()
    for speed in np.geomspace(1e7, 1e12, 60).tolist():
        cluster = Cluster(Network(speed, 0.0), ranks=8, step_time=0.01)
        said = verdict_of(sweep, savings_of_sweep(sweep, cluster)).recommendation
        pays = re.search(r"it pays below (.*)\)$", said)
        kinds.add("pays" if pays else "gains little" if "within 2%" in said else "compress")
        assert pays is None or parse_bandwidth(pays[1], "") < 1.01 * speed, said
    assert kinds == {"pays", "gains little", "compress"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "none: every gradient of this sweep is zero"),
        (np.nan, "none: this sweep has no measured error of any codec"),
    ],
)
def test_gradients_without_energy_are_named_and_not_swept_again(tmp_path, value, said):
    path = write_arrays(tmp_path / "one.zarr", {"w": {step: np.full(100, value) for step in range(4)}})
    report = make_report([gtrace.run_sweep(path, ["qsgdinf:bits=4"])])
    section = next(sections(report))
    assert section.verdict.recommendation == said
    assert section.following == ""
    assert "not measured:" not in section.verdict.confidence
    assert [table.title for table in section.tables] == ["Configurations"]


def test_a_sweep_without_codecs_is_swept_with_some(tmp_path):
    values = np.random.default_rng(0).standard_normal((2, 100))
    path = write_arrays(tmp_path / "one.zarr", {"w": dict(enumerate(values))})
    section = next(sections(make_report([gtrace.run_sweep(path, ["bf16"])])))
    assert section.following == f"gtrace sweep {path}"
