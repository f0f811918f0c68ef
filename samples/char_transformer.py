"""Train a character-level transformer on Shakespeare's sonnets.

    python char_transformer.py --steps 300 --seed 0

Plain PyTorch. The same seed gives the same weights on the same machine.
"""

import argparse
import math
from pathlib import Path

import torch
from char_lstm import DATA, windows
from torch import nn
from torch.nn import functional


class CharTransformer(nn.Module):
    """Characters to the scores of the next one: pre-norm blocks with causal attention."""

    def __init__(self, characters, length, width, heads, blocks):
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)

    def forward(self, codes):
        length = codes.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.blocks(self.embedding(codes) + self.position[:length], mask=mask, is_causal=True)
        return self.head(self.norm(hidden))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="characters in a training window")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write the trained weights to this file")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    raw = DATA.read_text(encoding="ascii")
    alphabet = sorted(set(raw))
    code = {character: index for index, character in enumerate(alphabet)}
    text = torch.tensor([code[character] for character in raw])
    held_out = len(text) // 10
    train, test = text[:-held_out], text[-held_out:]
    model = CharTransformer(len(alphabet), args.length, args.width, 4, args.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    total = 0.0
    for step in range(1, args.steps + 1):
        inputs, targets = windows(train, args.batch_size, args.length)
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        schedule.step()
        total += loss.item()
        if step % 100 == 0 or step == args.steps:
            print(f"step {step:4d}  loss {total / (step % 100 or 100):.4f}", flush=True)
            total = 0.0

    with torch.no_grad():
        torch.manual_seed(args.seed)
        inputs, targets = windows(test, 64, args.length)
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
    print(f"held-out loss {loss:.4f}, {loss / math.log(2):.3f} bits per character")

    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
