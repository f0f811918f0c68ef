"""Small models, and captured blocks around their training, for tests of neural gradients."""

import torch
from helpers_capture import Captured
from torch import nn
from torch.nn import functional


class Run(Captured):
    """A captured block of neural gradients."""

    def __init__(self, path, kind="neural", **options):
        super().__init__(path, kind=kind, **options)

    @property
    def steps(self):
        return {info.name: self.trace.steps(info.name, kind="neural").tolist() for info in self.infos}

    @property
    def infos(self):
        return [info for info in self.trace.tensors if info.kind == "neural"]

    def read(self, name, step, **which):
        return self.trace.read(name, step, kind="neural", **which)


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 8, 3, padding=1)
        self.fc1 = nn.Linear(8 * 4 * 4, 16)
        self.fc2 = nn.Linear(16, 10)

    def outputs(self, x):
        a = self.conv1(x)
        b = self.conv2(functional.relu(a))
        c = self.fc1(functional.max_pool2d(functional.relu(b), 2).flatten(1))
        return [a, b, c, self.fc2(functional.relu(c))]

    def forward(self, x):
        return self.outputs(x)[-1]


def batches(count=4, sizes=(8, 8, 8, 3)):
    generator = torch.Generator().manual_seed(2)
    for k in range(count):
        n = sizes[k % len(sizes)]
        yield torch.randn(n, 1, 8, 8, generator=generator), torch.randint(10, (n,), generator=generator)


def captured(kind, path, steps, **options):
    """The end of a captured training."""
    torch.manual_seed(0)
    with Run(path, kind=kind, **options) as run:
        model = CNN()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for x, y in batches(steps):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return run
