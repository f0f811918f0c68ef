"""Levels, thresholds and sparsities fitted to a law or to data, as pure functions."""

from gtrace.fitting.adaquant import adaquant
from gtrace.fitting.allocation import allocate_sparsity
from gtrace.fitting.alq import alq_levels
from gtrace.fitting.amq import amq_levels, amq_multiplier
from gtrace.fitting.moments import bucket_moments, moment_mixture
from gtrace.fitting.optimal import certified_levels, objective, optimal_levels
from gtrace.fitting.sparsity import achieved_sparsity, pruned_cosine, pruning_threshold, sparsity, threshold, unpruned
from gtrace.fitting.variance import expected_variance

__all__ = [
    "achieved_sparsity",
    "adaquant",
    "allocate_sparsity",
    "alq_levels",
    "amq_levels",
    "amq_multiplier",
    "bucket_moments",
    "certified_levels",
    "expected_variance",
    "moment_mixture",
    "objective",
    "optimal_levels",
    "pruned_cosine",
    "pruning_threshold",
    "sparsity",
    "threshold",
    "unpruned",
]
