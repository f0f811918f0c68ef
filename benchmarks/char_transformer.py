"""Train a character-level transformer of two blocks on Shakespeare's sonnets: an input for benchmarks.

    python benchmarks/char_transformer.py --steps 300 --seed 0

Plain PyTorch, about 110,000 parameters. The same seed gives the same weights on the same machine.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

DATA = Path(__file__).resolve().parents[1] / "samples" / "data" / "sonnets.txt"


class CharTransformer(nn.Module):
    """Characters to the scores of the next one."""

    def __init__(self, characters, length, width=64, heads=4, blocks=2):
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, codes):
        return self.head(self.blocks(self.embedding(codes) + self.places, mask=self.mask, is_causal=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="characters in a training window")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    raw = DATA.read_text(encoding="ascii")
    code = {character: index for index, character in enumerate(sorted(set(raw)))}
    text = torch.tensor([code[character] for character in raw])
    model = CharTransformer(len(code), args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - args.length, (args.batch_size, 1))
        places = starts + torch.arange(args.length)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(text[places]).flatten(0, 1), text[places + 1].flatten())
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == args.steps:
            print(f"step {step:4d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
