"""HDF5 files that somebody damaged or forged end in one line that says where."""

import io
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import time
import zlib
from contextlib import redirect_stderr, redirect_stdout

import h5py
import numpy as np
import pytest
from fuzz.mutations import edited, random_edits
from helpers_trace import refused, write_trace
from numcodecs.jenkins import jenkins_lookup3

from gtrace.cli import main

FORKED = multiprocessing.get_context("fork")
GROUP = "rank00000/weight_grad"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("written") / "run.h5")


@pytest.fixture
def path(written, tmp_path):
    return shutil.copy(written, tmp_path / "run.h5")


def edit(path, node, change):
    """Change the attributes of a node, which are one JSON text."""
    with h5py.File(path, "r+", libver="v110") as file:
        attrs = json.loads(file[node].attrs["metadata"])
        change(attrs)
        text = json.dumps(attrs)
        file[node].attrs.create("metadata", text, dtype=h5py.string_dtype("utf-8", len(text)))


def replace(path, name, make):
    """Put another data set in the place of one; it inherits the attributes."""
    with h5py.File(path, "r+", libver="v110") as file:
        group = file[GROUP]
        values, text = group[name][:], group[name].attrs.get("metadata")
        del group[name]
        made = make(group, name, values)
        if made is not None and text is not None:
            made.attrs.create("metadata", text)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("version", 2, ("newer gtrace", "upgrade")),
        ("version", "1\x1b", (r"version 1\x1b",)),
        ("format", "x", ("not a gtrace trace",)),
        ("seed", float("nan"), ("attribute 'metadata': bad JSON (NaN is not valid JSON)",)),
    ],
)
def test_forged_root(key, value, words, path):
    edit(path, "/", lambda attrs: attrs.update({key: value}))
    refused(path, *words)


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        ("{", "S1", ("bad JSON",)),
        ("[1]", "S3", ("not a JSON object",)),
        ("{}", h5py.string_dtype(), ("not text of fixed length",)),
        (3, "i4", ("not text of fixed length",)),
        ("x" * 5_000_000, "S5000000", ("too long",)),
    ],
    ids=range(5),
)
def test_forged_attributes(value, dtype, words, path):
    with h5py.File(path, "r+", libver="v110") as file:
        file.attrs.create("metadata", value, dtype=dtype)
    refused(path, "attribute 'metadata'", *words)


@pytest.mark.parametrize(
    "link", [h5py.SoftLink("/rank00000/weight_grad/fc.weight"), h5py.ExternalLink("other.h5", "/x")]
)
@pytest.mark.parametrize("place", ["a\x1b", "rank00001", f"{GROUP}/stray", f"{GROUP}/loss"])
def test_links_are_refused(link, place, path):
    with h5py.File(path, "r+") as file:
        if place in file:
            del file[place]
        file[place] = link
    refused(path, place.rsplit("/", 1)[-1].replace("\x1b", r"\x1b"), "soft and external links are not followed")


def _external(group, name, values):
    with open(os.path.join(os.path.dirname(group.file.filename), "secret"), "wb") as file:
        file.write(values.tobytes())
    return group.create_dataset(name, values.shape, "<f4", external=[("secret", 0, values.nbytes)])


def _virtual(group, name, values):
    layout = h5py.VirtualLayout(values.shape, "<f4")
    layout[:] = h5py.VirtualSource("other.h5", "x", values.shape)
    return group.create_virtual_dataset(name, layout)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_external, ("with its data in this file",)),
        (_virtual, ("with its data in this file",)),
        (lambda g, n, v: g.create_dataset(n, data=v, dtype="f8"), ("not a 2-dimensional data set of float32",)),
        (lambda g, n, _: g.create_dataset(n, (6, 7), h5py.vlen_dtype("f4")), ("not a 2-dimensional data set",)),
        (lambda g, n, _: g.create_group(n), ("not a 2-dimensional data set of float32",)),
        (lambda g, n, v: g.create_dataset(n, data=v, compression="lzf"), ("filter 32000 is not among those",)),
        (
            lambda g, n, _: g.create_dataset(n, (6, 2**28), "<f4", chunks=(6, 2**26)),
            ("chunks of 1610612736 bytes; at most",),
        ),
        (lambda g, n, _: g.create_dataset(n, (6, 2**30), "<f4"), ("1073741824 elements of a tensor of shape [7]",)),
        (lambda g, n, v: g.create_dataset(n, data=v[:2]), ("fc.bias", "step 2", "missing or truncated")),
        (lambda g, n, _: g.create_dataset(n, (6, 7), "<f4", chunks=(6, 7)), ("step 0", "missing or truncated")),
        (lambda g, n, v: g.create_dataset(n, data=v * 2), ("tensor 'fc.bias', step 0: checksum mismatch",)),
        (lambda *_: None, ("tensor number 0 is missing",)),
    ],
)
def test_forged_tensors(make, words, path):
    replace(path, "fc.bias", make)
    refused(path, *words)


def test_metadata_that_ask_for_memory_get_none(path):
    """A sampled tensor may claim any length; memory is asked for where bytes stand behind it."""
    replace(path, "fc.bias", lambda group, name, _: group.create_dataset(name, (6, 2**40), "<f4", chunks=(1, 2**20)))
    edit(path, f"{GROUP}/fc.bias", lambda attrs: attrs.update(sample={}))
    refused(path, "tensor 'fc.bias', step 0", "missing or truncated")


def test_a_data_set_that_says_it_is_stored_gets_no_memory(path):
    """Contiguous, so that its size is what it says, and not what the file has."""

    def claim(group, name, _):
        made = group.create_dataset(name, (6, 1000), "<f4")
        made[0] = 1
        return made

    replace(path, "fc.bias", claim)
    edit(path, f"{GROUP}/fc.bias", lambda attrs: attrs.update(sample={}))
    data = path.read_bytes()
    # The extent in the data space message, and the size in the layout message of the object's header.
    old, new = (np.array(shape, "<u8").tobytes() for shape in ([6, 1000], [6, 2**40]))
    assert data.count(old) == 2
    data = data.replace(old, new).replace((6 * 1000 * 4).to_bytes(8, "little"), (6 * 2**42).to_bytes(8, "little"))
    path.write_bytes(reseal_headers(data))
    refused(path, "fc.bias")


@pytest.mark.parametrize("table", ["step", "present", "norm2", "loss"])
def test_tables_that_claim_much_get_nothing(table, path):
    def claim(group, name, values):
        shape = (2**40, *values.shape[1:])
        return group.create_dataset(name, shape, values.dtype, chunks=(64, *values.shape[1:]))

    replace(path, table, claim)
    refused(path, table, "missing or truncated")


def test_truncated_files(path):
    whole = path.read_bytes()
    for keep in (0, 7, 8, 47, 48, 500, 3000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        refused(path, "truncated or damaged")


def reseal_headers(data):
    """Put right the checksums of all object headers, chunk by chunk."""
    data = bytearray(data)
    for found in re.finditer(rb"OHDR\x02", bytes(data)):
        start = found.start()
        flags = data[start + 5]
        place = start + 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        width = 1 << (flags & 3)
        end = place + width + int.from_bytes(data[place : place + width], "little")
        data[end : end + 4] = int(jenkins_lookup3(np.frombuffer(data[start:end], np.uint8), 0)).to_bytes(4, "little")
    return bytes(data)


def mark(data):
    """The bytes of a file, marked as open for writing in SWMR mode."""
    data = bytearray(data)
    data[11] = 5
    data[44:48] = int(jenkins_lookup3(np.frombuffer(data[:44], np.uint8), 0)).to_bytes(4, "little")
    return bytes(data)


def mutants(whole, rng):
    """Files that are almost right, half of them with the checksums of object headers made right again."""
    while True:
        # The values of the large tensor fill most of the file; what lies before them matters more.
        edits = [edit._replace(place=rng.randrange(rng.choice((200, 20_000, 1 << 20)))) for edit in random_edits(rng)]
        data = edited(whole, edits)
        yield reseal_headers(data) if rng.random() < 0.5 else data


#: in messages of the library itself
HDF5_WORDS = ("ynchronously", "nable to", "H5", "signature", "errno", "B-tree", "Traceback")


def attempt(path, command, count, told):
    """Give a command mutants of a file, within limits; exit codes, and what is not as promised."""
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
    codes, faults = set(), []
    for data in itertools.islice(mutants(path.read_bytes(), random.Random(1)), count):
        path.write_bytes(data)
        out, err, start = io.StringIO(), io.StringIO(), time.process_time()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
            main(command.format(path).split())
        codes.add(end.value.code)
        code, said = end.value.code, err.getvalue()
        # A check reports faults in its table.
        right = said.count("\n") == (code > 0) or (command.startswith("trace check") and not said)
        raw = any(word in out.getvalue() + said for word in HDF5_WORDS)
        if not right or raw or time.process_time() > start + 5:
            faults.append((code, said, zlib.crc32(data)))
    told.send((codes, faults))


@pytest.mark.parametrize(
    ("command", "count"),
    [("trace export {0} -o {0}.npz --force", 60), ("trace check {0}", 60), ("trace import {0} -o {0}.zarr --force", 8)],
)
def test_mutants_are_read_right_or_refused_in_one_line(command, count, path):
    if "import" in command:
        with h5py.File(path, "w") as file:
            file["w"] = np.arange(24.0).reshape(2, 12)
            file.create_dataset("step", data=[3, 4], compression="gzip")
    here, there = FORKED.Pipe()
    process = FORKED.Process(target=attempt, args=(path, command, count, there))
    process.start()
    there.close()
    codes, faults = here.recv()
    process.join()
    assert not faults
    assert {3} <= codes <= {0, 2, 3}


def test_a_file_that_is_open_for_writing_is_refused(path):
    """No trace of gtrace ever is. The library reads such files only in a mode in which damage is searched for ever."""
    path.write_bytes(mark(path.read_bytes()))
    refused(path, "truncated or damaged")
