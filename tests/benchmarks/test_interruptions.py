"""The interruptions in short: one of each way, in both formats, with one process and with four; kills of others."""

import json

from helpers_capture import run_python
from helpers_installed import ROOT


def test_one_of_each(tmp_path):
    script = ROOT / "benchmarks" / "interruptions.py"
    done = run_python(script, "--runs", 16, "--fresh", 0, "--seed", 7, "-o", "counts.json", cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "counts.json").read_text())
    ways = {"kill -9", "SIGTERM", "Ctrl-C", "SIGSTOP", "full disk", "deleted"}
    others = {(name, "kill -9") for name in ("sweep", "report", "plan", "train", "import")}
    others |= {("sweep", "full disk"), ("sweep", "deleted")}
    assert {(row["command"], row["way"]) for row in found} == {("capture", way) for way in ways} | others
    assert sum(row["late"] for row in found) > 2
