"""Studies of several seeds, what they say of differences, simulated networks, and optimizers."""

import math

import numpy as np
import pytest
from scipy import stats

from gtrace.cli.train_task import paired, spread, summarize
from gtrace.costs import Network
from gtrace.runlog import read_runlog
from gtrace.training import Study, train
from gtrace.training.exchange import Tally
from gtrace.training.run import simulated_step

from ..helpers_training import Regression

CODECS = ["ef:topk:ratio=0.2", "qsgdinf:bits=2"]


def study(**options):
    return Study(Regression(), CODECS, workers=2, steps=6, eval_every=2, **options)


def test_seeds_are_run_one_after_the_other_and_each_as_alone_and_differences_are_paired(tmp_path):
    several = study(seeds=3, seed=4)
    several.run(tmp_path / "log.jsonl")
    assert [(result.run, result.seed) for result in several.results] == [
        (spec, seed) for seed in (4, 5, 6) for spec in ("none", *CODECS)
    ]
    for seed in (4, 6):
        alone = study(seed=seed)
        alone.run()
        for one, other in zip(alone.results, several.results[3 * (seed - 4) :], strict=False):
            assert (one.loss, one.tally.bits) == (other.loss, other.tally.bits)
    steps = [record["seed"] for record in read_runlog(tmp_path / "log.jsonl") if record["type"] == "step"]
    assert steps == sorted(steps)
    assert len(steps) == 3 * 3 * 6

    entries = {entry["run"]: entry for entry in summarize(several)}
    losses = {(result.run, result.seed): result.loss for result in several.results}
    spec = CODECS[1]
    differences = [losses[spec, seed] - losses["none", seed] for seed in (4, 5, 6)]
    assert entries[spec]["loss_change"] == pytest.approx(np.mean(differences))
    assert paired(several, spec, lambda result: result.loss).deviation == pytest.approx(np.std(differences, ddof=1))
    assert entries["none"]["loss_change"] == 0
    assert entries[spec]["loss"] == pytest.approx(np.mean([losses[spec, seed] for seed in (4, 5, 6)]))


def test_intervals_are_students():
    values = [0.3, 0.5, 0.1, 0.9, math.nan]
    found = spread(values)
    low, high = stats.t.interval(0.95, 3, np.mean(values[:4]), stats.sem(values[:4]))
    assert (found.mean - found.reach, found.mean + found.reach) == pytest.approx((low, high))
    assert found.count == 4
    assert math.isnan(spread([1.0]).reach)
    assert math.isnan(spread([]).mean)


def test_a_step_is_computed_once_and_decoded_for_all_and_linear_messages_are_added_up_on_the_way():
    tally = Tally(payload_bits=8000, float32_bits=4 * 32 * 1000)
    assert simulated_step(Network(1e3, 0.0), 4, tally, 0.0, exact=False) == pytest.approx(3 * 2000 / 1e3)
    seconds = simulated_step(Network(1e3, 0.0), 4, tally, 0.0, exact=False, linear=True)
    assert seconds == pytest.approx(2 * 3 / 4 * 2000 / 1e3)
    tally = Tally(payload_bits=8000, float32_bits=4 * 32 * 1000, codec_seconds=0.3, decode_seconds=0.1)
    seconds = simulated_step(Network(1e3, 0.0, "allgather"), 4, tally, 1.1, exact=False)
    assert seconds == pytest.approx((1.1 - 0.3) / 4 + 0.2 / 4 + 0.1 + 3 * 2000 / 1e3)


def test_optimizers_and_clipping_take_the_place_of_the_tasks_own():
    losses = {}
    for name in ("", "sgd", "momentum", "nesterov", "adam", "amsgrad", "adamw", "clip"):
        settings = {"clip": 1e-3} if name == "clip" else {"optimizer": name}
        losses[name] = train(Regression(), [], workers=1, steps=5, **settings).results[0].loss
    assert losses[""] == losses["sgd"] < losses["clip"]
    assert len(set(losses.values())) >= 6
