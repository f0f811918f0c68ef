"""``gtrace capture`` from the outside: what the user types, sees and is left with."""

import re
import signal
import textwrap
from pathlib import Path

import numpy as np
import pytest
from helpers_capture import Command, but_first_line, run_gtrace, run_python, write_script

import gtrace
from gtrace.capture.summary import CaptureSummary, result_text

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

#: Gradients that tell their step, for runs that are cut short: step + 0, 1, 2, ... per element.
ENDLESS = """
    import sys, time, torch
    from torch import nn

    model = nn.Linear(300, 20, bias=False)
    ramp = torch.arange(6000.0).reshape(20, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10**6):
        optimizer.zero_grad()
        (model.weight * (ramp + step)).sum().backward()
        optimizer.step()
        if step == 5:
            print("going", flush=True)
        time.sleep(0.001)
    """


@pytest.fixture
def folder(folder):
    write_script(folder / "train.py", TRAIN)
    return folder


@pytest.fixture
def capture(call, folder):
    """Run ``gtrace capture``: exit code, stdout, stderr."""

    def run(*args):
        done = call("capture", *args)
        return done.returncode, done.stdout, but_first_line(done.stderr)

    return run


def check_ramp(path, least):
    """Every committed step of ENDLESS is right, and none is missing before the last one."""
    trace = gtrace.open_trace(path)
    steps = trace.steps("weight").tolist()
    assert steps == list(range(len(steps)))
    assert len(steps) >= least
    ramp = np.arange(6000, dtype=np.float32)
    for step in steps:
        assert np.array_equal(trace.read("weight", step), ramp + step)
    return trace


def end_endless(folder, by):
    """How the command ends by a signal while it records."""
    write_script(folder / "endless.py", ENDLESS)
    with Command("capture", "endless.py", cwd=folder) as process:
        assert process.stdout.readline() == "going\n"
        return process.end(by)


@pytest.mark.parametrize(
    ("blocked", "waited", "span", "said"),
    [
        (0.974, 0.0118, 0.01211, "waited 12 ms (97%)"),
        (0.004, 0.0036, 0.9, "waited 3.6 ms (0%)"),
        (0.0204, 0.0306, 1.5, "waited 2.0% of its time"),
    ],
)
def test_how_long_training_waited(blocked, waited, span, said):
    summary = CaptureSummary(Path("run.zarr"), rows=3, tensors=4, blocked=blocked, waited=waited, span=span)
    assert result_text(summary, summary.path) == f"3 steps captured in run.zarr (4 tensors, 0 bytes, training {said})"


@pytest.mark.parametrize(
    ("counts", "seen", "said"),
    [
        (((1,),), 1, "1 step captured in"),
        (((1,),), 4, "1 of 4 steps captured in"),
        (((20, 20),), 40, "20 steps of each of 2 optimizers captured in"),
        (((20, 20),), 80, "20 of 40 steps of each of 2 optimizers captured in"),
        (((20, 10),), 30, "10 to 20 steps of each of 2 optimizers captured in"),
        (((3,), (3, 5)), 8, "3 to 5 steps of each of 1 to 2 optimizers captured in each of 2 processes in"),
    ],
)
def test_counts_are_those_of_an_optimizer(counts, seen, said):
    summary = CaptureSummary(Path("x.zarr"), rows=sum(counts[0]), steps_seen=seen, counts=counts, ranks=len(counts))
    assert result_text(summary, summary.path).startswith(said)


def test_the_short_form(folder, capture):
    code, out, err = capture("train.py")
    assert (code, out) == (0, "trained 4 the script's own\n")
    line = r"gtrace: 4 steps captured in train\.zarr \(4 tensors, [\d.]+ kB, training waited [\d.]+"
    line += r"(?: ms \(\d+%\)|% of its time)\)"
    assert re.fullmatch(line + r"; next: gtrace info train\.zarr, gtrace sweep train\.zarr\n", err)
    trace = gtrace.open_trace("train.zarr")
    assert [tensor.name for tensor in trace.tensors] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert trace.attrs["argv"] == ["train.py"]
    assert (trace.attrs["model"], trace.attrs["seed"], trace.attrs["world_size"]) == ("Sequential", 3, 1)
    assert {"python", "torch", "numpy"} <= trace.attrs["versions"].keys()


def test_hdf5_and_the_scripts_own_options(folder, capture):
    code, out, err = capture("-o", "x.h5", "--every", "2", "train.py", "--steps", "5", "--every", "mine")
    assert (code, out) == (0, "trained 5 mine\n")
    assert "3 of 5 steps captured in x.h5" in err
    trace = gtrace.open_trace("x.h5")
    assert trace.steps("0.weight").tolist() == [0, 2, 4]
    assert trace.attrs["argv"] == ["train.py", "--steps", "5", "--every", "mine"]


def test_steps_and_tensors(folder, capture):
    code, _, _ = capture("--steps", "1,3+2", "--tensors", "0.*,1.*", "--exclude", "*.bias", "train.py", "--steps", "9")
    assert code == 0
    trace = gtrace.open_trace("train.zarr")
    assert [tensor.name for tensor in trace.tensors] == ["0.weight", "1.weight"]
    assert trace.steps("0.weight").tolist() == [1, 3, 4]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("--every 2", True),
        ("--steps 0,1,3-4", True),
        ("--steps 1+3", False),
        ("--every 2 --sketch none", False),
        ("", False),
    ],
)
def test_single_steps_have_no_noise(folder, capture, asked, says):
    code, _, err = capture(*asked.split(), "train.py", "--steps", "6")
    assert code == 0
    notes = [line for line in err.splitlines() if "single steps" in line]
    assert notes == says * [
        "gtrace: note: gradient noise can't be estimated from single steps; record bursts, e.g. --steps 0+4,100+4"
    ]


@pytest.mark.capture_case("python -m")
def test_a_module(folder, capture):
    write_script(folder / "pkg" / "__init__.py", "")
    write_script(folder / "pkg" / "train.py", TRAIN)
    code, out, _ = capture("-m", "pkg.train", "--steps", "2")
    assert (code, out) == (0, "trained 2 the script's own\n")
    assert gtrace.open_trace("train.zarr").attrs["argv"] == ["-m", "pkg.train", "--steps", "2"]


def test_an_existing_trace_stays_and_the_script_does_not_run(folder, capture):
    assert capture("train.py")[0] == 0
    before = {path: path.stat().st_mtime_ns for path in (folder / "train.zarr").rglob("*")}
    code, out, err = capture("train.py", "--steps", "2")
    assert (code, out) == (4, "")
    assert err == ("gtrace: train.zarr already exists; use --force to replace it, or choose another place\n")
    assert {path: path.stat().st_mtime_ns for path in (folder / "train.zarr").rglob("*")} == before
    assert capture("--force", "train.py", "--steps", "2")[0] == 0
    assert gtrace.open_trace("train.zarr").steps("0.bias").tolist() == [0, 1]


def test_force_with_a_script_that_fails_at_once_keeps_the_old_trace(folder, capture):
    assert capture("train.py")[0] == 0
    write_script(folder / "broken.py", "import torch\nraise ValueError('early')\n")
    assert capture("--force", "-o", "train.zarr", "broken.py")[0] == 5
    assert gtrace.open_trace("train.zarr").steps("0.bias").tolist() == [0, 1, 2, 3]


def test_force_never_deletes_a_folder_that_is_no_trace(folder, capture):
    (folder / "mine.zarr").mkdir()
    (folder / "mine.zarr" / "thesis.txt").write_text("all of it")
    code, out, err = capture("--force", "-o", "mine.zarr", "train.py")
    assert (code, out) == (4, "")
    assert "is a folder but not a trace, so it is kept" in err
    assert (folder / "mine.zarr" / "thesis.txt").read_text() == "all of it"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere.py"], "nowhere.py: no such script"),
        (["-o", "x.npz", "train.py"], "x.npz: a trace ends in .zarr or .h5; choose another name"),
        (["-o", "nowhere/x.zarr", "train.py"], "nowhere/x.zarr: the folder nowhere does not exist"),
        (["--forse", "train.py"], "No such option '--forse'"),
        ([], "Missing argument 'SCRIPT'"),
        (["-m", "pkg.nowhere"], "-m pkg.nowhere: "),
    ],
)
def test_wrong_usage_is_one_line_before_anything_runs(folder, capture, args, message):
    code, out, err = capture(*args)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(path.name for path in folder.iterdir()) == ["train.py"]


def test_a_script_that_fails_shows_its_own_traceback(folder, capture):
    source = TRAIN.replace('print("trained"', 'raise KeyError("bad batch"')
    write_script(folder / "failing.py", source)
    code, _, err = capture("failing.py")
    *traceback, last = err.splitlines()
    line = len(source.strip().splitlines())
    assert code == 5
    assert traceback[:2] == [
        "Traceback (most recent call last):",
        f'  File "{folder}/failing.py", line {line}, in <module>',
    ]
    assert [text for text in traceback if "File" in text] == traceback[1:2]
    assert traceback[-1] == "KeyError: ('bad batch', 4, \"the script's own\")"
    assert last.startswith("gtrace: failing.py failed with exit code 1; 4 steps captured in failing.zarr (")
    trace = gtrace.open_trace("failing.zarr")
    assert (trace.status, trace.steps("0.bias").tolist()) == ("interrupted", [0, 1, 2, 3])


def test_an_error_inside_the_hooks_reach_shows_no_frame_of_ours(folder, capture):
    """The failing call goes through the wrapped backward pass and, by its closure, through the step hook."""
    source = """
        import torch

        class Explode(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.sum()

            @staticmethod
            def backward(ctx, gradient):
                raise RuntimeError("boom")

        w = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([w], lr=0.1)

        def closure():
            Explode.apply(w).backward()

        optimizer.step(closure)
        """
    write_script(folder / "failing.py", source)
    # The frames of runpy, which starts it here, come first.
    _, script, frames = run_gtrace(cwd=folder, module="failing").stderr.partition(f'  File "{folder}')
    code, _, err = capture("failing.py")
    assert code == 5
    assert err.splitlines()[:-1] == ["Traceback (most recent call last):", *(script + frames).splitlines()]
    assert "boom" in err
    assert "gtrace/" not in err


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("sys.exit(0)", 0, "gtrace: 4 steps captured"),
        ("sys.exit()", 0, "gtrace: 4 steps captured"),
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
    assert gtrace.open_trace("ending.zarr").steps("0.bias").size == 4


def test_scripts_that_train_nothing(folder, capture):
    heavy = 'import sys; print(sorted({"torch", "numpy", "zarr"} & set(sys.modules)))'
    write_script(folder / "idle.py", heavy)
    write_script(folder / "still.py", "import torch\nprint(torch.ones(2).sum().item())\n")
    assert capture("still.py") == (2, "2.0\n", "gtrace: nothing was captured: it took no step of a torch optimizer\n")
    passes = (
        "import torch\nw = torch.ones(2, requires_grad=True)\nfor _ in range(3):\n    w.square().sum().backward()\n"
    )
    write_script(folder / "passes.py", passes)
    code, _, err = capture("passes.py")
    assert code == 2
    assert "nothing was captured: it took no step of a torch optimizer, and no weight that a backward pass" in err
    functional = """
        import torch
        w = torch.ones(2)
        for _ in range(3):
            w = w - 0.1 * torch.func.grad(lambda w: w.square().sum())(w)
        """
    write_script(folder / "functional.py", functional)
    assert capture("functional.py") == (
        2,
        "",
        (
            "gtrace: nothing was captured: its gradients come from torch.autograd.grad or torch.func.grad (3 calls), "
            "which leave nothing in p.grad; add `import gtrace` and, in each step, "
            "`gtrace.record_gradients({name: gradient, ...}, loss=loss)`\n"
        ),
    )
    # In a process of its own: here torch is imported already. There the script's own setup of torch takes effect.
    result = run_python("-m", "gtrace", "capture", "idle.py", cwd=folder)
    assert (result.returncode, result.stdout) == (2, "[]\n")
    assert result.stderr == "gtrace: nothing was captured: it never imported torch\n"
    assert sorted(path.suffix for path in folder.iterdir()) == [".py"] * 5


@pytest.mark.capture_case("no optimizer: new parameters at each step")
def test_a_program_that_makes_new_parameters_at_each_step(folder, capture):
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


@pytest.mark.capture_case("python -c")
def test_code(folder, capture):
    assert capture("-c", TRAIN, "--steps", "2")[:2] == (0, "trained 2 the script's own\n")
    assert gtrace.open_trace("run.zarr").steps("0.bias").tolist() == [0, 1]
    assert capture("-c", "-m", "x")[2] == "gtrace: -m and -c exclude each other\n"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--steps", "100-200"], "the script took 4 steps, and --steps or --every asked for others"),
        (["--exclude", "*"], "its 4 optimizer steps had no gradient of a tensor that was to be recorded"),
        (["--budget", "8"], "a single step is larger than the budget; give a larger --budget or fewer --tensors"),
    ],
)
def test_why_nothing_was_captured(folder, capture, options, reason):
    code, out, err = capture(*options, "train.py")
    assert (code, out) == (2, "trained 4 the script's own\n")
    assert err == f"gtrace: nothing was captured: {reason}\n"
    assert not (folder / "train.zarr").exists()


def test_a_pattern_that_matches_nothing_is_told_and_costs_no_data(folder, capture):
    code, out, err = capture("--tensors", "0.*,1.wieght", "train.py")
    assert (code, out) == (2, "trained 4 the script's own\n")
    status, complaint = err.splitlines()
    assert status.startswith("gtrace: 4 steps captured in train.zarr (2 tensors")
    assert complaint == "gtrace: --tensors '1.wieght' matched no tensor; did you mean 1.weight or 0.weight?"
    assert [tensor.name for tensor in gtrace.open_trace("train.zarr").tensors] == ["0.weight", "0.bias"]


def test_a_relative_output_stays_where_it_was_meant(folder, capture):
    (folder / "elsewhere").mkdir()
    write_script(folder / "moving.py", "import os\nos.chdir('elsewhere')\n" + TRAIN)
    assert capture("moving.py")[0] == 0
    assert gtrace.open_trace(folder / "moving.zarr").steps("0.bias").size == 4


def test_ranks_above_zero_only_train(folder, capture, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert capture("--rank", "0", "train.py") == (0, "trained 4 the script's own\n", "")
    assert not (folder / "train.zarr").exists()


def test_without_torch_there_is_one_clear_line(folder):
    code = "import sys; sys.modules['torch'] = None; from gtrace.cli import main; main(['capture', 'train.py'])"
    result = run_python("-c", code, cwd=folder)
    assert result.returncode == 2
    assert result.stderr == ("gtrace: gtrace.capture needs PyTorch, which is not installed: pip install torch\n")


@pytest.mark.capture_case("Ctrl-C, SIGTERM, os._exit, kill -9")
def test_ctrl_c_keeps_what_is_done(folder):
    done = end_endless(folder, signal.SIGINT)
    assert done.returncode == 130
    status, last = but_first_line(done.stderr).splitlines()
    assert status.startswith("gtrace: ")
    assert "steps captured in endless.zarr" in status
    assert last == "gtrace: interrupted; finished work is kept."
    assert check_ramp(folder / "endless.zarr", 6).status == "interrupted"


@pytest.mark.capture_case("Ctrl-C, SIGTERM, os._exit, kill -9")
def test_sigterm_keeps_what_is_done(folder):
    done = end_endless(folder, signal.SIGTERM)
    assert done.returncode == -signal.SIGTERM
    assert but_first_line(done.stderr).startswith("gtrace: endless.py failed with exit code 143; ")
    assert check_ramp(folder / "endless.zarr", 6).status == "interrupted"


@pytest.mark.capture_case("Ctrl-C, SIGTERM, os._exit, kill -9")
def test_os_exit_keeps_what_is_done_and_a_forked_child_ends_as_it_would(folder):
    forks = "sys.stdout.flush()\nsys.exit(7) if os.fork() == 0 else print(os.wait()[1] >> 8, flush=True)\n"
    write_script(folder / "leaving.py", TRAIN + "import os, sys\n" + forks + "os._exit(3)\n")
    result = run_gtrace("capture", "leaving.py", cwd=folder)
    assert (result.returncode, result.stdout) == (5, "trained 4 the script's own\n7\n")
    told = but_first_line(result.stderr)
    assert told.count("gtrace:") == 1
    assert told.startswith("gtrace: leaving.py failed with exit code 3; 4 steps captured in leaving.zarr")
    trace = gtrace.open_trace(folder / "leaving.zarr")
    assert (trace.status, trace.steps("0.bias").size) == ("interrupted", 4)
