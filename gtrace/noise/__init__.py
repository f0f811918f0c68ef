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
    noise_ratio,
    pooled,
)
from gtrace.noise.filtering import FilteredRatio, filtered_ratio, impulse_weight, ratio_along
from gtrace.noise.prediction import ADAM, Dynamics, NoiseCosts, Prediction, cost, predict
from gtrace.noise.quadrature import bounded_ratio

__all__ = [
    "ADAM",
    "Dynamics",
    "FilteredRatio",
    "Moments",
    "Noise",
    "NoiseCosts",
    "Prediction",
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
    "noise_ratio",
    "pooled",
    "predict",
    "ratio_along",
]
