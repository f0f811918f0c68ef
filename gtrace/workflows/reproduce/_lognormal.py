"""What the experiments on near-lognormal gradients have in common."""

from __future__ import annotations

PAPER = "Chmiel et al., Neural gradients are near-lognormal, ICLR 2021"
