"""Runs whose bits a policy chose: what the report says about bits and about the time to a loss."""

import math

import numpy as np
import pytest

from gtrace.report import analyze_runs
from gtrace.report.analysis.runs import chosen_bits, common_loss, running_mean, seconds_to_loss
from gtrace.report.figures.style import look
from gtrace.report.sections.charts import bits_of_runs
from gtrace.report.sections.training import run_table


def records(run, losses, bits=None, seconds=2.0, **end):
    """A run in a log: a step takes ``seconds``."""
    for step, loss in enumerate(losses):
        yield {
            "type": "step", "run": run, "seed": 0, "step": step, "loss": loss, "bits": 100, "bits_float32": 3200,
            "sim_seconds": seconds, **({} if bits is None else {"codec_bits": bits[step]}),
        }  # fmt: skip
    yield {"type": "end", "run": run, "seed": 0, "ratio": 32, **end}


def analysis(*runs, network="80 Mbit/s, latency 0 us, ps"):
    head = {"type": "study", "workers": 1, "task": "t", "network": network}
    return analyze_runs([head, *(record for run in runs for record in run)])


FALLING = list(np.linspace(2, 1, 40))


def test_the_common_loss_is_the_highest_end_rounded_up():
    found = analysis(
        records("none", FALLING),
        records("minmax:bits=2", [2.0] * 36 + [1.2341] * 4),
        records("x", [3.0], diverged=True),
    )
    assert common_loss(found.runs) == 1.24
    assert math.isnan(common_loss(found.runs[:0]))
    assert common_loss(analysis(records("none", [1234.5])).runs) == 1240


def test_seconds_to_a_loss_are_those_of_the_running_mean():
    (run,) = analysis(records("none", FALLING)).runs
    window = 2  # a twentieth of 40 steps
    means = [np.mean(FALLING[max(0, k - window + 1) : k + 1]) for k in range(40)]
    assert running_mean(np.array(FALLING), window) == pytest.approx(means)
    for target in (1.9, 1.5, 1.02):
        first = next(k for k in range(1, 40) if means[k] <= target)
        assert seconds_to_loss(run, target) == 2.0 * (first + 1)
    assert math.isnan(seconds_to_loss(run, 0.9))


def test_one_lucky_first_batch_is_no_arrival():
    (run,) = analysis(records("none", [0.1] + [2.0] * 38 + [0.1])).runs
    assert math.isnan(seconds_to_loss(run, 0.5))


@pytest.mark.parametrize(
    ("bits", "said"),
    [(None, ""), ([2] * 40, "2"), ([2] * 15 + [3] * 25, "2, 3 from 15"), ([2, 8] * 20, "2 to 8, mean 5.00, last 8")],
)
def test_chosen_bits_in_words(bits, said):
    (run,) = analysis(records("minmax@adaptive", FALLING, bits)).runs
    assert chosen_bits(run) == said


def test_the_table_shows_bits_and_time_where_there_are_any():
    found = analysis(records("none", FALLING, seconds=9.0), records("minmax@mqgrad", FALLING, [2] * 20 + [3] * 20))
    table = run_table(found)
    headings = [column.heading for column in table.columns]
    assert headings[-3:] == ["simulated time", "time to loss 1.04", "bits chosen"]
    assert [[cell.text for cell in row[-3:]] for row in table.rows] == [
        ["360 s", "351 s", ""], ["80.0 s", "78.0 s", "2, 3 from 20"]
    ]  # fmt: skip
    assert any("1.04" in note for note in table.notes)
    plain = run_table(analysis(records("none", FALLING, seconds=None), records("minmax:bits=3", FALLING, seconds=None)))
    assert "bits chosen" not in [column.heading for column in plain.columns]
    assert not any("time" in column.heading for column in plain.columns)


def test_the_network_says_whether_computing_was_measured():
    for network, said in (("1 Gbit/s, ps", True), ("1 Gbit/s, ps, 5 s of computing a step", False)):
        notes = run_table(analysis(records("none", FALLING), network=network)).notes
        assert any("as measured" in note for note in notes) == said


def test_policies_of_one_codec_look_different_and_keep_its_marker():
    looks = [look(name) for name in ("minmax", "minmax@adaptive", "minmax@mqgrad", "minmax@schedule")]
    assert len({one.line for one in looks}) == 4
    assert {one.marker for one in looks} == {looks[0].marker}
    assert look("minmax@mqgrad", 1) != look("minmax@mqgrad")
    assert look("ef:minmax@mqgrad").line == look("qsgd@mqgrad").line


def test_curves_of_policies_are_named():
    found = analysis(records("none", FALLING), records("ef:minmax@mqgrad:seed=1", FALLING, [2] * 40))
    assert "ef:minmax@mqgrad" in {curve.label for curve in bits_of_runs(found).panels[0].curves}
