"""A check finds every fault, and a repair keeps everything else."""

import json
import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import zarr
from fuzz.mutations import edited, random_edits
from helpers_trace import (
    SHAPES,
    SUFFIXES,
    check_gradients,
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


def damage(path, entry="gone"):
    (chunk,) = (path / GROUP / entry).glob("c.0*")
    os.truncate(chunk, chunk.stat().st_size - 1)


@pytest.fixture
def small(tmp_path):
    """Two tensors, of which one will be damaged, with a further number."""
    path = tmp_path / "run.zarr"
    with create_trace(path) as writer:
        for step in range(3):
            writer.append(step, "gone", np.full(5, 7.0 + step), numbers={"second_moment": 5.0 + step})
            if step != 1:
                writer.append(step, "kept", np.full(4, 0.1 * (step + 1)), numbers={"second_moment": 2.0 + step})
            writer.commit(step, loss=1.0 + step)
    return path


def lost(path):
    """(tensor, step) that the made-up trace has and this one does not; everything else is right and nothing is more."""
    found = set()
    with open_trace(path) as trace:
        for info in trace.tensors:
            for step in trace.steps(info.name).tolist():
                np.testing.assert_array_equal(trace.read(info.name, step), gradient(info.name, step).ravel())
                found.add((info.name, step))
    wanted = {(name, step) for name in SHAPES for step in present(name, STEPS)}
    assert found <= wanted
    return wanted - found


def check_repaired(path, expected):
    """After a repair just these are missing, and nothing is left to be repaired."""
    repair = repair_trace(path)
    assert (repair.changed, repair.report.wrong) == (True, len(expected))
    assert lost(path) == expected
    assert check_trace(path).clean
    assert not repair_trace(path).changed
    assert set(os.listdir(path.parent)) == {path.name} | ({repair.backup.name} if repair.backup else set())
    assert open_trace(path).scalars()["step"].tolist() == [*STEPS]
    return repair


def test_a_whole_trace_is_clean_and_stays_as_it_is(whole):
    before = {file: file.stat().st_mtime_ns for file in whole.parent.rglob("*")}
    report = check_trace(whole)
    assert report.clean
    assert (report.steps, report.gradients, report.wrong) == (70, 275, 0)
    assert not repair_trace(whole).changed
    assert before == {file: file.stat().st_mtime_ns for file in whole.parent.rglob("*")}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_killed_writer(suffix, tmp_path):
    """Its process ended in the middle of its 70th step."""
    program = "import os, sys; from helpers_trace import *; writer = create_trace(sys.argv[1]); "
    program += "write_steps(writer, range(69)); writer.append(69, 'fc.bias', gradient('fc.bias', 69)); os._exit(0)"
    killed = tmp_path / f"run{suffix}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program, killed], check=True, env=environment)
    report = check_trace(killed)
    assert (report.unfinished, report.clean, report.live) == (True, False, False)
    assert (report.status, report.steps, report.faults) == ("writing", 69, ())
    assert repair_trace(killed).backup is None
    assert check_trace(killed).clean
    with open_trace(killed) as trace:
        check_gradients(trace, range(69))
        assert trace.attrs["status"] == "interrupted"
    assert os.listdir(killed.parent) == [killed.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_trace_that_is_being_written_is_checked_and_not_repaired(suffix, tmp_path):
    place = tmp_path / f"run{suffix}"
    with create_trace(place) as writer:
        write_steps(writer, range(5))
        report = check_trace(place)
        assert (report.live, report.clean, report.steps) == (True, True, 5)
        with pytest.raises(UsageError, match="still writing it"):
            repair_trace(place)
    assert not check_trace(place).live


def test_leftovers_are_removed(whole):
    """Of writers that were killed, and only of those."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for process in (dead.pid, os.getpid()):
        whole.with_name(f".{whole.name}.gtrace-partial-{process}").write_text("x")
    if whole.is_dir():
        (whole / GROUP / "fc.bias" / "c.9.0.partial").write_bytes(b"x")
    report = check_trace(whole)
    assert (len(report.leftovers), report.faults, report.clean) == (1 + whole.is_dir(), (), False)
    assert repair_trace(whole).backup is None
    assert check_trace(whole).clean
    assert sorted(os.listdir(whole.parent)) == [f".{whole.name}.gtrace-partial-{os.getpid()}", whole.name]
    assert lost(whole) == set()


def test_a_tensor_with_the_name_of_a_leftover_is_kept(tmp_path):
    path = tmp_path / "run.zarr"
    write_arrays(path, {"net.partial": {0: np.ones(3, np.float32)}, "other": {0: np.zeros(2, np.float32)}})
    assert check_trace(path).clean
    (path / GROUP / "other" / "c.9.0.partial").write_bytes(b"x")
    assert repair_trace(path).changed
    assert open_trace(path).read("net.partial", 0).tolist() == [1, 1, 1]


def test_a_flipped_bit(path):
    chunk = path / GROUP / "embed%2Fweight" / "c.30.0"
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 16
    chunk.write_bytes(data)
    (fault,) = check_trace(path).faults
    assert (fault.tensor, fault.step) == ("embed/weight", 30)
    repair = check_repaired(path, {("embed/weight", 30)})
    assert repair.backup.name == "run.zarr.damaged"
    assert open_trace(path).attrs["repaired"]["lost"] == 1
    assert not check_trace(repair.backup).clean


def test_a_flipped_bit_in_hdf5(tmp_path):
    path = write_trace(tmp_path / "run.h5", STEPS)
    data = bytearray(path.read_bytes())
    data[data.find(gradient("embed/weight", 30).tobytes()) + 1000] ^= 16
    path.write_bytes(data)
    check_repaired(path, {("embed/weight", 30)})


@pytest.mark.parametrize("table", ["present", "norm2", "absmax", "zeros", "nonfinite", "crc32c", "loss"])
def test_a_damaged_table_costs_no_gradient(table, path):
    """What it says follows from the gradients, but for numbers about steps."""
    (chunk,) = (path / GROUP / table).glob("c.*")
    chunk.write_bytes(chunk.read_bytes()[:-3])
    assert check_trace(path).faults
    check_repaired(path, set())
    with open_trace(path) as trace:
        assert np.isnan(trace.scalars()["loss"]).all() == (table == "loss")


@pytest.mark.parametrize(
    ("entry", "change", "faults", "wrong", "says"),
    [
        ("norm2", lambda old: old * (1 + 1e-8), 0, 0, ""),  # summed in another order
        ("norm2", lambda old: old * (1 + 1e-4), 5, 0, "stored norm2 does not match the values"),
        ("norm2", lambda old: old * [[np.nan], [1], [1]], 2, 0, "stored norm2 does not match the values"),
        ("absmax", lambda old: old * (1 + 1e-8), 5, 0, "stored absmax does not match the values"),
        ("crc32c", lambda old: old + np.uint32(1) * (old > 0), 5, 5, "checksum mismatch with the commit record"),
        ("kept", np.nan_to_num, 1, 0, "values although the tensor is absent"),
    ],
)
def test_entries_that_do_not_match(entry, change, faults, wrong, says, small):
    array = zarr.open_array(small / GROUP / entry, mode="r+")
    array[:] = change(array[:])
    report = check_trace(small)
    assert (len(report.faults), report.wrong) == (faults, wrong)
    assert all(says in fault.what for fault in report.faults)


def test_a_tensor_of_which_nothing_is_right_is_left_out(small):
    damage(small)
    repair = repair_trace(small)
    assert (repair.report.wrong, repair.report.gradients) == (3, 5)
    with open_trace(small) as trace:
        assert [(info.name, trace.steps(info.name).tolist()) for info in trace.tensors] == [("kept", [0, 2])]
        assert trace.statistics("kept")["second_moment"].tolist() == [2.0, 4.0]
        assert trace.scalars()["loss"].tolist() == [1.0, 2.0, 3.0]
        assert trace.attrs["repaired"]["lost"] == 3
        assert all("gone" in fault for fault in trace.attrs["repaired"]["faults"])
    assert zarr.open_array(small / GROUP / "kept", mode="r").attrs["index"] == 0
    assert check_trace(small).clean
    # A damaged trace that is there from an earlier repair stays.
    damage(small, "kept")
    assert repair_trace(small).backup.name == "run.zarr.damaged2"


@pytest.mark.parametrize("function", ["os.rename", "gtrace.trace.zarr.write_file"])
def test_a_repair_that_fails_leaves_the_trace_where_it_was(function, small, monkeypatch):
    damage(small)
    rename = os.rename

    def fails(source, *to):
        if function == "os.rename" and "repair" not in os.path.basename(source):
            return rename(source, *to)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(function, fails)
    with pytest.raises(TraceError, match="the repaired trace cannot be written"):
        repair_trace(small)
    assert os.listdir(small.parent) == ["run.zarr"]
    assert check_trace(small).wrong == 3


@pytest.mark.parametrize("place", [".", "rank00000", GROUP, f"{GROUP}/fc.weight"])
def test_metadata(place, path):
    (path / place / "zarr.json").write_text("{")
    assert check_trace(path).faults
    repair_trace(path)
    assert lost(path) == {("fc.weight", step) for step in present("fc.weight", STEPS) if "fc" in place}
    assert check_trace(path).clean


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
        file.write_bytes(edited(file.read_bytes(), random_edits(rng)))
        try:
            repair_trace(copy)
        except TraceError:
            assert file == copy / "zarr.json"
        else:
            assert check_trace(copy).clean
        shutil.rmtree(copy.parent)


def test_the_command(path, capsys):
    def run(*options):
        with pytest.raises(SystemExit) as done:
            main(["check", str(path), *options])
        return done.value.code, capsys.readouterr().out

    (path / GROUP / "fc.weight" / "c.0.0").unlink()
    code, out = run()
    lines = out.splitlines()
    assert (code, lines[0].startswith(f"{GROUP}, tensor 'fc.weight', 62 steps from 0 to 63: ")) == (3, True)
    assert ("62 faults" in lines[1], "--repair" in lines[2]) == (True, True)
    document = json.loads(run("--json")[1])
    assert (document["wrong"], document["steps"], document["faults"][0]["tensor"]) == (62, 70, "fc.weight")
    code, out = run("--repair")
    assert (code, "run.zarr.damaged" in out) == (0, True)
