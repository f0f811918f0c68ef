"""docs/capture-matrix.md tells every case that a test is marked with."""

from __future__ import annotations

import re
from pathlib import Path

from helpers_styles import STYLES
from matrix import PAGE

MARK = re.compile(r'capture_case\(\s*"([^"]+)"')


def test_the_page_tells_every_marked_case():
    tests = Path(__file__).parent.parent
    marked = {name for path in tests.rglob("test_*.py") for name in MARK.findall(path.read_text())}
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert {row[0].removeprefix("| ") for row in rows[1:]} == marked | set(STYLES)
    assert {row[-1] for row in rows[1:]} == {"works |"}
    assert all(row[1].startswith("torch ") for row in rows[1:])
