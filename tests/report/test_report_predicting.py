"""Rank correlations of measures with final losses, against what is known of made-up studies."""

import numpy as np
import pytest
from scipy import stats

from gtrace.errors import TraceError, UsageError
from gtrace.report import predicting

CODECS = [f"qsgdinf:bits={bits}" for bits in range(2, 9)] + ["terngrad", "natural", "ef:topk:ratio=0.1"]


def study(seeds=3, measured=True, noise=0.0, diverged=()):
    """A log in which the loss follows the noise ratio, W1 is noise, and a codec with memory breaks the order."""
    rng = np.random.default_rng(4)
    records = [{"type": "study", "version": 1, "task": "made-up", "workers": 4}]
    for seed in range(seeds):
        for k, run in enumerate(["none", *CODECS]):
            error = 0.0 if run == "none" else 10.0**-k
            loss = 1 + 0.1 * seed + error ** (1 / 8) * (1 + noise * rng.standard_normal())
            who = {"run": run, "seed": seed}
            for step in range(10):
                here = {**who, "step": step}
                records.append({"type": "step", **here, "loss": 1.0, "bits": 1, "relative_variance": error})
                if measured:
                    # Later steps say the opposite of earlier ones.
                    numbers = {"noise_ratio": -4 * error if step >= 5 else 2 * error, "w1": rng.random()}
                    numbers |= {"update_error": None, "relative_variance": 2.0, "cosine": 1 - error}
                    records.append({"type": "measure", **here, **numbers})
            loss = None if run in diverged else 5.0 if run.startswith("ef:") else loss
            records.append({"type": "eval", **who, "step": 9, "loss": loss, "accuracy": None})
            records.append({"type": "end", **who, "steps": 10, "loss": loss, "bits": 1, "ratio": 1.0})
    return records


def predicted(records, exclude=("ef:*",), **given):
    """What is found, and each measure by its name."""
    found = predicting.predict(records, "log", exclude=exclude, **given)
    return found, {one.measure: one for one in found.found}


def test_what_orders_the_losses_is_found():
    found, one = predicted(study())
    assert found.codecs == tuple(CODECS[:-1])
    assert one["cosine"].correlation.estimate == pytest.approx(1)
    assert one["cosine"].verdict == "predicts"
    assert found.leader is one["cosine"]
    assert "1 - cosine orders the final losses best: rank correlation 1.00" in found.sentence
    assert one["noise_ratio"].correlation.estimate < 1
    early = predicted(study(), first=0.5)[1]["noise_ratio"]
    assert early.correlation.estimate == pytest.approx(1)
    assert one["w1"].verdict == "not seen to predict"
    assert one["w1"].correlation.low < 0 < one["w1"].correlation.high
    # What was not measured, and what is the same for all, is no order.
    assert not one["update_error"].correlation.known
    assert not one["relative_variance"].correlation.known
    # Without measurements the variance of the steps counts.
    _, one = predicted(study(measured=False))
    assert one["relative_variance"].correlation.estimate == pytest.approx(1)
    assert not one["cosine"].correlation.known


def test_the_numbers_are_scipys_and_a_run_that_diverged_has_the_largest_loss():
    found, one = predicted(study(noise=0.3), exclude=())
    cosine = one["cosine"].correlation
    assert cosine.estimate == pytest.approx(stats.spearmanr(one["cosine"].values, found.excess).statistic)
    assert cosine.low < cosine.estimate < cosine.high
    found, one = predicted(study(diverged=("qsgdinf:bits=2",)))
    assert np.isinf(found.excess[0])
    assert one["cosine"].correlation.estimate == pytest.approx(1)


def test_too_few_codecs_and_none_at_all():
    found, _ = predicted(study(), exclude=["qsgdinf:bits=[2-7]"])
    assert found.leader is None
    assert "needs at least 5 codecs" in found.sentence
    for records, exclude in ((study(), ["*"]), ([r for r in study() if r.get("run") != "none"], ())):
        with pytest.raises(UsageError, match="gtrace study compare"):
            predicted(records, exclude)


@pytest.mark.parametrize("wrong", [{"step": "x"}, {"seed": [1]}])
def test_a_damaged_measurement_is_an_error_of_the_log(wrong):
    records = study()
    place = next(k for k, record in enumerate(records) if record["type"] == "measure")
    records[place] = {**records[place], **wrong}
    with pytest.raises(TraceError, match="damaged"):
        predicted(records)


def test_numbers_that_cannot_be_are_left_out():
    huge = [record | {"w1": 10**400} if record["type"] == "measure" else record for record in study()]
    assert not predicted(huge)[1]["w1"].correlation.known


def test_without_losses_to_compare_nothing_is_judged_and_the_reason_is_said():
    # The uncompressed run has finished with another seed than all others, and it has diverged.
    records = [r for r in study() if r["type"] != "end" or (r["seed"] == 2) == (r["run"] == "none")]
    assert "5 codecs with a final loss; it was measured for 0)" in predicted(records)[0].sentence
    assert "(the final loss is the same for all codecs)" in predicted(study(diverged=("none",)))[0].sentence
