"""A Lightning module whose gradients go through a codec, recorded on the way.

    python lightning_sample.py --codec qsgdinf:bits=4 --steps 40

Needs Lightning: pip install lightning. Without a change to the module, `gtrace capture lightning_sample.py` records it
and `gtrace train --codec qsgdinf:bits=4 lightning_sample.py` trains it with a codec, too.
"""

import argparse
from pathlib import Path

import lightning
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gtrace

DATA = Path(__file__).resolve().parent / "data" / "digits.csv.gz"


class Digits(lightning.LightningModule):
    """A small network on the handwritten digits."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, _):
        images, digits = batch
        return nn.functional.cross_entropy(self.net(images), digits)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Compress(lightning.Callback):
    """Sends gradients through a codec while the module is fitted."""

    def __init__(self, codec):
        self.codec = codec

    def on_train_start(self, trainer, module):
        self.block = gtrace.training.compress(trainer.optimizers[0], self.codec)
        self.compression = self.block.__enter__()

    def on_train_end(self, trainer, module):
        self.block.__exit__(None, None, None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codec", default="qsgdinf:bits=4")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    table = torch.from_numpy(np.loadtxt(DATA, delimiter=",", dtype=np.float32))
    data = TensorDataset(table[:, :-1] / 16, table[:, -1].long())
    compress = Compress(args.codec)
    trainer = lightning.Trainer(
        max_steps=args.steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[compress],
    )
    trainer.fit(Digits(), DataLoader(data, batch_size=32, shuffle=True))
    print(f"{trainer.global_step} steps with {args.codec}: {compress.compression.tally.ratio:.1f} times fewer bits")


if __name__ == "__main__":
    main()
