"""What codecs save, from made-up sweeps and run logs: numbers by hand, words, tables, the figure, and files."""

import dataclasses
import json
import math

import numpy as np
import pytest

from gtrace.costs import Cluster, Network, sent, time_step
from gtrace.report import analyze, draw, figure_names, make_report, to_json
from gtrace.report.analysis.run_logs import analyze_runs
from gtrace.report.analysis.savings import savings_of_runs, savings_of_sweep
from gtrace.report.files import csv_tables, write_report
from gtrace.report.inputs import Asked
from gtrace.report.sections import sections
from gtrace.report.sections.savings import savings_records, savings_table, savings_verdict

from ..helpers_report import result_of, row, rows_of, write_runs, write_sweep

CLUSTER = Cluster(Network.parse("1Gbit/s", "20us"), ranks=8, step_time=0.05)
#: in the order of the model, which is not that of the names
SIZES = {"z.weight": 3_000_000, "b.weight": 500_000, "a.weight": 2_000_000}


def made_up(tensors=SIZES, bits=(2, 4, 8), order=True, **provenance):
    """A sweep in which a tensor's measured bits are the nominal ones and its place in the names."""
    rows = [
        row(name, 0, "qsgd", b, draw, n=size, energy=1.0, squared_error=4.0**-b, bits_total=b + place / 4)
        for place, (name, size) in enumerate(sorted(tensors.items()))
        for b in bits
        for draw in (-1, 0)
    ]
    told = {"tensors": dict(SIZES)} if order else {}
    return analyze(result_of(rows, provenance={"kind": "weight", **told, **provenance}))


def measured_bits(b, names=SIZES):
    return np.array([b + sorted(names).index(name) / 4 for name in SIZES])


def test_bits_of_each_tensor_go_into_buckets_in_the_traces_order():
    found = savings_of_sweep(made_up(), CLUSTER)
    sizes = list(SIZES.values())
    assert (found.elements, found.buckets) == (sum(sizes), 2)
    pairs = [(f"qsgd:bits={b}", exchange) for b in (2, 4, 8) for exchange in ("allgather", "two-shot")]
    assert [(one.spec.split(",")[0], one.exchange) for one in found.rows] == pairs
    for one, b in zip(found.rows, (2, 2, 4, 4, 8, 8), strict=True):
        expected = time_step(sizes, measured_bits(b), CLUSTER, one.exchange)
        assert one.step == expected
        assert one.sent_bytes == pytest.approx(sent(one.exchange, 8, np.dot(sizes, measured_bits(b)) / 8))
        assert one.over_bfloat16 == expected.speed_up(time_step(sizes, 16, CLUSTER, "allreduce"))
        assert one.relative_variance == pytest.approx(4.0**-b)
    assert [one.sent_bytes for one in found.plain] == [2 * 7 / 8 * bytes_each * sum(sizes) for bytes_each in (4, 2)]
    # The order matters: with the names' own the buckets are others.
    assert savings_of_sweep(made_up(order=False), CLUSTER).rows[0].step != found.rows[0].step


def test_what_a_sweep_does_not_say_is_said():
    found = savings_of_sweep(made_up(order=False), CLUSTER)
    assert any("in which order" in note for note in found.notes)
    part = {name: SIZES[name] for name in ("b.weight", "a.weight")}
    found = savings_of_sweep(made_up(part), CLUSTER)
    assert found.elements == sum(SIZES.values())
    assert any("1 of 3 tensors were not swept" in note for note in found.notes)
    mean = np.dot([500_000, 2_000_000], [2.25, 2]) / 2_500_000
    assert found.rows[0].step == time_step([*SIZES.values()], [mean, 2.25, 2], CLUSTER, "allgather")


@pytest.mark.parametrize("told", [{"w": -1}, {"w": "many"}, ["w"], {"w": True}, {"w": 1 << 60}, {"w": 1.5}, {}, None])
def test_sizes_from_a_damaged_file_are_left_aside(told):
    sweep = made_up()
    sweep.provenance["tensors"] = told
    found = savings_of_sweep(sweep, CLUSTER)
    assert found.elements == sum(SIZES.values())
    assert "order" in found.notes[0]


def test_a_codec_of_the_whole_model_counts_with_its_mean():
    rows = [row("*", 0, "qsgd", 3, draw, n=5_500_000, squared_error=0.1, bits_total=2.5) for draw in (-1, 0)]
    found = savings_of_sweep(analyze(result_of(rows, provenance={"kind": "weight", "tensors": SIZES})), CLUSTER)
    assert found.rows[0].step == time_step([*SIZES.values()], 2.5, CLUSTER, "allgather")
    assert not found.notes


def test_nothing_of_neural_gradients_travels():
    assert savings_of_sweep(made_up(kind="neural"), CLUSTER) is None
    assert savings_of_sweep(analyze(result_of([])), CLUSTER) is None
    assert "none" not in {one.spec for one in savings_of_sweep(made_up(), CLUSTER).rows}


def run_log(spec="qsgdinf:bits=3", **study):
    records = [{"type": "study", "workers": 1, "tensors": dict(SIZES), "runs": [spec], **study}]
    for step in range(3):
        common = {"type": "step", "run": spec, "seed": 0, "step": step, "loss": 1.0}
        records.append({**common, "bits": 4e6, "bits_float32": 32e6, "codec_seconds": 5.0 if step == 0 else 0.01})
    return analyze_runs(records)


def test_the_bits_of_a_run_are_spread_over_its_tensors():
    found = savings_of_runs(run_log(), CLUSTER)
    assert [one.bits for one in found.rows] == [4.0, 4.0]
    assert found.rows[1].step == time_step([*SIZES.values()], 4.0, CLUSTER, "two-shot")
    assert [one.coding for one in found.rows] == ["", ""]
    assert {one.method for one in savings_of_runs(run_log("ef:topk:ratio=0.1"), CLUSTER).rows} == {"ef:topk"}
    for log in (run_log("none"), run_log(kind="neural"), run_log(kind="linear"), run_log(tensors=None)):
        assert savings_of_runs(log, CLUSTER) is None


def test_coding_that_was_measured_counts_where_it_was():
    log = run_log(world_size=8, exchange="two-shot")
    gathered, shot = savings_of_runs(log, CLUSTER).rows
    # The first step, which compiles, is left out.
    assert (shot.coding, shot.step.codec) == ("measured", pytest.approx(0.01))
    assert (gathered.coding, gathered.step.codec) == ("", 0.0)
    assert "codes for 10.0 ms" in savings_verdict(savings_of_runs(log, CLUSTER))[1]
    fewer = dataclasses.replace(CLUSTER, ranks=4)
    assert {one.coding for one in savings_of_runs(log, fewer).rows} == {""}


def test_a_given_rate_of_coding_counts_for_all():
    cluster = dataclasses.replace(CLUSTER, codec_rate=1e9)
    found = savings_of_sweep(made_up(), cluster)
    gathered, shot = found.rows[:2]
    assert gathered.step.codec == pytest.approx(9 * 5.5e6 / 1e9)
    assert shot.step.codec == pytest.approx((3 + 1 / 8) * 5.5e6 / 1e9)
    assert "coding" in [column.heading for column in savings_table(found).columns]
    assert "at 1 Gelem/s, as given" in savings_table(found).notes[2]


def test_the_verdict_says_what_saves_nothing():
    slow = savings_of_sweep(made_up(), CLUSTER)
    said = savings_verdict(slow)
    assert said[0].startswith("On 8 ranks at 1 Gbit/s and 20.0 us a message, communication adds ")
    assert "qsgd:bits=2,bucket_size=8192" in said[1]
    assert said[2].endswith("Melem/s to match bf16.")
    # 4 and 8 bits to 8 ranks are no less than bf16's ring sends.
    assert said[3] == "With all-gather, 2 of 3 codecs save less than 1% over bf16 even if encoding is free."
    fast = dataclasses.replace(CLUSTER, network=Network(1e14))
    assert "there is nothing to gain here" in savings_verdict(savings_of_sweep(made_up(), fast))[1]


def test_the_table_has_a_line_for_what_needs_no_codec():
    found = savings_of_sweep(made_up(), CLUSTER)
    table = savings_table(found)
    assert [line[0].text for line in table.rows[:2]] == ["none", "bf16"]
    assert all(len(line) == len(table.columns) for line in table.rows)
    headings = [column.heading for column in table.columns]
    gathered = dict(zip(headings, table.rows[6], strict=True))
    # 8 bits by all-gather: slower than bf16 whatever the codec takes.
    assert gathered["over bf16"].mark == "quiet"
    assert gathered["break-even coding"].mark == "missing"
    assert gathered["pays below"].text == "nowhere"
    assert "first 1" in table.notes[0]
    assert "two thirds" in table.notes[0]
    one = dataclasses.replace(CLUSTER, bucket_mb=4.0, backward_time=0.03)
    assert "buckets (of 4 MiB)" in savings_table(savings_of_sweep(made_up(), one)).notes[0]


def test_a_terminal_gets_the_pareto_optimal_codecs_of_many():
    found = savings_of_sweep(made_up(), CLUSTER)
    rows = tuple(dataclasses.replace(one, pareto=one.spec.startswith("qsgd:bits=2")) for one in found.rows)
    table = savings_table(dataclasses.replace(found, rows=rows), most=4)
    assert len(table.rows) == 4
    assert "2 codecs with more bits or error" in table.notes[3]


def test_records_hold_every_number():
    found = savings_of_sweep(made_up(), CLUSTER)
    records = savings_records(found)
    assert len(records) == 2 + len(found.rows)
    last = records[-1]
    step = found.rows[-1].step
    assert (last["step_seconds"], last["exposed_seconds"]) == (step.seconds, step.exposed)
    assert last["step_seconds_no_overlap"] >= last["step_seconds"] >= last["step_seconds_ideal_overlap"]
    assert math.isnan(last["codec_seconds"])
    assert last["over_float32"] == records[0]["step_seconds"] / last["step_seconds"]


def test_every_way_out_has_the_savings(tmp_path):
    rows = rows_of(methods=("qsgd",), bits=(2, 3), layers=("a", "b"), steps=(0,))
    sweep = write_sweep(tmp_path / "a.sweep.db", rows, provenance={"kind": "weight", "tensors": SIZES})
    log = write_runs(tmp_path / "t.jsonl", steps=30)
    report = make_report([sweep], [log], asked=Asked(cluster=CLUSTER))
    headings = [f"Savings between 8 ranks: {name}" for name in ("a.sweep.db", "t.jsonl")]
    assert [s.heading for s in sections(report)][-2:] == headings
    assert {"a-savings", "t-savings"} <= set(figure_names(report))
    axes = draw(report, "a-savings").axes
    assert [a.get_title(loc="left") for a in axes] == ["by all-gather", "in two shots"]
    marks = {text.get_text() for text in axes[0].texts}
    assert marks == {"computing alone", "bf16", "float32"}
    told = to_json(report)["savings"]
    assert [one["name"] for one in told] == ["a.sweep.db", "t.jsonl"]
    assert told[0]["cluster"]["ranks"] == 8
    page = write_report(report, tmp_path / "page.html")[0].read_text(encoding="utf-8")
    for name in ("a.sweep.db", "t.jsonl"):
        assert f"Savings between 8 ranks: <code>{name}</code>" in page
    assert '<div class="verdict"></div>' not in page
    lines = write_report(report, tmp_path / "all.jsonl")[0].read_text(encoding="utf-8").splitlines()
    assert "saving" in {json.loads(line)["record"] for line in lines}
    assert len(csv_tables(report)["savings"]) == sum(2 + len(savings.rows) for savings in report.savings)


def test_a_report_without_machines_or_without_codecs_has_no_savings(tmp_path):
    sweep = write_sweep(tmp_path / "a.sweep.db", rows_of(methods=("qsgd",), bits=(2,), steps=(0,)))
    report = make_report([sweep])
    assert report.savings == ()
    assert not any("Savings" in s.heading for s in sections(report))
    assert make_report([result_of([])], asked=Asked(cluster=CLUSTER)).savings == ()
