"""A packed trace has the same content and fingerprint in fewer files, and its shards are read with care."""

import os
import struct

import numpy as np
import pytest
import zarr
from helpers_trace import (
    SHAPES,
    SUFFIXES,
    check_gradients,
    edit_json,
    gradient,
    present,
    write_arrays,
    write_steps,
    write_trace,
)

from gtrace.errors import OutputExistsError, TraceError, UsageError
from gtrace.trace import create_trace, open_trace
from gtrace.trace.check import check_trace
from gtrace.trace.convert import pack_trace
from gtrace.trace.format import encode_name
from gtrace.trace.rows import checksum_bytes

STEPS = range(70)
GROUP = "rank00000/weight_grad"


@pytest.fixture
def packed(tmp_path, monkeypatch):
    # Shards of some chunks each, so that there are several.
    monkeypatch.setattr("gtrace.trace.zarr._SHARD_BYTES", 600_000)
    return pack_trace(write_trace(tmp_path / "run.zarr", STEPS, attrs={"seed": 4}))


def files(path):
    return [file for file in path.rglob("*") if file.is_file()]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("target", SUFFIXES)
def test_content_and_fingerprint_stay(suffix, target, tmp_path):
    path, out = tmp_path / f"run{suffix}", tmp_path / f"out{target}"
    with create_trace(path, attrs={"seed": 4}) as writer:
        for step in STEPS:
            writer.append(step, "act", np.arange(3 + step % 4), kind="neural")
            if step > 60:
                writer.append(step, f"late{step}", [1.0], optimizer=1, rank=2)
            write_steps(writer, [step])
    assert pack_trace(path, out) == out
    with open_trace(path) as old, open_trace(out) as new:
        assert (new.fingerprint, new.attrs, new.tensors) == (old.fingerprint, old.attrs, old.tensors)
        for info in old.tensors:
            where = {"kind": info.kind, "optimizer": info.optimizer, "rank": info.rank}
            for name, values in old.statistics(info.name, **where).items():
                np.testing.assert_array_equal(new.statistics(info.name, **where)[name], values)
            for step in old.steps(info.name, **where):
                np.testing.assert_array_equal(new.read(info.name, step, **where), old.read(info.name, step, **where))
        for name, values in old.scalars().items():
            np.testing.assert_array_equal(new.scalars()[name], values)
    assert check_trace(out).clean
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, out.name])
    if suffix == target == ".zarr":
        assert len(files(out)) < len(files(path)) * 2 / 3


def test_several_shards_and_parts(packed, tmp_path):
    assert len(list((packed / GROUP / "embed%2Fweight").glob("c.*"))) > 10
    check_gradients(packed, STEPS)
    # Rows of more than 16 MiB are cut into parts.
    pack_trace(write_arrays(tmp_path / "long.zarr", {"w": {step: gradient("w", step, 5_000_000) for step in range(2)}}))
    with open_trace(tmp_path / "long.zarr") as trace:
        for step in range(2):
            np.testing.assert_array_equal(trace.read("w", step), gradient("w", step, 5_000_000))


def test_other_tools_open_it(packed):
    group = zarr.open_group(packed, mode="r")[GROUP]
    for name in SHAPES:
        values = group[encode_name(name)][:]
        for step in present(name, STEPS):
            np.testing.assert_array_equal(values[step], gradient(name, step).ravel())
        assert np.isnan(values[[step for step in STEPS if step not in present(name, STEPS)]]).all()


def test_what_is_refused(tmp_path):
    path = write_trace(tmp_path / "run.zarr", STEPS)
    other = write_trace(tmp_path / "other.zarr", range(3))
    with pytest.raises(OutputExistsError, match="already exists"):
        pack_trace(path, other)
    check_gradients(other, range(3))
    pack_trace(path, other, force=True)
    check_gradients(other, STEPS)
    with pytest.raises(UsageError, match="already a single file"):
        pack_trace(write_trace(tmp_path / "run.h5", range(3)))
    with pytest.raises(UsageError, match=r"end in \.zarr"):
        pack_trace(path, tmp_path / "run.zip")
    with create_trace(tmp_path / "open.zarr") as writer:
        writer.append(0, "w", [1.0])
        writer.commit(0)
        with pytest.raises(UsageError, match="not finished"):
            pack_trace(tmp_path / "open.zarr")
    # A damaged trace stays as it is.
    os.truncate(path / GROUP / "fc.bias" / "c.0.0", 30)
    before = files(tmp_path)
    with pytest.raises(TraceError, match=r"fc\.bias"):
        pack_trace(path)
    assert files(tmp_path) == before


def _codec(change):
    return lambda d: change(d["codecs"][0]["configuration"])


NOT_OURS, UNREAD = "its shards are not those of a trace", "are not read"
FORGED = [
    (_codec(lambda c: c.update(chunk_shape=[63, 7])), NOT_OURS),
    (_codec(lambda c: c.update(codecs=[{"name": "bytes"}, {"name": "gzip"}])), UNREAD),
    (_codec(lambda c: c.update(index_codecs=[{"name": "bytes"}])), NOT_OURS),
    (_codec(lambda c: c.update(index_location="start")), NOT_OURS),
    (_codec(lambda c: c["index_codecs"][0].update(configuration={"endian": "big"})), NOT_OURS),
    (lambda d: d["chunk_grid"]["configuration"].update(chunk_shape=[64 * 2**17, 7]), NOT_OURS),
]


def test_forged_metadata(packed):
    metadata = packed / GROUP / "fc.bias" / "zarr.json"
    whole = metadata.read_text()
    for change, words in FORGED:
        edit_json(metadata, change)
        with pytest.raises(TraceError, match=words):
            open_trace(packed)
        metadata.write_text(whole)


def test_truncated_and_forged_shards(packed):
    shard = packed / GROUP / "fc.bias" / "c.0.0"
    whole = shard.read_bytes()
    for keep in (0, 10, 100, -1):
        shard.write_bytes(whole[:keep])
        with open_trace(packed) as trace, pytest.raises(TraceError, match=r"fc\.bias.*(truncated|checksum)"):
            trace.read("fc.bias", 0)
    # An index with a checksum of its own.
    for offset, length in ((0, 2**40), (2**63, 100), (10**6, 100), (3, 300)):
        data = bytearray(whole)
        start = len(data) - 4 - 16 * 2
        struct.pack_into("<QQ", data, start, offset, length)
        data[-4:] = checksum_bytes(np.frombuffer(bytes(data[start:-4]), np.uint8)).to_bytes(4, "little")
        shard.write_bytes(data)
        with open_trace(packed) as trace, pytest.raises(TraceError, match=r"c\.0\.0"):
            trace.read("fc.bias", 0)


def test_every_flipped_byte_of_an_index_is_noticed(packed):
    shard = packed / GROUP / "fc.bias" / "c.0.0"
    whole = shard.read_bytes()
    for place in range(len(whole) - 36, len(whole)):
        shard.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with open_trace(packed) as trace, pytest.raises(TraceError, match="checksum mismatch in the index"):
            trace.read("fc.bias", 0)
