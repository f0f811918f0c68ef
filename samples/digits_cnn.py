"""Train a small convolutional network on the UCI handwritten digits (1,797 images of 8x8).

    python digits_cnn.py --epochs 12 --seed 0

Plain PyTorch. The same seed gives the same weights on the same machine.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

DATA = Path(__file__).resolve().parent / "data" / "digits.csv.gz"
TEST_IMAGES = 360


class DigitsCNN(nn.Module):
    """Two convolutions and two linear layers: 85,066 parameters."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images):
        x = functional.relu(self.conv1(images))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def load_digits():
    """Images (1797, 1, 8, 8) in [0, 1] and their digits, in the order of the file."""
    table = np.loadtxt(DATA, delimiter=",", dtype=np.float32)
    images = torch.from_numpy(table[:, :-1] / 16).reshape(-1, 1, 8, 8)
    return images, torch.from_numpy(table[:, -1].astype(np.int64))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write the trained weights to this file")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    images, digits = load_digits()
    order = torch.randperm(len(images))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    model = DigitsCNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(args.epochs, 1))

    for epoch in range(1, args.epochs + 1):
        model.train()
        total = 0.0
        for batch in train[torch.randperm(len(train))].split(args.batch_size):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[batch]), digits[batch])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        scheduler.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(images[test]).argmax(1) == digits[test]).float().mean().item()
        print(f"epoch {epoch:2d}  loss {total / len(train):.4f}  test accuracy {accuracy:.4f}")

    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
