"""Experiments at the papers' own size: estimated, interrupted, continued; and CIFAR-10 from its package."""

import dataclasses
import gzip
import json
import sys
import types

import matplotlib.image
import numpy as np
import pandas
import pytest
from click.testing import CliRunner

from gtrace.errors import TraceError, UsageError
from gtrace.training import checkpoint, load_task
from gtrace.training.tasks.images import IMAGES, LABELS, VARIABLE, FashionCNN
from gtrace_experiments.reproduce import _alq, datasets, experiment_names
from gtrace_experiments.reproduce._training import seeded_task, studied
from gtrace_experiments.reproduce.command import command
from gtrace_experiments.reproduce.experiment import Context
from gtrace_experiments.reproduce.full import FULL, Full, full_size
from gtrace_experiments.reproduce.reasons import REASONS
from gtrace_experiments.reproduce.runner import read_result
from gtrace_experiments.reproduce.small import SmallTreebank

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


def test_costs_grow_with_steps_and_nothing_is_trained_for_long():
    costs = []
    full = dataclasses.replace(LENGTH, steps=1_000_000)
    context = Context(quick=True, full=full, costs=costs)
    found = studied(context, load_task("digits-mlp"), [], steps=1)
    assert {len(losses) for losses in found.losses.values()} == {2}
    assert costs[0] > 10


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


def test_cifar_is_read_as_its_package_has_it(cifar):
    from gtrace_experiments.reproduce.tasks import CifarResNet8, cifar10

    train, classes, test, tested = cifar10()
    # A row of the picture is an image, its pixels row by row.
    np.testing.assert_array_equal(train[5], cifar[1, 1].reshape(32, 32, 3).transpose(2, 0, 1))
    assert (len(train), len(classes), len(test), tested.tolist()) == (20, 20, 4, [3] * 4)
    task = CifarResNet8()
    images, _ = task.batch(np.random.default_rng(1), 6)
    assert images.shape == (6, 3, 32, 32)
    # Each is a training image, moved by at most four pixels and perhaps mirrored, with black around it.
    whole = np.pad(task._inputs(task._train[0]).numpy(), ((0, 0), (0, 0), (4, 4), (4, 4)))
    moved = {
        whole[k, :, r : r + 32, c : c + 32][:, :, ::flip].tobytes()
        for k in range(20)
        for r in range(9)
        for c in range(9)
        for flip in (1, -1)
    }
    assert all(np.ascontiguousarray(image).tobytes() in moved for image in images.numpy())


def test_an_experiment_with_one_size_says_so():
    with pytest.raises(UsageError, match="lognormal-table2 has one size"):
        full_size("lognormal-table2")
    assert set(FULL) <= set(experiment_names())


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


def test_a_data_frame_of_mlbench_becomes_samples_and_labels(tmp_path, monkeypatch):
    frame = pandas.DataFrame({"V1": range(20), "Class": ["Rad.Flow", "High"] * 10, "V2": [3.0, 5.0] * 10})
    monkeypatch.setenv(datasets.VARIABLE, str(tmp_path))
    with pytest.raises(TraceError, match=r"Shuttle\.rda: not found"):
        datasets.real(9, labels=True)
    (tmp_path / "Shuttle.rda").touch()
    monkeypatch.setitem(sys.modules, "rdata", None)
    with pytest.raises(UsageError, match="pip install rdata"):
        datasets.real(9, labels=True)
    reader = types.SimpleNamespace(read_rda=lambda _path, default_encoding: {"Shuttle": frame})
    monkeypatch.setitem(sys.modules, "rdata", reader)
    data = datasets.real(9, labels=True)
    assert data.a.shape == (16, 2)
    # Even rows are radiator flow, and have the smaller V2.
    assert (np.sign(data.a[:, 1]) == -data.b).all()
    monkeypatch.setattr(datasets, "MOST", 10)
    assert len(datasets.real(9, labels=True).a) == 8


def test_fashion_made_small_is_a_tenth_of_the_images_in_blocks_of_pixels(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    for part, count in (("train", 40), ("t10k", 6)):
        pixels = random.integers(256, size=(count, 28, 28), dtype=np.uint8)
        for kind, magic, body in (("images-idx3", IMAGES, pixels), ("labels-idx1", LABELS, pixels[:, 0, 0] % 10)):
            head = magic.to_bytes(4, "big") + b"".join(size.to_bytes(4, "big") for size in body.shape)
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + body.tobytes()))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    task, words = seeded_task(Context(), "CIFAR-10")
    assert "made small" in words
    whole, small = FashionCNN(), task
    assert len(small._train[1]) == 4
    before, after = whole._inputs(whole._train[0][[10]]), small._inputs(small._train[0][[1]])
    assert after.shape == (1, 1, 7, 7)
    assert float(after[0, 0, 2, 3]) == pytest.approx(float(before[0, 0, 8:12, 12:16].mean()), rel=1e-5)
    assert sum(parameter.numel() for parameter in small.model().parameters()) == 75_178
    assert small.model()(after).shape == (1, 10)


def test_the_treebank_made_small_is_a_third_with_its_most_frequent_words(tmp_path, monkeypatch):
    numbered = [f"w{k:04}" for k in range(2500)]
    # The first 500 words come five times, the next four times, the last once.
    third = [word for k, word in enumerate(numbered) for _ in range(1 + (2499 - k) // 500)]
    (tmp_path / "ptb.train.txt").write_text(" ".join(third + ["other"] * (2 * len(third))))
    (tmp_path / "ptb.valid.txt").write_text("w0000 w1999 w2000 other\n")
    monkeypatch.setenv("GTRACE_PTB", str(tmp_path))
    task = SmallTreebank()
    words = list(task._vocabulary)
    assert len(task._train) == len(third)
    assert words == ["<unk>", *numbered[:2000]]
    assert [words[code] for code in task._test] == ["w0000", "w1999", "<unk>", "<unk>", "<unk>"]
    assert int((task._train == 0).sum()) == 500
