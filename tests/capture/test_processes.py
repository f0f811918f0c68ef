"""Programs that run as several processes, launched or forked, and what each of them leaves in the trace."""

import json
import os
import runpy
import signal
import socket
import sys

import numpy as np
import pytest
import torch
from helpers_capture import run_gtrace, run_python, write_script
from helpers_hooks import quadratic, weight
from torch import nn

from gtrace.capture import session
from gtrace.trace import open_trace
from gtrace.trace.shared import parts

TRAIN = """
    import gc, os, sys, time
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    def train(rank, end=""):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(6, 4, generator=generator)).square().mean().backward()
            optimizer.step()
        torch.save(model.state_dict(), f"weights{rank}.pt")
        if end == "kill" and rank == 1:
            from gtrace.trace import open_trace
            while not os.path.exists("run.zarr/rank00001"):
                time.sleep(0.01)
            while not any(info.rank == 1 for info in open_trace("run.zarr").tensors):
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
        # In this order, and together: a process group that is torn down under its users may abort the process.
        del model, optimizer
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()

    def work(rank, port):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        dist.init_process_group("gloo", rank=rank, world_size=2)
        train(rank, "kill")

    if __name__ == "__main__":
        if len(sys.argv) > 1:
            mp.spawn(work, (sys.argv[1],), nprocs=2)
        else:
            dist.init_process_group("gloo")
            train(dist.get_rank())
    """


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def launch(port):
    return ["--master-port", port, "--nproc-per-node", "2"]


@pytest.fixture
def folder(tmp_path):
    write_script(tmp_path / "train.py", TRAIN)
    return tmp_path


def check_two_ranks(folder):
    """Their rows, and their weights: those of one process that averages both ranks' gradients as DDP does."""
    trace = open_trace(folder / "run.zarr")
    assert (trace.status, trace.attrs["world_size"]) == ("complete", 2)
    steps = [(key.rank, trace.scalars(rank=key.rank)["step"].tolist()) for key in trace.streams]
    assert steps == [(0, [0, 1, 2]), (1, [0, 1, 2])]
    assert [info.name for info in trace.tensors if info.rank == 1] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for info in trace.tensors:
        assert all(trace.read(info.name, step, rank=info.rank).any() for step in range(3))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generators = [torch.Generator().manual_seed(rank) for rank in (0, 1)]
    for _ in range(3):
        optimizer.zero_grad()
        for generator in generators:
            (model(torch.randn(6, 4, generator=generator)).square().mean() / 2).backward()
        optimizer.step()
    for rank in (0, 1):
        found = torch.load(folder / f"weights{rank}.pt")
        assert all(torch.equal(found[f"module.{name}"], value) for name, value in model.state_dict().items())


@pytest.mark.capture_case("torchrun -m -- gtrace capture")
def test_gtrace_inside_torchrun(folder):
    command = [*launch(free_port()), "-m", "--", "gtrace", "capture", "-o", "run.zarr"]
    result = run_gtrace(*command, "train.py", cwd=folder, module="torch.distributed.run")
    assert result.returncode == 0, result.stderr
    first, last = [line for line in result.stderr.splitlines() if line.startswith("gtrace: ")]
    assert first.startswith("gtrace: recording 4 tensors")
    assert "3 steps captured on rank 0 in run.zarr (4 tensors" in last
    check_two_ranks(folder)


@pytest.mark.capture_case("gtrace capture -m torch.distributed.run")
def test_torchrun_inside_gtrace_keeps_weights(folder, gtrace_here):
    torchrun = ["-m", "torch.distributed.run", *launch(free_port())]
    result = run_gtrace("capture", "-o", "run.zarr", *torchrun, "train.py", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "gtrace: 3 steps captured on each of 2 ranks in run.zarr (4 tensors" in result.stderr
    check_two_ranks(folder)
    assert json.loads(gtrace_here("info", "run.zarr", "--json")[1])["ranks"] == [0, 1]


@pytest.mark.capture_case("torch.multiprocessing.spawn")
@pytest.mark.capture_case("kill -9 of one rank")
def test_a_killed_one_of_spawned_ranks_keeps_its_steps(folder):
    result = run_gtrace("capture", "-o", "run.zarr", "train.py", free_port(), cwd=folder)
    assert result.returncode == 5
    trace = open_trace(folder / "run.zarr")
    assert trace.status == "interrupted"
    assert {key.rank for key in trace.streams} == {0, 1}
    for info in trace.tensors:
        steps = trace.steps(info.name, rank=info.rank).tolist()
        assert steps
        assert steps == [0, 1, 2][: len(steps)]
        for step in steps:
            trace.read(info.name, step, rank=info.rank)


LAUNCH = """
    import subprocess, sys
    for end in sys.argv[1:]:
        print(subprocess.run([sys.executable, "alone.py", end]).returncode)
    """
ALONE = """
    import os, signal, sys
    import torch
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([w], lr=0.5)
    for _ in range(4):
        optimizer.zero_grad()
        w.square().sum().backward()
        optimizer.step()
    if "term" in sys.argv:
        os.kill(os.getpid(), signal.SIGTERM)
    optimizer.step(lambda: 1 / 0)
    """


@pytest.mark.capture_case("subprocess")
def test_a_child_however_it_ends(tmp_path):
    write_script(tmp_path / "launch.py", LAUNCH)
    write_script(tmp_path / "alone.py", ALONE)
    result = run_gtrace("capture", "-o", "run.zarr", "launch.py", "term", "raise", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["-15", "1"]
    assert "ZeroDivisionError" in result.stderr
    assert os.path.join("gtrace", "torch_hooks") not in result.stderr
    with open_trace(tmp_path / "run.zarr") as trace:
        assert [trace.scalars(rank=rank)["step"].tolist() for rank in range(2)] == [[0, 1, 2, 3]] * 2
    assert [part["status"] for part in parts(tmp_path / "run.zarr")] == ["interrupted"] * 2


BYSTANDERS = """
    import subprocess
    import torch
    from torch.utils.data import DataLoader

    def main():
        w = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([w], lr=0.5)
        for context in ("spawn", "fork"):
            loader = DataLoader(list(range(4)), batch_size=2, num_workers=1, multiprocessing_context=context)
            for batch in loader:
                optimizer.zero_grad()
                (w.sum() * batch.sum()).backward()
                optimizer.step()
        print(subprocess.run(["sh", "-c", "echo $0"], capture_output=True, text=True).stdout.strip())

    if __name__ == "__main__":
        main()
    """


@pytest.mark.capture_case("DataLoader workers, spawned and forked")
def test_workers_and_strangers_write_nothing(tmp_path):
    write_script(tmp_path / "script.py", BYSTANDERS)
    result = run_gtrace("capture", "-o", "run.zarr", "script.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "sh\n"
    with open_trace(tmp_path / "run.zarr") as trace:
        assert [(key.rank, trace.scalars(rank=key.rank)["step"].size) for key in trace.streams] == [(0, 4)]
    assert "GTRACE_CAPTURE" not in os.environ


FORKS = """
    import multiprocessing, os, signal, sys, time
    from concurrent.futures import ProcessPoolExecutor
    import torch

    model = torch.nn.Linear(4, 2, bias=False)  # of the parent, which does not train
    torch.optim.SGD(model.parameters()).zero_grad()  # imports what each child would have to

    def train(seed, end=None):
        torch.manual_seed(seed)
        model.weight.data.normal_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gradients = []
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            gradients.append(model.weight.grad.clone())
            optimizer.step()
        torch.save((gradients, model.weight.data), f"{seed}.pt")
        if end == "raise":
            raise ValueError("over")
        if end == "wait":
            open("waits", "w").close()
            time.sleep(100)
        return seed

    def both(seed):
        train(seed)
        ends(fork.Process(target=train, args=(seed + 1,)))

    def ends(*children):
        for child in children:
            child.start()
        for child in children:
            child.join()
        return [child.exitcode for child in children]

    if __name__ == "__main__":
        fork = multiprocessing.get_context("fork")
        child = os.fork()
        if child == 0:
            train(1)
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(ends(fork.Process(target=train, args=(2,)), fork.Process(target=train, args=(3, "raise"))))
        child = fork.Process(target=train, args=(4, "wait"))
        child.start()
        while not os.path.exists("waits"):
            time.sleep(0.01)
        child.terminate()
        print(ends(fork.Process(target=both, args=(5,))))
        with fork.Pool(1) as pool:
            print(pool.map(train, [7, 8]))
        with ProcessPoolExecutor(1, mp_context=fork) as pool:
            print(list(pool.map(train, [9])))
        child.join()
        print(child.exitcode)
    """
#: seed of a child -> how it ended: os.fork; mp.Process that returns, raises, is terminated; a child and its own child;
#: a worker of mp.Pool, which its program terminates, with two trainings; one of ProcessPoolExecutor
ENDS = {seed: "interrupted" if seed in (1, 3, 4) else "complete" for seed in range(1, 10)}


@pytest.mark.capture_case("forked children: os.fork, mp.Process, mp.Pool, ProcessPoolExecutor")
def test_each_forked_child_that_trains_has_its_own_group_and_ends_as_it_would(tmp_path, monkeypatch):
    script = write_script(tmp_path / "train.py", FORKS)
    # A process of its own: forks are followed before the program imports torch.
    result = run_python("-m", "gtrace", "capture", "-o", "run.zarr", "train.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["7", "[0, 1]", "[0]", "[7, 8]", "[9]", "-15"]
    last = result.stderr.splitlines()[-1]
    assert last.startswith("gtrace: 3 steps of each of 1 to 2 optimizers captured in each of 8 processes in run.zarr (")
    saved = {seed: torch.load(tmp_path / f"{seed}.pt") for seed in ENDS}
    found = {}
    with open_trace(tmp_path / "run.zarr") as trace:
        statuses = [part["status"] for part in parts(tmp_path / "run.zarr")]
        for info in trace.tensors:
            place = {"rank": info.rank, "optimizer": info.optimizer}
            assert trace.scalars(**place)["step"].tolist() == [0, 1, 2]
            rows = [trace.read(info.name, step, **place) for step in range(3)]
            for seed, (gradients, _) in saved.items():
                if all(np.array_equal(row, g.flatten()) for row, g in zip(rows, gradients, strict=True)):
                    found[seed] = statuses[info.rank]
    assert found == ENDS
    monkeypatch.chdir(tmp_path)
    train = runpy.run_path(str(script), run_name="without capture")["train"]
    for seed, (_, weights) in saved.items():
        train(seed)
        assert torch.equal(torch.load(tmp_path / f"{seed}.pt")[1], weights)


#: Its writer writes nothing until a child, which was forked in the meantime, has trained and ended.
STUCK = """
    import os, sys, threading, torch
    from gtrace.capture import recorder
    from gtrace.capture.writer import AsyncWriter

    recorder.PATIENCE = 0.1
    begun, ended, write = threading.Event(), threading.Event(), AsyncWriter._write
    AsyncWriter._write = lambda self, row: begun.set() or (ended.wait() and write(self, row))

    def train():
        w = torch.nn.Parameter(torch.ones(5))
        optimizer = torch.optim.SGD([w], lr=0.1)
        w.square().sum().backward()
        optimizer.step()

    train()
    begun.wait()
    if (child := os.fork()) == 0:
        train()
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    ended.set()
"""


def test_a_child_that_is_forked_while_a_step_is_written_lives_as_without_capture(tmp_path):
    write_script(tmp_path / "train.py", STUCK)
    result = run_gtrace("capture", "-o", "run.zarr", "train.py", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "7\n")
    assert result.stderr.count("warning") == 1
    assert "capture could not start: TimeoutError: this child was forked while its parent wrote a step" in result.stderr
    with open_trace(tmp_path / "run.zarr") as trace:
        assert [trace.steps(info.name).tolist() for info in trace.tensors] == [[0]]
        assert trace.status == "complete"


@pytest.fixture
def live(path, monkeypatch):
    """A process that a captured program launched, from its import of torch to its end; here it is this one."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    ends, before = [], (os._exit, signal.getsignal(signal.SIGTERM))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(session.processes, "before_shutdown", ends.append)

    def run(path=path, count=2, **settings):
        session.start({"path": str(path), "run": "word", "settings": settings, "attrs": {"argv": ["x"]}})
        parameter = weight(1.0, 1.0, 1.0)
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        for _ in range(count):
            optimizer.zero_grad()
            quadratic(parameter).backward()
            optimizer.step()
        for end in ends:
            end()
            end.__self__._exits.close()
        assert (os._exit, signal.getsignal(signal.SIGTERM)) == before

    return run


def test_what_stops_capture_does_not_stop_the_program(live, path, capsys):
    live(steps="rubbish")
    assert capsys.readouterr().err.startswith("gtrace: warning: capture could not start: UsageError: ")
    assert not path.exists()


def test_several_processes_cannot_write_hdf5(live, tmp_path, capfd, gtrace_here, monkeypatch):
    live(tmp_path / "run.h5")
    refused = "an HDF5 trace cannot take the steps of several processes; choose a name that ends in .zarr"
    assert refused in capfd.readouterr().err
    assert not (tmp_path / "run.h5").exists()
    # A rank is told before it starts.
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = gtrace_here("capture", "-o", "run.h5", "train.py")
    assert code == 2
    assert err == "gtrace: run.h5: 2 processes cannot write one HDF5 file; choose a name that ends in .zarr\n"


@pytest.mark.parametrize("machines", [1, 2])
def test_the_word_of_a_run_over_several_machines_and_the_budget_of_its_processes(machines, live, path, monkeypatch):
    world = 2 * machines
    for name, value in {"RANK": 1, "LOCAL_WORLD_SIZE": 2, "WORLD_SIZE": world}.items():
        monkeypatch.setenv(name, str(value))
    live(count=4, every=1, budget=world * 2 * 12)
    with open_trace(path) as trace:
        assert trace.scalars(rank=1)["step"].tolist() == [0, 1]
        assert trace.attrs["writers"] == world
        assert (trace.attrs["run"] == "word") == (machines == 1)
        assert trace.attrs.get("launchers") == (None if machines == 1 else ["word"])


THREADS = """
    import concurrent.futures, os, subprocess, sys, threading, time
    import torch

    def train():
        main_ended.wait()
        weight = torch.nn.Parameter(torch.ones(5))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(4):
            time.sleep(0.06)
            weight.square().sum().backward()
            optimizer.step()

    def watch():
        while threading.main_thread().is_alive():
            time.sleep(0.01)

    if len(sys.argv) > 2:
        subprocess.run([sys.executable, *sys.argv[:2]])
        sys.exit()
    main_ended = threading.Event()
    if sys.argv[1] == "executor":
        executor = concurrent.futures.ThreadPoolExecutor(1)
        for work in (len, train):
            executor.submit(work)
    else:
        threading.Thread(target=train).start()
    for act in (watch, threading.main_thread().join):
        threading.Thread(target=act).start()
    main_ended.set()
    """


@pytest.mark.parametrize("arguments", [["thread"], ["executor"], ["thread", "launched"], ["executor", "launched"]])
def test_threads_that_train_when_the_main_module_has_ended(arguments, tmp_path):
    write_script(tmp_path / "train.py", THREADS)
    result = run_gtrace("capture", "-o", "run.zarr", "train.py", *arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "")
    with open_trace(tmp_path / "run.zarr") as trace:
        assert [trace.steps(info.name).tolist() for info in trace.tensors] == [[0, 1, 2, 3]]
        assert trace.status == "complete"


STOPPED = """
    import os, signal, sys, threading, time
    sys.stdout.write("begun")
    sys.stdout.flush()
    def stop():
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    threading.Thread(target=stop).start()
    """


def test_ctrl_c_ends_the_wait_for_threads(tmp_path):
    write_script(tmp_path / "train.py", STOPPED)
    result = run_gtrace("capture", "-o", "run.zarr", "train.py", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (130, "begun")
    assert result.stderr.endswith("gtrace: interrupted; finished work is kept.\n")


REPLACED = """
    import contextlib, os, sys, torch

    def train():
        weight = torch.nn.Parameter(torch.ones(5))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(4):
            weight.square().sum().backward()
            optimizer.step()

    train()
    end = sys.argv.pop()
    with contextlib.suppress(OSError):
        os.execlp("no-such-command", "no-such-command")
    train()
    if end == "again":
        os.execvp(sys.executable, [sys.executable, *sys.argv, "last"])
    if end == "fails":
        with contextlib.suppress(OSError):
            os.execv(__file__, [__file__])
        train()
    """


def test_steps_before_another_program_takes_the_process(tmp_path):
    write_script(tmp_path / "train.py", REPLACED)
    result = run_gtrace("capture", "-o", "run.zarr", "train.py", "again", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "")
    with open_trace(tmp_path / "run.zarr") as trace:
        assert {(one.rank, one.optimizer, *trace.steps(one.name, rank=one.rank)) for one in trace.tensors} == {
            (rank, optimizer, 0, 1, 2, 3) for rank in (0, 1) for optimizer in (0, 1)
        }
        assert trace.status == "complete"


@pytest.mark.parametrize("launched", [False, True])
def test_a_program_that_cannot_take_the_process_leaves_an_interrupted_trace(tmp_path, launched):
    write_script(tmp_path / "train.py", REPLACED)
    write_script(tmp_path / "launch.py", "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])")
    launch = ["launch.py"] * launched
    result = run_gtrace("capture", "-o", "run.zarr", *launch, "train.py", "fails", cwd=tmp_path)
    assert result.returncode == 0
    assert "warning: capture ended before os.exec, which failed; later steps are not recorded\n" in result.stderr
    with open_trace(tmp_path / "run.zarr") as trace:
        assert {(one.optimizer, *trace.steps(one.name)) for one in trace.tensors} == {(0, 0, 1, 2, 3), (1, 0, 1, 2, 3)}
        assert trace.status == "interrupted"


LEFT = """
    import multiprocessing, time, torch

    def train(started):
        started.wait()
        weight = torch.nn.Parameter(torch.ones(5))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        time.sleep(1)
        weight.square().sum().backward()
        optimizer.step()

    started = multiprocessing.get_context("fork").Event()
    multiprocessing.get_context("fork").Process(target=train, args=(started,)).start()
    started.set()
    """


def test_a_process_that_the_script_does_not_wait_for(tmp_path):
    write_script(tmp_path / "train.py", LEFT)
    result = run_gtrace("capture", "-o", "run.zarr", "train.py", cwd=tmp_path)
    goes_on = "nothing was captured in run.zarr yet; other processes of the script go on and record theirs"
    assert (result.returncode, result.stderr) == (0, f"gtrace: {goes_on}\n")
    with open_trace(tmp_path / "run.zarr") as trace:
        assert ([trace.steps(info.name).tolist() for info in trace.tensors], trace.status) == ([[0]], "complete")
