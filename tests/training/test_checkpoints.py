"""Checkpoints of a study: it goes on from them as if nothing had happened, and from nothing else."""

import os
import pickle

import pytest
import torch
from helpers_training import Regression, interrupt, without_times

from gtrace.costs import Network
from gtrace.errors import TraceError
from gtrace.runlog import read_runlog
from gtrace.training import Study
from gtrace.training.checkpoint import path_of
from gtrace.training.settings import JOINT_CODEC

CODECS = ["ef21:topk:ratio=0.2", "qsgdinf:bits=2"]


POLICIES = ["mqgrad:epsilon=0.4,period=2", "schedule:0=2,5=4", "adaptive:divisor=0.1"]
SMALL = {"steps": 8, "workers": 1, "batch_size": 4}
SIGNS = {"steps": 9, "eval_every": 3}
#: task, codecs and settings of studies
STUDIES = {
    "plain": (Regression, CODECS, {"steps": 6}),
    "seeds": (Regression, CODECS, {"steps": 6, "seeds": 2}),
    "policies": (
        Regression,
        ["ef:alq"],
        {"steps": 9, "policies": POLICIES, "down": "same", "network": Network.parse("1kbit/s", "0s", "ps", "2s")},
    ),
    "weights": ("digits-mlp".format, [], {**SMALL, "weights": ["optimal5", "xnor5"], "refit": "0,3"}),
    "onebit-adam:warmup=2": (Regression, [JOINT_CODEC], {**SIGNS, "optimizer": "onebit-adam:warmup=2"}),
    "zeroone-adam every=2": (Regression, [JOINT_CODEC], {**SIGNS, "optimizer": "zeroone-adam", "every": 2}),
    "ef-signsgd:scale=rms every=4": (Regression, [JOINT_CODEC], {**SIGNS, "every": 4}),
}


def study(kind="plain", **options):
    task, codecs, settings = STUDIES[kind]
    return Study(task(), codecs, **{"workers": 2, "eval_every": 2, **settings, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Kind of study -> one that was not interrupted, and its log."""
    found = {}
    for kind in STUDIES:
        found[kind] = study(kind), tmp_path_factory.mktemp("whole") / "log.jsonl"
        found[kind][0].run(found[kind][1])
    return found


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        *(("seeds", after) for after in (14, 27, 41, 54)),
        *(("policies", 20), ("policies", 36), ("weights", 22)),
        *((kind, 18) for kind in STUDIES if "=" in kind),
    ],
)
def test_an_interrupted_study_goes_on_to_the_same_weights_and_records(tmp_path, whole, kind, after):
    log, (expected, expected_log) = tmp_path / "log.jsonl", whole[kind]
    interrupt(study(kind), log, after)
    assert path_of(log).exists()
    again = study(kind)
    assert again.can_resume(log)
    again.run(log)
    for one, other in zip(expected._runs, again._runs, strict=True):
        for name, value in one._model.state_dict().items():
            assert torch.equal(value, other._model.state_dict()[name])
    assert without_times(read_runlog(log)) == without_times(read_runlog(expected_log))
    assert [r.loss for r in again.results] == [r.loss for r in expected.results]
    assert [r.tally.bits for r in again.results] == [r.tally.bits for r in expected.results]
    assert again.results[1].run == kind or "=" not in kind
    assert not path_of(log).exists()


def test_another_study_does_not_go_on_with_the_log(tmp_path):
    log = tmp_path / "log.jsonl"
    interrupt(study(), log, 20)
    before = log.read_bytes()
    for other in (study(seed=1), study(lr=0.5), Study(Regression(), CODECS[:1], workers=2, steps=6, eval_every=2)):
        assert not other.can_resume(log)
        with pytest.raises(Exception, match="already exists"):
            other.run(log)
    assert log.read_bytes() == before
    path_of(log).write_bytes(b"no checkpoint")
    with pytest.raises(TraceError, match="not a checkpoint, or a damaged one"):
        study().run(log)
    study().run(log, force=True)
    assert read_runlog(log)[-1]["type"] == "end"


@pytest.mark.parametrize("writes", range(3))
def test_a_study_killed_before_its_first_record_starts_again(tmp_path, monkeypatch, writes):
    log, left = tmp_path / "log.jsonl", [writes]
    real = os.replace

    def dies(*args):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        real(*args)

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        study().run(log)
    monkeypatch.undo()
    assert log.exists() == (writes == 2)
    assert not log.exists() or path_of(log).exists()
    again = study()
    again.run(log)
    assert read_runlog(log)[-1]["type"] == "end"
    assert not path_of(log).exists()


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A study that was interrupted: its log and its checkpoint."""
    log = tmp_path_factory.mktemp("study") / "log.jsonl"
    interrupt(study(), log, 18)
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
    refused(log, "not a checkpoint, or a damaged one")
    torch.save({"log_bytes": Attack()}, path_of(log))
    refused(log, "not a checkpoint, or a damaged one")
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
    refused(log, "not a checkpoint of this study")
