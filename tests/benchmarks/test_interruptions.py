"""The interruptions in short: one of each way, in both formats, with one process and with four."""

from pathlib import Path

from helpers_capture import run_python

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "interruptions.py"


def test_one_of_each(tmp_path):
    done = run_python(SCRIPT, "--runs", 6, "--fresh", 0, "--seed", 7, cwd=tmp_path, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("|")[2:4] for line in done.stdout.splitlines()[-6:]]
    assert [[int(cell) for cell in row] for row in rows] == [[1, 1]] * 6
