"""Studies: codecs against the uncompressed run, their logs and words, and several seeds."""

import json
import math
import threading

import numpy as np
import pytest
import torch
from helpers_training import Faulty, Regression, interrupt, without_times
from scipy import stats

from gtrace.cli.train_task import paired, summarize
from gtrace.costs import Network
from gtrace.errors import OutputExistsError, UsageError
from gtrace.runlog import read_runlog
from gtrace.training import Study, load_task, train
from gtrace.training.exchange import Tally
from gtrace.training.run import simulated_step
from gtrace.types import Key


def records(study):
    return list(study.records())


def of(found, kind, run=None):
    return [r for r in found if r["type"] == kind and run in (None, r.get("run"))]


@pytest.mark.parametrize("name", ["digits-cnn", "digits-mlp", "char-lstm"])
def test_training_without_a_codec_is_plain_data_parallel_training(name):
    """One backward pass over all workers' batches together gives the same weights, to rounding.

    Dropout draws per worker, so the reference passes each worker's batch alone and averages in torch.
    """
    steps, workers, size = 4, 3, 4
    task = load_task(name)
    if name == "char-lstm":
        task._test = task._test[:200]  # reading all of it takes longer than the training
    records(study := Study(task, [], workers=workers, steps=steps, batch_size=size, seed=11))
    lr, clip = task.recipe.lr, task.recipe.clip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Key.derive(11, tensor="model", role="sample").low)
        model = task.model()
        optimizer = task.optimizer(model, lr)
        for step in range(steps):
            if task.recipe.decay == "cosine":
                optimizer.param_groups[0]["lr"] = lr / 2 * (1 + math.cos(math.pi * step / steps))
            optimizer.zero_grad()
            for worker in range(workers):
                key = Key.derive(11, tensor="batch", step=step, worker=worker, role="sample")
                batch = task.batch(np.random.default_rng(key), size)
                torch.manual_seed(key.low)
                (task.loss(model, batch) / workers).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    trained = dict(study._runs[0]._model.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[parameter_name], parameter, rtol=1e-4, atol=2e-6)


def test_the_same_arguments_give_the_same_log(tmp_path):
    for name in ("a", "b"):
        train(Regression(), ["qsgd:bits=3", "natural"], log=tmp_path / f"{name}.jsonl", seed=3)
    train(Regression(), ["qsgd:bits=3", "natural"], log=tmp_path / "c.jsonl", seed=4)
    a, b, c = (without_times(read_runlog(tmp_path / f"{name}.jsonl")) for name in "abc")
    assert a == b
    first, second = ([r["loss"] for r in of(a, "step") if r["step"] == step] for step in (0, 1))
    assert len(set(first)) == 1 < len(set(second))  # all runs start alike on the same batches
    assert a[1:] != [{**record, "seed": 3} if "seed" in record else record for record in c[1:]]


def test_the_result_depends_on_nothing_around_it():
    """The global generator and the number of threads change nothing, and are left as they were."""
    alive = threading.active_count()
    before = without_times(records(Study(Regression(), ["terngrad"])))
    assert threading.active_count() == alive
    threads = torch.get_num_threads()
    torch.manual_seed(77)
    torch.set_num_threads(2)
    try:
        state = torch.get_rng_state()
        assert without_times(records(Study(Regression(), ["terngrad"]))) == before
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_the_log_says_everything(tmp_path):
    path = tmp_path / "log.jsonl"
    study = train("digits-mlp", ["qsgdinf:bits=3"], log=path, workers=2, steps=7, batch_size=4, eval_every=3)
    found = read_runlog(path)
    head = found[0]
    assert head["task"] == "digits-mlp"
    assert (head["workers"], head["steps"], head["batch_size"], head["lr"]) == (2, 7, 4, 2e-3)
    assert head["parameters"] == sum(head["tensors"].values()) == 26_122
    assert head["tensors"]["fc1.weight"] == 64 * 128
    assert head["runs"] == ["none", "qsgdinf:bits=3"]
    assert head["command"].startswith("gtrace study compare qsgdinf:bits=3 --task digits-mlp --workers 2 --steps 7")
    assert set(head["versions"]) == {"gtrace", "numpy", "python", "torch"}
    for result in study.results:
        steps = of(found, "step", result.run)
        assert [r["step"] for r in steps] == list(range(7))
        assert {r["bits_float32"] for r in steps} == {32 * 2 * 26_122}
        assert {r["envelope_bits"] for r in steps} == {8 * 24 * 2 * 6}
        assert [r["step"] for r in of(found, "eval", result.run)] == [2, 5, 6]
        (end,) = of(found, "end", result.run)
        assert end["steps"] == result.steps == 7
        assert end["bits"] == result.tally.bits == sum(r["bits"] for r in steps)
        assert end["ratio"] == pytest.approx(sum(r["bits_float32"] for r in steps) / end["bits"])
        assert end["accuracy"] == result.accuracy == of(found, "eval", result.run)[-1]["accuracy"]
        assert result.relative_variance == pytest.approx(np.mean([r["relative_variance"] for r in steps]))
        assert 0 <= result.tally.fit_seconds <= result.tally.codec_seconds <= result.seconds
        assert not end["diverged"]
    assert study.results[0].tally.ratio == 1.0
    assert study.results[1].tally.ratio > 8
    assert [r["run"] for r in of(found, "step")] == ["none", "qsgdinf:bits=3"] * 7


def test_a_worker_with_bad_gradients_is_left_out_and_reported():
    study = Study(Faulty(lambda batch: batch % 4 == 1), ["qsgdinf"], steps=5)
    found = records(study)
    assert all(math.isfinite(r["loss"]) for r in of(found, "step"))
    assert [r["nonfinite"] for r in of(found, "step", "qsgdinf:bits=4")] == [13] * 5
    texts = [r["text"] for r in of(found, "warning")]
    assert texts == study.warnings
    said = "qsgdinf:bits=4: step 0, worker 1, 1.weight: 12 gradient values are not finite; this worker's tensor is "
    assert f"{said}left out of the mean" in texts
    assert texts[-1] == "qsgdinf:bits=4: 65 gradient values in 2 tensors were not finite, at 5 steps"
    assert len(texts) == 2 * (3 + 1)
    assert all(result.finished and result.tally.nonfinite == 65 for result in study.results)


def test_divergence_is_said_in_words_and_stops_that_run_only():
    """The batches of the second run's third step go bad, for all four workers."""
    study = Study(Faulty(lambda batch: 20 <= batch < 24), ["terngrad"], steps=6)
    found = records(study)
    none, coded = study.results
    assert (none.steps, none.diverged) == (6, "")
    assert coded.steps == 3
    assert coded.finished
    assert coded.diverged == study.warnings[-1]
    assert "no worker's training loss is finite at step 2" in coded.diverged
    (end,) = of(found, "end", "terngrad")
    assert end["diverged"]
    assert end["steps"] == 3


def test_an_interruption_keeps_what_was_done_and_an_existing_log_is_refused_before_training(tmp_path):
    path, study = tmp_path / "log.jsonl", Study(Regression(), ["qsgd"], steps=50)
    seen = interrupt(study, path, 8)
    assert read_runlog(path)[1:] == seen
    assert [(result.steps, result.finished) for result in study.results] == [(4, False)] * 2
    assert study.results[1].tally.bits > 0
    path = tmp_path / "mine.jsonl"
    path.write_text("mine")
    study = Study(Regression(), [])
    with pytest.raises(OutputExistsError):
        study.run(path)
    assert path.read_text() == "mine"
    assert study.results[0].steps == 0
    study.run(path, force=True)
    assert json.loads(path.read_text().splitlines()[-1])["type"] == "end"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers: 0 is below 1"),
        ({"seed": -1}, "seed: -1 is below 0"),
        ({"lr": 0.0}, "lr: must be a positive number, not 0"),
        ({"refit": "sometimes"}, "refit: 'sometimes' is not a schedule"),
        ({"codecs": ["qsgd", "qsgd:bits=4"]}, "named twice"),
        ({"kind": "neural", "network": Network(1e9)}, "do not travel"),
        ({"kind": "neural", "nonfinite": "pass"}, "pass is for weight gradients"),
        ({"shadow": 5}, "choose kind neural"),
        ({"codecs": ["terngrad"], "policies": ["adaptive"]}, "no codec with bits"),
        ({"codecs": ["minmax"], "policies": ["adaptive"], "kind": "neural"}, "between workers"),
        ({"codecs": ["minmax"], "down": "same", "network": Network(1e6)}, "topology"),
        ({"task": "digits-mlp", "weights": ["optimal5"], "kind": "neural"}, "kind neural"),
        ({"task": "digits-cmm"}, "no task 'digits-cmm'; did you mean digits-"),
        ({"codecs": ["qsgdinf"], "kind": "neural", "measure": 2}, "measure"),
        ({"optimizer": "onebit-adam", "every": 4}, "exchanges at every step"),
        ({"every": 4, "down": "same"}, "down: "),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    task, codecs = arguments.pop("task", Regression()), arguments.pop("codecs", [])
    with pytest.raises(UsageError, match=message):
        Study(task, codecs, **arguments)


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
    found = paired(several, spec, lambda result: result.loss)
    assert (found.low, found.high) == pytest.approx(
        stats.t.interval(0.95, 2, np.mean(differences), stats.sem(differences))
    )
    assert math.isnan(paired(alone, spec, lambda result: result.loss).low)
    assert math.isnan(paired(several, spec, lambda result: math.nan if result.seed < 6 else result.loss).low)
    assert entries["none"]["loss_change"] == 0
    assert entries[spec]["loss"] == pytest.approx(np.mean([losses[spec, seed] for seed in (4, 5, 6)]))


def test_a_step_is_computed_once_and_decoded_for_all_and_linear_messages_are_added_up_on_the_way():
    tally = Tally(payload_bits=8000, float32_bits=4 * 32 * 1000)
    assert simulated_step(Network(1e3, 0.0), 4, tally, 0.0, exact=False) == pytest.approx(3 * 2000 / 1e3)
    seconds = simulated_step(Network(1e3, 0.0), 4, tally, 0.0, exact=False, linear=True)
    assert seconds == pytest.approx(2 * 3 / 4 * 2000 / 1e3)
    tally = Tally(payload_bits=8000, float32_bits=4 * 32 * 1000, codec_seconds=0.3, decode_seconds=0.1)
    seconds = simulated_step(Network(1e3, 0.0, "allgather"), 4, tally, 1.1, exact=False)
    assert seconds == pytest.approx((1.1 - 0.3) / 4 + 0.2 / 4 + 0.1 + 3 * 2000 / 1e3)
