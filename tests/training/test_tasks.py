"""The built-in tasks; those on Fashion-MNIST on a few made-up images in files of its format."""

import gzip
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from helpers_training import losses

import gtrace.training
from gtrace.errors import TraceError, UsageError
from gtrace.training import load_task
from gtrace.training.tasks import describe_task, text
from gtrace.training.tasks.images import VARIABLE

#: how many answers each task chooses from
CLASSES = {"digits-cnn": 10, "digits-mlp": 10, "char-lstm": 60, "char-transformer": 60, "word-lstm": 3282}


def fresh(task, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.model().eval()


@pytest.mark.parametrize("name", CLASSES)
def test_models_and_batches_come_from_their_seeds_and_an_untrained_model_can_learn(name):
    task = load_task(name)
    assert task.name == name
    assert describe_task(name)
    first, again, other = (task.batch(np.random.default_rng(seed), 6) for seed in (1, 1, 2))
    assert len(first[0]) == len(first[1]) == 6
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    weights = [torch.cat([p.detach().flatten() for p in fresh(task, seed).parameters()]) for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    model = fresh(task)
    with torch.no_grad():
        found = task.evaluate(model)
    assert found.loss == pytest.approx(np.log(CLASSES[name]), rel=0.1)
    assert (found.accuracy is not None) == name.startswith("digits")
    assert 0 <= (found.accuracy or 0) < 0.3
    found = losses(task, model, task.batch(np.random.default_rng(0), 8), min(2.0, task.recipe.lr))
    assert found[-1] < 0.95 * found[0]


def test_targets_of_a_text_are_the_next_characters_or_words():
    characters, words = load_task("char-lstm"), load_task("word-lstm")
    line = "From fairest creatures we desire increase,"
    assert "".join(characters._vocabulary[characters._train[: len(line)]]) == line
    shown = words._vocabulary[words._train[:8]]
    assert list(shown) == ["from", "fairest", "creatures", "we", "desire", "increase", ",", "\n"]
    assert len(words._test) == pytest.approx(len(words._train) / 9, rel=0.01)
    for task, length in ((characters, text.LENGTH), (words, text.WORD_LENGTH)):
        inputs, targets = task.batch(np.random.default_rng(0), 3)
        assert inputs.shape == targets.shape == (3, length)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


TRAIN = " the cat sat on the mat \n a dog sat on the <unk> \n" * 20
VALID = " the dog sat on a cat \n" * 200


def test_the_treebank_from_a_folder_or_its_package(tmp_path, monkeypatch):
    monkeypatch.delenv(text.VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "treebank", types.SimpleNamespace(penn={"train": TRAIN, "valid": VALID}))
    assert len(load_task("ptb-lstm")._train) == 20 * 14
    for package in (None, types.SimpleNamespace()):
        monkeypatch.setitem(sys.modules, "treebank", package)
        with pytest.raises(TraceError, match=r"Penn Treebank: not found .* set GTRACE_PTB .* or install"):
            load_task("ptb-lstm")
    monkeypatch.setenv(text.VARIABLE, str(tmp_path))
    with pytest.raises(TraceError, match=r"ptb\.train\.txt"):
        load_task("ptb-lstm")
    (tmp_path / "ptb.train.txt").write_text(TRAIN)
    (tmp_path / "ptb.valid.txt").write_text(VALID)
    task = load_task("ptb-lstm")
    assert list(task._vocabulary) == ["<eos>", "<unk>", "a", "cat", "dog", "mat", "on", "sat", "the"]
    assert list(task._vocabulary[task._train[:7]]) == ["the", "cat", "sat", "on", "the", "mat", "<eos>"]
    assert list(task._vocabulary[task._test[:3]]) == ["the", "dog", "sat"]
    assert sum(p.numel() for p in fresh(task).parameters()) == 9 * 200 + 4 * 800 * 200 + 4 * 800 + 201 * 9


def idx(array):
    header = (0x800 | array.ndim).to_bytes(4, "big") + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return gzip.compress(header + array.tobytes())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Ten classes, told apart by the row that is bright."""
    random = np.random.default_rng(0)
    for part, count in (("train", 600), ("t10k", 700)):
        classes = random.integers(0, 10, count).astype(np.uint8)
        images = random.integers(0, 40, (count, 28, 28)).astype(np.uint8)
        images[np.arange(count), 2 * classes + 3] += 200
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(idx(images))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(classes))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("name", "parameters"), [("fashion-resnet8", 75_002), ("fashion-cnn", 941_386)])
def test_models_have_their_size_and_learn(folder, name, parameters):
    task = load_task(name)
    model, random = fresh(task).train(), np.random.default_rng(1)
    assert sum(p.numel() for p in model.parameters()) == parameters
    batch = task.batch(random, 16)
    assert batch[0].shape == (16, 1, 28, 28)
    assert abs(float(task.batch(random, 500)[0].mean())) < 0.05
    found = losses(task, model, batch, task.recipe.lr)
    assert found[-1] < 0.8 * found[0]


def test_missing_and_damaged_files_are_named(folder, monkeypatch):
    images = folder / "train-images-idx3-ubyte.gz"
    whole, labels = images.read_bytes(), (folder / "t10k-labels-idx1-ubyte.gz").read_bytes()
    for bad in (whole[:500], gzip.compress(gzip.decompress(whole)[:-1]), labels):
        images.write_bytes(bad)
        with pytest.raises(TraceError, match=r"train-images-idx3-ubyte\.gz"):
            load_task("fashion-resnet8")
    monkeypatch.setenv(VARIABLE, str(folder / "elsewhere"))
    with pytest.raises(TraceError, match="install Debian's dataset-fashion-mnist, or set GTRACE_FASHION_MNIST"):
        load_task("fashion-resnet8")


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, gtrace.training, gtrace.training.tasks; gtrace.training.RefitSchedule\n"
        "print([m for m in ('torch', 'numpy', 'numba', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("use", ["train", "compress", "digits-cnn"])
def test_torch_missing_is_said_in_one_line(monkeypatch, use):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match=r"needs PyTorch.*pip install torch"):
        load_task(use) if "-" in use else getattr(gtrace.training, use)
