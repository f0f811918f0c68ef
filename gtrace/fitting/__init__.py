"""Levels, thresholds and sparsities fitted to a law or to data, as pure functions."""

from gtrace.fitting.laws import bucket_moments, moment_mixture
from gtrace.fitting.levels import alq_level_sets, alq_levels, amq_levels, amq_multiplier, expected_variance
from gtrace.fitting.optimal import adaquant, certified_levels, objective, optimal_level_sets, optimal_levels
from gtrace.fitting.sparsity import (
    achieved_sparsity,
    allocate_sparsity,
    pruned_cosine,
    pruning_threshold,
    sparsity,
    threshold,
    unpruned,
)

__all__ = ["achieved_sparsity", "adaquant", "allocate_sparsity", "alq_level_sets", "alq_levels", "amq_levels"]
__all__ += ["amq_multiplier", "bucket_moments", "certified_levels", "expected_variance", "moment_mixture"]
__all__ += ["objective", "optimal_level_sets", "optimal_levels", "pruned_cosine", "pruning_threshold", "sparsity"]
__all__ += ["threshold", "unpruned"]
