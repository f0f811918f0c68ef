"""Traces that somebody damaged or forged end in one line that says where, never in an allocation or execution."""

import functools
import itertools
import json
import os
import random
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
import zarr
from fuzz.mutations import edited, random_edits
from helpers_trace import STEPS, edit_json, read_all, refused, write_trace
from numcodecs.zstd import Zstd

from gtrace.errors import TraceError
from gtrace.trace import open_trace
from gtrace.trace.files import LocalFiles
from gtrace.trace.rows import checksum_bytes
from gtrace.trace.zarr import decode_chunk


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("written") / "run.zarr")


@pytest.fixture
def path(written, tmp_path):
    return shutil.copytree(written, tmp_path / "run.zarr")


@pytest.fixture
def group(path):
    return path / "rank00000" / "weight_grad"


def seal(data):
    return data + checksum_bytes(data).to_bytes(4, "little")


def test_what_is_no_trace(tmp_path):
    refused(tmp_path / "no.zarr", "no such trace")
    refused(tmp_path, "not a gtrace trace")
    (tmp_path / "text.h5").write_text("hello")
    refused(tmp_path / "text.h5", "cannot be read: truncated or damaged")
    (tmp_path / "old.zarr").mkdir()
    (tmp_path / "old.zarr" / ".zgroup").write_text('{"zarr_format": 2}')
    refused(tmp_path / "old.zarr", "Zarr format 2")
    zarr.create_group(tmp_path / "foreign.zarr")
    refused(tmp_path / "foreign.zarr", "not a gtrace trace")
    os.mkfifo(tmp_path / "pipe.h5")
    refused(tmp_path / "pipe.h5", "neither a file nor a folder")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["attributes"].update(version=2), ("newer gtrace", "format 2", "upgrade")),
        (lambda d: d["attributes"].update(version="1\x1b[2J"), (r"1\x1b[2J",)),
        (lambda d: d["attributes"].update(format="other"), ("not a gtrace trace",)),
        (lambda d: d.update(zarr_format=2), ("zarr.json", "not Zarr format 3")),
        (lambda d: d.update(node_type="array"), ("is an array instead of a group",)),
        (lambda d: d.update(attributes=[]), ("'attributes' is not an object",)),
    ],
)
def test_forged_root(change, words, path):
    edit_json(path / "zarr.json", change)
    refused(path, *words)


BAD_JSON = [
    ("", "bad JSON"),
    ('{"zarr_format": 3', "bad JSON"),
    ("[" * 100_000, "nested too deep"),
    ('{"zarr_format": 3, "node_type": "group", "attributes": {"x": NaN}}', "NaN is not valid JSON"),
    ("\xff\xfe", "bad JSON"),
    ("9" * 10_000, "bad JSON"),
]


@pytest.mark.parametrize("place", [".", "rank00000", "rank00000/weight_grad", "rank00000/weight_grad/fc.bias"])
def test_bad_json(place, path):
    for text, words in BAD_JSON:
        (path / place / "zarr.json").write_text(text, encoding="latin-1")
        refused(path, "zarr.json", words)


@pytest.mark.parametrize("place", ["zarr.json", "rank00000/weight_grad/fc.bias/c.0.0"])
def test_a_document_too_large_is_not_read(place, path):
    os.truncate(path / place, 2**30)
    refused(path, place, "1073741824 bytes, but at most")


def _codec(*names):
    return lambda d: d.update(codecs=[{"name": name} for name in names])


def _chunks(*shape):
    return lambda d: d["chunk_grid"]["configuration"].update(chunk_shape=list(shape))


FORM = "its node type, data type, shape, chunks or codecs are not those of an array in a trace"
FORGED = [
    (_codec("bytes", "numcodecs.pickle"), ("numcodecs.pickle", "are not read")),
    (_codec("sharding_indexed"), ("its shards are not those of a trace",)),
    (_codec("bytes", "blosc", "blosc", "crc32c"), ("are not read",)),
    (lambda d: d["codecs"][0]["configuration"].update(endian="big"), ("are not read",)),
    (lambda d: d.update(data_type="object"), (FORM,)),
    (lambda d: d.update(data_type="float64"), ("array of float32",)),
    (_chunks(1, 2**30), ("chunks of 4294967296 bytes", "at most")),
    (lambda d: d.update(shape=[6, 2**40]), ("1099511627776 elements of a tensor of shape [7]",)),
    (lambda d: d.update(shape=[6, -7]), (FORM,)),
    (lambda d: d["chunk_grid"].update(name="rectangular"), (FORM,)),
    (lambda d: d["chunk_key_encoding"]["configuration"].update(separator="/"), (FORM,)),
    (lambda d: d.update(storage_transformers=[{"name": "x"}]), (FORM,)),
    (lambda d: d["attributes"].update(name=3), ("'name' is not text",)),
    (lambda d: d["attributes"].update(name="fc.weight"), ("two tensors have one name",)),
    (lambda d: d["attributes"].update(index=10**12), ("tensor number 0 is missing",)),
    (lambda d: d["attributes"].update(index=1), ("two tensors have one index",)),
    (lambda d: d["attributes"].update(shape="7"), ("'shape' is not a list of lengths",)),
    (lambda d: d["attributes"].update(sample=3), ("'sample' is not an object",)),
]


def test_forged_metadata_of_a_tensor(path, group):
    metadata = group / "fc.bias" / "zarr.json"
    whole = metadata.read_text()
    for change, words in FORGED:
        edit_json(metadata, change)
        refused(path, "weight_grad", *words)
        metadata.write_text(whole)


def test_a_name_that_a_terminal_would_act_on_is_escaped(path, group):
    edit_json(group / "fc.bias" / "zarr.json", lambda d: d["attributes"].update(name="a\x1b]0;x\x07\n"))
    (group / "fc.bias" / "c.0.0").unlink()
    refused(path, r"tensor 'a\x1b]0;x\x07\n', step 0", "missing")


def test_metadata_that_ask_for_memory_get_none(path, group):
    """A sampled tensor may claim any length; memory is asked for where chunks are, not where metadata say so."""

    def claim(document):
        document["shape"] = [6, 2**40]
        document["chunk_grid"]["configuration"]["chunk_shape"] = [1, 2**24]
        document["attributes"]["sample"] = {}

    edit_json(group / "fc.bias" / "zarr.json", claim)
    refused(path, "c.0.1", "tensor 'fc.bias', step 0", "the chunk is missing")


def test_tables_that_claim_many_columns(path, group):
    """Columns beyond those of the tensors are not asked for."""
    edit_json(group / "norm2" / "zarr.json", lambda d: d.update(shape=[6, 2**40]))
    read_all(path)
    edit_json(group / "norm2" / "zarr.json", _chunks(512, 2**20))
    refused(path, "chunks of", "at most")


def test_truncated_and_missing_chunks(path, group):
    for entry, lengths in (("fc.weight", (0, 3, 4, 10, 19, 100)), ("step", [9]), ("present", [9]), ("loss", [9])):
        (chunk,) = (group / entry).glob("c.*")
        whole = chunk.read_bytes()
        about = "tensor 'fc.weight', step 0" if entry == "fc.weight" else ""
        for keep in (*lengths, -1):
            chunk.write_bytes(whole[:keep])
            refused(path, str(chunk), about, "truncated")
        if entry in ("fc.weight", "present"):
            chunk.unlink()
            refused(path, str(chunk), about, "missing")
        chunk.write_bytes(whole)


def test_a_trace_that_is_moved_while_it_is_read_is_gone(path):
    with open_trace(path) as trace:
        path.rename(path.with_name("moved"))
        with pytest.raises(TraceError, match="is gone: it was deleted, moved or replaced"):
            trace.read("fc.bias", 0)


@pytest.mark.parametrize("place", range(6))
def test_a_trace_that_is_moved_while_it_is_opened_is_gone(place, path, monkeypatch):
    """Before it reads its first file, its second, and so on."""
    turns = itertools.count()

    def moved(self, name, *args, original):
        if next(turns) == place:
            path.rename(path.with_name("moved"))
        return original(self, name, *args)

    for name in ("read", "read_range", "size", "folders"):
        original = getattr(LocalFiles, name)
        monkeypatch.setattr(LocalFiles, name, functools.partialmethod(moved, original=original))
    with pytest.raises(TraceError, match=r"run\.zarr: is gone: it was deleted, moved or replaced"):
        open_trace(path)
    assert next(turns) > place


def test_every_flipped_byte_of_a_chunk_is_noticed(path, group):
    chunk = group / "fc.bias" / "c.0.0"
    whole = chunk.read_bytes()
    for place in range(len(whole)):
        chunk.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with open_trace(path) as trace, pytest.raises(TraceError, match=r"tensor 'fc\.bias', step 0: "):
            trace.read("fc.bias", 0)


@pytest.mark.parametrize("size", [8, 2**31 - 1, 2**32 - 1])
def test_a_blosc_header_that_claims_another_size(size, path, group):
    chunk = group / "fc.bias" / "c.0.0"
    data = bytearray(chunk.read_bytes()[:-4])
    struct.pack_into("<I", data, 4, size)
    chunk.write_bytes(seal(bytes(data)))
    refused(path, "tensor 'fc.bias', step 0", "it does not hold the")


def test_a_zstd_frame_that_inflates(path, group):
    """30 KB of zstd that hold 1 GB are refused by their header."""
    edit_json(group / "fc.bias" / "zarr.json", _codec("bytes", "zstd"))
    bomb = Zstd(level=1).encode(np.zeros(2**24, np.uint8))
    chunk = group / "fc.bias" / "c.0.0"
    for data in (bomb, bomb[:5], b"", b"\x28\xb5\x2f\xfd\x00" + bomb[5:]):
        chunk.write_bytes(data)
        refused(path, "tensor 'fc.bias', step 0", "it does not hold the")


def test_zstd_content_sizes_of_every_width():
    for size in (1, 255, 256, 65_535, 65_792, 70_000):
        values = np.zeros(size, np.uint8)
        out = np.ones(size, np.uint8)
        decode_chunk(bytes(Zstd().encode(values)), ("bytes", "zstd"), out, "here")
        np.testing.assert_array_equal(out, values)


def test_symbolic_links_are_not_followed(path, group, tmp_path):
    outside = tmp_path / "outside"
    for place in (group / "fc.bias" / "c.0.0", group / "fc.bias", group, group.parent, path / "zarr.json"):
        place.rename(outside)
        place.symlink_to(outside)
        refused(path, "" if place.name == "zarr.json" else str(place), "symbolic link")
        place.unlink()
        outside.rename(place)
    (tmp_path / "link.zarr").symlink_to(path)
    read_all(tmp_path / "link.zarr")


def test_pipes_and_folders_in_place_of_files(path, group):
    chunk = group / "fc.bias" / "c.0.0"
    chunk.unlink()
    os.mkfifo(chunk)
    refused(path, str(chunk), "not a regular file")
    chunk.unlink()
    chunk.mkdir()
    refused(path, str(chunk), "not a regular file")


def test_other_groups_and_arrays_are_left_alone(path, group):
    """Room for what later versions add: sketches, shards, further tables."""
    for name in ("sketch", "weight_grad_opt0", "weight_grad_optx", "other"):
        (path / "rank00000" / name).mkdir()
        (path / "rank00000" / name / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    (path / "summary").mkdir()
    zarr.create_array(str(group / "extra"), shape=(3,), dtype="int16")
    assert read_all(path)["step"].tolist() == list(STEPS)


def test_damage_anywhere_ends_in_a_trace_error(path):
    """Bytes are changed, cut off and doubled in every kind of file; reading is right or refused, nothing else."""
    rng = random.Random(5)
    files = sorted(p for p in path.rglob("*") if p.is_file())
    outcomes = set()
    for _ in range(150):
        file = rng.choice(files)
        whole = file.read_bytes()
        file.write_bytes(edited(whole, random_edits(rng)))
        try:
            read_all(path)
            outcomes.add("read")
        except TraceError:
            outcomes.add("refused")
        file.write_bytes(whole)
    assert outcomes == {"read", "refused"}


def test_reading_loads_no_code_that_others_chose(path):
    """Neither zarr-python with its codec registry nor pickle has a part in reading."""
    program = (
        "import sys; from gtrace.trace import open_trace; t = open_trace(sys.argv[1]); t.read('fc.bias', 0); "
        "print([m for m in ('zarr', 'pickle', 'torch', 'numba', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) in ([], ["pickle"])
