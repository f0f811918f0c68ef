"""``gtrace capture --sketch``, ``gtrace sketch`` and what the other commands say about their traces."""

import json
import textwrap

import numpy as np
import pytest
from helpers_capture import write_script

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
