"""What noise costs: predictions in words and as verdicts, ratios of sums without them, and where they are shown."""

import dataclasses
import math
import runpy
from pathlib import Path

import numpy as np
import pytest
from helpers_report import result_of, row

from gtrace.costs import Cluster, Network
from gtrace.noise import NoiseCosts, NoisePrediction
from gtrace.report import analyze, answer
from gtrace.report.analysis.safety import (
    MANY_STEPS,
    NOT_ASKED,
    NOT_MEASURED,
    Safety,
    outlook_on,
    shorter_in_words,
    verdict_on,
)
from gtrace.report.files import to_json
from gtrace.report.html import to_html
from gtrace.report.inputs import Asked, make_report
from gtrace.report.names import number
from gtrace.report.sections import sections
from gtrace.report.sections.checks import least_over_noise, over_noise_sentence, safety_sentences, safety_table
from gtrace.report.statistics import ratio_of_sums
from gtrace.sweep.gradient_noise import NOISE

STEPS = range(40)
ATTRS = {
    "world_size": 4,
    "optimizers": {"0": {"planned_steps": 500}},
    "argv": ["train.py", "--batch-size", "64", "--lr", "0.1"],
}
PROVENANCE = {"noise": {"from": ["ranks"]}, "trace_attrs": ATTRS}


def swept(codecs, *, provenance=PROVENANCE, steps=STEPS, signal=1.0):
    """A sweep (spec -> noise ratio or None, relative bias) whose gradients have noise 2, scattered by a tenth."""
    random = np.random.default_rng(0)
    rows, details = [], {}
    for step in steps:
        for layer, energy in (("w", 6.0), ("b", 3.0)):
            noise = 2 * energy / 3 * math.exp(0.1 * random.normal())
            details[layer, step, NOISE] = {"variance": noise, "signal": signal * energy / 3, "freedom": 3}
            for k, (spec, (ratio, bias)) in enumerate(codecs.items()):
                error = bias**2 * energy + (ratio or 0.0) * noise
                about = {"codec": spec, "method": spec.split(":")[0], "params": "{}", "bits": None}
                about |= {"bits_total": float(k + 1), "noise_ratio": ratio, "relative_bias": bias}
                rows.append(row(layer, step, n=1000, energy=energy, squared_error=error) | about)
    return result_of(rows, provenance=provenance, details=details)


def verdicts(codecs, **given):
    return analyze(swept(codecs, **given)).safety.judged


def lines_of(table):
    return {line[0].text: [cell.text for cell in line] for line in table.rows}


def test_errors_and_noise_are_summed_before_they_are_divided():
    result = swept({"alq": (0.05, 0.0)})
    # One layer alone has ten times the noise and half the error: means of ratios would say something else.
    for (layer, _, _), found in result.details.items():
        found["variance"] *= 10 if layer == "b" else 1
    noises = [result.details[r["tensor"], r["step"], NOISE]["variance"] for r in result.rows()]
    result.columns["noise_ratio"] = result["squared_error"] / noises
    found = analyze(result).safety
    assert found.judged["alq"].ratio.estimate == pytest.approx(result["squared_error"].sum() / sum(noises))
    assert found.noise.estimate == pytest.approx(sum(noises) / result["energy"].sum())
    np.testing.assert_allclose(found.ratio_per_tensor, [[0.005, 0.05]])


def predicted(equivalent=99.0, least=None, most=None, **given):
    """A prediction of this equivalent batch, of 100."""
    sizes = (equivalent, most or equivalent, least or equivalent)
    return NoisePrediction(*(100 / size - 1 for size in sizes), 100, **given)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        pytest.param(predicted(95, 90, 99), "safe", id="all of the interval costs a tenth or less"),
        pytest.param(predicted(95, 89.9, 99), "cannot tell", id="its worse end costs more"),
        pytest.param(predicted(90.1, 20, 99), "cannot tell", id="the likely value costs a tenth"),
        pytest.param(predicted(89.9, 20, 99), "at risk", id="the likely value costs more"),
        pytest.param(predicted(50, 20, 90.1, memory=True), "cannot tell", id="a memory, its better end costs a tenth"),
        pytest.param(predicted(50, 20, 89.9, memory=True), "at risk", id="a memory, all of the interval costs more"),
        pytest.param(predicted(lost=0.1), "safe", id="a tenth of the progress"),
        pytest.param(predicted(lost=0.11), "at risk", id="more than a tenth of the progress"),
        pytest.param(predicted(lost=-0.2), "safe", id="longer steps"),
        pytest.param(predicted(shorter=0.05), "safe", id="a twentieth shorter"),
        pytest.param(predicted(shorter=0.1), "cannot tell", id="a tenth shorter"),
        pytest.param(predicted(shorter=0.11), "at risk", id="shorter steps"),
        pytest.param(predicted(shorter=math.nan), "cannot tell", id="memory under Adam"),
    ],
)
def test_what_costs_a_tenth_decides(found, verdict):
    assert verdict_on(found, MANY_STEPS) == verdict
    if found.equivalent > 90:
        # Over a few steps a bias and shorter steps do not count.
        assert verdict_on(found, MANY_STEPS - 1) == ("cannot tell" if verdict == "at risk" else verdict)


SGD = {"kind": "SGD", "momentum": 0.9, "nesterov": False, "weight_decay": 0.0}


def costs_of(ratios, *, optimizer=SGD, batch=64.0):
    """Costs of codecs whose noise is ``ratios`` times that of a gradient with white noise, in two tensors."""
    noise = np.random.default_rng(0).standard_normal((64, 8))
    half = np.repeat(list(ratios.values()), 2).reshape(-1, 2) / 2
    return NoiseCosts(
        codecs=tuple(ratios),
        tensors=("b", "w"),
        noise=noise @ noise.T,
        gram=half[:, :, None, None] * (noise @ noise.T),
        variance=half * 8,
        lost=np.zeros(half.shape),
        signal=np.ones(2),
        growth=np.full(len(ratios), math.nan),
        unbiased=(True,) * len(ratios),
        source="consecutive steps",
        batch=batch,
        optimizer=optimizer,
        lr=0.05,
        last=399,
    )


@pytest.mark.parametrize(
    ("given", "batch", "why"),
    [
        ({"optimizer": {}}, math.nan, "the optimizer is not known; capture it again"),
        ({"optimizer": {"kind": "Rprop"}}, math.nan, "there is no theory for Rprop; train with the codec to find out"),
        ({"batch": math.nan}, math.nan, "add it with --batch-size"),
        ({"batch": math.nan}, 256.0, ""),
        ({"optimizer": {"kind": "AdamW", "betas": [0.9, 0.999], "decoupled": True}}, math.nan, ""),
    ],
)
def test_without_facts_the_cost_is_not_known_and_the_reason_says_what_to_do(costs, given, batch, why):
    costs(costs_of({"a": 0.1}, **given))
    found = outlook_on(result_of([row()]), np.zeros(1, np.int64), batch, None)
    assert why in found.why
    assert bool(found.why) == bool(why) == (found.predict("a") is None)
    assert found.predict("another") is None


@pytest.mark.parametrize(
    ("planned", "asked", "horizon", "assumed"),
    [
        (500, None, 490, False),
        (10, None, 400, True),
        (None, None, 400, True),
        (None, 20, 20, False),
        (500, 20, 20, False),
    ],
)
def test_the_horizon_is_what_is_left_of_the_training_or_as_long_as_it_was(costs, planned, asked, horizon, assumed):
    costs(costs_of({"a": 0.1}))
    result = result_of([row()], provenance={"trace_attrs": {"optimizers": {"0": {"planned_steps": planned}}}})
    found = outlook_on(result, np.array([10, 20]), math.nan, asked, 4)
    assert (found.horizon, found.assumed, found.batch) == (horizon, assumed, 256.0)


@pytest.fixture
def costs(monkeypatch):
    """Sweeps have these costs."""
    return lambda found: monkeypatch.setattr("gtrace.report.analysis.safety.noise_costs", lambda _: found)


def test_verdicts_follow_from_the_prediction_whatever_the_plain_ratio_says(costs):
    costs(costs_of({"a": 1e-4, "b": 5.0, "c": 0.11, "d": 1e6}))
    found = verdicts({"a": (10.0, 0.0), "b": (0.001, 0.0), "c": (0.01, 0.9), "d": (None, 0.1), "e": (10.0, 0.0)})
    assert [j.verdict for j in found.values()] == ["safe", "at risk", "cannot tell", "at risk", "cannot tell"]
    assert [j.prediction is None for j in found.values()] == [False] * 4 + [True]
    assert found["a"].reason.startswith("costs nothing that can be seen over 500 steps (256 of 256; ")
    assert found["d"].reason.startswith("will not train")
    assert NOT_MEASURED in found["e"].reason
    assert [j.close for j in found.values()] == [False, False, True, False, False]


def test_noise_of_many_times_the_gradients_energy_is_not_safe_whatever_is_predicted(costs):
    costs(costs_of({"a": 1e-4, "b": 1e-4}))
    # The average of four workers has the energy 1 + 2 / 4, and the noise of a codec 2 / 4 times its ratio.
    found = verdicts({"a": (11.0, 0.0), "b": (13.0, 0.0)})
    assert [(j.verdict, j.close) for j in found.values()] == [("safe", False), ("cannot tell", False)]
    assert [j.noise for j in found.values()] == pytest.approx([11 / 3, 13 / 3], rel=0.02)
    assert found["b"].reason.endswith("its noise has 4.4 times the gradient's energy, with which training may diverge")


ADAM = {"kind": "Adam", "betas": [0.9, 0.999]}


def test_noise_that_makes_steps_of_adam_shorter_is_not_safe(costs):
    for optimizer, verdict in ((SGD, "safe"), (ADAM, "at risk")):
        made = costs_of({"a": 1.0, "b": 1e-4}, optimizer=optimizer)
        # All of the codec's noise is in flat directions, which cost no batch.
        costs(dataclasses.replace(made, gram=made.gram * 1e-6))
        found = verdicts({"a": (1.0, 0.0), "b": (1e-4, 0.0)})
        assert [j.verdict for j in found.values()] == [verdict, "safe"]
        assert found["a"].close == (verdict != "safe")
        assert found["a"].in_short == {"safe": "safe", "at risk": "at risk: steps"}[verdict]
        # Of four workers E is 2 + 8 / 4 and V is 8 / 4.
        remedy = "shortens Adam's steps by about a fifth (1.2 times the learning rate makes up for most of it)"
        assert found["a"].reason.endswith(remedy) == (verdict != "safe"), found["a"].reason
        said = answer(make_report([swept({"a": (1.0, 0.0), "b": (1e-4, 0.0)})])).confidence
        cheaper = "a, with 1.2 times the learning rate, would take 1.00 instead of 2.00 bits; train to find out"
        assert (cheaper in said) == (verdict != "safe"), said


@pytest.mark.parametrize(("optimizer", "verdict"), [(SGD, "safe"), (ADAM, "cannot tell")])
def test_what_a_memory_does_to_steps_of_adam_is_not_known(costs, optimizer, verdict):
    costs(dataclasses.replace(costs_of({"a": 1e-4}, optimizer=optimizer), growth=np.array([1.0])))
    found = verdicts({"a": (None, 0.1)})["a"]
    assert (found.verdict, found.close) == (verdict, False)
    assert found.reason.endswith("; what its memory does to Adam's steps is not known") == (verdict != "safe")
    assert Safety().record(found)["shorter_steps"] == (0.0 if verdict == "safe" else None)


def test_far_shorter_steps_get_no_remedy():
    assert shorter_in_words(0.6) == "shortens Adam's steps by about two thirds"


def test_a_prediction_that_does_not_hold_leaves_what_the_plain_ratio_clears(costs):
    made = costs_of({"a": 1e-4, "b": 1e-4})
    costs(dataclasses.replace(made, lost=np.full((2, 2), 0.05), unbiased=(False, False)))
    found = verdicts({"a": (0.05, 0.0), "b": (10.0, 0.0)})
    assert [j.verdict for j in found.values()] == ["safe", "cannot tell"]
    assert found["b"].reason.startswith("the cost of its noise is not known: ")


def test_a_bias_that_takes_much_of_each_step_is_at_risk(costs):
    made = dataclasses.replace(costs_of({"a": 0.0, "b": 0.0}), unbiased=(False, False), lost=np.full((2, 2), 0.2))
    costs(made)
    # The bias of "b" has 0.9% of the energy: where the gradient is lost in its noise, so little may seem to take much.
    found = verdicts({"a": (0.0, 0.7), "b": (0.0, 0.08)}, signal=0.2)
    assert [(j.verdict, j.close) for j in found.values()] == [("at risk", False), ("cannot tell", False)]
    assert [j.in_short for j in found.values()] == ["at risk: bias", "cannot tell"]
    assert found["a"].reason == "its bias takes about a fifth of each step's progress"
    assert "its error is a bias that takes 20% of a step's progress" in found["b"].reason
    costs(dataclasses.replace(made, lost=-made.lost))
    assert verdicts({"a": (0.0, 0.7)})["a"].verdict == "cannot tell"


def test_the_plain_ratio_clears_codecs_and_convicts_none():
    found = verdicts({"a": (0.05, 0.0), "b": (0.5, 0.0), "c": (0.02, 0.01), "d": (0.05, 0.5), "e": (None, 0.6)})
    assert [spec for spec, j in found.items() if j.verdict == "safe"] == ["a", "c"]
    assert found["a"].reason.startswith("costs at most 4.8% of the batch")
    assert verdicts({"a": (0.0, 0.01)})["a"].reason.startswith("adds no noise; its bias is 1.7% of the expected")
    assert all(NOT_MEASURED in found[spec].reason for spec in "bde")
    assert found["d"].bias == pytest.approx(0.5 * math.sqrt(3))
    assert found["e"].bounded
    # An error that is small beside the expected gradient is safe, whatever it is.
    small = verdicts({"a": (None, 0.02)})["a"]
    assert (small.verdict, small.bounded) == ("safe", True)
    assert verdicts({"a": (None, 0.0)})["a"].reason == "all of its error is at most 0% of the expected gradient"
    # Few steps, and an expected gradient that is lost in its noise, prove nothing.
    assert verdicts({"a": (0.01, 0.0)}, steps=range(5))["a"].verdict == "cannot tell"
    lost = verdicts({"a": (0.01, 0.02)}, signal=-0.01)["a"]
    assert (lost.verdict, lost.bias) == ("cannot tell", math.inf)


def test_the_norm_of_the_gradient_over_the_noise_of_a_codec():
    analysis = analyze(swept({"alq": (None, 0.32**0.5), "fp": (None, 0.5**0.5)}))
    assert least_over_noise(analysis) == pytest.approx([0.32**-0.5, 0.5**-0.5])
    assert "1 of 2 configurations" in over_noise_sentence(analysis)[0]


@pytest.mark.parametrize(
    ("provenance", "words"),
    [({}, NOT_ASKED), ({"noise": {"from": [], "why": "the trace holds one gradient a step"}}, "one gradient a step")],
)
def test_without_replicas_nothing_is_judged_and_the_reason_is_said(provenance, words):
    result = swept({"alq": (0.1, 0.0), "fp": (None, 0.3)}, provenance=provenance)
    result.details.clear()
    (sentence,) = safety_sentences(analyze(result))
    assert sentence.startswith("Safety unknown: ")
    assert words in sentence
    page = to_html(make_report([result]))
    assert ["Safety unknown" in page, "Is it safe?" in page] == [True, False]


def test_the_prediction_is_the_same_in_the_verdict_in_tables_and_in_json(costs):
    costs(costs_of({"alq": 1e-4, "qsgd": 5.0}))
    report = make_report([swept({"alq": (0.5, 0.0), "qsgd": (0.5, 0.0)})], asked=Asked(horizon=20000))
    (analysis,) = report.sweeps
    found, verdict, whole = analysis.safety.judged["alq"].prediction, answer(report), to_json(report)
    record = whole["sweeps"][0]["safety"]["judged"]["alq"]["prediction"]
    assert verdict.prediction == record == whole["verdict"]["prediction"]
    assert (record["horizon"], record["batch"], record["lost_progress"]) == (20000, 256.0, 0.0)
    assert 0.99 * 256 < record["equivalent_batch_low"] <= record["equivalent_batch"] == found.equivalent < 256
    assert verdict.costs.startswith("nothing that can be seen over 20,000 steps (256 of 256; 25")
    rows = lines_of(safety_table(analysis))
    assert rows["alq"][1:6] == ["safe", "1.00", "256", "0%", "0.500"]
    assert rows["qsgd"][1] == "at risk"
    assert "costs nothing that can be seen over 20,000 steps (256 of 256; 25" in safety_sentences(analysis)[-1]
    # The command that tests it.
    command = "torchrun --nproc-per-node 4 -m -- gtrace train --codec alq train.py --batch-size 64 --lr 0.1"
    assert safety_table(analysis).notes[-1].endswith(f": {command}")


def test_what_a_codec_saves_is_beside_its_verdict():
    cluster = Cluster(Network.parse("1Gbit/s", "20us"), ranks=8, step_time=0.05)
    report = make_report([swept({"alq": (0.25, 0.0), "fp": (0.0, 0.01)})], asked=Asked(cluster=cluster))
    table = next(t for part in sections(report) for t in part.tables if t.title == "Is it safe?")
    at = [column.heading for column in table.columns].index("step over bf16")
    # What is safe comes first.
    assert [line[0].text for line in table.rows] == ["fp", "alq"]
    for line in table.rows:
        best = min((r for r in report.savings[0].rows if r.spec == line[0].text), key=lambda r: r.step.seconds)
        assert line[at].text == f"{number(best.over_bfloat16[0])}x"


INTERVALS = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "noise_intervals.py"))


@pytest.mark.parametrize("steps", [20, 50])
@pytest.mark.parametrize("correlation", [0.3, 0.6])
def test_intervals_hold_the_truth_on_correlated_steps(steps, correlation):
    """ "Safe" rests on the upper end. The script has 2000 series of each kind, and lines for each."""
    found = [INTERVALS["measured"](kind, steps, correlation, 0.8, 150) for kind in INTERVALS["KINDS"]]
    known, inside, above, _ = np.mean(found, axis=0)
    assert known > 0.8
    assert inside >= 0.93
    assert above <= 0.035


def test_steps_without_an_interval_say_why():
    line = np.arange(1.0, 41.0)
    assert "too correlated" in ratio_of_sums(line**4, np.ones(40)).why
    assert ratio_of_sums(line[:11], np.ones(11)).why == "11 steps are too few for a confidence interval, which needs 12"
    assert ratio_of_sums(-line, np.ones(40)).why == "the ratio is not positive"
    same = ratio_of_sums(0.5 * line, line)
    assert (same.low, same.high) == (0.5, 0.5)


def test_a_trace_of_sketches_is_not_swept_again_for_nothing():
    for attrs, why in (({"sketch": {"sketches": ["l2:64"]}}, "the trace holds sketches"), ({}, NOT_MEASURED)):
        swept = result_of([row()], provenance={"trace_attrs": attrs})
        assert outlook_on(swept, np.zeros(1, np.int64), math.nan, None).why.startswith(why)
