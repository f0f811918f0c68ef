"""The shipped scripts: they train, repeat themselves, and do not notice that they are captured."""

import numpy as np
import pytest
import torch
from helpers_capture import SAMPLES

import gtrace
from gtrace.capture import CaptureSession, capture_options
from gtrace.capture.options import CaptureSettings
from gtrace.torch_hooks.launcher import Program, run_program

#: script -> arguments that make it short, its parameters, and its modules with gradients of outputs.
SCRIPTS = {
    "digits_cnn.py": (["--epochs", "1"], 8, {"conv1", "conv2", "fc1", "fc2"}),
    "digits_mlp.py": (["--epochs", "1"], 6, None),
    "char_lstm.py": (["--steps", "8"], 7, {"embedding", "lstm", "head"}),
    "char_transformer.py": (["--steps", "3"], 30, None),
}


@pytest.fixture(autouse=True)
def anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(script, *args):
    assert run_program(Program(str(SAMPLES / script), tuple(map(str, args)))).exit_code == 0


@pytest.mark.capture_case("shipped samples, bit-identical weights")
@pytest.mark.parametrize("script", SCRIPTS)
def test_weights_are_the_same_bit_for_bit_with_and_without_capture(anywhere, script, capsys):
    short, tensors, modules = SCRIPTS[script]
    train(script, *short, "--save", "plain.pt")
    plain_output = capsys.readouterr().out
    session = CaptureSession(capture_options(anywhere / "run.zarr", CaptureSettings(kind="both")))
    session.start()
    train(script, *short, "--save", "captured.pt")
    summary = session.finish("complete")
    assert capsys.readouterr().out == plain_output
    plain, captured = (torch.load(name, weights_only=True) for name in ("plain.pt", "captured.pt"))
    assert plain.keys() == captured.keys()
    assert all(torch.equal(plain[name], captured[name]) for name in plain)
    assert (summary.rows, summary.errors) == (summary.steps_seen, 0)
    trace = gtrace.open_trace(anywhere / "run.zarr")
    names = {kind: [info.name for info in trace.tensors if info.kind == kind] for kind in ("weight", "neural")}
    assert names["weight"] == list(plain)
    assert len(plain) == tensors
    assert modules is None or set(names["neural"]) == modules
    assert names["neural"]
    for name in names["neural"]:
        assert trace.steps(name, kind="neural").size == trace.scalars()["step"].size
        assert trace.read(name, 0, kind="neural").any()
    assert np.isfinite(trace.scalars()["loss"]).all()
