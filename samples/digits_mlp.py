"""Train a multilayer perceptron on the UCI handwritten digits (1,797 images of 8x8).

    python digits_mlp.py --epochs 20 --seed 0

Plain PyTorch. The same seed gives the same weights on the same machine.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DATA = Path(__file__).resolve().parent / "data" / "digits.csv.gz"
TEST_IMAGES = 360


def load_digits():
    """Images (1797, 64) in [0, 1] and their digits, in the order of the file."""
    table = np.loadtxt(DATA, delimiter=",", dtype=np.float32)
    return torch.from_numpy(table[:, :-1] / 16), torch.from_numpy(table[:, -1].astype(np.int64))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write the trained weights to this file")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    images, digits = load_digits()
    order = torch.randperm(len(images))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    loader = DataLoader(TensorDataset(images[train], digits[train]), batch_size=args.batch_size, shuffle=True)
    model = nn.Sequential(
        nn.Linear(64, args.hidden),
        nn.ReLU(),
        nn.Dropout(args.dropout),
        nn.Linear(args.hidden, args.hidden),
        nn.ReLU(),
        nn.Linear(args.hidden, 10),
    )
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(1, args.epochs + 1):
        model.train()
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_function(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        model.eval()
        with torch.no_grad():
            accuracy = (model(images[test]).argmax(1) == digits[test]).float().mean().item()
        print(f"epoch {epoch:2d}  loss {total / len(train):.4f}  test accuracy {accuracy:.4f}")

    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
