"""Children that are forked: each one that trains has its own group in the trace, and ends as it would."""

import runpy

import numpy as np
import pytest
import torch
from helpers_capture import run_python, write_script

from gtrace.trace import open_trace
from gtrace.trace.shared import parts

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
        child = fork.Process(target=train, args=(seed + 1,))
        child.start()
        child.join()

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
def test_forked_children_that_train(tmp_path, monkeypatch):
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
        for key in trace.streams:
            place = {"rank": key.rank, "optimizer": key.optimizer}
            assert trace.scalars(**place)["step"].tolist() == [0, 1, 2]
            name = next(info.name for info in trace.tensors if (info.rank, info.optimizer) == (key.rank, key.optimizer))
            rows = [trace.read(name, step, **place) for step in range(3)]
            for seed, (gradients, _) in saved.items():
                if all(np.array_equal(row, g.flatten()) for row, g in zip(rows, gradients, strict=True)):
                    found[seed] = statuses[key.rank]
    assert found == ENDS
    monkeypatch.chdir(tmp_path)
    train = runpy.run_path(str(script), run_name="without capture")["train"]
    for seed, (_, weights) in saved.items():
        train(seed)
        assert torch.equal(torch.load(tmp_path / f"{seed}.pt")[1], weights)
