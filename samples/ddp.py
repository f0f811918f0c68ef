"""Two processes that train together and send their gradients through a codec: DistributedDataParallel with a hook.

    python ddp.py --codec qsgdinf:bits=4 --steps 40

Started like this it launches its own processes; under torchrun it takes those that are there.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gtrace

DATA = Path(__file__).resolve().parent / "data" / "digits.csv.gz"


def train(rank, ranks, args, meeting):
    """One process: its own samples, the same weights as all others."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    table = torch.from_numpy(np.loadtxt(DATA, delimiter=",", dtype=np.float32))
    images, digits = table[rank::ranks, :-1] / 16, table[rank::ranks, -1].long()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(model)
    # These two lines are all that a program needs.
    state = gtrace.training.State(args.codec)
    model.register_comm_hook(state, gtrace.training.ddp_comm_hook)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    samples = torch.Generator().manual_seed(rank)
    for _ in range(args.steps):
        batch = torch.randint(len(images), (32,), generator=samples)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), digits[batch])
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"{ranks} ranks, {args.codec}: loss {loss.item():.3f} after {state.steps} steps")
        print(f"{state.tally.ratio:.1f} times fewer bits than float32")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codec", default="qsgdinf:bits=4")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args, "env://")
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        torch.multiprocessing.spawn(train, (args.ranks, args, meeting), nprocs=args.ranks)


if __name__ == "__main__":
    main()
