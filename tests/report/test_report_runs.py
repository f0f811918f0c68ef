"""What a report says about run logs: of tasks and of programs of one's own, over ranks, seeds and several logs."""

import math

import numpy as np
import pytest
from helpers_report import write_runs
from scipy import stats

from gtrace.errors import TraceError
from gtrace.report import make_report, to_html, to_markdown
from gtrace.report.analysis.runs import analyze_runs, common_loss, running_mean
from gtrace.report.sections.training import difference_text, runs_section, runs_verdict, shadow_table, training_curves
from gtrace.report.statistics import Interval
from gtrace.runlog import read_runlog

STUDY = {"type": "study", "version": 1, "task": "t", "workers": 4}


def step(run, k, loss=1.0, bits=400.0, **more):
    found = {"type": "step", "run": run, "seed": 0, "step": k, "loss": loss, "bits": bits, "bits_float32": 12800.0}
    return found | more


def texts(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_bits_are_summed_per_worker_and_read_off_at_the_tests():
    tested = [
        {"type": "eval", "run": "q", "seed": 0, "step": 1, "loss": 0.5, "accuracy": 0.9},
        {"type": "eval", "run": "q", "seed": 0, "step": 3, "loss": 0.4, "accuracy": None},
    ]
    log = [STUDY, *(step("q", k) for k in range(4)), *tested]
    (run,) = analyze_runs(log).runs
    assert (run.sent.tolist(), run.eval_sent.tolist()) == ([100, 200, 300, 400], [200, 400])
    assert (run.ratio, run.final_accuracy, run.final_eval_loss) == (pytest.approx(12800 / 400), 0.9, 0.4)
    assert not run.finished
    # The end record settles the ratio.
    ended = analyze_runs([*log, {"type": "end", "run": "q", "seed": 0, "steps": 1, "ratio": 7.5, "diverged": True}])
    (run,) = ended.runs
    assert (run.ratio, run.finished, run.diverged) == (7.5, True, True)
    assert any(note.startswith("Diverged: q") for note in ended.notes)


def test_a_run_that_blew_up_has_not_reached_what_it_was_at_before():
    """Its last finite test loss may be the lowest of all."""
    log = [STUDY]
    for run, loss in (("none", 2.0), ("a", 2.1), ("b", 2.2), ("c", None)):
        tests = [{"type": "eval", "run": run, "seed": 0, "step": k, "loss": x} for k, x in ((2, 1.0), (3, loss))]
        steps = [*(step(run, k) for k in range(3)), step(run, 3, None if loss is None else 1.0)]
        log += [*steps, *tests, {"type": "end", "run": run, "seed": 0, "diverged": loss is None}]
    said = runs_verdict(analyze_runs(log))
    assert said[0].endswith("uncompressed (1 seed), best first: a +0.1 and b +0.2; diverged: c (1 of 1 seed).")
    assert said[3].startswith("Trained with c on 4 workers: diverged: no finite loss after step 2; uncompressed 2.00")
    again = [record | {"seed": 1} for record in log[1:] if record["run"] in ("none", "a")]
    again += [record | {"seed": 1, "run": "c"} for record in log[1:] if record["run"] == "b"]
    said = runs_verdict(analyze_runs([*log, *again]))
    assert "diverged: c (1 of 2 seeds)." in said[0]
    assert said[3].startswith("Trained with c on 4 workers, 2 seeds, of which 1 diverged: test loss 2.20; against")
    # Without tests, losses of training are compared, if there are any; without any loss there is nothing to draw.
    log = [
        {**record, "loss": None} if record.get("step") == 3 else record for record in log if record["type"] != "eval"
    ]
    log = [record | {"diverged": True} if record["type"] == "end" else record for record in log]
    assert "nan" not in " ".join(runs_verdict(analyze_runs(log)))
    unseen = analyze_runs([record | {"loss": None} for record in log])
    assert "nan" not in " ".join(runs_verdict(unseen))
    assert not [figure.name for figure in runs_section(unseen).figures if "training-over" in figure.name]


def test_the_uncompressed_run_comes_first_and_is_paired_by_seed(tmp_path):
    log = write_runs(tmp_path / "a.jsonl", runs=("qsgd:bits=2", "none"), seeds=(0, 1), steps=40)
    analysis = analyze_runs(read_runlog(log))
    assert [run.spec for run in analysis.runs] == ["none", "none", "qsgd:bits=2", "qsgd:bits=2"]
    assert analysis.baseline(analysis.runs[3]) is analysis.runs[1]


def test_a_run_that_was_cut_off_is_said_to_be(tmp_path):
    log = write_runs(tmp_path / "a.jsonl", runs=("qsgd:bits=2",), steps=30, end=False)
    analysis = analyze_runs(read_runlog(log))
    assert "Not finished: qsgd:bits=2 (step 29)." in analysis.notes
    assert "until step 29" in runs_verdict(analysis)[0]
    assert runs_verdict(analyze_runs([STUDY])) == ["No training step was logged."]


def test_the_verdict_names_both_accuracies_and_the_saving(tmp_path):
    (sentence,) = runs_verdict(analyze_runs(read_runlog(write_runs(tmp_path / "a.jsonl"))))
    for words in ("test accuracy 95.81%; uncompressed 96.81%", "10.7 times fewer bits", "on 4 workers"):
        assert words in sentence


@pytest.mark.parametrize(
    "record",
    [
        {"type": "step", "seed": 0, "step": 0},
        {"type": "step", "run": "q", "step": "x"},
        {"type": "eval", "run": "q", "step": 0, "accuracy": "high"},
        {"type": "shadow", "run": "q", "step": 0, "cosine": "high"},
    ],
)
def test_damaged_records_are_named(record):
    with pytest.raises(TraceError, match=r"broken\.jsonl: .*damaged"):
        analyze_runs([STUDY, record], "broken.jsonl")


def test_final_loss_is_the_mean_of_the_last_tenth_and_missing_numbers_are_nan():
    log = [STUDY, *(step("q", k, loss=float(k)) for k in range(20)), step("q", 20, loss=None)]
    assert analyze_runs(log).runs[0].final_loss == 18.5
    (run,) = analyze_runs([STUDY, {"type": "step", "run": "q", "step": 0}]).runs
    assert np.isnan([run.loss[0], run.ratio, run.final_loss, run.mean_relative_variance]).all()


# Bits that a policy chose, and simulated time


def records(run, losses, bits=None, seconds=2.0, **end):
    """A run in a log: a step takes ``seconds``."""
    for k, loss in enumerate(losses):
        chosen = {} if bits is None else {"codec_bits": bits[k]}
        yield step(run, k, loss, 100, sim_seconds=seconds, **chosen) | {"bits_float32": 3200}
    yield {"type": "end", "run": run, "seed": 0, "ratio": 32, **end}


def analysis(*runs):
    head = {"type": "study", "workers": 1, "task": "t", "network": "80 Mbit/s, latency 0 us, ps"}
    return analyze_runs([head, *(record for run in runs for record in run)])


FALLING = list(np.linspace(2, 1, 40))


def test_the_common_loss_is_the_highest_end_rounded_up():
    worse = records("minmax:bits=2", [2.0] * 36 + [1.2341] * 4)
    found = analysis(records("none", FALLING), worse, records("x", [3.0], diverged=True))
    assert common_loss(found.runs) == 1.24


def test_seconds_to_a_loss_are_those_of_the_running_mean():
    (run,) = analysis(records("none", FALLING)).runs
    window = 2  # a twentieth of 40 steps
    means = [np.mean(FALLING[max(0, k - window + 1) : k + 1]) for k in range(40)]
    assert running_mean(np.array(FALLING), window) == pytest.approx(means)
    for target in (1.9, 1.5, 1.02):
        assert run.seconds_to_loss(target) == 2.0 * (1 + next(k for k in range(1, 40) if means[k] <= target))
    assert math.isnan(run.seconds_to_loss(0.9))
    # One lucky first batch is no arrival.
    (run,) = analysis(records("none", [0.1] + [2.0] * 38 + [0.1])).runs
    assert math.isnan(run.seconds_to_loss(0.5))


# Programs of one's own: real ranks, one process, several encodings

WORLD, VALUES = 4, 1000


def ranks_log(world=WORLD, exchange="two-shot", down=0.75):
    study = {**STUDY, "task": "train.py", "workers": 1, "world_size": world, "exchange": exchange}
    sent = {"bits_float32": 32.0 * VALUES, "down_bits": down * VALUES, "wire_bytes": 500}
    compared = {"relative_variance": 0.3, "bf16_variance": 6e-6}
    steps = [step("qsgd:bits=3", k, 2.0 - 0.1 * k, 2.0 * VALUES) | sent for k in range(8)]
    steps = [one | compared if down and k % 4 == 0 else one for k, one in enumerate(steps)]
    return [study, *steps, {"type": "end", "run": "qsgd:bits=3", "seed": 0, "steps": 8, "ratio": 16.0}]


def test_ranks_and_their_exchange_are_named_with_both_shots_and_bf16_beside():
    found = analyze_runs(ranks_log())
    ranks = found.runs[0].ranks
    assert (ranks.up_bits, ranks.down_bits, ranks.wire_bytes) == (2.0, 0.75, 4000)
    assert (ranks.compared, ranks.relative_variance) == (2, pytest.approx(0.3))
    assert runs_verdict(found) == [
        "Trained with qsgd:bits=3 on 4 ranks (two-shot): training loss 1.30; 16.0 times fewer bits sent up than "
        "with float32.",
        "It takes 2.00 bits per value from each rank and 0.750 for the average sent on, and the average has relative "
        "variance 0.300; a bf16 all-reduce takes 16 and has 6.0e-6 (2 steps compared).",
    ]
    assert "Between the ranks" in to_markdown(make_report(runs=[ranks_log()]))
    # One shot has no second, and no comparison no bf16.
    found = analyze_runs(ranks_log(exchange="allgather", down=0))
    assert runs_verdict(found)[1] == "It takes 2.00 bits per value from each rank."


def test_a_process_alone_says_that_nothing_left_it():
    alone = analyze_runs(ranks_log(world=1, exchange=None))
    assert (alone.averaged, alone.runs[0].ranks) == ("1 worker", None)
    assert any("no payload left it" in note for note in alone.notes)
    # Logs with and without ranks are not pooled.
    assert make_report(runs=[ranks_log(), ranks_log(world=1, exchange=None)]).pools == ()


# Weight gradients under compressed neural gradients

RUN = "qsgdinf:bits=3"
COSINES = {"a.weight": (0.9, 0.7), "a.bias": (None, None), "b<i>.weight": (0.99, 0.97)}


def test_weight_gradients_in_curves_tables_words_and_pages(tmp_path):
    log = read_runlog(write_runs(tmp_path / "a.jsonl", runs=("none", RUN), steps=20, workers=1))
    shadows = [
        {"type": "shadow", "run": RUN, "seed": 0, "step": 10 * k, "tensor": tensor}
        | {"cosine_alone": None if tensor == "a.bias" else 0.995, "error_alone": 0.1}
        | {"cosine": values[k], "error": 0.5 + k}
        for k in range(2)
        for tensor, values in COSINES.items()
    ]
    neural = [log[0] | {"kind": "neural", "shadow": 10}, *log[1:], *shadows]
    found = analyze_runs(neural)
    none, coded = found.runs
    first, second, _ = coded.shadow
    assert (none.shadow, [curve.tensor for curve in coded.shadow]) == ((), list(COSINES))
    assert (first.steps.tolist(), first.cosine.tolist(), first.error.tolist()) == ([0, 10], [0.9, 0.7], [0.5, 1.5])
    assert np.isnan([second.cosine, second.cosine_alone]).all()
    assert texts(shadow_table(found)) == [
        ["a.weight", "0.8000", "0.7000", "1.00", "0.9950", "0.100"],
        ["a.bias", "–", "–", "1.00", "–", "0.100"],
        ["b<i>.weight", "0.9800", "0.9700", "1.00", "0.9950", "0.100"],
    ]
    sentences = runs_verdict(found)
    assert "times fewer bits for the neural gradients than with float32" in sentences[0]
    assert sentences[1] == (
        "Its weight gradients have a mean cosine of 0.8900 to the exact ones; the worst is a.weight with 0.8000."
    )
    page = to_html(make_report(runs=[neural]))
    assert "Weight gradients under compressed neural gradients" in page
    assert ("b&lt;i&gt;.weight" in page, "b<i>" in page) == (True, False)


# Seeds, and several logs


def test_run_logs_of_one_task_are_put_together(tmp_path):
    chosen = enumerate([(0, 1, 2), (3, 4, 2)])
    report = make_report(runs=[write_runs(tmp_path / f"{k}.jsonl", steps=40, seeds=seeds) for k, seeds in chosen])
    ((_, pool),) = report.pools
    none, codec = pool.groups
    assert (none.spec, none.seeds, codec.seeds) == ("none", (0, 1, 2, 3, 4), (0, 1, 2, 3, 4))
    assert (codec.metric, codec.mean) == ("test accuracy", pytest.approx(np.mean(codec.values)))
    assert codec.deviation == pytest.approx(np.std(codec.values, ddof=1), abs=1e-12)
    assert any("with seed 2" in note for note in pool.notes)
    assert codec.difference.estimate == pytest.approx(np.mean(codec.values) - np.mean(none.values))
    assert "5 seeds: test accuracy" in to_markdown(report)
    # Another task or number of workers stays apart.
    apart = [write_runs(tmp_path / f"w{k}.jsonl", steps=20, workers=2 + k) for k in range(2)]
    assert make_report(runs=apart).pools == ()


def finished(values, spec):
    for seed, value in values.items():
        yield step(spec, 0) | {"seed": seed}
        yield {"type": "eval", "run": spec, "seed": seed, "step": 0, "loss": value, "accuracy": None}
        yield {"type": "end", "run": spec, "seed": seed, "steps": 1}


def test_runs_without_accuracy_are_compared_by_test_loss_and_those_that_did_not_finish_are_no_samples():
    random = np.random.default_rng(0)
    noise = random.normal(0, 0.5, 6)
    exact = {seed: 2.0 + noise[seed] for seed in range(6)}
    worse = {seed: value + 0.1 + random.normal(0, 0.01) for seed, value in exact.items()}
    report = make_report(runs=[[STUDY, *finished(exact, "none"), *finished(worse, "qsgd:bits=2")]])
    _, codec = report.runs[0].groups
    record = [r for r in runs_section(report.runs[0]).numbers().records if r["record"] == "seeds"][1]
    assert record["interval"] == record["mean"] == codec.mean
    assert record["interval_low"] < codec.mean < record["interval_high"]
    paired = stats.ttest_rel(list(worse.values()), list(exact.values()))
    assert (codec.metric, codec.difference.p) == ("test loss", pytest.approx(paired.pvalue))
    assert (codec.difference.low, codec.difference.high) == pytest.approx(tuple(paired.confidence_interval()))
    # Unpaired, half a unit of noise between seeds would hide a tenth.
    assert stats.ttest_ind(list(worse.values()), list(exact.values())).pvalue > 0.3
    log = [STUDY, *finished({0: 1.0, 1: 2.0}, "none")]
    unfinished = [r for r in log if not (r["type"] == "end" and r["seed"] == 1)]
    assert make_report(runs=[unfinished]).runs[0].groups[0].seeds == (0,)


def test_several_codecs_and_seeds_have_one_sentence_first_and_one_curve_name_each(tmp_path):
    runs = ("none", "qsgd:bits=2", "alq:bits=3")
    log = analyze_runs(read_runlog(write_runs(tmp_path / "a.jsonl", runs=runs, seeds=range(5), steps=40)))
    first = runs_verdict(log)[0]
    assert first.startswith("Test accuracy against ")
    assert first.index("qsgd:bits=2 -1.00 points") < first.index("alq:bits=3 -2.00 points")
    section = runs_section(log)
    # The answer is over seeds, not the first runs of the log.
    assert section.brief.title == section.tables[0].title == "Over seeds"
    for panel in training_curves(log, "steps").panels:
        assert len(panel.curves) == 15
        assert {curve.label for curve in panel.curves} == {"uncompressed", "qsgd b2", "alq b3"}
        assert {curve.names[-1] for curve in panel.curves if curve.label == "alq b3"} == {
            f"alq b3, seed {seed}" for seed in range(5)
        }


@pytest.mark.parametrize(
    ("low", "high", "p", "said"),
    [
        (-0.2, -0.02, 0.01, ""),
        (-0.2, 0.02, 0.2, ", within the noise of seeds"),
        (-0.2, -0.02, 0.06, ", but not sure with several codecs compared"),
    ],
)
def test_a_difference_is_not_called_noise_beside_an_interval_without_zero(low, high, p, said):
    text = difference_text("test loss", Interval(-0.1, low, high, count=5), p)
    assert text.partition(")")[2] == said
