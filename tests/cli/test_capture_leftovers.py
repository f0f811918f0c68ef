"""However a captured program ends, nothing of gtrace stays in the process."""

import inspect
import os
import re
import signal
import sys
import textwrap
import threading
import warnings

import pytest
import torch
from helpers_capture import write_script
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from gtrace.cli import main
from gtrace.torch_hooks.hooks import TrainingHooks

TRAIN = textwrap.dedent("""
    import os, sys, torch
    from torch import nn

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
    step()
    step()
    """)

ENDS = {
    "the end": "",
    "sys.exit(0)": "sys.exit(0)",
    "sys.exit(3)": "sys.exit(3)",
    "an exception": "raise ValueError('bad batch')",
    "Ctrl-C": "raise KeyboardInterrupt",
    "os._exit": "os._exit(3)",
    "an exception in a backward pass": """
        model[0].weight.register_hook(lambda gradient: 1 / 0)
        step()
        """,
    "an exception in a step": """
        optimizer.param_groups[0]["weight_decay"] = "much"
        step()
        """,
    "a graph that is kept": "kept = model(torch.randn(5, 3))",
}


class _Left(BaseException):
    """Stands for the end of the process."""


def footprint():
    """What gtrace might leave in a process: hooks, wrapped functions, threads, settings."""
    functions = (
        torch.autograd.backward,
        torch.amp.GradScaler.scale,
        torch.amp.GradScaler.step,
        torch.nn.utils.clip_grad_norm_,
        torch.nn.utils.clip_grad.clip_grad_norm_,
        torch.nn.parallel.DistributedDataParallel.__init__,
        torch.optim.Optimizer.add_param_group,
    )
    tables = [
        *(table for name, table in sorted(vars(modules).items()) if name.startswith("_global_") and "hooks" in name),
        *(table for name, table in sorted(vars(optimizers).items()) if name.startswith("_global_")),
    ]
    return {
        "functions": [inspect.unwrap(function) is function for function in functions],
        "hooks": [len(table) for table in tables if isinstance(table, dict)],
        "threads": {thread.name for thread in threading.enumerate() if "gtrace" in thread.name},
        "finders": [finder for finder in sys.meta_path if type(finder).__module__.startswith("gtrace")],
        "environment": {name: os.environ.get(name) for name in ("GTRACE_CAPTURE", "PYTHONPATH")},
        "excepthook": sys.excepthook,
        "leave": os._exit,
        "signals": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)],
        "filters": [one for one in warnings.filters if "global hooks" in str(one[1])],
        "argv": sys.argv,
        "main": sys.modules["__main__"],
    }


@pytest.fixture
def capture(tmp_path, monkeypatch, capfd):
    """Run ``gtrace capture`` in this process to its end, whichever that is, after which nothing stays: stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)

    def leave(_status):
        raise _Left

    monkeypatch.setattr(os, "_exit", leave)

    def run(*args, end=""):
        write_script(tmp_path / "train.py", TRAIN + textwrap.dedent(end))
        before = footprint()
        with pytest.raises((SystemExit, _Left)):
            main(["capture", "--kind", "both", "--noise", *args])
        assert footprint() == before
        return capfd.readouterr().err

    return run


@pytest.mark.parametrize("end", ENDS)
def test_nothing_stays(end, capture):
    err = capture("train.py", end=ENDS[end])
    assert err.count("gtrace: recording ") == 1
    assert re.search(r"[23] steps captured", err)


@pytest.mark.parametrize("args", [("-m", "no_package.no_module"), ("-o", "nowhere/x.zarr", "train.py")])
def test_nothing_stays_of_what_never_ran(args, capture):
    assert capture(*args).count("\n") == 1


def test_nothing_stays_of_a_capture_that_could_not_start(capture, monkeypatch):
    def install(_self):
        raise RuntimeError("no hook today")

    monkeypatch.setattr("gtrace.capture.neural.NeuralRecorder.install", install)
    assert "capture could not start: RuntimeError: no hook today" in capture("train.py")


def test_a_wrapper_that_another_one_wrapped_does_nothing_any_more(tmp_path):
    model = torch.nn.Linear(2, 1)
    hooks = TrainingHooks(lambda *_: True, lambda _: None, pytest.fail)
    original = torch.autograd.backward
    hooks.install()
    ours = torch.autograd.backward
    torch.autograd.backward = lambda *args, **kwargs: ours(*args, **kwargs)
    hooks.remove()
    model(torch.ones(1, 2)).sum().backward()
    torch.autograd.backward = original
    assert hooks.backward_passes == 0
