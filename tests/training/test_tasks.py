import numpy as np
import pytest
import torch
from helpers_training import losses

from gtrace.errors import TraceError, UsageError
from gtrace.training import load_task, task_names, tasks
from gtrace.training.tasks import describe_task


@pytest.fixture(params=["digits-cnn", "digits-mlp", "char-lstm", "char-transformer"])
def task(request):
    return load_task(request.param)


def test_a_task_is_called_what_it_is_known_by(task):
    assert task.name in task_names()
    assert describe_task(task.name)
    assert load_task(task.name).recipe == task.recipe


def test_batches_come_from_the_generator_alone(task):
    first, again, other = (task.batch(np.random.default_rng(seed), 6) for seed in (1, 1, 2))
    assert len(first[0]) == len(first[1]) == 6
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_models_come_from_torchs_generator_alone(task):
    weights = []
    for seed in (1, 1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            weights.append(torch.cat([p.detach().flatten() for p in task.model().parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_an_untrained_model_knows_nothing_and_can_learn(task):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = task.model()
    classes = 10 if task.name.startswith("digits") else 60
    with torch.no_grad():
        found = task.evaluate(model.eval())
    assert found.loss == pytest.approx(np.log(classes), rel=0.1)
    if task.name.startswith("char-"):
        assert found.accuracy is None
    else:
        assert 0 <= found.accuracy < 0.3
    batch = task.batch(np.random.default_rng(0), 8)
    found = losses(task, model.eval(), batch)
    assert found[-1] < 0.95 * found[0]


def test_training_and_held_out_digits_are_apart():
    task = load_task("digits-mlp")
    assert len(task._train[1]) == 1438
    assert len(task._test[1]) == 359
    assert all((task._test[1] == digit).sum() > 20 for digit in range(10))
    table = np.loadtxt(tasks.sample_file("digits.csv.gz"), delimiter=",", dtype=np.float32)
    np.testing.assert_array_equal(task._test[0][1], table[9, :-1] / 16)
    np.testing.assert_array_equal(task._train[0][4], table[5, :-1] / 16)
    assert task._test[1][1] == int(table[9, -1])


def test_targets_of_the_text_are_the_next_characters():
    task = load_task("char-lstm")
    inputs, targets = task.batch(np.random.default_rng(0), 3)
    assert inputs.shape == targets.shape == (3, 64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    line = "From fairest creatures we desire increase,"
    assert "".join(task._alphabet[task._train[: len(line)]]) == line


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(UsageError, match=r"no task 'char-lsmt'; did you mean char-lstm"):
        load_task("char-lsmt")


def test_installed_data_come_before_those_of_a_checkout(tmp_path, monkeypatch):
    installed, checkout = tmp_path / "installed", tmp_path / "checkout"
    monkeypatch.setattr(tasks, "_FOLDERS", (installed, checkout))
    with pytest.raises(TraceError, match=r"digits\.csv\.gz: the data of the samples are missing .*install gtrace"):
        load_task("digits-cnn")
    for folder in (checkout, installed):
        folder.mkdir()
        (folder / "a.txt").touch()
        assert tasks.sample_file("a.txt") == folder / "a.txt"


def test_where_the_data_are_looked_for():
    """The wheel carries samples/ as gtrace/workflows/samples."""
    package, checkout = tasks._FOLDERS
    assert package.parts[-4:] == ("gtrace", "workflows", "samples", "data")
    assert checkout.parts[-2:] == ("samples", "data")
    assert package.parents[3] == checkout.parents[1]
