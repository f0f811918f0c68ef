"""The tasks on Fashion-MNIST, on a few made-up images in files of its format."""

import gzip

import numpy as np
import pytest
import torch
from helpers_training import losses

from gtrace.errors import TraceError
from gtrace.training import load_task
from gtrace.training.tasks.images import VARIABLE, FashionResNet8


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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = task.model()
    assert sum(p.numel() for p in model.parameters()) == parameters
    random = np.random.default_rng(1)
    batch = task.batch(random, 16)
    assert batch[0].shape == (16, 1, 28, 28)
    assert abs(float(task.batch(random, 500)[0].mean())) < 0.05
    found = losses(task, model, batch)
    assert found[-1] < 0.8 * found[0]


def test_a_smaller_test_takes_images_evenly_spread(folder):
    whole, part = FashionResNet8(), FashionResNet8(test_images=350)
    assert np.array_equal(part._test[1], whole._test[1][::2])
    assert np.array_equal(part._test[0], whole._test[0][::2])
    assert len(FashionResNet8(test_images=10_000)._test[1]) == 700


def test_the_test_covers_all_images(folder):
    task = load_task("fashion-resnet8")
    seen = []

    class Knows(torch.nn.Module):
        def forward(self, x):
            seen.append(len(x))
            rows = x.mean(3)[:, 0]
            scores = torch.zeros(len(x), 10)
            scores[torch.arange(len(x)), (rows.argmax(1) - 3) // 2] = 20.0
            scores[0] = 0.0  # of each part, one answer is a guess
            return scores

    found = task.evaluate(Knows())
    assert seen == [500, 200]
    assert 698 / 700 <= found.accuracy <= 1
    assert found.loss == pytest.approx(2 * np.log(10) / 700, rel=1e-3)


def test_missing_and_damaged_files_are_named(folder, monkeypatch):
    images = folder / "train-images-idx3-ubyte.gz"
    whole = images.read_bytes()
    for bad in (
        whole[:500],
        gzip.compress(gzip.decompress(whole)[:-1]),
        (folder / "t10k-labels-idx1-ubyte.gz").read_bytes(),
    ):
        images.write_bytes(bad)
        with pytest.raises(TraceError, match=r"train-images-idx3-ubyte\.gz"):
            load_task("fashion-resnet8")
    monkeypatch.setenv(VARIABLE, str(folder / "elsewhere"))
    with pytest.raises(TraceError, match="install Debian's dataset-fashion-mnist, or set GTRACE_FASHION_MNIST"):
        load_task("fashion-resnet8")
