"""Experiments at the papers' own size: estimated, interrupted, continued; and CIFAR-10 from its package."""

import dataclasses
import json

import matplotlib.image
import numpy as np
import pytest
from click.testing import CliRunner

from gtrace.errors import TraceError
from gtrace.training import checkpoint, load_task
from gtrace_experiments.reproduce import _alq, experiment_names
from gtrace_experiments.reproduce._training import studied
from gtrace_experiments.reproduce.command import command
from gtrace_experiments.reproduce.experiment import Context
from gtrace_experiments.reproduce.full import FULL, Full
from gtrace_experiments.reproduce.reasons import REASONS
from gtrace_experiments.reproduce.runner import read_result

LENGTH = Full("", "", 12, {"batch_size": 4, "workers": 1, "seeds": 2})


def stop_at(count):
    def say(_line):
        said.append(_line)
        if len(said) == count:
            raise KeyboardInterrupt

    said = []
    return say


@pytest.mark.parametrize("settings", [{}, {"kind": "neural"}])
def test_an_interrupted_training_goes_on_to_the_same_end(tmp_path, settings):
    task = load_task("digits-mlp")
    whole = studied(Context(full=LENGTH), task, ["qsgdinf:bits=3"], steps=1, **settings)
    context = Context(full=LENGTH, folder=tmp_path)
    # Of two seeds with two runs of 12 steps, each of which says two lines.
    with pytest.raises(KeyboardInterrupt):
        studied(dataclasses.replace(context, say=stop_at(6)), task, ["qsgdinf:bits=3"], steps=1, **settings)
    again = studied(context, task, ["qsgdinf:bits=3"], steps=1, **settings)
    assert again.losses == whole.losses
    assert len(again.losses) == 4
    assert {len(losses) for losses in again.losses.values()} == {12}
    assert [one.tally.bits for one in again.results] == [one.tally.bits for one in whole.results]
    # What is finished is read, and not trained again.
    kept = studied(dataclasses.replace(context, say=stop_at(1)), task, ["qsgdinf:bits=3"], steps=1, **settings)
    assert kept.losses == whole.losses


def test_a_damaged_result_is_named(tmp_path):
    context = Context(full=dataclasses.replace(LENGTH, steps=2), folder=tmp_path)
    studied(context, load_task("digits-mlp"), [], steps=1)
    [done] = tmp_path.glob("*.json")
    done.write_text('[{"run": 1}]')
    with pytest.raises(TraceError, match="remove it"):
        studied(context, load_task("digits-mlp"), [], steps=1)


def test_an_interrupted_path_goes_on_to_the_same_gradients(tmp_path, monkeypatch):
    task, at = load_task("digits-mlp"), (0, 3, 5)
    whole = _alq.record(task, 0, 6, at, (4,), batch_size=4, batches=2)
    save, saved = checkpoint.save, []

    def killed(path, content):
        save(path, content)
        saved.append(path)
        if len(saved) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        _alq.record(task, 0, 6, at, (4,), batch_size=4, batches=2, place=tmp_path)
    again = _alq.record(task, 0, 6, at, (4,), batch_size=4, batches=2, place=tmp_path)
    for before, after in zip(whole, again, strict=True):
        for info in before.tensors:
            for step in at:
                np.testing.assert_array_equal(before.read(info.name, step), after.read(info.name, step))


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    from gtrace_experiments.reproduce import tasks

    random = np.random.default_rng(0)
    pixels = random.integers(256, size=(6, 4, 1024, 3), dtype=np.uint8)
    names = [*(f"data_batch_{k}.png" for k in range(1, 6)), "test_batch.png"]
    for name, part in zip(names, pixels, strict=True):
        matplotlib.image.imsave(tmp_path / name, part)
    (tmp_path / "train_lables.json").write_text(json.dumps(random.integers(10, size=20).tolist()))
    (tmp_path / "test_lables.json").write_text(json.dumps([3] * 4))
    monkeypatch.setenv(tasks.VARIABLE, str(tmp_path))
    tasks.cifar10.cache_clear()
    yield pixels
    tasks.cifar10.cache_clear()


def test_the_command_says_what_it_will_take_and_keeps_what_is_done(cifar, tmp_path, monkeypatch):
    monkeypatch.setitem(FULL, "mcgq-fig3", Full("CifarResNet8", "a test", 2, {"batch_size": 2, "seeds": 1}))
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(command, ["mcgq-fig3", "--full"])
    assert found.exit_code == 0, found.output
    assert "mcgq-fig3: a test: about" in found.stderr
    assert read_result(tmp_path / "reproduction" / "mcgq-fig3-full.json").full
    assert len(list((tmp_path / "reproduction" / "mcgq-fig3-full").glob("*.json"))) == 1


def test_every_verdict_says_why_and_shown_means_reproduced(request):
    stored = request.config.rootpath / "docs" / "reproduction"
    assert set(REASONS) == {path.stem for path in stored.glob("*.json")}
    assert set(experiment_names()) <= set(REASONS)
    for name, reason in REASONS.items():
        verdict = read_result(stored / f"{name}.json").outcome.verdict
        assert verdict != "reproduced" or reason.kind == "shown", name
        assert verdict != "not reproduced" or reason.kind != "shown", name
