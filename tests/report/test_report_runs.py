"""What a report says about run logs, also about runs whose bits a policy chose."""

import math

import numpy as np
import pytest
from helpers_report import write_runs

from gtrace.errors import TraceError
from gtrace.report.analysis.run_logs import analyze_runs
from gtrace.report.analysis.runs import chosen_bits, common_loss, running_mean, seconds_to_loss
from gtrace.report.figures.style import look
from gtrace.report.sections.charts import bits_of_runs
from gtrace.report.sections.training import run_table, runs_verdict
from gtrace.runlog import read_runlog

STUDY = {"type": "study", "version": 1, "task": "t", "workers": 4}


def step(run, k, loss=1.0, bits=400.0, **more):
    found = {"type": "step", "run": run, "seed": 0, "step": k, "loss": loss, "bits": bits, "bits_float32": 12800.0}
    return found | more


def test_bits_are_summed_per_worker_and_read_off_at_the_tests():
    records = [
        STUDY,
        *(step("q", k) for k in range(4)),
        {"type": "eval", "run": "q", "seed": 0, "step": 1, "loss": 0.5, "accuracy": 0.9},
        {"type": "eval", "run": "q", "seed": 0, "step": 3, "loss": 0.4, "accuracy": None},
    ]
    (run,) = analyze_runs(records).runs
    assert run.sent.tolist() == [100, 200, 300, 400]
    assert run.eval_sent.tolist() == [200, 400]
    assert (run.ratio, run.final_accuracy, run.final_eval_loss) == (pytest.approx(12800 / 400), 0.9, 0.4)
    assert not run.finished


def test_the_end_record_settles_the_ratio():
    records = [STUDY, step("q", 0), {"type": "end", "run": "q", "seed": 0, "steps": 1, "ratio": 7.5, "diverged": True}]
    analysis = analyze_runs(records)
    (run,) = analysis.runs
    assert (run.ratio, run.finished, run.diverged) == (7.5, True, True)
    assert any(note.startswith("Diverged: q") for note in analysis.notes)


def test_the_uncompressed_run_comes_first_and_is_paired_by_seed(tmp_path):
    log = write_runs(tmp_path / "a.jsonl", runs=("qsgd:bits=2", "none"), seeds=(0, 1), steps=40)
    analysis = analyze_runs(read_runlog(log))
    assert [run.spec for run in analysis.runs] == ["none", "none", "qsgd:bits=2", "qsgd:bits=2"]
    compressed = analysis.runs[3]
    assert analysis.baseline(compressed) is analysis.runs[1]
    assert analysis.baseline(analysis.runs[0]) is None
    assert any(note.startswith("2 seeds") for note in analysis.notes)


def test_final_loss_is_the_mean_of_the_last_tenth():
    records = [STUDY, *(step("q", k, loss=float(k)) for k in range(20)), step("q", 20, loss=None)]
    assert analyze_runs(records).runs[0].final_loss == 18.5


def test_nothing_logged_yet():
    analysis = analyze_runs([STUDY])
    assert analysis.runs == ()
    assert runs_verdict(analysis) == ["No training step was logged."]


def test_a_run_that_was_cut_off_is_said_to_be(tmp_path):
    log = write_runs(tmp_path / "a.jsonl", runs=("qsgd:bits=2",), steps=30, end=False)
    analysis = analyze_runs(read_runlog(log))
    assert "Not finished: qsgd:bits=2 (step 29)." in analysis.notes
    assert any("no uncompressed run" in note for note in analysis.notes)
    assert "until step 29" in runs_verdict(analysis)[0]


def test_verdict_names_both_accuracies_and_the_saving(tmp_path):
    analysis = analyze_runs(read_runlog(write_runs(tmp_path / "a.jsonl")))
    (sentence,) = runs_verdict(analysis)
    for words in ("test accuracy 95.81%; uncompressed 96.81%", "10.7 times fewer bits", "on 4 workers"):
        assert words in sentence


def test_without_accuracy_the_loss_speaks():
    records = [STUDY, *(step(run, k, loss=0.25) for run in ("none", "q") for k in range(3))]
    (sentence,) = runs_verdict(analyze_runs(records))
    assert "training loss 0.250; uncompressed 0.250" in sentence


@pytest.mark.parametrize(
    "record",
    [
        {"type": "step", "seed": 0, "step": 0},
        {"type": "step", "run": "q", "step": None},
        {"type": "step", "run": "q", "step": "x"},
        {"type": "eval", "run": "q", "step": 0, "accuracy": "high"},
    ],
)
def test_damaged_records_are_named(record):
    with pytest.raises(TraceError, match=r"broken\.jsonl: .*damaged"):
        analyze_runs([STUDY, record], "broken.jsonl")


def test_missing_numbers_are_nan():
    (run,) = analyze_runs([STUDY, {"type": "step", "run": "q", "step": 0}]).runs
    assert math.isnan(run.loss[0])
    assert math.isnan(run.ratio)
    assert math.isnan(run.final_loss)
    assert math.isnan(run.mean_relative_variance)


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
