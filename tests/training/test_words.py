import sys
import types

import numpy as np
import pytest
import torch
from torch.nn import functional

from gtrace.errors import TraceError
from gtrace.training import load_task, train
from gtrace.training.tasks import text

TRAIN = " the cat sat on the mat \n a dog sat on the <unk> \n" * 20
VALID = " the dog sat on a cat \n" * 200


@pytest.fixture
def without_treebank(monkeypatch):
    monkeypatch.delenv(text.VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "treebank", None)


def fresh(task, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.model().eval()


def test_the_sonnets_in_words():
    task = load_task("word-lstm")
    shown = task._vocabulary[task._train[:8]]
    assert list(shown) == ["from", "fairest", "creatures", "we", "desire", "increase", ",", "\n"]
    assert len(task._test) == pytest.approx(len(task._train) / 9, rel=0.01)
    inputs, targets = task.batch(np.random.default_rng(0), 3)
    assert inputs.shape == targets.shape == (3, text.WORD_LENGTH)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    again, _ = task.batch(np.random.default_rng(0), 3)
    assert torch.equal(inputs, again)


def test_an_untrained_model_knows_nothing_and_learns():
    study = train("word-lstm", [], workers=1, steps=6, batch_size=4, lr=2.0)
    (result,) = study.results
    assert result.first_loss == pytest.approx(np.log(len(study.task._vocabulary)), rel=0.02)
    assert result.loss < result.first_loss
    assert result.accuracy is None


def test_the_loss_of_word_frequencies():
    task = load_task("word-lstm")
    counts = {}
    for code in task._train.tolist():
        counts[code] = counts.get(code, 0) + 1
    total = len(task._train) + len(task._vocabulary)
    by_hand = [-np.log((counts.get(code, 0) + 1) / total) for code in task._test[1:].tolist()]
    assert task.unigram_loss == pytest.approx(np.mean(by_hand))


def test_the_test_in_pieces_is_that_of_the_whole_text(monkeypatch):
    task = load_task("word-lstm")
    model = fresh(task)
    task._test = task._test[:900]
    with torch.no_grad():
        scores = model(task._test[None, :-1])[0]
        whole = functional.cross_entropy(scores, task._test[1:]).item()
        assert task.evaluate(model).loss == pytest.approx(whole, rel=1e-5)
        monkeypatch.setattr(text, "_PIECE", 7)
        assert task.evaluate(model).loss == pytest.approx(whole, rel=1e-5)


def test_the_treebank_from_a_folder(tmp_path, monkeypatch, without_treebank):
    (tmp_path / "ptb.train.txt").write_text(TRAIN)
    (tmp_path / "ptb.valid.txt").write_text(VALID)
    monkeypatch.setenv(text.VARIABLE, str(tmp_path))
    task = load_task("ptb-lstm")
    assert list(task._vocabulary) == ["<eos>", "<unk>", "a", "cat", "dog", "mat", "on", "sat", "the"]
    assert list(task._vocabulary[task._train[:7]]) == ["the", "cat", "sat", "on", "the", "mat", "<eos>"]
    assert list(task._vocabulary[task._test[:3]]) == ["the", "dog", "sat"]
    assert len(task._train) == 20 * 14
    assert sum(p.numel() for p in fresh(task).parameters()) == 9 * 200 + 4 * 800 * 200 + 4 * 800 + 201 * 9


def test_the_treebank_from_its_package(monkeypatch):
    monkeypatch.delenv(text.VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "treebank", types.SimpleNamespace(penn={"train": TRAIN, "valid": VALID}))
    assert len(load_task("ptb-lstm")._train) == 20 * 14


def test_without_the_treebank_one_line_says_where_it_belongs(tmp_path, monkeypatch, without_treebank):
    with pytest.raises(TraceError, match=r"Penn Treebank: not found .* set GTRACE_PTB .* or install"):
        load_task("ptb-lstm")
    monkeypatch.setenv(text.VARIABLE, str(tmp_path))
    with pytest.raises(TraceError, match=r"ptb\.train\.txt"):
        load_task("ptb-lstm")
    monkeypatch.delenv(text.VARIABLE)
    monkeypatch.setitem(sys.modules, "treebank", types.SimpleNamespace())
    with pytest.raises(TraceError, match="Penn Treebank"):
        load_task("ptb-lstm")
