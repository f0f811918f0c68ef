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
from gtrace.noise.prediction import (
    ADAM,
    Dynamics,
    FilteredRatio,
    NoiseCosts,
    NoisePrediction,
    bounded_ratio,
    cost,
    filtered_ratio,
    impulse_weight,
    predict,
    shorter_steps,
)

__all__ = ["ADAM", "Dynamics", "FilteredRatio", "Moments", "Noise", "NoiseCosts", "NoisePrediction", "added"]
__all__ += ["averaged", "bounded_ratio", "cost", "equivalent_batch", "filtered_ratio", "impulse_weight", "moments"]
__all__ += ["noise_between", "noise_of_steps", "noise_of_sum", "noise_of_sums", "noise_ratio", "pooled", "predict"]
__all__ += ["shorter_steps"]
