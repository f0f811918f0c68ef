import math

import pytest
from helpers_report import write_runs

from gtrace.errors import TraceError
from gtrace.report.analysis.run_logs import analyze_runs
from gtrace.report.sections.training import runs_verdict
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
