"""Cells of a notebook, run by IPython's own shell."""

import numpy as np
import pytest

import gtrace

InteractiveShell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell

SETUP = """
%load_ext gtrace
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = []

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        rows.append(model.weight.grad.flatten().numpy().copy())
        optimizer.step()
"""


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    shell = InteractiveShell()
    shell.history_manager.enabled = False
    assert shell.run_cell(SETUP).success
    yield shell
    shell.history_manager.end_session()


@pytest.mark.capture_case("notebooks: a cell with %%gtrace_capture, with gtrace.capture(...)", packages=("ipython",))
@pytest.mark.parametrize(
    "cell", ["%%gtrace_capture run.zarr --every 2\ntrain(5)", "with gtrace.capture('run.zarr', every=2):\n    train(5)"]
)
def test_a_cell(cell, shell, capsys):
    shell.run_cell("import gtrace")
    capsys.readouterr()
    assert shell.run_cell(cell).success
    if cell.startswith("%%"):
        assert "gtrace: 3 of 5 steps captured in run.zarr (2 tensors" in capsys.readouterr().err
    with gtrace.open_trace("run.zarr") as trace:
        assert trace.status == "complete"
        assert trace.steps("weight").tolist() == [0, 2, 4]
        for step in (0, 2, 4):
            assert np.array_equal(trace.read("weight", step), shell.user_ns["rows"][step])
    shell.run_cell("train(1)")
    assert len(shell.user_ns["rows"]) == 6
    assert gtrace.open_trace("run.zarr").steps("weight").size == 3


def test_a_cell_that_fails_and_mistakes(shell, capsys):
    shell.run_cell("%%gtrace_capture\ntrain(2)\n1 / 0")
    out = capsys.readouterr()
    assert "ZeroDivisionError" in out.out + out.err
    assert gtrace.open_trace("run.zarr").status == "interrupted"
    shell.run_cell("%%gtrace_capture --forse run.zarr\ntrain(1)")
    out = capsys.readouterr()
    assert "No such option" in out.out + out.err
    assert len(shell.user_ns["rows"]) == 2


@pytest.mark.framework_case("IPython: traces and sweeps show themselves", packages=("ipython",))
def test_a_trace_and_a_sweep_show_themselves(shell):
    shell.run_cell("import gtrace\nwith gtrace.capture('run.zarr'):\n    train(3)")
    shell.run_cell("trace = gtrace.open_trace('run.zarr')\nresult = gtrace.sweep(trace, 'qsgdinf', bits=4)")
    for name, said in (("trace", "3 steps, 2 tensors"), ("result", "Recommendation")):
        shown, _ = shell.display_formatter.format(shell.user_ns[name])
        assert said in shown["text/html"]
