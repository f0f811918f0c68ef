import math

import numpy as np
import pytest
from helpers_report import result_of, row, write_runs
from scipy import stats

from gtrace.report.files import all_records, to_json
from gtrace.report.inputs import make_report
from gtrace.report.text import to_markdown

STEPS = tuple(range(0, 300, 10))


def swept(factor, layers=("a", "b"), steps=STEPS, methods=("qsgd", "nuqsgd"), seed=0, trace=None):
    """A sweep whose errors are ``factor`` times those of any other with the same seed, up to 1% of noise."""
    shared, own = np.random.default_rng(0), np.random.default_rng([seed, 1])
    rows = []
    for step in STEPS:
        for layer in ("a", "b", "c"):
            error = math.exp(shared.normal(0, 1.0))
            if step in steps and layer in layers:
                for method in methods:
                    value = factor * error * math.exp(own.normal(0, 0.01))
                    rows.append(row(layer, step, method, 2, squared_error=value, energy=2.0, bits_total=2.0))
    return result_of(rows, provenance={"trace_fingerprint": trace} if trace else None)


def test_the_same_codecs_are_paired_on_what_both_have():
    report = make_report([swept(1.0, seed=1), swept(1.3, seed=2, layers=("b", "c"), steps=STEPS[5:])])
    (pair,) = report.side_by_side
    assert (pair.tensors, pair.steps, pair.same_trace, pair.paired) == (1, 25, None, True)
    assert [c.spec.split(":")[0] for c in pair.shared] == ["qsgd", "nuqsgd"]
    for found in pair.shared:
        assert (found.cells, found.ratio) == (25, pytest.approx(1.3, rel=0.02))
        ratio, low, high = found.by_elements.exp()
        assert low < ratio < high < 1.33
        assert low > 1.27
        assert found.differs


def test_the_same_sweep_twice_does_not_differ():
    (pair,) = make_report([swept(1.0), swept(1.0)]).side_by_side
    assert [c.ratio for c in pair.shared] == pytest.approx([1.0, 1.0])
    assert not any(c.differs for c in pair.shared)


def test_codecs_of_one_sweep_alone_are_listed():
    report = make_report([swept(1.0, methods=("qsgd", "alq")), swept(1.0, methods=("qsgd", "zipml"))])
    (pair,) = report.side_by_side
    assert [s.split(":")[0] for s in (*pair.only_first, *pair.only_second)] == ["alq", "zipml"]
    text = to_markdown(report)
    assert "Only in sweep 1: alq:bits=2" in text
    assert "Only in sweep 2: zipml:bits=2" in text


def test_nothing_in_common_is_said():
    report = make_report([swept(1.0, layers=("a",), trace="x"), swept(2.0, layers=("c",), trace="y")])
    (pair,) = report.side_by_side
    assert (pair.tensors, pair.same_trace, pair.paired) == (0, False, False)
    assert all(not c.by_elements.known and math.isfinite(c.ratio) for c in pair.shared)
    text = to_markdown(report)
    assert "No tensor at any step is in both" in text
    assert "different traces" in text
    (other,) = make_report([swept(1.0), swept(1.0, methods=("alq",))]).side_by_side
    assert not other.shared
    assert "No codec is in both sweeps" in to_markdown(make_report([swept(1.0), swept(1.0, methods=("alq",))]))


def test_every_further_sweep_is_compared_with_the_first():
    report = make_report([swept(1.0), swept(2.0), swept(4.0)])
    assert [pair.second for pair in report.side_by_side] == ["sweep 2", "sweep 3"]
    assert [pair["shared"][0]["ratio"] for pair in to_json(report)["side_by_side"]] == pytest.approx([2.0, 4.0])
    found = [r for r in all_records(report) if r["record"] == "side_by_side"]
    assert {r["first_results"] for r in found} == {"sweep 1"}


def test_run_logs_of_one_task_are_put_together(tmp_path):
    chosen = enumerate([(0, 1, 2), (3, 4, 2)])
    paths = [write_runs(tmp_path / f"{k}.jsonl", steps=40, seeds=seeds) for k, seeds in chosen]
    report = make_report(runs=paths)
    (pool,) = report.pools
    none, codec = pool.groups
    assert (none.spec, none.seeds, codec.seeds) == ("none", (0, 1, 2, 3, 4), (0, 1, 2, 3, 4))
    assert (codec.metric, codec.mean) == ("test accuracy", pytest.approx(np.mean(codec.values)))
    assert codec.deviation == pytest.approx(np.std(codec.values, ddof=1), abs=1e-12)
    assert any("with seed 2" in note for note in pool.notes)
    assert codec.difference.estimate == pytest.approx(np.mean(codec.values) - np.mean(none.values))
    assert codec.difference.known
    text = to_markdown(report)
    assert "5 seeds: test accuracy" in text
    assert "points" in text


def test_another_task_or_number_of_workers_stays_apart(tmp_path):
    paths = [write_runs(tmp_path / f"{k}.jsonl", steps=20, workers=2 + k) for k in range(2)]
    assert make_report(runs=paths).pools == ()


def records(values, spec, workers=4):
    for seed, value in values.items():
        yield {"type": "step", "run": spec, "seed": seed, "step": 0, "loss": 1.0, "bits": 8.0, "bits_float32": 32.0}
        yield {"type": "eval", "run": spec, "seed": seed, "step": 0, "loss": value, "accuracy": None}
        yield {"type": "end", "run": spec, "seed": seed, "steps": 1}


def test_runs_without_accuracy_are_compared_by_test_loss():
    random = np.random.default_rng(0)
    noise = random.normal(0, 0.5, 6)
    exact = {seed: 2.0 + noise[seed] for seed in range(6)}
    worse = {seed: value + 0.1 + random.normal(0, 0.01) for seed, value in exact.items()}
    log = [{"type": "study", "workers": 4}, *records(exact, "none"), *records(worse, "qsgd:bits=2")]
    (analysis,) = make_report(runs=[log]).runs
    none, codec = analysis.groups
    assert codec.metric == "test loss"
    paired = stats.ttest_rel(list(worse.values()), list(exact.values()))
    assert codec.difference.p == pytest.approx(paired.pvalue)
    assert (codec.difference.low, codec.difference.high) == pytest.approx(tuple(paired.confidence_interval()))
    assert not math.isfinite(none.difference.estimate)
    assert "within the noise" not in to_markdown(make_report(runs=[log]))
    # Unpaired, half a unit of noise between seeds would hide a tenth.
    assert stats.ttest_ind(list(worse.values()), list(exact.values())).pvalue > 0.3


def test_runs_that_did_not_finish_are_no_samples():
    log = [{"type": "study"}, *records({0: 1.0, 1: 2.0}, "none")]
    unfinished = [r for r in log if not (r["type"] == "end" and r["seed"] == 1)]
    (analysis,) = make_report(runs=[unfinished]).runs
    assert analysis.groups[0].seeds == (0,)
