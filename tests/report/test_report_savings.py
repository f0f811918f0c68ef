"""What codecs save, from made-up sweeps and run logs: numbers by hand, words, tables, the figure, and files."""

import dataclasses

import numpy as np
import pytest
from helpers_report import result_of, row

from gtrace.costs import Cluster, Network, sent, time_step
from gtrace.report import analyze
from gtrace.report.analysis.runs import analyze_runs
from gtrace.report.analysis.savings import savings_of_runs, savings_of_sweep
from gtrace.report.sections.savings import savings_records, savings_table, savings_verdict

CLUSTER = Cluster(Network.parse("1Gbit/s", "20us"), ranks=8, step_time=0.05)
#: in the order of the model, which is not that of the names
SIZES = {"z.weight": 3_000_000, "b.weight": 500_000, "a.weight": 2_000_000}
ELEMENTS = list(SIZES.values())


def made_up(names=SIZES, order=True, **provenance):
    """A sweep in which a tensor's measured bits are the nominal ones and a quarter of its place in the names."""
    rows = [
        row(name, 0, "qsgd", b, draw, n=SIZES[name], squared_error=4.0**-b, bits_total=b + place / 4)
        for place, name in enumerate(sorted(names))
        for b in (2, 4, 8)
        for draw in (-1, 0)
    ]
    tensors = {"tensors": dict(SIZES)} if order else {}
    return analyze(result_of(rows, provenance={"kind": "weight", **tensors, **provenance}))


@pytest.fixture(scope="module")
def found():
    return savings_of_sweep(made_up(), CLUSTER)


def test_bits_of_each_tensor_go_into_buckets_in_the_traces_order(found):
    assert (found.elements, found.buckets) == (sum(ELEMENTS), 2)
    pairs = [(b, exchange) for b in (2, 4, 8) for exchange in ("allgather", "two-shot")]
    for one, (b, exchange) in zip(found.rows, pairs, strict=True):
        bits = b + np.array([0.5, 0.25, 0.0])
        expected = time_step(ELEMENTS, bits, CLUSTER, exchange)
        assert (one.spec.split(",")[0], one.exchange, one.step) == (f"qsgd:bits={b}", exchange, expected)
        assert one.sent_bytes == pytest.approx(sent(exchange, 8, np.dot(ELEMENTS, bits) / 8))
        assert one.over_bfloat16 == expected.speed_up(time_step(ELEMENTS, 16, CLUSTER, "allreduce"))
        assert one.relative_variance == pytest.approx(4.0**-b)
    assert [one.sent_bytes for one in found.plain] == [2 * 7 / 8 * each * sum(ELEMENTS) for each in (4, 2)]
    # The order matters: with the names' own the buckets are others, and that is said.
    other = savings_of_sweep(made_up(order=False), CLUSTER)
    assert other.rows[0].step != found.rows[0].step
    assert any("in which order" in note for note in other.notes)


def test_what_was_not_swept_counts_with_a_codecs_mean():
    found = savings_of_sweep(made_up(("b.weight", "a.weight")), CLUSTER)
    assert found.elements == sum(ELEMENTS)
    assert any("1 of 3 tensors were not swept" in note for note in found.notes)
    mean = np.dot([500_000, 2_000_000], [2.25, 2]) / 2_500_000
    assert found.rows[0].step == time_step(ELEMENTS, [mean, 2.25, 2], CLUSTER, "allgather")
    # A codec of the whole model has nothing but its mean.
    rows = [row("*", 0, "qsgd", 3, draw, n=5_500_000, squared_error=0.1, bits_total=2.5) for draw in (-1, 0)]
    found = savings_of_sweep(analyze(result_of(rows, provenance={"kind": "weight", "tensors": SIZES})), CLUSTER)
    assert found.rows[0].step == time_step(ELEMENTS, 2.5, CLUSTER, "allgather")
    assert not found.notes


@pytest.mark.parametrize("sizes", [{"w": -1}, {"w": "many"}, ["w"], {"w": True}, {"w": 1 << 60}, {"w": 1.5}, {}, None])
def test_sizes_from_a_damaged_file_are_left_aside(sizes):
    found = savings_of_sweep(made_up(tensors=sizes), CLUSTER)
    assert found.elements == sum(ELEMENTS)
    assert "order" in found.notes[0]


def run_log(spec="qsgdinf:bits=3", **study):
    records = [{"type": "study", "workers": 1, "tensors": dict(SIZES), "runs": [spec], **study}]
    for step in range(3):
        common = {"type": "step", "run": spec, "seed": 0, "step": step, "loss": 1.0}
        records.append({**common, "bits": 4e6, "bits_float32": 32e6, "codec_seconds": 5.0 if step == 0 else 0.01})
    return analyze_runs(records)


def test_the_bits_of_a_run_are_spread_over_its_tensors_and_nothing_of_neural_gradients_travels():
    found = savings_of_runs(run_log(), CLUSTER)
    assert [one.bits for one in found.rows] == [4.0, 4.0]
    assert found.rows[1].step == time_step(ELEMENTS, 4.0, CLUSTER, "two-shot")
    assert [one.coding for one in found.rows] == ["", ""]
    assert {one.method for one in savings_of_runs(run_log("ef:topk:ratio=0.1"), CLUSTER).rows} == {"ef:topk"}
    for log in (run_log("none"), run_log(kind="neural"), run_log(kind="linear"), run_log(tensors=None)):
        assert savings_of_runs(log, CLUSTER) is None
    for sweep in (made_up(kind="neural"), analyze(result_of([]))):
        assert savings_of_sweep(sweep, CLUSTER) is None


def test_coding_that_was_measured_counts_where_it_was_and_a_given_rate_for_all():
    log = run_log(world_size=8, exchange="two-shot")
    gathered, shot = savings_of_runs(log, CLUSTER).rows
    # The first step, which compiles, is left out.
    assert (shot.coding, shot.step.codec) == ("measured", pytest.approx(0.01))
    assert (gathered.coding, gathered.step.codec) == ("", 0.0)
    fewer = dataclasses.replace(CLUSTER, ranks=4)
    assert {one.coding for one in savings_of_runs(log, fewer).rows} == {""}
    found = savings_of_sweep(made_up(), dataclasses.replace(CLUSTER, codec_rate=1e9))
    gathered, shot = found.rows[:2]
    assert gathered.step.codec == pytest.approx(9 * 5.5e6 / 1e9)
    assert shot.step.codec == pytest.approx((3 + 1 / 8) * 5.5e6 / 1e9)


def test_the_table_has_a_line_for_what_needs_no_codec_and_records_hold_every_number(found):
    table = savings_table(found)
    assert [line[0].text for line in table.rows[:2]] == ["none", "bf16"]
    gathered = dict(zip([column.heading for column in table.columns], table.rows[6], strict=True))
    # 8 bits by all-gather: slower than bf16 whatever the codec takes.
    assert (gathered["break-even coding"].mark, gathered["pays below"].text) == ("missing", "nowhere")
    # 4 and 8 bits to 8 ranks are no less than bf16's ring sends.
    said = "With all-gather, 2 of 3 codecs save less than 1% over bf16 even if encoding is free."
    assert savings_verdict(found)[3] == said
    records, step = savings_records(found), found.rows[-1].step
    assert len(records) == 2 + len(found.rows)
    last = records[-1]
    assert (last["step_seconds"], last["exposed_seconds"]) == (step.seconds, step.exposed)
    assert last["step_seconds_no_overlap"] >= last["step_seconds"] >= last["step_seconds_ideal_overlap"]
    assert last["over_float32"] == records[0]["step_seconds"] / last["step_seconds"]
