"""Files that somebody else made: each is refused in one line, within limits on memory and time, or read right."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr
from helpers_trace import edit_json

from gtrace.errors import TraceError, UsageError
from gtrace.trace.foreign import READERS
from gtrace.trace.guard import MEMORY, SECONDS, Guard, confines
from gtrace.trace.importing import ImportRules, import_trace


def npy(array=None, **changes):
    """The bytes of an array, or of a header that says something else."""
    file = io.BytesIO()
    if array is not None:
        np.save(file, array, allow_pickle=True)
        return file.getvalue()
    declared = {"descr": "<f4", "fortran_order": False, "shape": (3,)} | changes
    np.lib.format.write_array_header_1_0(file, declared)
    return file.getvalue() + bytes(12)


def npz(members, **options):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def st(header, data=bytes(12)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(begin=0, end=12, shape=(3,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def write(path, make):
    """A file of these bytes, or a store that a function fills."""
    if isinstance(make, bytes):
        path.write_bytes(make)
    else:
        make(path)
    return path


def array(path, shape=(4,), chunks=(4,), **options):
    """A Zarr array without chunks."""
    zarr.create_array(path, shape=shape, chunks=chunks, dtype="f4", config={"write_empty_chunks": True}, **options)
    return path


def array_with_chunk(path):
    """The place of the only chunk of a new array."""
    array(path)
    (path / "c").mkdir(exist_ok=True)
    return path / "c/0"


def bomb(path):
    """65 KB of a zstd frame without a size: blocks that repeat one byte 131,072 times, 2.1 GB in all."""
    blocks = [(131072 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"] * 16383
    last = (131072 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"
    frame = b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(blocks) + last
    array(path, compressors=zarr.codecs.ZstdCodec())
    (path / "c").mkdir()
    (path / "c/0").write_bytes(frame)


def outside(path):
    """A chunk that is a link to a file elsewhere."""
    secret = path.parent / "secret"
    secret.write_bytes(np.arange(4, dtype="f4").tobytes())
    array_with_chunk(path).symlink_to(secret)


def pickled(path):
    zarr.create_array(path, shape=(3,), dtype="f4", zarr_format=2)
    pickle = {"id": "pickle", "protocol": 5}
    edit_json(path / ".zarray", lambda document: document.update(compressor=None, filters=[pickle]))
    (path / "0").write_bytes(b"cos\nmkdir\n(S'owned'\ntR.")


def terabytes(path):
    def change(document):
        document["shape"] = [2**20, 2**20]
        document["chunk_grid"]["configuration"]["chunk_shape"] = [2**15, 2**15]

    edit_json(array(path) / "zarr.json", change)


def hdf5(fill):
    def make(path):
        with h5py.File(path, "w") as file:
            fill(file)

    return make


def virtual(file):
    """A data set made of one in another file."""
    layout = h5py.VirtualLayout(shape=(4,), dtype="f4")
    layout[:] = h5py.VirtualSource("/etc/hostname", "x", shape=(4,))
    file.create_virtual_dataset("w", layout)


def inflating(file):
    """A chunk of 16 bytes that unpacks to 300 MB."""
    packer = zlib.compressobj(1)
    packed = b"".join(packer.compress(bytes(1 << 22)) for _ in range(75)) + packer.flush()
    made = file.create_dataset("w", shape=(4,), dtype="f4", chunks=(4,), compression="gzip")
    made.id.write_direct_chunk((0,), packed)


HOSTILE = {
    "pickled.npy": (npy(np.array([{}])), "pickled Python objects are never loaded"),
    "jax.npy": (npy(descr="|V2"), "bfloat16"),
    "code.npy": (npy().replace(b"(3,)", b"f()!"), "cannot be read"),
    "pickled.npz": (npz({"w.npy": npy(np.array([{}]))}), "array 'w': .* pickled Python objects are never loaded"),
    "huge.npz": (npz({"w.npy": npy(shape=(2**50,))}), "declares 4503.6 TB, but has 248 bytes"),
    "crc.npz": (npz({"w.npy": npy(np.full(50, 7.0))}).replace(np.float64(7).tobytes(), bytes(8), 1), "CRC"),
    "long.safetensors": ((2**60).to_bytes(8, "little") + b"{}", "a header of 1152921504606846976 bytes"),
    "beyond.safetensors": (st({"w": tensor(0, 16, (4,))}), "describes 86 bytes of 82"),
    "overlap.safetensors": (st({"w": tensor(), "v": tensor()}), "overlap or leave a hole"),
    "twice.safetensors": (st(b'{"w": {}, "w": {}}'), "holds a name twice"),
    "pipe.npy": (os.mkfifo, "cannot be read .Not a directory"),
    "pipe.zarr": (lambda path: os.mkfifo(array_with_chunk(path)), "links and pipes in a store are not read"),
    "outside.zarr": (outside, "links and pipes in a store are not read"),
    "bomb.zarr": (bomb, "cannot be read|more memory than its arrays need"),
    "one-value.zarr": (lambda path: array(path, shape=(2**24,), chunks=(1,)) and None, "in 16777216 parts, but has"),
    "terabytes.zarr": (terabytes, "declares 4.4 TB"),
    "filter.zarr": (pickled, "cannot be read .*pickle"),
    "external.h5": (
        hdf5(lambda file: file.create_dataset("w", (4,), "f4", external=[("/etc/hostname", 0, 16)])),
        "array 'w': its values are in another file",
    ),
    "virtual.h5": (hdf5(virtual), "array 'w': its values are in another file"),
    "inflating.h5": (hdf5(inflating), "cannot be read"),
    "trace.h5": (hdf5(lambda file: file.attrs.update(metadata='{"format": "gtrace"}')), "is already a gtrace trace"),
}


def resident(pid):
    """The most bytes that a process has had in memory."""
    return 1024 * int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0])


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    """One process for all files, since none of them may end it; what it has in memory before the first one."""
    folder = tmp_path_factory.mktemp("foreign")
    with Guard([folder], READERS) as guard:
        guard.folder = folder
        with guard.open(array(folder / "first.zarr"), ".zarr") as file:
            file.read(file.entries[0])
        guard.before = resident(guard.process.pid)
        yield guard


def read_all(guard, path):
    with guard.open(path, path.suffix) as file:
        return [file.read(entry) for entry in file.entries]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_one_line(name, guard):
    content, says = HOSTILE[name]
    path = guard.folder / name
    write(path, content)
    start = time.monotonic()
    with pytest.raises(TraceError, match=says) as caught:
        read_all(guard, path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    # What the files declare is small or refused.
    assert resident(guard.process.pid) - guard.before < MEMORY
    assert time.monotonic() - start < SECONDS
    assert not Path("owned").exists()


def test_links_in_hdf5_lead_nowhere(guard):
    def fill(file):
        file["w"] = np.arange(4, dtype="f4")
        file["outside"] = h5py.ExternalLink("/etc/hostname", "x")
        file["soft"] = h5py.SoftLink("/nowhere")
        file["again"] = file["/"]

    assert [values.tolist() for values in read_all(guard, write(guard.folder / "links.h5", hdf5(fill)))] == [
        [0, 1, 2, 3]
    ]


def test_an_axis_of_a_million_empty_steps(tmp_path):
    (tmp_path / "w.npy").write_bytes(npy(shape=(10**6, 0)))
    with pytest.raises(UsageError, match="a first axis of 1000000 is too long to count steps in 140 bytes"):
        import_trace([tmp_path / "w.npy"], tmp_path / "run.zarr", ImportRules(step_axis=True))
    assert os.listdir(tmp_path) == ["w.npy"]


def test_work_that_the_file_does_not_explain_is_ended(tmp_path, monkeypatch):
    """Chunks that are missing, one for each byte of the store."""
    path = array(tmp_path / "w.zarr", shape=(10**5,), chunks=(1,), attributes={"text": "x" * 10**5})
    says = r"w\.zarr: array '': takes more than 1\.\d+ seconds of processor time"
    monkeypatch.setattr("gtrace.trace.guard.SECONDS", 1.0)
    monkeypatch.setattr("gtrace.trace.guard.WAIT", 100.0)
    with Guard([path], READERS) as guard, pytest.raises(TraceError, match=says):
        read_all(guard, path)


def test_a_child_that_does_not_answer_is_ended(tmp_path, monkeypatch):
    path = write(tmp_path / "w.npy", npy(np.zeros(3)))
    with Guard([path], READERS) as guard:
        monkeypatch.setattr("gtrace.trace.guard.SECONDS", 0.1)
        monkeypatch.setattr("gtrace.trace.guard.WAIT", 3.0)
        os.kill(guard.process.pid, signal.SIGSTOP)
        with pytest.raises(TraceError, match=r"w\.npy: takes more than 0\.3 seconds to read"):
            guard.open(path, ".npy")
    monkeypatch.undo()
    with Guard([path], READERS) as guard:
        os.kill(guard.process.pid, signal.SIGKILL)
        with pytest.raises(TraceError, match=r"w\.npy: reading it ended its process \(code -9\)"):
            guard.open(path, ".npy")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends it")
def test_a_child_ends_with_a_killed_parent_whatever_it_does(tmp_path):
    path = write(tmp_path / "w.npy", npy(np.zeros(3)))
    program = """
import os, signal, sys
from pathlib import Path
from gtrace.trace.foreign import READERS
from gtrace.trace.guard import Guard

guard = Guard([Path(sys.argv[1])], READERS)
os.kill(guard.process.pid, signal.SIGSTOP)
print(guard.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", program, str(path)]
    child = int(subprocess.run(command, check=False, stdout=subprocess.PIPE).stdout)
    end = time.monotonic() + 30

    def lives():
        stat = Path(f"/proc/{child}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"

    while lives() and time.monotonic() < end:
        time.sleep(0.01)
    assert not lives()


@pytest.mark.skipif(not confines(), reason="this kernel has no Landlock")
def test_the_child_can_read_its_files_and_do_nothing_else(tmp_path):
    readers = {**READERS, ".rm": "os:remove", ".sh": "subprocess:check_output"}
    mine, other = write(tmp_path / "w.npy", npy(np.zeros(3))), write(tmp_path / "other.npy", npy(np.zeros(3)))
    kept, program = write(tmp_path / "kept.rm", b"x"), write(tmp_path / "run.sh", b"#!/bin/sh\ntouch owned\n")
    program.chmod(0o755)
    with Guard([mine, kept, program], readers) as guard:
        with guard.open(mine, ".npy") as file:
            assert file.read(file.entries[0]).tolist() == [0, 0, 0]
        for path in (other, kept, program):
            with pytest.raises(TraceError, match=f"{path.name}: cannot be read .Permission denied"):
                guard.open(path, path.suffix)
    assert sorted(os.listdir(tmp_path)) == ["kept.rm", "other.npy", "run.sh", "w.npy"]
