"""Traces at addresses: the same gradients, requests that are known beforehand, and the same suspicion."""

import json
import sys

import numpy as np
import pytest
from helpers_sweep import rows_of, write_trace

import gtrace
from gtrace.cli import main
from gtrace.errors import TraceError, UsageError
from gtrace.trace.check import check_trace
from gtrace.trace.convert import pack_trace
from gtrace.trace.remote import RemoteFiles

fsspec = pytest.importorskip("fsspec")

CODECS = ["qsgdinf:bits=3,bucket_size=512", "terngrad", "ef:topk"]


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def upload(memory, path, name=None):
    """Put a trace into the memory of fsspec; returns its address."""
    address = f"memory://bucket/{name or path.name}"
    memory.put(str(path), address, recursive=True)
    return address


def values(path):
    with gtrace.open_trace(path) as trace:
        return trace.fingerprint, [
            trace.read(info.name, int(step)).tobytes() for info in trace.tensors for step in trace.steps(info.name)
        ]


@pytest.mark.parametrize("name", ["run.zarr", "run.h5", "packed.zarr"])
def test_it_reads_as_it_does_on_this_machine(tmp_path, memory, name):
    path = write_trace(tmp_path / name)
    if name == "packed.zarr":
        pack_trace(path)
    address = upload(memory, path)
    assert values(address) == values(path) == values(f"file://{path}")
    with gtrace.open_trace(address) as trace:
        assert (trace.path, trace.location) == (address, address)
    if name == "packed.zarr":
        rows = [rows_of(gtrace.run_sweep(one, CODECS, jobs=2)) for one in (path, address)]
        assert rows[0] == rows[1]


def test_what_was_committed_by_a_killed_writer_is_there(tmp_path, memory):
    with gtrace.create_trace(tmp_path / "run.zarr") as writer:
        for step in range(3):
            writer.append(step, "w", np.full(5, step, np.float32))
            writer.commit(step)
        address = upload(memory, tmp_path / "run.zarr")  # rows are in the journal, and the root tells nothing yet
    with gtrace.open_trace(address) as trace:
        assert trace.status == "interrupted"
        assert trace.read("w", 2).tolist() == [2.0] * 5


def test_nothing_is_listed_and_nothing_is_asked_for_in_whole(tmp_path, memory, monkeypatch):
    path = write_trace(tmp_path / "run.zarr")
    pack_trace(path)
    address = upload(memory, path)
    asked = []
    cat = type(memory).cat_file

    def counted(self, path, start=None, end=None, **more):
        asked.append((path, start, end))
        return cat(self, path, start=start, end=end, **more)

    monkeypatch.setattr(type(memory), "cat_file", counted)
    monkeypatch.setattr(type(memory), "ls", lambda *a, **k: pytest.fail("a folder was listed"))
    values(address)
    assert sum(path.endswith("zarr.json") for path, _, _ in asked) == 1
    assert all(start is not None and end is not None for _, start, end in asked)


def test_damage_and_loss_are_told(tmp_path, memory):
    path = write_trace(tmp_path / "run.zarr")
    chunk = next((path / "rank00000" / "weight_grad").glob("fc.weight*/c.*"))
    address = upload(memory, path)
    place = f"{address}/{chunk.relative_to(path)}"
    memory.pipe(place, memory.cat_file(place)[:-3])
    assert len(check_trace(address).faults) == 4

    def read():
        with gtrace.open_trace(address) as trace:
            trace.read("fc.weight", 0)

    memory.rm(place)
    with pytest.raises(TraceError, match="the chunk is missing"):
        read()
    # What is larger than can belong there is not read.
    memory.pipe(place, bytes(10_000_000))
    with pytest.raises(TraceError, match=r"more than .* bytes, the most that is possible"):
        read()


@pytest.mark.parametrize("entry", ["../other", "rank00000//w", "/etc", "rank00000/../../x"])
def test_metadata_that_lead_out_of_the_trace_are_refused(tmp_path, memory, entry):
    address = upload(memory, write_trace(tmp_path / "run.zarr"))
    document = json.loads(memory.cat_file(f"{address}/zarr.json"))
    document["consolidated_metadata"]["metadata"][entry] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    memory.pipe(f"{address}/zarr.json", json.dumps(document).encode())
    with pytest.raises(TraceError, match="is not a path inside a trace"):
        gtrace.open_trace(address)


def test_links_are_not_followed(tmp_path, memory, monkeypatch):
    address = upload(memory, write_trace(tmp_path / "run.zarr"))
    monkeypatch.setattr(type(memory), "ls", lambda self, path, **k: [{"name": f"{path}/x", "type": "link", "size": 0}])
    monkeypatch.setattr("gtrace.trace.remote._gathered", lambda *a: None)
    with pytest.raises(TraceError, match="symbolic links inside a trace are not followed"):
        gtrace.open_trace(address)
    (tmp_path / "link.zarr").mkdir()
    (tmp_path / "link.zarr" / "zarr.json").symlink_to(tmp_path / "run.zarr" / "zarr.json")
    with pytest.raises(TraceError, match="symbolic links inside a trace are not followed"):
        gtrace.open_trace(f"file://{tmp_path}/link.zarr")


def test_what_a_file_system_raises_is_one_line(tmp_path, memory, monkeypatch):
    address = upload(memory, write_trace(tmp_path / "run.zarr"))

    def refused(*_, **__):
        raise RuntimeError("no\ncredentials")

    monkeypatch.setattr(type(memory), "cat_file", refused)
    with pytest.raises(TraceError, match=r"zarr\.json: cannot be read \(RuntimeError: no credentials\)"):
        gtrace.open_trace(address)


@pytest.mark.parametrize(
    ("address", "missing", "error", "says"),
    [
        ("memory://bucket/none.zarr", (), TraceError, r"memory://bucket/none\.zarr: no such trace"),
        ("memory://bucket/none.h5", (), TraceError, r"memory://bucket/none\.h5: no such"),
        ("zip://run.zarr::memory://bucket/run.zip", (), UsageError, "chains of addresses are not supported"),
        ("nonsense://bucket/run.zarr", (), UsageError, "cannot read such an address"),
        ("s3://bucket/run.zarr", ("s3fs",), UsageError, r"reads s3:// is not installed \(Install s3fs to access S3\)"),
        ("memory://run.zarr", ("fsspec", "fsspec.core"), UsageError, "not installed: pip install fsspec"),
    ],
)
def test_addresses_that_cannot_be_read(address, missing, error, says, memory, monkeypatch):
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(error, match=says):
        gtrace.open_trace(address)


def test_a_file_system_that_cannot_be_reached(monkeypatch):
    def lost(_):
        raise OSError("Unable to load libjvm\nnor anything else")

    monkeypatch.setattr("fsspec.core.url_to_fs", lost)
    with pytest.raises(TraceError, match=r"hdfs://host/run.zarr: cannot be read \(OSError: Unable to load libjvm nor"):
        gtrace.open_trace("hdfs://host/run.zarr")


def test_commands_take_addresses(tmp_path, memory, monkeypatch, capsys):
    address = upload(memory, write_trace(tmp_path / "run.zarr"))
    monkeypatch.chdir(tmp_path)

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main(words)
        return ended.value.code, capsys.readouterr()

    for words in ("info", "sweep --methods terngrad", "export --steps 0", "pack -o copy.zarr"):
        assert run(*words.split(), address)[0] == 0
    assert (tmp_path / "run.sweep.db").exists()
    assert values("copy.zarr") == values(address)
    assert run("check", address)[1].out == f"{address}: 4 steps, 12 of 12 gradients are right\n"
    for words, said in (
        (("check", address, "--repair"), "is not on this machine and can only be read; copy it here to repair it"),
        (("pack", address), "-o NAME.zarr packs it here"),
        (("import", "run.npz", "-o", "s3://bucket/new.zarr"), "traces can be written only on this machine"),
    ):
        code, told = run(*words)
        assert (code, said in told.err, told.err.count("\n")) == (2, True, 1)


class Web:
    """A server over HTTP: whole files whatever part is asked for, and no folders."""

    def __init__(self, memory):
        self.memory = memory

    def cat_file(self, path, start=None, end=None):
        return self.memory.cat_file(path.replace("https:", "memory:"))

    def info(self, path):
        return self.memory.info(path.replace("https:", "memory:"))


def test_over_http_sizes_come_first_and_folders_are_not_listed(tmp_path, memory, monkeypatch):
    path = write_trace(tmp_path / "run.zarr")
    upload(memory, path)
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda address: (Web(memory), address))
    address = "https://bucket/run.zarr"
    assert values(address) == values(path)
    asked = []
    monkeypatch.setattr(Web, "cat_file", lambda *a, **k: asked.append(a))
    with pytest.raises(TraceError, match="more than 10 bytes"):
        RemoteFiles(address).read(f"{address}/zarr.json", 10)
    assert asked == []
    monkeypatch.undo()
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda address: (Web(memory), address))
    pack_trace(path)
    memory.rm("memory://bucket", recursive=True)
    upload(memory, path)
    with pytest.raises(TraceError, match="the server does not support ranges"):
        values(address)
    monkeypatch.setattr("gtrace.trace.remote._gathered", lambda *a: None)
    with pytest.raises(TraceError, match="HTTP cannot list a folder"):
        gtrace.open_trace(address)
