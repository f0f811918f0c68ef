"""Checkpoints that somebody damaged or forged are refused in one line; nothing in them is run."""

from __future__ import annotations

import os
import pickle

import pytest
import torch

from gtrace.errors import TraceError
from gtrace.training import Study
from gtrace.training.checkpoint import path_of

from ..helpers_training import Regression


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


def study():
    return Study(Regression(), ["qsgdinf:bits=2"], workers=2, steps=6, eval_every=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A study that was interrupted: its log and its checkpoint."""
    log = tmp_path_factory.mktemp("study") / "log.jsonl"
    left = [12]

    def interrupt(_):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study().run(log, on_record=interrupt)
    return log.read_bytes(), path_of(log).read_bytes()


@pytest.fixture
def log(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "log.jsonl"
    log.write_bytes(saved[0])
    path_of(log).write_bytes(saved[1])
    return log


def refused(log, *words):
    before = {p.name: p.read_bytes() for p in log.parent.iterdir()}
    with pytest.raises(TraceError) as error:
        study().run(log)
    assert str(error.value).count("\n") == 0
    for word in (str(path_of(log)), *words):
        assert word in str(error.value), error.value
    assert {p.name: p.read_bytes() for p in log.parent.iterdir()} == before


def test_code_is_not_run(log):
    path_of(log).write_bytes(pickle.dumps(Attack()))
    refused(log, "no checkpoint, or a damaged one")
    torch.save({"log_bytes": Attack()}, path_of(log))
    refused(log, "no checkpoint, or a damaged one")
    assert not os.path.exists("attacked")


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.clear(),
        lambda s: s.update(seed=None, runs=[]),
        lambda s: s.update(runs=3),
        lambda s: s["runs"][0].update(model={}),
        lambda s: s["runs"][1].update(exchange=[1]),
        lambda s: s["runs"][1].update(result={"tally": {"x": 1}}),
        lambda s: s.update(done=[{"run": "x"}]),
        lambda s: s.update(warnings=1),
        lambda s: s.update(log_bytes=2**40),
        lambda s: s.update(log_bytes=-1),
        lambda s: s.update(log_bytes="all"),
    ],
)
def test_wrong_contents(change, log):
    """A length beyond the log's own would have made a file of a terabyte of it."""
    content = torch.load(path_of(log), weights_only=True)
    change(content)
    torch.save(content, path_of(log))
    refused(log, "no checkpoint of this study")


def test_what_is_right_goes_on(log):
    study().run(log)
    assert not path_of(log).exists()
