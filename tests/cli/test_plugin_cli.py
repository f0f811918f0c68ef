import json

import pytest
from helpers_sweep import PLUGIN, write_trace

from gtrace.codecs.spec import unregister
from gtrace.sweep import ResultStore


@pytest.fixture
def half(folder):
    """A file with a codec, which later tests of this process must not see."""
    (folder / "half.py").write_text(PLUGIN)
    yield
    unregister("half")


def test_two_plain_functions_take_part_in_a_sweep_and_in_training(call, half, tmp_path):
    write_trace(tmp_path / "run.zarr", steps=(0, 1))
    done = call("sweep", "run.zarr", "--plugin", "half.py", "--methods", "half", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["codecs"] == ["half"]
    rows = ResultStore.load(tmp_path / "run.sweep.db")
    assert set(rows["bits_payload"]) == {16.0}
    assert 0 < max(rows["relative_variance"]) < 1e-5
    done = call("train", *["--codec", "half", "--plugin", "half.py", "--task", "digits-mlp", "--steps", "3", "--json"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["runs"][1]["run"] == "half"


def test_error_feedback_is_a_prefix(call, tmp_path):
    write_trace(tmp_path / "run.zarr", steps=(0, 1))
    words = ("--methods", "topk,signsgd", "--ratio", "0.01-0.1", "--error-feedback", "--json")
    done = call("sweep", "run.zarr", *words)
    assert done.returncode == 0, done.stderr
    swept = " ".join(json.loads(done.stdout)["codecs"])
    assert swept == "ef:signsgd ef:topk ef:topk:ratio=0.02 ef:topk:ratio=0.05 ef:topk:ratio=0.1"


def test_a_broken_plugin_is_one_line(refuse, tmp_path):
    write_trace(tmp_path / "run.zarr", steps=(0,))
    (tmp_path / "bad.py").write_text("x = 1\nraise RuntimeError('no')\n")
    words = ("--methods", "none", "--plugin")
    assert refuse("sweep", "run.zarr", *words, "bad.py", code=5) == "gtrace: plugin bad.py, line 2: RuntimeError: no\n"
    refuse("sweep", "run.zarr", *words, "missing.py")
