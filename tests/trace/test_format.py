"""``docs/trace-format.md`` names everything that is stored, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from helpers_trace import gradient, write_trace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gtrace.errors import UsageError
from gtrace.trace import create_trace, open_trace
from gtrace.trace import format as layout
from gtrace.trace.files import MAX_METADATA_BYTES
from gtrace.trace.format import DIMENSION_SUFFIX, MAX_ENTRY, RESERVED, encode_name
from gtrace.trace.journal import MOST_ROWS
from gtrace.trace.zarr import PIPELINES

TEXT = (Path(__file__).parents[2] / "docs" / "trace-format.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_every_stored_name_is_described():
    for name in (*layout.SCALARS, *layout.STATISTICS, "step", *layout.KINDS.values(), *RESERVED):
        assert f"`{name}`" in TEXT or re.search(rf"^ +.*\b{name}\b", TEXT, re.MULTILINE), name
    for name in (layout.METADATA, *{codec for order in PIPELINES for codec in order}):
        assert name in TEXT, name


def test_sizes_are_those_of_the_code():
    assert f"({MOST_ROWS}\nat most)" in TEXT
    assert f"above {layout.MAX_CHUNK_BYTES >> 20} MiB ({layout.MAX_TABLE_CHUNK_BYTES >> 20} MiB of arrays" in TEXT
    assert f"metadata above {MAX_METADATA_BYTES >> 20} MiB" in TEXT
    assert f"# The trace format, version {layout.VERSION}" in TEXT


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_run(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "run.zarr")
    write_trace(tmp_path / "run.h5")
    names: dict[str, object] = {}
    exec(compile(example, "trace-format.md", "exec"), names)
    if "weight" in names:
        np.testing.assert_array_equal(names["weight"], gradient("fc.weight", 4).ravel())
    assert len(EXAMPLES) == 4


NAMES = st.text(min_size=1, max_size=200) | st.sampled_from(
    [*RESERVED, ".", "..", "../x", "/abs", "a\\b", "a/b", "a%2Fb", "__x", "c.0.0", "a.i", "zarr.json", "~", "\0", " "]
)


@given(st.lists(NAMES, unique=True, max_size=30))
def test_entries_are_safe_and_distinct(names):
    entries = [encode_name(name) for name in names]
    assert len(set(entries)) == len(entries)
    for entry in entries:
        assert re.fullmatch(r"[A-Za-z0-9_\-.%~]+", entry)
        assert len(entry) <= MAX_ENTRY
        assert not entry.startswith((".", "__"))
        assert not entry.endswith(DIMENSION_SUFFIX)
        assert entry not in RESERVED


def test_long_names_that_share_their_beginning_differ():
    one, two = ("x" * 300 + end for end in "ab")
    assert encode_name(one) != encode_name(two)
    assert encode_name(one).startswith("x" * 100 + "~")
    # No %XX is cut in half.
    assert re.fullmatch(r"(%[0-9A-F]{2})+~[0-9a-f]{16}", encode_name("é" * 300))
    with pytest.raises(UsageError, match="name"):
        encode_name("a\ud800")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(NAMES, unique=True, min_size=1, max_size=6))
def test_names_come_back(path, names, tmp_path):
    with create_trace(path, force=True) as writer:
        for k, name in enumerate(names):
            writer.append(0, name, [k])
    with open_trace(path) as trace:
        assert [info.name for info in trace.tensors] == names
        for k, name in enumerate(names):
            assert trace.read(name, 0).tolist() == [k]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
