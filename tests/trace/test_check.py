"""A check finds every fault, and a repair keeps everything else."""

import json
import os
import random
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
import zarr
from helpers_trace import (
    SUFFIXES,
    check_gradients,
    edit_json,
    gradient,
    loss,
    present,
    write_arrays,
    write_steps,
    write_trace,
)

from gtrace.cli import main
from gtrace.errors import TraceError, UsageError
from gtrace.trace import create_trace, open_trace
from gtrace.trace.check import check_trace, repair_trace

STEPS = range(70)
GROUP = "rank00000/weight_grad"


@pytest.fixture(params=SUFFIXES)
def whole(request, tmp_path):
    return write_trace(tmp_path / f"run{request.param}", STEPS)


@pytest.fixture
def path(tmp_path):
    return write_trace(tmp_path / "run.zarr", STEPS)


@pytest.fixture(params=SUFFIXES)
def killed(request, tmp_path):
    """The trace of a process that ended in the middle of its 70th step."""
    program = "import os, sys; from helpers_trace import *; writer = create_trace(sys.argv[1]); "
    program += "write_steps(writer, range(69)); writer.append(69, 'fc.bias', gradient('fc.bias', 69)); os._exit(0)"
    place = tmp_path / f"run{request.param}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program, place], check=True, env=environment)
    return place


def lost(path):
    """(tensor, step) that the made-up trace has and this one does not; everything else is right and nothing is more."""
    missing = set()
    with open_trace(path) as trace:
        there = {info.name: set(trace.steps(info.name).tolist()) for info in trace.tensors}
        for name in ("fc.bias", "fc.weight", "embed/weight", "scale"):
            for step in present(name, STEPS):
                if step in there.get(name, ()):
                    np.testing.assert_array_equal(trace.read(name, step), gradient(name, step).ravel())
                else:
                    missing.add((name, step))
            assert there.get(name, set()) <= set(present(name, STEPS))
    return missing


def check_repaired(path, expected):
    """After a repair just these are missing, and nothing is left to be repaired."""
    repair = repair_trace(path)
    assert repair.changed
    assert lost(path) == expected
    assert check_trace(path).clean
    assert not repair_trace(path).changed
    assert repair.report.wrong == len(expected)
    names = {path.name} | ({repair.backup.name} if repair.backup else set())
    assert set(os.listdir(path.parent)) == names
    with open_trace(path) as trace:
        assert trace.scalars()["step"].tolist() == list(STEPS)[: len(trace.scalars()["step"])]
    return repair


def test_a_whole_trace_is_clean_and_stays_as_it_is(whole):
    before = {file: file.stat().st_mtime_ns for file in whole.parent.rglob("*")}
    report = check_trace(whole)
    assert report.clean
    assert (report.steps, report.gradients, report.wrong) == (70, 275, 0)
    assert not repair_trace(whole).changed
    assert before == {file: file.stat().st_mtime_ns for file in whole.parent.rglob("*")}


def test_a_killed_writer(killed):
    report = check_trace(killed)
    assert report.unfinished
    assert not report.clean
    assert (report.status, report.live, report.steps, report.faults) == ("writing", False, 69, ())
    repair = repair_trace(killed)
    assert repair.backup is None
    assert check_trace(killed).clean
    with open_trace(killed) as trace:
        check_gradients(trace, range(69))
        assert trace.attrs["status"] == "interrupted"
        assert trace.scalars()["loss"].tolist() == [loss(step) for step in range(69)]
    # Other tools open it again.
    if killed.suffix == ".zarr":
        assert zarr.open_group(killed, mode="r")[GROUP]["step"].shape == (69,)
    else:
        with h5py.File(killed, "r") as file:
            assert file[GROUP]["step"].shape == (69,)
    assert os.listdir(killed.parent) == [killed.name]


def test_a_trace_that_is_being_written_is_checked_and_not_repaired(tmp_path):
    for suffix in SUFFIXES:
        place = tmp_path / f"run{suffix}"
        with create_trace(place) as writer:
            write_steps(writer, range(5))
            report = check_trace(place)
            assert report.live
            assert report.clean
            assert report.steps == 5
            with pytest.raises(UsageError, match="still writing it"):
                repair_trace(place)
        assert not check_trace(place).live


def test_leftovers_are_removed(whole):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for process in (dead.pid, os.getpid()):
        whole.with_name(f".{whole.name}.gtrace-partial-{process}").write_text("x")
    assert len(check_trace(whole).leftovers) == 1
    repair_trace(whole)
    assert sorted(os.listdir(whole.parent)) == [f".{whole.name}.gtrace-partial-{os.getpid()}", whole.name]
    assert lost(whole) == set()


def test_a_flipped_bit(path):
    chunk = path / GROUP / "embed%2Fweight" / "c.30.0"
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 16
    chunk.write_bytes(data)
    (fault,) = check_trace(path).faults
    assert (fault.tensor, fault.step) == ("embed/weight", 30)
    repair = check_repaired(path, {("embed/weight", 30)})
    assert repair.backup.name == "run.zarr.damaged"
    with open_trace(path) as trace:
        assert trace.status == "complete"
        assert trace.attrs["repaired"]["lost"] == 1
    with pytest.raises(TraceError), open_trace(repair.backup) as trace:
        trace.read("embed/weight", 30)


def test_a_flipped_bit_in_hdf5(tmp_path):
    path = write_trace(tmp_path / "run.h5", STEPS)
    data = bytearray(path.read_bytes())
    place = data.find(gradient("embed/weight", 30).tobytes())
    data[place + 1000] ^= 16
    path.write_bytes(data)
    (fault,) = check_trace(path).faults
    assert (fault.tensor, fault.step) == ("embed/weight", 30)
    check_repaired(path, {("embed/weight", 30)})


@pytest.mark.parametrize("damage", ["truncated", "missing", "folder"])
def test_a_chunk_of_several_rows(damage, path):
    chunk = path / GROUP / "fc.weight" / "c.0.0"
    if damage == "truncated":
        os.truncate(chunk, chunk.stat().st_size - 9)
    else:
        chunk.unlink()
        if damage == "folder":
            chunk.mkdir()
    report = check_trace(path)
    expected = {("fc.weight", step) for step in present("fc.weight", range(64))}
    assert {(fault.tensor, fault.step) for fault in report.faults} == expected
    check_repaired(path, expected)


@pytest.mark.parametrize("table", ["present", "norm2", "absmax", "zeros", "nonfinite", "crc32c", "loss"])
def test_a_damaged_table_costs_no_gradient(table, path):
    """What it says follows from the gradients, but for numbers about steps."""
    (chunk,) = (path / GROUP / table).glob("c.*")
    chunk.write_bytes(chunk.read_bytes()[:-3])
    assert check_trace(path).faults
    check_repaired(path, set())
    with open_trace(path) as trace:
        assert np.isnan(trace.scalars()["loss"]).all() == (table == "loss")


def test_wrong_statistics_and_values_that_should_not_be_there(tmp_path, path):
    other = write_trace(tmp_path / "other.zarr", range(100, 170))
    shutil.copyfile(other / GROUP / "norm2" / "c.0.0", path / GROUP / "norm2" / "c.0.0")
    # Gradients of 1 and 2, where this tensor is absent.
    name = "fc.weight"
    write_arrays(tmp_path / "full.zarr", {name: {step: gradient(name, step) for step in STEPS}})
    shutil.copyfile(tmp_path / "full.zarr" / GROUP / name / "c.0.0", path / GROUP / name / "c.0.0")
    shutil.rmtree(other)
    shutil.rmtree(tmp_path / "full.zarr")
    report = check_trace(path)
    wrong = {"stored norm2 does not match the values", "values although the tensor is absent"}
    assert {fault.what for fault in report.faults} == wrong
    absent = {(fault.tensor, fault.step) for fault in report.faults if fault.what.startswith("values")}
    assert absent == {(name, 1), (name, 2)}
    check_repaired(path, set())


@pytest.mark.parametrize("place", [".", "rank00000", GROUP])
def test_metadata_of_groups(place, path):
    (path / place / "zarr.json").write_text("{")
    assert len(check_trace(path).faults) == 1
    check_repaired(path, set())


def test_metadata_of_a_tensor(path):
    (path / GROUP / "fc.weight" / "zarr.json").write_text("{")
    assert any("fc.weight/zarr.json" in fault.what for fault in check_trace(path).faults)
    repair_trace(path)
    assert lost(path) == {("fc.weight", step) for step in present("fc.weight", STEPS)}


def test_steps_that_fall_end_the_trace(path):
    array = zarr.open_array(path / GROUP / "step", mode="r+")
    array[50:] = 3
    assert any("steps do not ascend" in fault.what for fault in check_trace(path).faults)
    repair_trace(path)
    check_gradients(path, range(50))


def test_a_damaged_journal_ends_the_trace_there(tmp_path):
    path, copy = tmp_path / "run.zarr", tmp_path / "copy.zarr"
    with create_trace(path) as writer:
        write_steps(writer, range(20))
        shutil.copytree(path, copy)
    journal = copy / GROUP / "step" / "journal"
    data = bytearray(journal.read_bytes())
    # A value of one gradient is found by its checksum, like in a chunk.
    data[data.find(gradient("fc.bias", 4).tobytes())] ^= 1
    journal.write_bytes(data)
    (fault,) = check_trace(copy).faults
    assert (fault.tensor, fault.step) == ("fc.bias", 4)
    place = data.find(np.float64(loss(10)).tobytes())
    data[place] ^= 1
    journal.write_bytes(data)
    with pytest.raises(TraceError, match="journal: checksum mismatch at row 10"):
        open_trace(copy)
    repair_trace(copy)
    with open_trace(copy) as trace:
        assert trace.scalars()["step"].tolist() == list(range(10))
        assert trace.steps("fc.bias").tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_damage_anywhere_is_repaired_or_refused(tmp_path):
    """Whatever happens to one file, a repair ends with a trace that is right, or says that it cannot."""
    path = write_trace(tmp_path / "run.zarr", range(12))
    rng = random.Random(8)
    files = sorted(p.relative_to(path) for p in path.rglob("*") if p.is_file())
    for _ in range(40):
        copy = tmp_path / "copy" / "run.zarr"
        shutil.copytree(path, copy)
        file = copy / rng.choice(files)
        data = bytearray(file.read_bytes())
        place = rng.randrange(len(data))
        if rng.random() < 0.5:
            data[place] ^= 1 << rng.randrange(8)
        else:
            del data[place:]
        file.write_bytes(data)
        try:
            repair_trace(copy)
        except TraceError:
            assert file == copy / "zarr.json"
        else:
            assert check_trace(copy).clean
        shutil.rmtree(copy.parent)


def test_what_is_no_trace_is_refused(tmp_path):
    for place in (tmp_path / "no.zarr", tmp_path):
        with pytest.raises(TraceError):
            check_trace(place)
        with pytest.raises(TraceError):
            repair_trace(place)


def test_the_command(path, capsys):
    with pytest.raises(SystemExit) as done:
        main(["check", str(path)])
    assert done.value.code == 0
    assert "70 steps, 275 of 275 gradients are right" in capsys.readouterr().out
    (path / GROUP / "fc.weight" / "c.0.0").unlink()
    edit_json(path / "zarr.json", lambda document: document.pop("consolidated_metadata"))
    with pytest.raises(SystemExit) as done:
        main(["check", str(path)])
    assert done.value.code == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{GROUP}, tensor 'fc.weight', 62 steps from 0 to 63: ")
    assert "62 faults" in lines[1]
    assert "--repair" in lines[2]
    with pytest.raises(SystemExit) as done:
        main(["check", str(path), "--json"])
    assert done.value.code == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["wrong"], document["steps"], len(document["faults"])) == (62, 70, 62)
    assert document["faults"][0]["tensor"] == "fc.weight"
    with pytest.raises(SystemExit) as done:
        main(["check", str(path), "--repair"])
    assert done.value.code == 0
    assert "run.zarr.damaged" in capsys.readouterr().out
