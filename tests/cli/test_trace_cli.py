"""``gtrace capture --sketch``, ``gtrace sketch`` and what the other commands say about their traces."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from helpers_capture import write_script
from helpers_foreign import SHAPES, check_trace, tensors, write_safetensors

import gtrace
from gtrace.trace import SketchPlan, SketchRow

TRAIN = textwrap.dedent("""
    import torch
    from torch import nn

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(200, 150), nn.Linear(150, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(5, 200)).square().mean().backward()
        optimizer.step()
    """)


@pytest.fixture
def gtrace_main(call, folder):
    write_script(folder / "train.py", TRAIN)
    return call


@pytest.fixture
def full(gtrace_main):
    assert gtrace_main("capture", "-o", "full.zarr", "train.py")[0] == 0
    return gtrace_main


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_capture_of_sketches(full, suffix):
    name = f"sketched{suffix}"
    code, _, err = full("capture", "-o", name, "--sketch", "l2:512,none", "--sketch-mantissa", "5", "train.py")
    assert code == 0, err
    with gtrace.open_trace("full.zarr") as values, gtrace.open_trace(name) as trace:
        sketched = [(info.name, bool(info.sketches)) for info in trace.tensors]
        assert sketched == [("0.weight", True), ("0.bias", False), ("1.weight", False), ("1.bias", False)]
        assert trace.attrs["capture"]["sketch"] == "l2:512,none"
        for step in range(6):
            expected = SketchRow.of(values.read("0.weight", step), SketchPlan.parse("l2:512,none").specs)
            found = trace.sketch_row("0.weight", step, [])
            assert found.norm2 == expected.norm2
            sketch = trace.sketch("0.weight", step, "l2", 512)
            assert (sketch.mantissa, sketch.energy) == (5, pytest.approx(expected.norm2, rel=1e-6))
            np.testing.assert_array_equal(trace.read("0.bias", step), values.read("0.bias", step))
    code, out, _ = full("info", "--full", name)
    assert code == 0
    assert "sketch   l2:512, none of 1 tensor; no values, so sweeps give expectations only" in out
    kept = [line.split()[2] for line in out.splitlines() if "x200" in line or ".bias" in line]
    assert kept == ["sketch", "values", "values"]
    tensors = json.loads(full("info", "--json", name)[1])["tensors"]
    assert [tensor["sketches"] for tensor in tensors][:2] == [["l2:512", "none"], []]


def test_the_budget_counts_what_sketches_take(gtrace_main):
    # 30,000 values a step and two small tensors: 120 kB as values, less than 50 kB as sketches.
    for options, stopped in (("-o values.zarr", True), ("--sketch none -o sketch.zarr", False)):
        code, _, err = gtrace_main("capture", "--every", 1, "--budget", "200kB", *options.split(), "train.py")
        assert (code, "stopped at the budget" in err) == (0, stopped)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--sketch", "l2:8192,foo"], "'l2:8192,foo' is not a list of norms"),
        (["--sketch-mantissa", "5"], "--sketch-mantissa is for sketches"),
    ],
)
@pytest.mark.usefixtures("gtrace_main")
def test_wrong_options(refuse, options, match):
    assert match in refuse("capture", *options, "train.py")


def test_a_sketch_of_a_trace(full):
    code, out, err = full("sketch", "full.zarr", "--sketch", "l2:512,none", "--merge-steps", 4)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert " -> " in lines[0]
    assert lines[1] == "1 tensor as sketches, 3 as values, which take less room"
    assert lines[2].startswith("kept: ")
    assert lines[3].startswith("lost: the values")
    assert lines[-2:] == ["full.sketch.zarr", "next: gtrace sweep full.sketch.zarr"]
    code, out, _ = full("info", "--full", "full.sketch.zarr")
    assert "sketch of 4 steps" in out
    row = next(line for line in out.splitlines() if "150x200" in line)
    with gtrace.open_trace("full.zarr") as trace:
        energies = trace.statistics("0.weight")["norm2"]
    from gtrace.report.names import number

    assert number(float(np.sqrt(energies[:4].mean()))) in row
    assert number(float(np.sqrt(energies[4:].mean()))) in row
    code, _, err = full("sketch", "full.zarr")
    assert code == 4
    assert "exists" in err
    code, out, _ = full("sketch", "full.zarr", "--sketch", "none", "--mantissa", 9, "--force", "--json")
    found = json.loads(out)
    assert (found["sketches"], found["mantissa"], found["sketched"], found["raw"]) == (["none"], 9, 0, 4)
    code, _, err = full("sketch", "nothing.zarr")
    assert (code, err.count("\n")) == (3, 1)


def test_sweep_and_report_of_a_sketch(full):
    full("sketch", "full.zarr", "--sketch", "l2:512")
    code, out, err = full("sweep", "full.sketch.zarr", "--methods", "qsgd:bucket_size=512,topk", "--bits", "3")
    assert code == 0
    assert err.count("gtrace: warning: 1 of 4 tensors are kept as sketches: ") == 2
    assert "without topk: they have no closed form and need values: capture without --sketch" in err
    code, out, _ = full("report", "full.sketch.sweep.db", "-o", "report.md")
    assert code == 0, out
    code, _, err = full("report", "full.sketch.zarr", "-o", "page.html")
    assert code == 0, err
    with open("page.html", encoding="utf-8") as page:
        assert "1 of 4 tensors are kept as sketches; laws are fitted to values." in page.read()
    code, _, err = full("info", "--fit", "full.sketch.zarr")
    assert (code, err.count("\n")) == (2, 1)
    assert "the trace holds sketches of it (l2:512) and no values" in err
    code, _, err = full("sweep", "full.sketch.zarr", "--methods", "topk", "--tensors", "0.weight", "-o", "x.db")
    assert (code, err.count("\n")) == (2, 1)


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
