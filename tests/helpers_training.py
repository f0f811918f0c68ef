"""Small tasks, codecs and simulated ranks for the tests of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers_capture import run_gtrace
from torch import nn

from gtrace.codecs.assignment import CodecTable
from gtrace.codecs.link import LinkOptions
from gtrace.runlog import read_runlog
from gtrace.schedule import RefitSchedule
from gtrace.training import Evaluation, Recipe, Task, vectors
from gtrace.training.ranks import RankCodecs


def without_times(records):
    """Records of a run log as they are on any machine."""
    return [{name: value for name, value in record.items() if not name.endswith("seconds")} for record in records]


def interrupt(study, log, after):
    """Run a study until so many records are written."""
    seen = []

    def count(record):
        seen.append(record)
        if len(seen) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study.run(log, on_record=count)
    return seen


def heavy(shape, seed=0, scale=1e-3):
    """Values with heavy tails, so that a Huffman code pays."""
    return (np.random.default_rng(seed).standard_t(3, shape) * scale).astype(np.float32)


class Regression(Task):
    """Linear regression with dropout: two tensors, microseconds a step."""

    name: ClassVar[str] = "regression"
    recipe: ClassVar[Recipe] = Recipe(steps=6, batch_size=8, lr=0.05)

    def __init__(self):
        random = np.random.default_rng(5)
        self._x = torch.from_numpy(random.standard_normal((200, 12)).astype(np.float32))
        self._y = self._x @ torch.arange(12.0)[:, None] / 12

    def model(self):
        return nn.Sequential(nn.Dropout(0.2), nn.Linear(12, 1))

    def optimizer(self, model, lr):
        return torch.optim.SGD(model.parameters(), lr=lr)

    def batch(self, random, size):
        chosen = torch.from_numpy(random.integers(len(self._y), size=size))
        return self._x[chosen], self._y[chosen]

    def criterion(self, outputs, targets):
        return ((outputs - targets) ** 2).mean()

    def evaluate(self, model):
        return Evaluation(self.loss(model, (self._x, self._y)).item(), None)


class Faulty(Regression):
    """Regression in which chosen batches are poisoned: ``bad`` is asked with the number of each batch."""

    def __init__(self, bad):
        super().__init__()
        self._bad, self._batches = bad, 0

    def batch(self, random, size):
        x, y = super().batch(random, size)
        if self._bad(self._batches):
            x = torch.full_like(x, float("nan"))
        self._batches += 1
        return x, y


def rank_codecs(place, codec, *, seed=3, refit="once", common=False):
    """The codecs of one rank."""
    options = LinkOptions(RefitSchedule.parse(refit), seed, vectors.engine)
    return RankCodecs(CodecTable.of(codec), options, place, common=common)


def reports_of_ranks(name, worlds, folder):
    """World size -> what went wrong on each rank of a program beside the tests of training, by part."""
    run = run_gtrace(folder, cwd=Path(__file__).with_name("training"), module=f"{name}_program")
    assert run.returncode == 0, run.stderr[-3000:]
    return {
        world: [json.loads((folder / f"{name}-{world}-{rank}.json").read_text()) for rank in range(world)]
        for world in worlds
    }


#: run by ranks: six steps
RANKS_PROGRAM = """
import os, signal, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

def main(rank, world, folder, dies=False):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, bf16_compress_hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    random, seen = torch.Generator().manual_seed(rank), []
    for step in range(6):
        if dies and rank == 1 and step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = torch.randn(8, 20, generator=random), torch.randint(0, 5, (8,), generator=random)
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        seen.append([p.detach().clone() for p in model.parameters()])
    torch.save(seen, f"{folder}/rank{rank}.pt")
    weights = [None] * world
    dist.all_gather_object(weights, [p.tolist() for p in model.parameters()])
    assert all(one == weights[0] for one in weights)
    dist.destroy_process_group()

if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(int(sys.argv[2]), 2, sys.argv[1], dies=True)
    else:
        import torch.multiprocessing as mp
        mp.spawn(main, args=(2, sys.argv[1]), nprocs=2)
"""


def logged(folder, name="log.jsonl"):
    """The study, the steps and the end of a run log."""
    study, *records, end = read_runlog(folder / name)
    return study, [record for record in records if record["type"] == "step"], end


def launched(folder, program, *words, start="train.py"):
    """What a program with ranks said under ``gtrace train``, and its run log."""
    (folder / "train.py").write_text(program)
    done = run_gtrace("train", *words, "-o", "log.jsonl", start, folder, cwd=folder)
    return done, *logged(folder)


def assert_recorded(run, plain, trained, seen, optimizer=0):
    """Weights are those of a run without capture, and recorded is what a hand-written hook saw, in order or by name."""
    assert run.said == []
    assert all(torch.equal(trained[name], value) for name, value in plain.items())
    names = [info.name for info in run.trace.tensors if info.optimizer == optimizer]
    assert run.trace.scalars(optimizer=optimizer)["step"].tolist() == list(range(len(seen)))
    for step, gradients in enumerate(seen):
        found = gradients if isinstance(gradients, dict) else dict(zip(names, gradients, strict=True))
        for name, gradient in found.items():
            values = run.trace.read(name, step, optimizer=optimizer)
            assert np.array_equal(values, gradient.reshape(-1).float().numpy())
    assert np.isfinite(run.trace.scalars()["loss"]).all()


def losses(task, model, batch, lr):
    """The losses of eight steps on one batch."""
    optimizer, found = task.optimizer(model, lr), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
