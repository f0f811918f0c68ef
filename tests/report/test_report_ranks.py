"""Run logs of programs of one's own: real ranks, one process, several encodings; and studies over a network."""

import csv
import io
import math

import pytest
from helpers_report import result_of, rows_of, write_runs

from gtrace.report import draw, figure_names, make_report, to_csv, to_html, to_json, to_latex, to_markdown
from gtrace.report.analysis.run_logs import analyze_runs
from gtrace.report.analysis.side_by_side import compare_sweeps
from gtrace.report.sections.training import runs_verdict
from gtrace.runlog import read_runlog

WORLD, VALUES = 4, 1000
STUDY = {"type": "study", "version": 1, "task": "train.py", "workers": 1, "world_size": WORLD, "exchange": "two-shot"}


def step(k, **more):
    found = {"type": "step", "run": "qsgd:bits=3", "seed": 0, "step": k, "loss": 2.0 - 0.1 * k, "bits": 2.0 * VALUES}
    sent = {"bits_float32": 32.0 * VALUES, "down_bits": 0.75 * VALUES / WORLD, "wire_bytes": 500}
    return found | sent | more


def ranks_log(**study):
    compared = {"relative_variance": 0.3, "bf16_variance": 6e-6}
    end = {"type": "end", "run": "qsgd:bits=3", "seed": 0, "steps": 8, "ratio": 16.0}
    return [STUDY | study, *(step(k, **(compared if k % 4 == 0 else {})) for k in range(8)), end]


def test_ranks_and_their_exchange_are_named_with_both_shots_and_bf16_beside():
    analysis = analyze_runs(ranks_log())
    (run,) = analysis.runs
    assert (run.ranks.up_bits, run.ranks.down_bits, run.ranks.wire_bytes) == (2.0, 0.75, 4000)
    assert (run.ranks.compared, run.ranks.relative_variance) == (2, pytest.approx(0.3))
    first, second = runs_verdict(analysis)
    assert first == (
        "Trained with qsgd:bits=3 on 4 ranks (two-shot): training loss 1.30; 16.0 times fewer bits sent up than "
        "with float32."
    )
    assert second == (
        "It takes 2.00 bits per value from each rank and 0.750 for the average sent on, and the average has relative "
        "variance 0.300; a bf16 all-reduce takes 16 and has 6.0e-6 (2 steps compared)."
    )
    report = make_report(runs=[ranks_log()])
    for text in (to_html(report), to_markdown(report), to_latex(report)):
        assert "Between the ranks" in text
        assert "both by one rank" in text
    assert to_json(report)["runs"][0]["averaged"] == "4 ranks (two-shot)"


def test_one_shot_has_no_second_and_no_comparison_no_bf16():
    records = [r if r["type"] != "step" else step(r["step"], down_bits=0) for r in ranks_log(exchange="allgather")]
    analysis = analyze_runs(records)
    assert runs_verdict(analysis)[1] == "It takes 2.00 bits per value from each rank."
    assert math.isnan(analysis.runs[0].ranks.bf16_variance)


def test_a_process_alone_says_that_nothing_left_it_and_several_encodings_that_they_are_optimistic():
    alone = analyze_runs(ranks_log(world_size=1, exchange=None))
    assert alone.averaged == "1 worker"
    assert alone.runs[0].ranks is None
    assert any("no payload left it" in note for note in alone.notes)
    several = analyze_runs(ranks_log(world_size=1, exchange=None, workers=4))
    assert several.averaged == "4 encodings of the same gradient"
    assert any("optimistic" in note for note in several.notes)


def test_logs_with_and_without_ranks_fit_in_one_table_and_are_not_pooled():
    report = make_report(runs=[ranks_log(), ranks_log(world_size=1, exchange=None)])
    rows = list(csv.DictReader(io.StringIO(to_csv(report))))
    assert [row["rank_up_bits"] for row in rows] == ["2.0", ""]
    assert report.pools == ()


def test_a_loss_without_tests_has_the_figure_to_itself():
    assert len(draw(make_report(runs=[ranks_log()]), "training-over-steps").axes) == 1


def test_each_seed_is_named_and_a_network_gives_times(tmp_path):
    records = read_runlog(write_runs(tmp_path / "a.jsonl", runs=("none", "qsgd:bits=3"), steps=20, seeds=(0, 1, 2)))
    records[0]["network"] = "1 Gbit/s, latency 0 us, ring"
    for record in records:
        if record["type"] == "step":
            record["sim_seconds"] = 0.5
    report = make_report(runs=[records])
    assert "training-over-time" in figure_names(report)
    (legend,) = draw(report, "training-over-time").legends
    expected = {f"{name}, seed {seed}" for name in ("uncompressed", "qsgd b3") for seed in (0, 1, 2)}
    assert {text.get_text() for text in legend.get_texts()} == expected
    text = to_markdown(report)
    for words in ("simulated time", "links of 1 Gbit/s, latency 0 us, ring", "10.0 s"):
        assert words in text


REDUCED = {"stages": ["reduced"], "trace_attrs": {"world_size": 4}}


@pytest.mark.parametrize("provenance", [REDUCED, {"trace_attrs": {"world_size": 4, "capture": {"stage": "reduced"}}}])
def test_averages_over_ranks_are_said_to_be_so_wherever_a_ratio_is(provenance):
    report = make_report([result_of(rows_of(), provenance=provenance)])
    text = to_markdown(report)
    assert "Measured on averages over 4 ranks" in text
    assert text.count("of the average of 4 ranks' gradients") == 2
    assert "one worker" not in text
    (sweep,) = to_json(report)["sweeps"]
    assert (sweep["workers"], sweep["averaged_over"]) == (4, 4)


@pytest.mark.parametrize("provenance", [{}, {"trace_attrs": {"world_size": 4, "capture": {"stage": "local"}}}])
def test_gradients_of_each_rank_are_those_of_one_worker(provenance):
    text = to_markdown(make_report([result_of(rows_of(), provenance=provenance)]))
    assert "averages over" not in text
    assert text.count("of one worker's gradient") == 2


def test_a_ratio_of_sweeps_says_whose_gradients_stand_above_and_below():
    one, two = (make_report([result_of(rows_of(), provenance=p)]).sweeps[0] for p in ({}, REDUCED))
    assert compare_sweeps(one, one).whose == "one worker's gradient"
    assert compare_sweeps(one, two).whose == "the average of 4 ranks' gradients over one worker's gradient"
