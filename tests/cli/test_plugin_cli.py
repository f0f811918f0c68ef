import json
import subprocess
import sys

from helpers_sweep import write_trace

PLUGIN = """
import numpy as np

def compress(values):
    return values.astype("<f2").tobytes()

def decompress(data, size):
    return np.frombuffer(data, "<f2", size).astype(np.float32)
"""


def run(*args, cwd):
    return subprocess.run(
        [sys.executable, "-m", "gtrace", *args], capture_output=True, text=True, check=False, cwd=cwd, timeout=240
    )


def test_two_plain_functions_take_part_in_a_sweep(tmp_path):
    write_trace(tmp_path / "run.zarr", steps=(0, 1))
    (tmp_path / "half.py").write_text(PLUGIN)
    done = run("sweep", "run.zarr", "--plugin", "half.py", "--methods", "half", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["codecs"] == ["half"]
    import sqlite3

    sql = sqlite3.connect(tmp_path / "run.sweep.db")
    bits = {row[0] for row in sql.execute("SELECT bits_payload FROM rows")}
    errors = [row[0] for row in sql.execute("SELECT relative_variance FROM rows")]
    sql.close()
    assert bits == {16.0}
    assert 0 < max(errors) < 1e-5


def test_error_feedback_is_a_prefix(tmp_path):
    write_trace(tmp_path / "run.zarr", steps=(0, 1))
    done = run(
        "sweep",
        "run.zarr",
        "--methods",
        "topk,signsgd",
        "--ratio",
        "0.01-0.1",
        "--error-feedback",
        "--json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["codecs"] == [
        "ef:signsgd",
        "ef:topk",
        "ef:topk:ratio=0.02",
        "ef:topk:ratio=0.05",
        "ef:topk:ratio=0.1",
    ]


def test_plugin_in_training(tmp_path):
    (tmp_path / "half.py").write_text(PLUGIN)
    done = run(
        "train",
        "--codec",
        "half",
        "--plugin",
        "half.py",
        "--task",
        "digits-mlp",
        "--steps",
        "3",
        "--json",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["runs"][1]["run"] == "half"


def test_a_broken_plugin_is_one_line(tmp_path):
    write_trace(tmp_path / "run.zarr", steps=(0,))
    (tmp_path / "bad.py").write_text("x = 1\nraise RuntimeError('no')\n")
    done = run("sweep", "run.zarr", "--plugin", "bad.py", "--methods", "none", cwd=tmp_path)
    assert done.returncode == 5
    assert done.stderr.splitlines() == ["gtrace: plugin bad.py, line 2: RuntimeError: no"]
    done = run("sweep", "run.zarr", "--plugin", "missing.py", "--methods", "none", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
