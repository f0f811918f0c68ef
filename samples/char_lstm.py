"""Train a character-level LSTM on Shakespeare's sonnets.

    python char_lstm.py --steps 300 --seed 0

Plain PyTorch. The same seed gives the same weights on the same machine.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

DATA = Path(__file__).resolve().parent / "data" / "sonnets.txt"


class CharLSTM(nn.Module):
    """Characters to the scores of the next one."""

    def __init__(self, characters, embedding, hidden):
        super().__init__()
        self.embedding = nn.Embedding(characters, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, characters)

    def forward(self, codes):
        states, _ = self.lstm(self.embedding(codes))
        return self.head(states)


def windows(text, count, length):
    """Random pieces of the text and the same pieces one character later, both (count, length)."""
    starts = torch.randint(len(text) - length, (count, 1))
    places = starts + torch.arange(length)
    return text[places], text[places + 1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=64, help="characters in a training window")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--lr", type=float, default=4e-3)
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
    model = CharLSTM(len(alphabet), 32, args.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    for step in range(1, args.steps + 1):
        model.train()
        inputs, targets = windows(train, args.batch_size, args.length)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        if step % 50 == 0 or step == args.steps:
            model.eval()
            with torch.no_grad():
                scores = model(test[None, :-1])[0]
                bits = functional.cross_entropy(scores, test[1:]).item() / math.log(2)
            print(f"step {step:4d}  loss {loss.item():.4f}  test bits per character {bits:.3f}")

    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
