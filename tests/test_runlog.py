"""Run logs: what is written is read, killed writers leave what they wrote, and foreign files end in one line."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from gtrace.errors import OutputExistsError, TraceError, UsageError
from gtrace.report.inputs import kind_of, make_report, newest_results
from gtrace.runlog import MAX_LINE, RunLogWriter, read_runlog

STUDY = {"command": ["gtrace", "train"], "task": "digits-cnn", "workers": 4, "seed": 0, "tensors": {"w": 3}}
STEPS = [
    {"run": "qsgd:bits=4", "seed": 0, "step": step, "loss": 2.5 - step, "bits": 96, "bits_float32": 384}
    for step in range(3)
]


def write(path, steps=STEPS, **options):
    with RunLogWriter(path, STUDY, **options) as log:
        for step in steps:
            log.write("step", **step)
    return path


@pytest.fixture
def path(tmp_path):
    path = write(tmp_path / "run.jsonl")
    with path.open("a") as log:
        for kind, about in {
            "eval": {"step": 2, "loss": 0.5, "accuracy": 0.9},
            "end": {"steps": 3, "loss": 0.5, "accuracy": 0.9, "bits": 288, "ratio": 4.0, "seconds": 1.0},
        }.items():
            log.write(json.dumps({"type": kind, "run": "qsgd:bits=4", "seed": 0, **about}) + "\n")
    return path


def test_records_come_back_in_order_as_soon_as_they_are_written(tmp_path):
    wanted = [{"type": "study", "version": 1, **STUDY}]
    with RunLogWriter(tmp_path / "a.jsonl", STUDY) as log:
        assert read_runlog(tmp_path / "a.jsonl") == wanted
        for loss in (2.5, math.nan, math.inf):
            log.write("step", loss=loss)
            wanted.append({"type": "step", "loss": loss if loss == 2.5 else None})
            assert read_runlog(tmp_path / "a.jsonl") == wanted


def test_a_last_line_cut_anywhere_is_ignored_and_nothing_else(path):
    whole, records = path.read_bytes(), read_runlog(path)
    for end in range(whole.rindex(b"\n", 0, -1) + 1, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert read_runlog(path) == records[:-1]
    path.write_bytes(whole[:-1])
    assert read_runlog(path) == records


WRITING = """
import sys; from pathlib import Path; from gtrace.runlog import RunLogWriter
log = RunLogWriter(Path(sys.argv[1]), {})
k = 0
while True: log.write('step', step=k, text='x' * 3000); k += 1
"""


def test_killed_while_writing(tmp_path):
    path = tmp_path / "a.jsonl"
    child = subprocess.Popen([sys.executable, "-c", WRITING, str(path)])
    try:
        deadline = time.monotonic() + 60
        while not (path.exists() and path.stat().st_size > 50_000):
            assert time.monotonic() < deadline
            assert child.poll() is None
            time.sleep(0.01)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    records = read_runlog(path)
    assert [record["step"] for record in records[1:]] == list(range(len(records) - 1))
    assert len(records) > 15


def test_an_existing_file_is_left_alone_unless_a_new_one_takes_its_place(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("mine")
    for study, force, error in ((STUDY, False, OutputExistsError), ({"seed": object()}, True, TypeError)):
        with pytest.raises(error):
            RunLogWriter(path, study, force=force)
        assert path.read_text() == "mine"
    assert len(read_runlog(write(path, force=True))) == 4
    assert os.listdir(tmp_path) == ["a.jsonl"]
    with pytest.raises(UsageError, match=r"none/a\.jsonl: cannot be written \(No such file"):
        RunLogWriter(tmp_path / "none" / "a.jsonl", STUDY)


def test_a_full_disk_keeps_what_was_written(tmp_path, monkeypatch):
    class Full:
        def write(self, _text=""):
            raise OSError(28, "No space left on device")

        # What is still in a buffer is tried again at the end.
        flush = close = write

    log = RunLogWriter(tmp_path / "a.jsonl", STUDY)
    log.write("step", step=0)
    log.close()
    monkeypatch.setattr(log, "_file", Full())
    with pytest.raises(TraceError, match=r"a\.jsonl: cannot be written any further \(No space left"):
        log.write("step", step=1)
    log.close()
    assert len(read_runlog(tmp_path / "a.jsonl")) == 2


def refused(path, *words):
    """A report of the log is refused in one line with these words, and nothing is written."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(TraceError) as error:
        make_report(runs=[path])
    assert str(error.value).isprintable()
    for word in (path.name, *words):
        assert word in str(error.value), error.value
    assert sorted(path.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a run log"),
        (b'{"type": "step"}\n', "first record is not a study"),
        (b"[1, 2]\n", "line 1 is not a record"),
        (b'{"type": "study", "version": 2}\n', "newer gtrace"),
        (b"\x93NUMPY\xff\xfe", "not UTF-8"),
    ],
)
def test_what_is_no_run_log_is_refused_in_one_line(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    refused(tmp_path / "a.jsonl", message)
    assert (tmp_path / "a.jsonl").read_bytes() == content


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"type": "step", "loss": NaN}', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"type": "step", "run": "x", "step": "\\u001b[2J"}', "'step' of a step record is not a number"),
        ('{"type": "step", "run": "x", "step": 1e999}', "out of range"),
        ('{"type": "step", "run": "x", "step": 1, "seed": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"type": "shadow", "run": "x", "tensor": {"a": 1}, "step": 1, "cosine": "x"}', "not a number"),
    ],
)
def test_a_forged_record(line, words, path):
    assert len(make_report(runs=[path]).runs[0].runs) == 1
    path.write_text(path.read_text() + line + "\n")
    refused(path, words)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"version": "2\x1b[2J"}, r"run log 2\x1b[2J"),
        ({"version": 99}, "newer gtrace"),
        ({"workers": 1e300}, "'workers' of a study record is out of range"),
    ],
)
def test_a_forged_study(field, words, path):
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(first), **field}), *rest]) + "\n")
    refused(path, words)


def test_a_damaged_line_and_one_without_an_end_are_not_read(path):
    """100 GB of zeros take nothing on a disk and would fill any memory."""
    whole = path.read_text()
    path.write_text(whole.replace('"step": 0', '"step": \n'))
    refused(path, "line 2 is not JSON")
    path.write_text(whole)
    os.truncate(path, 100 * 2**30)
    refused(path, "line 7 is longer than", str(MAX_LINE))


def test_what_is_no_file_is_not_waited_for(path, tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        read_runlog(tmp_path)
    os.mkfifo(tmp_path / "pipe.jsonl")
    for read in (read_runlog, kind_of):
        with pytest.raises(TraceError, match=r"no file|not a file"):
            read(tmp_path / "pipe.jsonl")
    # Foreign logs among the results are passed over.
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "text.jsonl").write_bytes(b"\xff\xfe")
    assert newest_results(tmp_path) == [path]
