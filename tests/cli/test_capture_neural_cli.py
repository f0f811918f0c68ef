"""``gtrace capture --kind`` from the outside, and what other commands make of its traces."""

import json
import random
import re
import signal
import time

import numpy as np
import pytest
from helpers_capture import SAMPLES, Command, run_gtrace, write_script

import gtrace

#: One module, whose gradient tells its step: step, step + 1, ... per element; batches of 3 and 2.
ENDLESS = """
    import time, torch
    from torch import nn

    model = nn.Sequential(nn.Linear(3, 50))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10**6):
        optimizer.zero_grad()
        rows = 3 - step % 2
        ramp = torch.arange(50.0 * rows).reshape(rows, 50) + step
        (model(torch.ones(rows, 3)) * ramp).sum().backward()
        optimizer.step()
        if step == 5:
            print("going", flush=True)
        time.sleep(0.001)
    """


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A trace of both kinds with a smaller last batch and a cap that cuts the convolutions' gradients."""
    folder = tmp_path_factory.mktemp("digits")
    script = [SAMPLES / "digits_cnn.py", "--epochs", 1, "--batch-size", 256]
    cut = ["--steps", "4-5", "--max-elements", 20_000]
    done = run_gtrace("capture", "--kind", "both", *cut, "-o", "run.zarr", *script, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run.zarr"


def test_info_tells_batches_and_what_was_kept(succeed, digits):
    out, _ = succeed("info --full --kind neural", digits)
    rows = {line.split()[0]: line.split()[1:4] for line in out.splitlines() if line.startswith(("conv", "fc"))}
    assert rows == {
        "conv1": ["157-256x32x8x8", "3.8%", "float32"],
        "conv2": ["157-256x64x8x8", "1.9%", "float32"],
        "fc1": ["157-256x64", "100.0%", "float32"],
        "fc2": ["157-256x10", "100.0%", "float32"],
    }
    found = {tensor["name"]: tensor for tensor in json.loads(succeed("info --json", digits)[0])["tensors"]}
    assert (found["fc2"]["elements_fewest"], found["fc2"]["elements_most"]) == (1570, 2560)
    assert found["conv1"]["elements_stored"] == found["conv1"]["size"] == 20_000
    assert found["fc1.bias"]["elements_fewest"] == found["fc1.bias"]["elements_most"] == 64
    # Half of what passes a ReLU is zero, so counted over padding it would be less.
    with gtrace.open_trace(digits) as trace:
        values = np.concatenate([trace.read("fc1", step) for step in trace.steps("fc1")])
    assert found["fc1"]["zeros"] == pytest.approx(np.mean(values == 0))


def test_a_report_takes_such_a_trace(succeed, folder, digits):
    assert succeed("report -o report.md", digits)[1] == ""
    assert "12 tensors" in (folder / "report.md").read_text()


def test_only_neural(succeed, folder):
    write_script(folder / "train.py", ENDLESS.replace("10**6", "4"))
    _, err = succeed("capture --kind neural --every 2 train.py")
    assert re.search(r"gtrace: 2 of 4 steps captured in train.zarr \(1 neural tensors, ", err)
    assert [info.kind for info in gtrace.open_trace("train.zarr").tensors] == ["neural"]


def committed(path):
    """Steps with neural gradients that are in a trace that is being written."""
    if not path.exists():
        return 0
    with gtrace.open_trace(path) as trace:
        there = any(info.kind == "neural" for info in trace.tensors)
        return trace.scalars(kind="neural")["step"].size if there else 0


@pytest.mark.capture_case("Ctrl-C, SIGTERM, os._exit, kill -9")
@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_after_kill_9_every_committed_step_is_right(suffix, tmp_path):
    write_script(tmp_path / "train.py", ENDLESS)
    trace = tmp_path / f"run.{suffix}"
    with Command("capture", "--kind", "both", "-o", trace.name, "train.py", cwd=tmp_path) as process:
        assert process.stdout.readline() == "going\n"
        while committed(trace) <= 10:
            time.sleep(0.02)
        time.sleep(random.Random(suffix).uniform(0, 0.3))
        process.end(signal.SIGKILL)
    with gtrace.open_trace(trace) as opened:
        steps = opened.steps("0", kind="neural").tolist()
        assert len(steps) >= 10
        assert steps == list(range(len(steps)))
        for step in steps:
            rows = 3 - step % 2
            ramp = step + np.arange(50 * rows)
            assert np.array_equal(opened.read("0", step, kind="neural"), ramp)
            # The module's input is ones.
            if step in opened.steps("0.weight"):
                assert np.array_equal(opened.read("0.weight", step), np.repeat(ramp.reshape(rows, 50).sum(axis=0), 3))
        weights = opened.steps("0.weight").tolist()
        assert weights == list(range(len(weights)))
        assert abs(len(weights) - len(steps)) <= 64  # rows of a second may be written together
        assert opened.status == "interrupted"
