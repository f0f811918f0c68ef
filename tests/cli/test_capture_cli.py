"""``gtrace capture`` from the outside: what the user types, sees and is left with."""

import os
import random
import re
import signal
import sys
import textwrap
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from helpers_capture import Command, but_first_line, run_gtrace, run_python, write_script
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

import gtrace

TRAIN = textwrap.dedent("""
    import argparse, torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--every", default="the script's own")
    args = parser.parse_args()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(args.steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
    print("trained", args.steps, args.every)
    """)
TRAINED = "trained 4 the script's own\n"

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


@pytest.fixture
def folder(folder):
    write_script(folder / "train.py", TRAIN)
    return folder


def footprint():
    """What gtrace might leave in a process: hooks, wrapped functions, threads, settings."""
    tables = [
        *(table for name, table in sorted(vars(modules).items()) if name.startswith("_global_") and "hooks" in name),
        *(table for name, table in sorted(vars(optimizers).items()) if name.startswith("_global_")),
    ]
    return {
        "functions": (
            *(torch.autograd.backward, torch.amp.GradScaler.scale, torch.amp.GradScaler.step),
            *(torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_norm_),
            *(torch.nn.parallel.DistributedDataParallel.__init__, torch.optim.Optimizer.add_param_group),
        ),
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
def capture(call, folder, monkeypatch):
    """Run ``gtrace capture``, of which nothing stays in the process however it ends: exit code, stdout, stderr."""

    def run(line, *words):
        monkeypatch.setattr(sys, "argv", ["gtrace", "capture", *line.split(), *words])
        before = footprint()
        try:
            done = call(f"capture {line}", *words)
        finally:
            assert footprint() == before
        return done.returncode, done.stdout, but_first_line(done.stderr)

    return run


def steps_of(path, tensor="0.bias"):
    with gtrace.open_trace(path) as trace:
        return trace.steps(tensor).tolist()


def test_the_short_form(capture):
    code, out, err = capture("train.py")
    assert (code, out) == (0, TRAINED)
    line = r"gtrace: 4 steps captured in train\.zarr \(4 tensors, [\d.]+ kB, training waited [\d.]+"
    line += r"(?: ms \(\d+%\)|% of its time)\)"
    assert re.fullmatch(line + r"; next: gtrace info train\.zarr, gtrace sweep train\.zarr\n", err)
    trace = gtrace.open_trace("train.zarr")
    assert [tensor.name for tensor in trace.tensors] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert trace.attrs["argv"] == ["train.py"]
    assert (trace.attrs["model"], trace.attrs["seed"], trace.attrs["world_size"]) == ("Sequential", 3, 1)
    assert {"python", "torch", "numpy"} <= trace.attrs["versions"].keys()


def test_hdf5_and_the_scripts_own_options(capture):
    code, out, err = capture("-o x.h5 --every 2 train.py --steps 5 --every mine")
    assert (code, out) == (0, "trained 5 mine\n")
    assert "3 of 5 steps captured in x.h5" in err
    assert steps_of("x.h5") == [0, 2, 4]
    assert gtrace.open_trace("x.h5").attrs["argv"] == ["train.py", "--steps", "5", "--every", "mine"]


@pytest.mark.capture_case("python -m")
def test_a_module(folder, capture):
    write_script(folder / "pkg" / "__init__.py", "")
    write_script(folder / "pkg" / "train.py", TRAIN)
    assert capture("-m pkg.train --steps 2")[:2] == (0, "trained 2 the script's own\n")
    assert gtrace.open_trace("train.zarr").attrs["argv"] == ["-m", "pkg.train", "--steps", "2"]


@pytest.mark.capture_case("python -c")
def test_code(capture):
    assert capture("-c", TRAIN, "--steps", "2")[:2] == (0, "trained 2 the script's own\n")
    assert steps_of("run.zarr") == [0, 1]


def test_what_was_there_is_replaced_only_by_force_and_only_if_it_is_a_trace(folder, capture):
    assert capture("train.py")[0] == 0
    before = {path: path.stat().st_mtime_ns for path in (folder / "train.zarr").rglob("*")}
    code, out, err = capture("train.py --steps 2")
    assert (code, out) == (4, "")
    assert err == "gtrace: train.zarr already exists. Use --force to replace it or -o to write elsewhere.\n"
    assert {path: path.stat().st_mtime_ns for path in (folder / "train.zarr").rglob("*")} == before
    write_script(folder / "broken.py", "import torch\nraise ValueError('early')\n")
    assert capture("--force -o train.zarr broken.py")[0] == 5
    assert steps_of("train.zarr") == [0, 1, 2, 3]
    assert capture("--force train.py --steps 2")[0] == 0
    assert steps_of("train.zarr") == [0, 1]
    write_script(folder / "mine.zarr" / "thesis.txt", "all of it")
    code, out, err = capture("--force -o mine.zarr train.py")
    assert (code, out) == (4, "")
    assert "is a folder but not a gtrace trace, so it is kept" in err
    assert (folder / "mine.zarr" / "thesis.txt").read_text() == "all of it"
    code, _, err = capture("-o s3://bucket/run.zarr train.py")
    assert code == 2
    assert "traces can be written only on this machine" in err


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("sys.exit(0)", 0, "gtrace: 4 steps captured"),
        ("sys.exit(3)", 5, "gtrace: ending.py failed with exit code 3; 4 steps captured"),
        ("sys.exit('out of data')", 5, "out of data\ngtrace: ending.py failed with exit code 1; 4 steps captured"),
        ("raise KeyboardInterrupt", 130, "gtrace: 4 steps captured"),
    ],
)
def test_exit_codes(folder, capture, end, code, message):
    write_script(folder / "ending.py", TRAIN.replace('print("trained"', f'import sys; {end}\nprint("trained"'))
    exit_code, _, err = capture("ending.py")
    assert exit_code == code
    assert err.startswith(message)
    assert len(steps_of("ending.zarr")) == 4
    assert gtrace.open_trace("ending.zarr").status == ("interrupted" if code else "complete")


class _Left(BaseException):
    """Stands for the end of the process."""


STEP = "optimizer.zero_grad(); model(torch.randn(5, 3)).square().mean().backward(); optimizer.step()"


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os._exit(3)", 5),
        ("raise ValueError('bad batch')", 5),
        (f"model[0].weight.register_hook(lambda gradient: 1 / 0); {STEP}", 5),
        (f"optimizer.param_groups[0]['weight_decay'] = 'much'; {STEP}", 5),
        ("kept = model(torch.randn(5, 3))", 0),
    ],
)
def test_nothing_stays_of_both_kinds_and_noise(end, code, folder, capture, monkeypatch):
    def leave(_status):
        raise _Left

    monkeypatch.setattr(os, "_exit", leave)
    write_script(folder / "ending.py", f"{TRAIN}\nimport os\n{end}\n")
    exit_code, _, err = capture("--kind both --noise ending.py")
    assert exit_code == code
    assert re.search(r"[45] steps captured", err)


def test_nothing_stays_of_a_capture_that_could_not_start(capture, monkeypatch):
    def install(_self):
        raise RuntimeError("no hook today")

    monkeypatch.setattr("gtrace.capture.neural.NeuralRecorder.install", install)
    assert "capture could not start: RuntimeError: no hook today" in capture("--kind both train.py")[2]
    assert capture("-m no_package.no_module")[2].count("\n") == 1


PASSES = "import torch\nw = torch.ones(2, requires_grad=True)\nfor _ in range(3):\n    w.square().sum().backward()"
FUNCTIONAL = "import torch\nw = torch.ones(2)\nfor _ in range(3):\n    torch.func.grad(lambda w: w.square().sum())(w)"
RECORD = "add `import gtrace` and, in each step, `gtrace.record_gradients({name: gradient, ...}, loss=loss)`"
OTHER = "its gradients come from torch.autograd.grad or torch.func.grad (3 calls), which leave nothing in p.grad"


@pytest.mark.parametrize(
    ("options", "source", "reason"),
    [
        ("", "import torch", "it took no step of a torch optimizer\n"),
        ("", PASSES, "it took no step of a torch optimizer, and no weight that a backward pass"),
        ("", FUNCTIONAL, f"{OTHER}; {RECORD}\n"),
        ("--steps 100-200", TRAIN, "the script took 4 steps, and --steps or --every asked for others\n"),
        ("--exclude *", TRAIN, "its 4 optimizer steps had no gradient of a tensor that was to be recorded\n"),
        ("--budget 8", TRAIN, "a single step is larger than the budget; give a larger --budget or fewer --tensors\n"),
    ],
)
def test_why_nothing_was_captured(folder, capture, options, source, reason):
    write_script(folder / "still.py", source)
    code, out, err = capture(f"{options} still.py")
    assert (code, out, err.count("\n")) == (2, TRAINED * (source == TRAIN), 1)
    assert err.startswith(f"gtrace: nothing was captured: {reason}")
    assert {path.suffix for path in folder.iterdir()} == {".py"}


def test_a_script_finds_nothing_heavy_loaded_and_torch_may_be_missing(folder):
    # In processes of their own: here torch is imported already. There the script's own setup of torch takes effect.
    write_script(folder / "idle.py", 'import sys; print(sorted({"torch", "numpy", "zarr"} & set(sys.modules)))')
    result = run_python("-m", "gtrace", "capture", "idle.py", cwd=folder)
    assert (result.returncode, result.stdout) == (2, "[]\n")
    assert result.stderr == "gtrace: nothing was captured: it never imported torch\n"
    code = "import sys; sys.modules['torch'] = None; from gtrace.cli import main; main(['capture', 'train.py'])"
    result = run_python("-c", code, cwd=folder)
    assert result.returncode == 2
    assert result.stderr == "gtrace: gtrace.capture needs PyTorch, which is not installed: pip install torch\n"


@pytest.mark.capture_case("no optimizer: new parameters at each step")
def test_a_program_that_makes_new_parameters_at_each_step(folder):
    source = """
        import torch
        w = torch.ones(2, requires_grad=True)
        for _ in range(3):
            w.square().sum().backward()
            print(w.grad.tolist())
            w = (w - 0.25 * w.grad).detach().requires_grad_()
        """
    write_script(folder / "bare.py", source)
    # In a process of its own: here other tests have left modules.
    done = run_gtrace("capture", "bare.py", cwd=folder)
    chosen, _, last = done.stderr.splitlines()
    assert chosen == "gtrace: no optimizer of torch steps here; recording the gradients after each backward pass"
    assert last.startswith("gtrace: 3 steps captured in bare.zarr (1 tensor")
    assert "without an optimizer" in last
    trace = gtrace.open_trace(folder / "bare.zarr")
    assert [str(trace.read("w", step).tolist()) for step in range(3)] == done.stdout.splitlines()


def test_a_pattern_that_matches_nothing_is_told_and_costs_no_data(capture):
    code, out, err = capture("--tensors 0.*,1.wieght train.py")
    assert (code, out) == (2, TRAINED)
    status, complaint = err.splitlines()
    assert status.startswith("gtrace: 4 steps captured in train.zarr (2 tensors")
    assert complaint == "gtrace: --tensors '1.wieght' matched no tensor; did you mean 1.weight or 0.weight?"
    assert [tensor.name for tensor in gtrace.open_trace("train.zarr").tensors] == ["0.weight", "0.bias"]


def test_a_relative_output_stays_where_it_was_meant(folder, capture):
    (folder / "elsewhere").mkdir()
    write_script(folder / "moving.py", "import os\nos.chdir('elsewhere')\n" + TRAIN)
    assert capture("moving.py")[0] == 0
    assert len(steps_of(folder / "moving.zarr")) == 4


def test_ranks_above_zero_only_train(folder, capture, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert capture("--rank 0 train.py") == (0, TRAINED, "")
    assert not (folder / "train.zarr").exists()


def committed(path):
    """Steps with neural gradients that are in a trace that is being written."""
    if not path.exists():
        return 0
    with gtrace.open_trace(path) as trace:
        there = any(info.kind == "neural" for info in trace.tensors)
        return trace.scalars(kind="neural")["step"].size if there else 0


@pytest.mark.capture_case("Ctrl-C, SIGTERM, os._exit, kill -9")
@pytest.mark.parametrize(
    ("by", "suffix"),
    [(signal.SIGINT, "zarr"), (signal.SIGTERM, "zarr"), (signal.SIGKILL, "zarr"), (signal.SIGKILL, "h5")],
)
def test_however_it_ends_every_committed_step_is_right(by, suffix, folder):
    write_script(folder / "endless.py", ENDLESS)
    path = folder / f"run.{suffix}"
    with Command("capture", "--kind", "both", "-o", path.name, "endless.py", cwd=folder) as process:
        assert process.stdout.readline() == "going\n"
        while by == signal.SIGKILL and committed(path) <= 10:
            time.sleep(0.02)
        time.sleep(random.Random(suffix).uniform(0, 0.3))
        done = process.end(by)
    err = but_first_line(done.stderr)
    if by == signal.SIGINT:
        status, last = err.splitlines()
        assert (done.returncode, last) == (130, "gtrace: interrupted; finished work is kept.")
        assert re.match(r"gtrace: .* steps captured in run\.zarr", status)
    else:
        assert done.returncode == -by
        assert by == signal.SIGKILL or err.startswith("gtrace: endless.py failed with exit code 143; ")
    with gtrace.open_trace(path) as trace:
        steps, weights = trace.steps("0", kind="neural").tolist(), trace.steps("0.weight").tolist()
        assert len(steps) >= (10 if by == signal.SIGKILL else 6)
        assert steps == list(range(len(steps)))
        assert weights == list(range(len(weights)))
        assert abs(len(weights) - len(steps)) <= 64  # rows of a second may be written together
        for step in steps:
            rows = 3 - step % 2
            ramp = step + np.arange(50 * rows)
            assert np.array_equal(trace.read("0", step, kind="neural"), ramp)
            # The module's input is ones.
            if step < len(weights):
                assert np.array_equal(trace.read("0.weight", step), np.repeat(ramp.reshape(rows, 50).sum(axis=0), 3))
        assert trace.status == "interrupted"


@pytest.mark.capture_case("Ctrl-C, SIGTERM, os._exit, kill -9")
def test_os_exit_keeps_what_is_done_and_a_forked_child_ends_as_it_would(folder):
    forks = "sys.stdout.flush()\nsys.exit(7) if os.fork() == 0 else print(os.wait()[1] >> 8, flush=True)\n"
    write_script(folder / "leaving.py", TRAIN + "import os, sys\n" + forks + "os._exit(3)\n")
    result = run_gtrace("capture", "leaving.py", cwd=folder)
    assert (result.returncode, result.stdout) == (5, f"{TRAINED}7\n")
    said = but_first_line(result.stderr)
    assert said.count("gtrace:") == 1
    assert said.startswith("gtrace: leaving.py failed with exit code 3; 4 steps captured in leaving.zarr")
    assert gtrace.open_trace(folder / "leaving.zarr").status == "interrupted"
    assert len(steps_of(folder / "leaving.zarr")) == 4
