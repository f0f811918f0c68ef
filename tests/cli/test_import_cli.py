"""``gtrace import`` and ``gtrace export``: what they print, their exit codes, and ``docs/importing.md``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers_foreign import SHAPES, check_trace, tensors, write_safetensors

PAGE = (Path(__file__).parents[2] / "docs" / "importing.md").read_text(encoding="utf-8")
STEPS = (0, 9, 10)


@pytest.fixture
def grads(tmp_path):
    """A folder of safetensors, one file per step."""
    (tmp_path / "grads").mkdir()
    for step in STEPS:
        write_safetensors(tmp_path / f"grads/step_{step}.safetensors", tensors(step))
    return tmp_path / "grads"


def test_every_option_is_described():
    from gtrace.cli.trace import export, import_

    for command in (export, import_):
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert f"`{max(parameter.opts, key=len)}" in PAGE or f", `{parameter.opts[-1]}" in PAGE, parameter.name


def test_a_sweep_of_an_imported_folder_of_safetensors(call, grads, tmp_path):
    code, out, err = call("import", grads, "-o", "run.zarr")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "3 steps (0 to 10), 3 tensors from 3 files; steps from file names"
    check_trace(tmp_path / "run.zarr", STEPS)
    code, out, err = call("sweep", "run.zarr", "--methods", "qsgd", "--bits", "3", "--draws", "0", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["tensors"], told["steps"], told["warnings"]) == (len(SHAPES), len(STEPS), [])


def test_json(call, succeed, grads):
    np.savez(grads / "more_9.npz", extra=np.array([np.nan, 1.0]), flag=np.array(True))
    (grads / "notes.txt").touch()
    out, _ = succeed("import", grads, "-o", "run.h5", "--json", "--steps", "9-10")
    made = {"output": "run.h5", "steps": [9, 10], "tensors": ["extra", *SHAPES], "files": 3, "step_numbers": ["names"]}
    assert json.loads(out) == made | {"left_out": ["flag"], "files_ignored": 1, "nonfinite": 1}
    out, _ = succeed("export", "run.h5", "--to", "safetensors", "--json", "--tensors", "fc.*")
    assert json.loads(out) == {
        "output": "run.safetensors",
        "steps": [9, 10],
        "tensors": ["fc.weight", "fc.bias"],
        "files": 2,
    }
    assert "1 value not finite" in call("import", grads, "-o", "two.h5")[1]


def test_errors_are_one_line(call, refuse, grads, tmp_path):
    (tmp_path / "bad").mkdir()
    np.savez(tmp_path / "bad/1.npz", w=np.array([{}]))
    (tmp_path / "flat").mkdir()
    np.save(tmp_path / "flat/w.npy", np.zeros(3))
    assert call("import", grads, "-o", "run.zarr")[0] == 0
    cases = [
        (("import", "nowhere", "-o", "x.zarr"), 3, "no such file or folder"),
        (("import", "bad", "-o", "x.zarr"), 3, "pickled Python objects"),
        (("import", "flat", "-o", "x.zarr"), 2, "pass --step-axis"),
        (("import", "flat", "-o", "x.npz"), 2, "must end in .zarr"),
        (("import", "flat", "-o", "no/x.zarr"), 2, "does not exist"),
        (("import", "grads", "-o", "run.zarr"), 4, "already exists"),
        (("import", "-o", "x.zarr"), 2, "SOURCE"),
        (("import", "grads"), 2, "--output"),
        (("import", "run.zarr", "-o", "x.zarr"), 3, "is already a gtrace trace"),
        (("export", "nowhere.zarr"), 3, "no such trace"),
        (("export", "run.zarr", "-o", "grads", "--force"), 4, "so it is kept"),
        (("export", "run.zarr", "--steps", "77"), 2, "none of these steps"),
        (("export", "run.zarr", "--rank", "1"), 2, "holds no kind weight, rank 1"),
    ]
    for arguments, code, words in cases:
        assert words in refuse(*arguments, code=code), arguments
    assert sorted(os.listdir(tmp_path)) == ["bad", "flat", "grads", "run.zarr"]


def test_names_that_would_act_on_a_terminal_are_shown(refuse, succeed, tmp_path):
    (tmp_path / "g").mkdir()
    np.savez(tmp_path / "g/1.npz", **{"w\x1b[2J": np.zeros(3), "n\x1b[2J": np.zeros(3, int)})
    out, _ = succeed("import", "g", "-o", "r.zarr")
    assert "\x1b" not in out
    (tmp_path / "g/\x1b[31m.npy").write_bytes(b"")
    assert "\x1b" not in refuse("import", "g", "-o", "s.zarr", "--pattern", "*.npy", code=3)


def test_only_state_dicts_need_torch(call, grads, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(3).bfloat16()}, tmp_path / "grads_7.pt")
    assert "steps from file names" in call("import", "grads_7.pt", "-o", "dicts.zarr").stdout
    script = "import sys; from gtrace.cli import main\ntry: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    command = [sys.executable, "-c", script, "import", "grads", "-o", "run.zarr"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "steps from file names" in done.stdout


def test_a_single_step_that_no_name_told_hints_at_an_axis_of_steps(call, succeed, tmp_path):
    np.savez(tmp_path / "stacked.npz", w=np.ones((6, 4, 3), np.float32))
    told, _ = succeed("import", "stacked.npz", "-o", "one.zarr")
    assert "1 step, 1 tensor" in told
    assert "if the first axis of the arrays counts steps, pass --step-axis --force\n" in told
    told, _ = succeed("import", "stacked.npz", "-o", "one.zarr", "--step-axis", "--force")
    assert told.startswith("6 steps (0 to 5), 1 tensor")
    assert "--step-axis" not in told
