"""``docs/trace-format.md`` names everything that is stored, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from helpers_trace import gradient, write_trace

from gtrace.trace import format as layout
from gtrace.trace.format import RESERVED
from gtrace.trace.journal import MOST_ROWS
from gtrace.trace.shared import LAUNCHERS, RUN, WRITERS
from gtrace.trace.zarr import PIPELINES

TEXT = (Path(__file__).parents[2] / "docs" / "trace-format.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_every_stored_name_is_described():
    for name in (*layout.SCALARS, *layout.STATISTICS, "step", *layout.KINDS.values(), *RESERVED):
        assert f"`{name}`" in TEXT or re.search(rf"^ +.*\b{name}\b", TEXT, re.MULTILINE), name
    for name in (layout.METADATA, *{codec for order in PIPELINES for codec in order}):
        assert name in TEXT, name


def test_what_several_processes_add_is_described():
    for name in (RUN, WRITERS, LAUNCHERS, "restart", "placements", "mesh", "place", "whole_shape", "elements"):
        assert f"`{name}`" in TEXT, name


def test_sizes_are_those_of_the_code():
    assert f"({MOST_ROWS}\nat most)" in TEXT
    assert f"above {layout.MAX_CHUNK_BYTES >> 20} MiB ({layout.MAX_TABLE_CHUNK_BYTES >> 20} MiB of arrays" in TEXT
    assert f"metadata above {layout.MAX_METADATA_BYTES >> 20} MiB" in TEXT
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
