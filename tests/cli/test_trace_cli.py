"""``gtrace capture --sketch``, ``gtrace sketch``, ``import`` and ``export``, and other commands on their traces."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers_capture import write_script
from helpers_foreign import tensors, write_safetensors

import gtrace
from gtrace.report.names import number
from gtrace.trace import SketchPlan, SketchRow

TRAIN = """
    import torch
    from torch import nn

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(200, 150), nn.Linear(150, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(5, 200)).square().mean().backward()
        optimizer.step()
    """


@pytest.fixture
def train(folder):
    write_script(folder / "train.py", TRAIN)


@pytest.fixture
def full(train, succeed):
    """A trace of values, ``full.zarr``."""
    succeed("capture -o full.zarr train.py")


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("name", ["s.zarr", "s.h5"])
def test_capture_of_sketches(succeed, name):
    succeed(f"capture -o {name} --sketch l2:512,none --sketch-mantissa 5 train.py")
    with gtrace.open_trace("full.zarr") as values, gtrace.open_trace(name) as trace:
        sketched = [(info.name, bool(info.sketches)) for info in trace.tensors]
        assert sketched == [("0.weight", True), ("0.bias", False), ("1.weight", False), ("1.bias", False)]
        assert trace.attrs["capture"]["sketch"] == "l2:512,none"
        for step in range(6):
            expected = SketchRow.of(values.read("0.weight", step), SketchPlan.parse("l2:512,none").specs)
            assert trace.sketch_row("0.weight", step, []).norm2 == expected.norm2
            sketch = trace.sketch("0.weight", step, "l2", 512)
            assert (sketch.mantissa, sketch.energy) == (5, pytest.approx(expected.norm2, rel=1e-6))
            np.testing.assert_array_equal(trace.read("0.bias", step), values.read("0.bias", step))
    out, _ = succeed(f"info --full {name}")
    assert "sketch   l2:512, none of 1 tensor; no values, so sweeps give expectations only" in out
    found = json.loads(succeed(f"info --json {name}")[0])["tensors"]
    assert [tensor["sketches"] for tensor in found][:2] == [["l2:512", "none"], []]


@pytest.mark.usefixtures("full")
def test_a_sketch_of_a_trace(succeed, refuse):
    out, err = succeed("sketch full.zarr --sketch l2:512,none --merge-steps 4")
    assert err == ""
    assert out.splitlines()[1] == "1 tensor as sketches, 3 as values, which take less room"
    assert out.splitlines()[4:] == ["full.sketch.zarr", "next: gtrace sweep full.sketch.zarr"]
    out, _ = succeed("info --full full.sketch.zarr")
    assert "sketch of 4 steps" in out
    row = next(line for line in out.splitlines() if "150x200" in line)
    with gtrace.open_trace("full.zarr") as trace:
        energies = trace.statistics("0.weight")["norm2"]
    assert number(float(np.sqrt(energies[:4].mean()))) in row
    assert number(float(np.sqrt(energies[4:].mean()))) in row
    assert "exists" in refuse("sketch full.zarr", code=4)
    found = json.loads(succeed("sketch full.zarr --sketch none --mantissa 9 --force --json")[0])
    assert (found["sketches"], found["mantissa"], found["sketched"], found["raw"]) == (["none"], 9, 0, 4)
    refuse("sketch nothing.zarr", code=3)


@pytest.mark.usefixtures("full")
def test_sweep_and_report_of_a_sketch(succeed, refuse, folder):
    succeed("sketch full.zarr --sketch l2:512")
    _, err = succeed("sweep full.sketch.zarr --methods qsgd:bucket_size=512,topk --bits 3")
    assert err.count("gtrace: warning: 1 of 4 tensors are kept as sketches: ") == 2
    succeed("report full.sketch.sweep.db -o report.md")
    succeed("report full.sketch.zarr -o page.html")
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "1 of 4 tensors are kept as sketches; laws are fitted to values." in page
    assert "the trace holds sketches of it (l2:512) and no values" in refuse("info --fit full.sketch.zarr")
    refuse("sweep full.sketch.zarr --methods topk --tensors 0.weight -o x.db")


STEPS = (0, 9, 10)


@pytest.fixture
def grads(folder):
    """A folder of safetensors, one file per step."""
    (folder / "grads").mkdir()
    for step in STEPS:
        write_safetensors(folder / f"grads/step_{step}.safetensors", tensors(step))
    return folder / "grads"


def test_errors_are_one_line(succeed, refuse, grads, folder):
    for name in ("flat", "wrong"):
        (folder / name).mkdir()
    np.save(folder / "flat/w.npy", np.zeros(3))
    (folder / "wrong/\x1b[31m.npy").write_bytes(b"")
    succeed("import grads -o run.zarr")
    for line, code, words in [
        ("import nowhere -o x.zarr", 3, "no such file or folder"),
        ("import wrong -o x.zarr --pattern *.npy", 3, "\\x1b[31m.npy"),
        ("import flat -o x.zarr", 2, "pass --step-axis"),
        ("import flat -o no/x.zarr", 2, "does not exist"),
        ("import grads -o run.zarr", 4, "already exists"),
        ("import -o x.zarr", 2, "SOURCE"),
        ("import grads", 2, "--output"),
        ("export run.zarr -o grads --force", 4, "so it is kept"),
        ("export run.zarr --rank 1", 2, "holds no kind weight, rank 1"),
    ]:
        assert words in refuse(line, code=code), line
    assert sorted(os.listdir(folder)) == ["flat", "grads", "run.zarr", "wrong"]


def test_names_that_would_act_on_a_terminal_are_shown(succeed, folder):
    np.savez(folder / "1.npz", **{"w\x1b[2J": np.zeros(3), "n\x1b[2J": np.zeros(3, int)})
    assert "\x1b" not in succeed("import 1.npz -o r.zarr")[0]


@pytest.mark.usefixtures("grads")
def test_only_state_dicts_need_torch(succeed, folder):
    torch.save({"w": torch.ones(3).bfloat16()}, folder / "grads_7.pt")
    assert "steps from file names" in succeed("import grads_7.pt -o dicts.zarr")[0]
    script = "import sys; from gtrace.cli import main\ntry: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    command = [sys.executable, "-c", script, "import", "grads", "-o", "run.zarr"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "steps from file names" in done.stdout
