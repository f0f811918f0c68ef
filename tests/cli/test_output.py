"""What comes from files and file names never acts on a terminal or in a spreadsheet."""

import csv
import io
import json

import numpy as np
import pytest
from helpers_trace import write_arrays

from gtrace.report.files import csv_text

#: C1 controls, DEL, overrides of the direction, a tag beyond the basic plane, and a sequence that names the window
ACTS = "a\x9b31m\x7f\u202eb\x1b]0;x\x07\x85\u2028\u2066\U000e0001"
FILE = "t\x9b\u202e\x7f"
COMMANDS = [
    f"info {FILE}.zarr",
    f"info {FILE}.zarr --fit",
    f"formats {FILE}.zarr",
    f"trace check {FILE}.zarr",
    f"sweep {FILE}.zarr --methods qsgdinf --bits 3",
    "report --full",
    f"report {FILE}.sweep.db --json",
    f"plan {FILE}.zarr --max-bits 3 --json",
    f"plan show {FILE}.plan.toml --full",
    f"trace pack {FILE}.zarr -o {FILE}.h5",
]


def test_no_command_prints_what_a_terminal_acts_on(call, folder):
    values = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    about = {"attrs": {"model": ACTS}, "dtype": ACTS}
    write_arrays(folder / f"{FILE}.zarr", {ACTS: dict(enumerate(values)), "[red]b[/red]": values[0]}, **about)
    for line in COMMANDS:
        code, out, err = call(line)
        assert code == 0, (line, err)
        assert [text for text in (out + err).split("\n") if not text.isprintable()] == [], line
        assert "[red]b[/red]" in out or not line.startswith(("info", "formats")), line
    assert (folder / f"{FILE}.h5").exists()
    code, out, _ = call(f"info {FILE}.zarr --json")
    assert json.loads(out)["tensors"][0]["name"] == ACTS


@pytest.mark.parametrize("text", ["=1+1", "@SUM(A1)", "+1", "-1+2", "\t=1", "-", "fc.weight"])
def test_a_text_is_no_formula_in_a_spreadsheet(text):
    (row,) = csv.DictReader(io.StringIO(csv_text([{"name": text, "less": -1.5, "none": float("nan")}])))
    assert row == {"name": text if text in ("-", "fc.weight") else f"'{text}", "less": "-1.5", "none": ""}
