"""Gradient noise: how large it is, and what it and a codec's noise cost after some steps of training."""

from gtrace.noise.estimates import (
    Moments,
    Noise,
    added,
    averaged,
    equivalent_batch,
    moments,
    noise_between,
    noise_of_steps,
    noise_of_sum,
    noise_of_sums,
    noise_ratio,
    pooled,
)
from gtrace.noise.prediction import ADAM, Dynamics, NoiseCosts, NoisePrediction, cost, predict
from gtrace.noise.quadrature import FilteredRatio, bounded_ratio, filtered_ratio, impulse_weight

__all__ = [
    "ADAM",
    "Dynamics",
    "FilteredRatio",
    "Moments",
    "Noise",
    "NoiseCosts",
    "NoisePrediction",
    "added",
    "averaged",
    "bounded_ratio",
    "cost",
    "equivalent_batch",
    "filtered_ratio",
    "impulse_weight",
    "moments",
    "noise_between",
    "noise_of_steps",
    "noise_of_sum",
    "noise_of_sums",
    "noise_ratio",
    "pooled",
    "predict",
]
