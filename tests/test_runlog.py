import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from gtrace.errors import OutputExistsError, TraceError, UsageError
from gtrace.runlog import RunLogWriter, read_runlog

STUDY = {"command": "gtrace train --codec qsgd", "task": "digits-cnn", "workers": 4, "seed": 0}


def write(path, steps=3, **options):
    with RunLogWriter(path, STUDY, **options) as log:
        for step in range(steps):
            log.write("step", run="qsgd:bits=4", step=step, loss=2.5 - step)
    return path


def test_records_come_back_in_order(tmp_path):
    records = read_runlog(write(tmp_path / "a.jsonl"))
    assert records[0] == {"type": "study", "version": 1, **STUDY}
    assert records[1:] == [
        {"type": "step", "run": "qsgd:bits=4", "step": step, "loss": 2.5 - step} for step in range(3)
    ]


def test_each_record_is_readable_as_soon_as_it_is_written(tmp_path):
    with RunLogWriter(tmp_path / "a.jsonl", STUDY) as log:
        assert [record["type"] for record in read_runlog(tmp_path / "a.jsonl")] == ["study"]
        log.write("warning", text="w")
        assert read_runlog(tmp_path / "a.jsonl")[-1] == {"type": "warning", "text": "w"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_become_null(tmp_path, value):
    with RunLogWriter(tmp_path / "a.jsonl", STUDY) as log:
        log.write("eval", loss=value, accuracy=None)
    assert read_runlog(tmp_path / "a.jsonl")[1] == {"type": "eval", "loss": None, "accuracy": None}
    for line in (tmp_path / "a.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_a_last_line_cut_anywhere_is_ignored_and_nothing_else(tmp_path):
    path = write(tmp_path / "a.jsonl")
    whole = path.read_bytes()
    records = read_runlog(path)
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert read_runlog(path) == records[:-1]
    path.write_bytes(whole[:-1])
    assert read_runlog(path) == records


def test_killed_while_writing(tmp_path):
    path = tmp_path / "a.jsonl"
    code = (
        "import sys; from pathlib import Path; from gtrace.runlog import RunLogWriter\n"
        "log = RunLogWriter(Path(sys.argv[1]), {})\n"
        "k = 0\n"
        "while True: log.write('step', step=k, text='x' * 3000); k += 1\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)])
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


def test_a_damaged_line_before_the_last_is_an_error(tmp_path):
    path = write(tmp_path / "a.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:20] + "\n" + lines[2])
    with pytest.raises(TraceError, match=r"line 2 is not JSON"):
        read_runlog(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a run log"),
        (b'{"type": "stu', "not a run log"),
        (b'{"type": "step"}\n', "first record is not a study"),
        (b"[1, 2]\n", "line 1 is not a record"),
        (b'{"kind": "study"}\n', "line 1 is not a record"),
        (b'{"type": "study", "version": 2}\n', "newer gtrace"),
        (b'{"type": "study"}\n', "newer gtrace"),
        (b"\x93NUMPY\xff\xfe", "not UTF-8"),
    ],
)
def test_what_is_no_run_log_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as error:
        read_runlog(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert path.read_bytes() == content


def test_a_missing_log_or_a_folder_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"nowhere\.jsonl: cannot be read"):
        read_runlog(tmp_path / "nowhere.jsonl")
    with pytest.raises(TraceError, match="cannot be read"):
        read_runlog(tmp_path)


def test_an_existing_file_is_left_alone_without_force(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("mine")
    with pytest.raises(OutputExistsError, match="already exists"):
        RunLogWriter(path, STUDY)
    assert path.read_text() == "mine"
    assert len(read_runlog(write(path, steps=1, force=True))) == 2
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_log_that_cannot_be_started_leaves_the_old_one(tmp_path):
    path = write(tmp_path / "a.jsonl")
    before = path.read_bytes()
    with pytest.raises(TypeError):
        RunLogWriter(path, {"seed": object()}, force=True)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"none/a\.jsonl: cannot be written \(No such file"):
        RunLogWriter(tmp_path / "none" / "a.jsonl", STUDY)


def test_a_full_disk_keeps_what_was_written(tmp_path, monkeypatch):
    log = RunLogWriter(tmp_path / "a.jsonl", STUDY)
    log.write("step", step=0)
    file = log._file

    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        flush = close = lambda self: None

    monkeypatch.setattr(log, "_file", Full())
    with pytest.raises(TraceError, match=r"a\.jsonl: cannot be written any further \(No space left"):
        log.write("step", step=1)
    file.close()
    assert len(read_runlog(tmp_path / "a.jsonl")) == 2
