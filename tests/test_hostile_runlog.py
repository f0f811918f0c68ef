"""Run logs that somebody damaged or forged end in one line, before memory is spent."""

import json
import os
import shutil
from pathlib import Path

import pytest

from gtrace.errors import TraceError
from gtrace.report.inputs import kind_of, make_report, newest_results
from gtrace.runlog import MAX_LINE, RunLogWriter, read_runlog

STUDY = {"command": ["gtrace", "train"], "task": "digits-cnn", "workers": 4, "seed": 0, "tensors": {"w": 3}}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.jsonl"
    with RunLogWriter(path, STUDY) as log:
        for step in range(3):
            log.write("step", run="qsgd:bits=4", seed=0, step=step, loss=2.5 - step, bits=96, bits_float32=384)
        log.write("eval", run="qsgd:bits=4", seed=0, step=2, loss=0.5, accuracy=0.9)
        log.write("end", run="qsgd:bits=4", seed=0, steps=3, loss=0.5, accuracy=0.9, bits=288, ratio=4.0, seconds=1.0)
    return path


def refused(path, *words):
    with pytest.raises(TraceError) as error:
        make_report(runs=[path])
    assert str(error.value).isprintable()
    for word in words:
        assert word in str(error.value), error.value


def test_the_log_is_fine(path):
    assert len(make_report(runs=[path]).runs[0].runs) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"type": "step", "loss": NaN}', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"type": 3}', "not a record"),
        ('{"type": "step", "run": "x", "step": "\\u001b[2J"}', "'step' of a step record is not a number"),
        ('{"type": "step", "run": "x", "step": null}', "'step' of a step record is not a number"),
        ('{"type": "step", "run": "x", "step": 1e999}', "out of range"),
        ('{"type": "step", "run": "x", "step": 0.5}', "out of range"),
        ('{"type": "step", "run": "x", "step": 1, "seed": ' + "9" * 400 + "}", "out of range"),
        ('{"type": "step", "run": "x", "step": 1, "seed": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"type": "step", "run": "x", "step": 1, "loss": true}', "'loss' of a step record is not a number"),
        ('{"type": "step", "run": "x", "step": 1, "bits": ' + "9" * 400 + "}", "out of range"),
        ('{"type": "eval", "run": "x", "step": 1, "accuracy": [1]}', "not a number"),
        ('{"type": "shadow", "run": "x", "tensor": {"a": 1}, "step": 1, "cosine": "x"}', "not a number"),
        ('{"type": "end", "step": 1}', "names no run"),
    ],
)
def test_a_forged_record(line, words, path):
    path.write_text(path.read_text() + line + "\n")
    refused(path, words)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"version": "2\x1b[2J"}, r"run log 2\x1b[2J"),
        ({"version": True}, "run log True"),
        ({"version": 1, "workers": 1e300}, "'workers' of a study record is out of range"),
        ({"version": 1, "workers": "four"}, "not a number"),
    ],
)
def test_a_forged_study(field, words, path):
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(first), **field}), *rest]) + "\n")
    refused(path, words)


def test_a_line_without_an_end_is_not_read(path):
    """100 GB of zeros take nothing on a disk and would fill any memory."""
    os.truncate(path, 100 * 2**30)
    refused(path, "line 7 is longer than", str(MAX_LINE))


def test_what_is_no_file_is_not_waited_for(path, tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for read in (read_runlog, kind_of):
        with pytest.raises(TraceError, match=r"no file|not a file"):
            read(tmp_path / "pipe.jsonl")
    os.mkfifo(tmp_path / "pipe.sweep.db")
    assert newest_results(tmp_path) == [path]


def test_a_foreign_log_among_the_results_is_passed_over(path, tmp_path):
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "text.jsonl").write_bytes(b"\xff\xfe")
    assert newest_results(tmp_path) == [path]


def test_nothing_is_written_beside_what_is_refused(path, tmp_path):
    shutil.copy(path, tmp_path / "b.jsonl")
    path.write_text('{"type": "study", "version": 99}\n')
    before = sorted(p.name for p in Path(tmp_path).iterdir())
    refused(path, "newer gtrace")
    assert sorted(p.name for p in Path(tmp_path).iterdir()) == before
